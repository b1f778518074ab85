"""The names of what is counted, and the text that Prometheus reads."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvloop.connector.metrics import FAMILIES, exposition, labelled, sample
from kvloop.connector.tally import KEPT, Tally
from kvloop.connector.turn import Turn
from kvloop.wire.control import COUNTER_MAX_CHARS, MAX_COUNTERS, Stat, StatReply
from tests.connector.decode import Decode
from tests.connector.fakes import Pool


def test_a_sample_s_name_is_prometheus_own() -> None:
    """With its label, or without one."""
    assert sample("kvloop_lease_blocks") == "kvloop_lease_blocks"
    assert labelled("kvloop_leases", "state", {"granted": 2, "soft": 0}) == {
        'kvloop_leases{state="granted"}': 2,
        'kvloop_leases{state="soft"}': 0,
    }


def test_the_text_is_what_prometheus_reads() -> None:
    """Each family once, with its kind and meaning, and a sample for each engine and label."""
    engines = {
        0: {"kvloop_lease_blocks": 7, 'kvloop_claims_total{outcome="granted"}': 3},
        3: {'kvloop_claims_total{outcome="granted"}': 5, 'kvloop_claims_total{outcome="expired"}': 1},
    }
    text = exposition(engines)
    assert text.count("# TYPE kvloop_claims_total counter\n") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["kvloop_lease_blocks"].type == "gauge"
    assert families["kvloop_lease_blocks"].documentation == FAMILIES["kvloop_lease_blocks"]
    claims = {(s.labels["engine"], s.labels["outcome"]): s.value for s in families["kvloop_claims"].samples}
    assert claims == {("0", "granted"): 3, ("3", "granted"): 5, ("3", "expired"): 1}


@pytest.mark.parametrize(
    "name",
    [
        "vllm:num_preemptions_total",
        "kvloop_claims",
        'kvloop_claims_total{outcome="a"} 1\nkvloop_leases{state="b"}',
        'kvloop_claims_total{outcome="a\\"}',
        'kvloop_claims_total{outcome="a",engine="9"}',
        "kvloop_claims_total{}",
        "",
    ],
)
def test_a_name_that_is_not_ours_is_left_out(name: str) -> None:
    """The counters come over a wire; none can write lines of its own."""
    assert exposition({0: {name: 1}}) == ""


def test_reads_are_counted_by_outcome_and_bytes_by_direction() -> None:
    """Bytes only of what was kept: what was read in vain is of no use to anybody."""
    tally = Tally(100)
    tally.read_back(KEPT, 3)
    tally.read_back("deadline", 5)
    tally.handed_over(2)
    assert tally.counts() == {
        'kvloop_reads_total{outcome="kept"}': 1,
        'kvloop_reads_total{outcome="deadline"}': 1,
        'kvloop_read_bytes_total{direction="return"}': 300,
        'kvloop_read_bytes_total{direction="handover"}': 200,
    }


def test_prompt_tokens_are_counted_by_where_they_came_from() -> None:
    """They add up to the prompts; a turn without a return is counted under its reason."""
    tally = Tally(100)
    tally.turn(Turn(100, local_tokens=16, returned_tokens=64))
    tally.turn(Turn(50, local_tokens=0, reason="expired"))
    assert tally.counts() == {
        'kvloop_prompt_tokens_total{source="local"}': 16,
        'kvloop_prompt_tokens_total{source="returned"}': 64,
        'kvloop_prompt_tokens_total{source="computed"}': 70,
        'kvloop_recomputed_total{reason="expired"}': 1,
    }


def test_everything_that_an_engine_counts_is_explained_and_fits_into_an_answer() -> None:
    """Each name is of a family, short enough, and there are not too many; all families are counted."""
    decode = Decode(Pool(10))
    decode.tally.read_back(KEPT, 1)
    decode.tally.turn(Turn(1, reason="no_handle"))
    answer = decode.serve(Stat())
    assert isinstance(answer, StatReply)
    assert 2 * len(answer.counters) < MAX_COUNTERS
    assert max(map(len, answer.counters)) <= COUNTER_MAX_CHARS
    assert {name.partition("{")[0] for name in answer.counters} == FAMILIES.keys()
    assert exposition({0: answer.counters}).count("{engine=") == len(answer.counters)
