"""Which format a file has, and what becomes of files that have none."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.bench.workload.agent import AgentOptions
from kvloop.bench.workload.files import MAX_BYTES, read_bytes
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.read import FORMATS, READERS, format_of, read_workload
from kvloop.bench.workload.turns import Workload
from kvloop.errors import UserError
from tests.bench.workload.layout import check
from tests.bench.workload.test_multi_turn import PLAN

USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}
SAMPLES: dict[str, list[str]] = {
    "sharegpt": [
        json.dumps(
            [{"id": "a", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
        ),
        json.dumps({"messages": [USER, ASSISTANT]}),
    ],
    "mooncake": ['{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}'],
    "multi-turn": [json.dumps(PLAN), json.dumps(PLAN, indent=2)],
    "agent-sessions": ['{"id": "s", "requests": [{"t": 0, "in": 100, "out": 5, "hash_ids": [1]}]}'],
    "turn-log": ['{"time": 1, "request_id": "r", "prompt_tokens": 5, "answer_tokens": 5}'],
}
EACH = [(name, text) for name, texts in SAMPLES.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), EACH)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_format_is_told_by_its_fields(tmp_path: Path, name: str, text: str, is_packed: bool) -> None:
    """Packed or not, and whatever the file is called."""
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(text.encode()) if is_packed else text.encode())
    assert format_of(path) == name
    workload = read_workload("auto", path)
    check(workload)
    assert workload == read_workload(name, path)
    assert workload.name == name
    assert "file" in workload.source


def test_every_format_has_a_sample() -> None:
    """And the agent needs no file."""
    assert set(SAMPLES) == set(READERS)
    assert set(FORMATS) == {"agent", "auto", *READERS}
    assert len(read_workload("agent", agent=AgentOptions(conversations=2)).conversations) == 2


@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" \n\n",
        b"\x00\xff\xfe\x80" * 20,
        b"\x1f\x8b\x08\x00garbage",
        gzip.compress(b"some text")[:-4],
        b"[",
        b"[[[[",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{}",
        b"[{}]",
        b"[1, 2]",
        b"null",
        b"5",
        b'"text"',
        b'{"timestamp": 0, "input_len',
        b'[{"messages": [{"role": "user"',
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_file_that_is_none_is_an_error(tmp_path: Path, spec: str, data: bytes) -> None:
    """Of one line, which names the file."""
    if spec == "agent":
        return
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(UserError, match="file") as caught:
        read_workload(spec, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "text"), EACH)
def test_a_file_that_was_torn_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    """At any place within its one line or entry."""
    path = tmp_path / "file"
    for end in range(1, len(text) - 1, 7):
        path.write_text(text[:end])
        with pytest.raises(UserError):
            read_workload(name, path)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(EACH), st.data())
def test_a_field_of_another_kind_is_an_error_or_a_workload(
    tmp_path_factory: pytest.TempPathFactory, sample: tuple[str, str], data: st.DataObject
) -> None:
    """Nothing that stands in a field crashes a reader."""
    name, text = sample
    value = json.loads(text)
    entry = value[0] if isinstance(value, list) else value
    while True:
        field = data.draw(st.sampled_from(sorted(entry)))
        inner = entry[field][0] if isinstance(entry[field], list) and entry[field] else entry[field]
        if not isinstance(inner, dict) or not inner or data.draw(st.booleans()):
            entry[field] = data.draw(VALUES)
            break
        entry = inner
    path = tmp_path_factory.mktemp("fields") / "file"
    path.write_text(json.dumps(value))
    try:
        workload = read_workload(name, path)
    except UserError:
        return
    check(workload)


def test_a_file_is_read_up_to_a_bound(tmp_path: Path) -> None:
    """Packed ones by what they hold."""
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(b"x" * 5000))
    assert len(read_bytes(path)) == 5000
    assert MAX_BYTES >= 650_000_000
    with pytest.raises(UserError, match="file: more than 4999 bytes are not read"):
        read_bytes(path, 4999)


def test_a_bound_holds_while_unpacking(tmp_path: Path) -> None:
    """What is packed into little is not unpacked beyond it."""
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(bytes(8_000_000), compresslevel=1))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="more than 200000 bytes"):
            read_bytes(path, 200_000)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2_000_000


def test_what_is_asked_for_is_checked(tmp_path: Path) -> None:
    """An unknown name, no file, a file that is not there, a directory."""
    with pytest.raises(UserError, match="no workload is called 'agents'; there are agent, sharegpt"):
        read_workload("agents")
    with pytest.raises(UserError, match="is read from a file, and none was given"):
        read_workload("mooncake")
    for spec in ("auto", "mooncake", "agent-sessions"):
        with pytest.raises(UserError, match="nowhere"):
            read_workload(spec, tmp_path / "nowhere")
        with pytest.raises(UserError, match=str(tmp_path)):
            read_workload(spec, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"scale": float("nan")},
        {"time_scale": -1.0},
        {"max_prompt_tokens": 0},
        {"conversations": 0},
        {"block_tokens": 0},
    ],
)
def test_options_out_of_range_are_errors(change: dict[str, float]) -> None:
    """Before any file is looked at."""
    with pytest.raises(UserError):
        RecordingOptions(**change)  # type: ignore[arg-type]


def test_messages_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories come back with every turn: a file of many turns is refused before they fill the memory."""
    monkeypatch.setattr("kvloop.bench.workload.recording.MAX_MESSAGES", 50)
    requests = [{"t": at, "in": 100 + 20 * at, "out": 5} for at in range(9)]
    path = tmp_path / "file"
    path.write_text(json.dumps({"id": "s", "requests": requests}))
    with pytest.raises(UserError, match="file: more than 50 messages; take fewer conversations"):
        read_workload("auto", path)
    path.write_text(json.dumps({"messages": [USER, ASSISTANT] * 9}))
    with pytest.raises(UserError, match="file: more than 50 messages"):
        read_workload("auto", path)
    path.write_text(json.dumps({"messages": [USER, ASSISTANT] * 5}))
    assert read_workload("auto", path).turns == 5


def test_lines_and_entries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are runs of blocks."""
    monkeypatch.setattr("kvloop.bench.workload.files.MAX_ENTRIES", 3)
    monkeypatch.setattr("kvloop.bench.workload.mooncake.MAX_RUNS", 2)
    path = tmp_path / "file"
    for text in (SAMPLES["turn-log"][0] + "\n", SAMPLES["sharegpt"][1] + "\n"):
        path.write_text(text * 4)
        with pytest.raises(UserError, match="line 4: more than 3 are not read"):
            read_workload("auto", path)
    path.write_text("[" + ",".join([SAMPLES["sharegpt"][1]] * 4) + "]")
    with pytest.raises(UserError, match="entry 4: more than 3 are not read"):
        read_workload("auto", path)
    path.write_text((SAMPLES["mooncake"][0].replace("5", "512") + "\n") * 3)
    with pytest.raises(UserError, match="line 3: more than 2 runs"):
        read_workload("auto", path)


def test_a_choice_is_evenly_spread(tmp_path: Path) -> None:
    """From the first on, each as far from the next."""
    path = tmp_path / "file"
    path.write_text("".join(SAMPLES["turn-log"][0].replace('"r"', f'"r{at}"') + "\n" for at in range(10)))

    def names(wanted: int) -> list[str]:
        workload: Workload = read_workload("auto", path, RecordingOptions(conversations=wanted))
        return [one.name for one in workload.conversations]

    assert names(2) == ["r0", "r5"]
    assert names(3) == ["r0", "r3", "r6"]
    assert len(names(99)) == 10
