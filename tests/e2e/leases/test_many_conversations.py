"""Two hundred conversations on engines that hold a few dozen of them, returning in random order."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from threading import Lock

from tests.e2e.counters import counters
from tests.e2e.leases.books import RECLAIMED, check_all_home
from tests.e2e.leases.conftest import StartRouter
from tests.e2e.test_histories import Messages, user
from tests.e2e.test_router import Answer, Client, grow
from tests.e2e.turns import Pair

SEED = 11
CONVERSATIONS = 200
AT_ONCE = 8
ANSWER_TOKENS = 8


@dataclass
class Conversation:
    """One conversation's history, and what was answered to it."""

    messages: Messages
    said: list[tuple[Messages, Answer]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def go_on(self, client: Client) -> None:
        """The next turn; one at a time."""
        with self.lock:
            if self.said:
                self.messages = grow(self.messages, self.said[-1][1], "And?")
            answer = client.chat(self.messages, {"max_tokens": ANSWER_TOKENS})
            self.said.append((self.messages, answer))


def conversations(random: Random) -> list[Conversation]:
    """First messages of some fifty to a hundred and fifty tokens."""
    return [
        Conversation([user(f"{number} " + " ".join(f"w{random.randrange(9999)}" for _ in range(length)))])
        for number, length in enumerate(random.choices(range(15, 40), k=CONVERSATIONS))
    ]


def test_conversations_return_in_random_order(pair: Pair, start_router: StartRouter) -> None:
    """Every answer is the cold engine's, each request gets one, and what is still there is used."""
    random = Random(SEED)
    talks = conversations(random)
    visits = [talk for talk in talks for _ in range(2)]
    random.shuffle(visits)
    router = start_router(policy="adaptive")
    client = Client(router.url)
    before = counters(pair.decode)[RECLAIMED]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda talk: talk.go_on(client), visits):
            pass
        said = [one for talk in talks for one in talk.said]
        halves = (pair, Pair(pair.decode, pair.decode))
        oracles = pool.map(
            lambda one, alone: alone.oracle(one[0], ANSWER_TOKENS), said, halves * CONVERSATIONS
        )
        wrong = [
            messages
            for (messages, answer), oracle in zip(said, oracles, strict=True)
            if answer.tokens != oracle
        ]
    assert not wrong, (SEED, len(wrong), wrong[0])
    assert counters(pair.decode)[RECLAIMED] > before, "every lease found room: nothing is shown"
    returned = [answer for _, answer in said if answer.route == "return"]
    assert len(returned) >= CONVERSATIONS // 20
    assert sum(answer.reused for answer in returned) > 0
    router.shut_down()
    check_all_home(pair)
