"""The router's process: it says when it is ready, ends in time on a signal, and lets answers finish."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

import pytest

from kvloop.errors import UserError
from kvloop.router.config import RouterConfig
from kvloop.router.serve import serving
from tests.router.fake_engine import DONE, chunk, engines, prefill_plan, stream_answer
from tests.router.harness import HELLO, get, in_loop, post, raw_client, until

AT_ONCE_S = 20.0
"""Less than a drain may take here: whoever ends within it has not waited for one."""
RUN = """
import sys
from kvloop.router.config import RouterConfig, Timeouts
from kvloop.router.serve import run
from kvloop.errors import UserError
decode, port = sys.argv[1], int(sys.argv[2])
try:
    timeouts = Timeouts(drain_timeout_s=120)
    run(RouterConfig(decode=(decode,), host="127.0.0.1", port=port, admin_port=0, timeouts=timeouts))
except UserError as error:
    sys.exit(str(error))
"""


async def started(url: str) -> tuple[Process, int]:
    """A router's process and its port, once it is ready."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, url, "0", stderr=PIPE)
    assert process.stderr is not None
    while b"ready on http://127.0.0.1:" not in (line := await process.stderr.readline()):
        assert line, "it ended"
    await process.stderr.readline()
    return process, int(line.rsplit(b":", 1)[1])


async def reachable(port: int) -> bool:
    """Whether anybody listens there."""
    try:
        async with raw_client(port):
            return True
    except OSError:
        return False


@in_loop
async def test_signals_end_it() -> None:
    """SIGINT and SIGTERM end an idle router at once, with status 0 and no complaint."""
    async with engines(prefill_plan) as (engine,):
        for number in (signal.SIGINT, signal.SIGTERM):
            process, port = await started(engine.url)
            async with raw_client(port) as client:
                client.send(get("/health"))
                assert (await client.answer())[0] == 200
                process.send_signal(number)
                assert await client.closed()
                assert process.stderr is not None
                assert await asyncio.wait_for(process.wait(), AT_ONCE_S) == 0
                assert b"Traceback" not in await process.stderr.read()


@in_loop
async def test_answers_finish() -> None:
    """On a signal the answer under way goes on to its end, new clients are refused; a second one hurries."""
    go = asyncio.Event()
    async with engines(lambda _: stream_answer(chunk("a"), go, chunk("b"), DONE)) as (engine,):
        for hurried in (False, True):
            go.clear()
            process, port = await started(engine.url)
            async with raw_client(port) as client:
                client.send(post({"model": "tiny", "messages": [HELLO], "stream": True}))
                await client.reader.readuntil(b'"a"')
                os.kill(process.pid, signal.SIGTERM)
                while await reachable(port):
                    await asyncio.sleep(0.01)
                if hurried:
                    os.kill(process.pid, signal.SIGTERM)
                else:
                    go.set()
                    await client.reader.readuntil(DONE)
                assert await asyncio.wait_for(process.wait(), AT_ONCE_S) == 0


@in_loop
async def test_port_taken() -> None:
    """A port that is taken, public or admin, is one sentence."""
    async with engines(prefill_plan) as (engine,):
        taken = int(engine.url.rsplit(":", 1)[1])
        free = {"host": "127.0.0.1", "port": 0, "admin_port": 0}
        for wanted in ({**free, "port": taken}, {**free, "admin_port": taken}):
            with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{taken} \(--(admin-)?host"):
                async with serving(RouterConfig(decode=(engine.url,), **wanted)):  # type: ignore[arg-type]
                    pass


@in_loop
async def test_nothing_left_behind() -> None:
    """After it has ended, no task and no connection of the router's is left in the loop."""
    async with engines(prefill_plan) as (engine,):
        before = len(asyncio.all_tasks())
        config = RouterConfig(
            decode=(engine.url,), host="127.0.0.1", port=0, admin_port=0, models_interval_s=0
        )
        async with serving(config) as ports, raw_client(ports.port) as client:
            client.send(post({"model": "tiny", "messages": [HELLO]}))
            await client.answer()
        await until(lambda: len(asyncio.all_tasks()) <= before)


@in_loop
async def test_load_balancers_are_told_first() -> None:
    """While the delay lasts /health is 503 on both ports and requests are served; a signal cuts it short."""
    async with engines(prefill_plan) as (engine,):
        hurry = asyncio.Event()
        config = RouterConfig(
            decode=(engine.url,),
            host="127.0.0.1",
            port=0,
            admin_port=0,
            drain_delay_s=1000.0,
            models_interval_s=0,
        )
        started, stop = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def run() -> None:
            async with serving(config, hurry) as ports:
                started.set_result(ports)
                await stop.wait()

        running = asyncio.create_task(run())
        ports = await started
        async with raw_client(ports.port) as client, raw_client(ports.admin_port) as operator:
            client.send(get("/health"))
            assert (await client.answer())[0] == 200
            stop.set()
            await asyncio.sleep(0)
            client.send(get("/health"))
            status, _, body = await client.answer()
            assert (status, b"stopping" in body) == (503, True)
            operator.send(get("/health"))
            status, _, body = await operator.answer()
            assert (status, b'"stopping"' in body) == (503, True)
            client.send(post({"model": "m", "messages": [HELLO]}))
            assert (await client.answer())[0] == 200
            assert await reachable(ports.port)
            hurry.set()
            assert await client.closed()
        await running
        assert not await reachable(ports.port)
