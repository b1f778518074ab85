"""Simulated engines in virtual time, and a turn through two of them, without a router."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from kvloop.sim.config import EngineConfig
from kvloop.sim.engine import Engine
from kvloop.sim.loop import Loop
from kvloop.sim.memory import torn
from kvloop.sim.profile import Profile, load_profile
from kvloop.sim.request import Finished, Hop, ReadDone, Request, Sampled, Send, StartRead, Starved
from kvloop.sim.text import Text, origin

KEY = bytes(range(32))
MS = 1_000_000
S = 1_000 * MS
LATENCY_NS = 100_000


def make_profile(**limits: int) -> Profile:
    """A small machine: a token takes 10 µs, a step 1 ms, a block read 10 µs."""
    plain = load_profile("instant")
    small = {"block_tokens": 16, "blocks": 256, "batch_tokens": 512, "running": 8, "model_tokens": 2048}
    return msgspec.structs.replace(
        plain,
        limits=msgspec.structs.replace(plain.limits, **small | limits),
        step=msgspec.structs.replace(plain.step, base_ns=MS, token_ns=10_000),
        transfer=msgspec.structs.replace(plain.transfer, setup_ns=MS, block_ns=10_000),
    )


def config(name: str, **changes: Any) -> EngineConfig:
    """An engine's settings; its name is its address, too."""
    return replace(EngineConfig(name, f"{name}/1", KEY, (name, 1), (name, 2)), **changes)


def tokens(count: int, kind: int = 0) -> bytes:
    """So many tokens; those of another kind differ from the first on."""
    return b"".join((kind * 1_000_000 + number).to_bytes(4, "little") for number in range(count))


class World:
    """Engines by their name, a link that delivers, and everything that they said."""

    def __init__(self, *engines: Engine) -> None:
        self.loop = Loop()
        self.engines = {engine.config.engine_id: engine for engine in engines}
        self.said: dict[str, bytes] = {}
        self.cached: dict[str, int] = {}
        self.finished: dict[str, Finished] = {}
        self.starved: list[Starved] = []
        self.sent: list[Send] = []
        self.reads: list[StartRead] = []
        self.first_ns: dict[str, int] = {}
        self.lose: Callable[[Send], bool] = lambda _: False
        self.check_each_step = True

    def text(self, data: bytes, salt: str = "") -> Text:
        """A prompt as these engines' memory sees it."""
        engine = next(iter(self.engines.values()))
        return Text(data, origin(engine.profile.model, salt), engine.memory.cell_tokens)

    def submit(self, engine_id: str, request: Request) -> None:
        """Hand a request in now."""
        self.engines[engine_id].submit(request, self.loop.now_ns)
        self.settle(self.engines[engine_id])

    def run(self, until: Callable[[], bool] = lambda: False, max_events: int = 1_000_000) -> None:
        """Let time pass until something is true, or nothing happens any more."""
        for _ in range(max_events):
            if until() or not self.loop.step():
                return
        raise AssertionError("it goes on for ever")

    def settle(self, engine: Engine) -> None:
        """Carry out what an engine wants, and wake it when it has something to do."""
        for event in engine.take_events():
            self._do(engine, event)
        if self.check_each_step:
            engine.check_integrity()
        due_ns = engine.next_ns()
        if due_ns is not None:
            self.loop.at(due_ns, lambda: self._wake(engine))

    def _wake(self, engine: Engine) -> None:
        if (due_ns := engine.next_ns()) is not None and due_ns <= self.loop.now_ns:
            engine.advance(self.loop.now_ns)
            self.settle(engine)

    def _do(self, engine: Engine, event: object) -> None:
        match event:
            case Sampled():
                self.said[event.request_id] = self.said.get(event.request_id, b"") + event.data
                self.cached.setdefault(event.request_id, event.cached_tokens)
                self.first_ns.setdefault(event.request_id, self.loop.now_ns)
            case Finished():
                self.finished[event.request_id] = event
            case Starved():
                self.starved.append(event)
            case Send():
                self.sent.append(event)
                if not self.lose(event):
                    self.loop.after(LATENCY_NS, lambda: self._ask(engine, event))
            case StartRead():
                self.reads.append(event)
                peer = self.engines[event.engine_id]
                before = peer.lend(event.blocks, event.request_id)
                self.loop.after(event.takes_ns, lambda: self._end_read(engine, event, before))
            case ReadDone():
                self.loop.after(LATENCY_NS, lambda: self._release(event))

    def _ask(self, engine: Engine, event: Send) -> None:
        peer = self.engines[event.address[0]]
        answer = peer.serve(event.message, self.loop.now_ns)
        self.settle(peer)

        def hear() -> None:
            engine.hear(event.tag, answer, self.loop.now_ns)
            self.settle(engine)

        self.loop.after(LATENCY_NS, hear)

    def _end_read(self, engine: Engine, event: StartRead, before: list[int] | None) -> None:
        peer = self.engines[event.engine_id]
        after = peer.lend(event.blocks, event.request_id)
        whole = before is not None and after is not None and peer.config.incarnation == event.incarnation
        contents = torn(before, after) if whole and before is not None and after is not None else None
        engine.read_ended(event.read_id, contents, self.loop.now_ns)
        self.settle(engine)

    def _release(self, event: ReadDone) -> None:
        peer = self.engines[event.engine_id]
        peer.release_handover(event.request_id, self.loop.now_ns)
        self.settle(peer)

    def turn(
        self, name: str, prompt: bytes, handle: str | None = None, **more: Any
    ) -> tuple[bytes, Finished]:
        """A prompt through engine `p`, its answer from engine `d`: what was said, and how it ended."""
        salt = more.get("salt", "")
        self.submit("p", Request(f"{name}p", self.text(prompt, salt), 1, salt, Hop.PREFILL, handle))
        self.run(lambda: f"{name}p" in self.finished)
        plain: dict[str, Any] = {"max_tokens": 40, "ends_at": 1000}
        request = Request(
            f"{name}d",
            self.text(prompt, salt),
            hop=Hop.DECODE,
            handover=self.finished[f"{name}p"].handover,
            **plain | more,
        )
        self.submit("d", request)
        self.run(lambda: f"{name}d" in self.finished)
        return self.said[f"{name}d"], self.finished[f"{name}d"]

    def report(self, name: str) -> dict[str, object]:
        """What prefill says of a turn."""
        turn = self.finished[f"{name}p"].turn
        assert turn is not None
        return turn


def pair(profile: Profile | None = None, **changes: Any) -> World:
    """A prefill engine `p` without a prefix cache of its own, and a decode engine `d`."""
    profile = profile or make_profile()
    prefill = config("p", retains=False, prefix_cache=False, **changes)
    return World(Engine(prefill, profile), Engine(config("d", reads=False, **changes), profile))
