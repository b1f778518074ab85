"""The simulation beside published figures: how far it is off, and what it reads back."""

import pytest

from kvloop.bench import agreement
from kvloop.bench.agreement import ANSWER_TOKENS, CONVERSATIONS, PUBLISHED_MS, REQUESTS, Workload, rows_of
from kvloop.sim.fleet.history import SYSTEM, USER, Message, prompt_tokens
from kvloop.sim.profile import load_profile


@pytest.mark.parametrize("name", PUBLISHED_MS)
def test_published_times_come_out(name: str) -> None:
    """Every figure of the article's text, with and without the return path, within the target."""
    rows = rows_of(name, list(PUBLISHED_MS[name]))
    assert len(rows) == 4
    assert not [row for row in rows if not row.met]


def test_a_machine_that_is_slower_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as fast is too far off at every point."""
    monkeypatch.setattr(agreement, "load_profile", lambda name: load_profile(name).faster(0.5))
    monkeypatch.setattr(agreement, "SHIFTS_MS", (600,))
    rows = rows_of("qwen3-32b-h200", list(PUBLISHED_MS["qwen3-32b-h200"]))
    assert all(row.met is False for row in rows)


@pytest.mark.parametrize("is_on", [False, True])
def test_what_is_read_back_can_be_counted(is_on: bool) -> None:
    """From the second request on all that decode has computed: the prompt before and its answer, but for the
    answer's last token, which was never computed. Without the return path nothing."""
    workload = Workload(load_profile("qwen3-32b-h200"), 2000, 600, is_on=is_on)
    workload.run()
    history = (Message(SYSTEM, 1, agreement.SHARED_TOKENS + 2000),)
    wanted = 0
    for _ in range(REQUESTS - 1):
        history = (*history, Message(USER, 1, agreement.NEW_TOKENS))
        wanted += prompt_tokens(history) + ANSWER_TOKENS - 1
        history = (*history, Message(USER, 1, ANSWER_TOKENS))
    assert len(workload.first_token_ms) == CONVERSATIONS * REQUESTS
    assert workload.returned_tokens == (CONVERSATIONS * wanted if is_on else 0)
