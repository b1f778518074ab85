"""The book of what is under way: waits, busy periods, and everything given back."""

from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.load import MAX_PERIOD_JOBS, Job, Load, Work, pairs_of


def test_a_prompt_waits_for_those_before_it() -> None:
    """As long as they are predicted to take, less what has passed; for nothing where none is left."""
    load = Load("p")
    assert load.wait_ns(5) == 0
    first = load.begin(0, 100, 50)
    second = load.begin(10, 100, 50)
    assert (load.wait_ns(10), load.wait_ns(60), load.wait_ns(500)) == (90, 40, 0)
    load.computed(first, 30, 100, 0)  # twenty earlier than predicted
    assert load.wait_ns(30) == 50
    load.computed(second, 200, 100, 0)
    assert load.wait_ns(200) == 0
    assert load.queued_tokens == 0


def test_a_lone_prompt_s_time_is_its_own() -> None:
    """From when it was sent."""
    load = Load("p")
    assert load.computed(load.begin(1000, 10, 5), 1300, 8, 2) == Work(1, 8, pairs_of(8, 2), 300)


def test_prompts_that_overlap_are_accounted_for_together() -> None:
    """From the first one's sending to the last one's end."""
    load = Load("p")
    jobs = [load.begin(now_ns, 10, 5) for now_ns in (0, 10, 20)]
    assert load.computed(jobs[0], 100, 10, 0) is None
    assert load.computed(jobs[2], 200, 20, 5) is None
    assert load.computed(jobs[1], 250, 30, 0) == Work(
        3, 60, pairs_of(10, 0) + pairs_of(20, 5) + pairs_of(30, 0), 250
    )


def test_an_engine_that_is_never_idle_is_accounted_for_too() -> None:
    """By so many prompts at a time, and then from there on."""
    load, accounts = Load("p"), []
    job = load.begin(0, 10, 5)
    for number in range(1, 2 * MAX_PERIOD_JOBS + 1):
        following = load.begin(number * 100 - 1, 10, 5)
        accounts.append(load.computed(job, number * 100, 10, 0))
        job = following
    works = [account for account in accounts if account is not None]
    assert [(work.jobs, work.took_ns) for work in works] == [(MAX_PERIOD_JOBS, MAX_PERIOD_JOBS * 100)] * 2


def test_a_failure_leaves_no_account() -> None:
    """Nor do those that were computed beside it."""
    load = Load("p")
    one, other = load.begin(0, 10, 5), load.begin(0, 10, 5)
    load.leave(one, 50)
    work = load.computed(other, 80, 10, 0)
    assert work == Work(1, 10, pairs_of(10, 0), 30)


@given(st.lists(st.tuples(st.sampled_from(["begin", "computed", "leave"]), st.integers(0, 100)), max_size=60))
def test_what_is_begun_is_given_back(steps: list[tuple[str, int]]) -> None:
    """In whatever order: at the end nothing is left, and no wait is negative."""
    load, under_way, now_ns = Load("p"), list[Job](), 0
    for step, amount in steps:
        now_ns += amount
        if step == "begin":
            under_way.append(load.begin(now_ns, amount, amount))
        elif under_way:
            job = under_way.pop(amount % len(under_way))
            if step == "computed":
                load.computed(job, now_ns, amount, amount)
            else:
                load.leave(job, now_ns)
        load.check_integrity()
        assert load.wait_ns(now_ns) >= 0
    for job in under_way:
        load.leave(job, now_ns)
    load.check_integrity()
    assert (load.queued_tokens, load.wait_ns(now_ns)) == (0, 0)
