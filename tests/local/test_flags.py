"""vLLM's flags are read as vLLM reads them."""

from kvloop.local.flags import VllmFlags


def test_a_flag_is_found_in_any_spelling() -> None:
    """Dashes or underscores, one word or two, and its negation."""
    flags = VllmFlags(("--max_model_len=100", "--no-enable-prefix-caching"))
    assert flags.has("--max-model-len")
    assert flags.has("--enable-prefix-caching")
    assert not flags.has("--max-num-seqs")
    assert flags.value("--max-model-len") == "100"


def test_the_last_of_several_wins() -> None:
    """As in vLLM's own parser."""
    assert VllmFlags(("--port", "1", "--port=2")).value("--port") == "2"


def test_a_bare_switch_has_an_empty_value() -> None:
    """The next flag is not its value; a negative number would be."""
    assert VllmFlags(("--enforce-eager", "--port", "1")).value("--enforce-eager") == ""
    assert VllmFlags(("--seed", "-1")).value("--seed") == "-1"
    assert VllmFlags(("--seed",)).value("--seed") == ""
    assert VllmFlags().value("--seed") is None


def test_a_flag_is_taken_out_with_its_value_and_nothing_else() -> None:
    """Both forms, wherever they stand."""
    flags = VllmFlags(("--a", "1", "--x", "v", "--b", "--x=w", "2", "--x"))
    assert flags.without("--x").words == ("--a", "1", "--b", "2")
