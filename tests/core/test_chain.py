"""The digest chain: equal to a naive one, unambiguous, fast, and byte for byte what it was."""

import hashlib
import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.chain import (
    DIGEST_BYTES,
    MAX_CHAIN_TOKENS,
    SEGMENT_TOKENS,
    Chain,
    Identity,
    MediaItem,
    build_chain,
    matched_tokens,
    root_digest,
)
from kvloop.errors import ProtocolError, UserError

KEY = bytes(range(32))
IDENTITY = Identity("smollm2", "main", "bf16/v1", "", "tenant-a")
ROOT = root_digest(KEY, IDENTITY)
VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "chain.json").read_text())

quick = settings(deadline=None, max_examples=150)
tokens_lists = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=300)
media_lists = st.lists(st.builds(MediaItem, st.integers(0, 320), st.binary(max_size=24)), max_size=4)


def naive_chain(tokens: list[int], media: list[MediaItem]) -> Chain:
    """The definition, one token at a time."""
    digests, previous = [], ROOT
    for start in range(0, len(tokens), SEGMENT_TOKENS):
        link = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + SEGMENT_TOKENS])
        here = [
            item for item in media if start <= item.start_token < min(start + SEGMENT_TOKENS, len(tokens))
        ]
        if here:
            framed = len(link).to_bytes(4, "little") + link
            for item in sorted(here, key=lambda item: item.start_token):
                framed += (item.start_token - start).to_bytes(4, "little")
                framed += len(item.digest).to_bytes(4, "little") + item.digest
            digest = hashlib.blake2b(previous + framed, key=KEY, digest_size=16, person=b"kvloop.media")
        else:
            digest = hashlib.blake2b(previous + link, key=KEY, digest_size=16)
        previous = digest.digest()
        digests.append(previous)
    whole = len(tokens) // SEGMENT_TOKENS
    return Chain(ROOT, b"".join(digests[:whole]), b"".join(digests[whole:]), len(tokens))


def naive_match(held: list[int], wanted: list[int]) -> int:
    """How many tokens a proof may find: all of `held` if `wanted` is equal, else whole segments."""
    common = 0
    while common < min(len(held), len(wanted)) and held[common] == wanted[common]:
        common += 1
    return common if common == len(held) == len(wanted) else common // SEGMENT_TOKENS * SEGMENT_TOKENS


@quick
@given(tokens_lists, media_lists)
def test_equals_naive(tokens: list[int], media: list[MediaItem]) -> None:
    """The fast chain is the definition, with or without multimodal items, from a list or an array."""
    naive = naive_chain(tokens, media)
    assert build_chain(KEY, ROOT, tokens, media) == naive
    assert build_chain(KEY, ROOT, array("I", tokens), media) == naive


@quick
@given(tokens_lists, tokens_lists, st.integers(0, 300))
def test_matches_exactly_the_common_prefix(tokens: list[int], other: list[int], cut: int) -> None:
    """A match is the common prefix, to the token where everything is equal, else to a whole segment."""
    wanted = tokens[:cut] + other
    held_chain, wanted_chain = build_chain(KEY, ROOT, tokens), build_chain(KEY, ROOT, wanted)
    assert matched_tokens(held_chain, wanted_chain) == naive_match(tokens, wanted)


@quick
@given(tokens_lists, st.integers(0, 400))
def test_exact_continuation_matches_to_the_token(tokens: list[int], more: int) -> None:
    """A prompt that goes on where decode ended matches every token decode holds."""
    prompt = tokens + [7] * more
    held = build_chain(KEY, ROOT, tokens)
    assert matched_tokens(held, build_chain(KEY, ROOT, prompt[: held.token_count])) == len(tokens)


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=300), st.data())
def test_one_changed_token_ends_the_match_at_its_segment(tokens: list[int], data: st.DataObject) -> None:
    """No token from a changed one on, nor any of its segment, is ever matched."""
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[position] += 1
    match = matched_tokens(build_chain(KEY, ROOT, tokens), build_chain(KEY, ROOT, changed))
    assert match == position // SEGMENT_TOKENS * SEGMENT_TOKENS


def test_chains_that_agree_again_do_not_match_again() -> None:
    """A peer that splices equal digests behind unequal ones gains nothing by it."""
    held = build_chain(KEY, ROOT, range(640))
    spliced = replace(held, segments=bytes(16) + held.segments[16:])
    assert matched_tokens(held, spliced) == 0


@quick
@given(st.integers(0, 10 * DIGEST_BYTES * 8 - 1))
def test_one_changed_bit_of_a_digest_ends_the_match_there(bit: int) -> None:
    """Digests are compared to their last bit: whichever one differs, its segment is not matched."""
    held = build_chain(KEY, ROOT, range(10 * SEGMENT_TOKENS))
    segments = bytearray(held.segments)
    segments[bit // 8] ^= 1 << bit % 8
    matched = bit // 8 // DIGEST_BYTES * SEGMENT_TOKENS
    assert matched_tokens(held, replace(held, segments=bytes(segments))) == matched
    assert matched_tokens(replace(held, segments=bytes(segments)), held) == matched


def test_what_a_peer_says_of_its_chain_is_not_believed() -> None:
    """The same digests under another root, or the same tail for another count, prove less or nothing."""
    held = build_chain(KEY, ROOT, range(70))
    assert matched_tokens(held, replace(held, root=bytes(DIGEST_BYTES))) == 0
    assert matched_tokens(held, replace(held, token_count=75)) == 64
    assert matched_tokens(held, replace(held, token_count=69)) == 64


@pytest.mark.parametrize("field", ["model", "revision", "kv_layout", "lora", "salt"])
def test_identity_separates(field: str) -> None:
    """Another model, revision, layout, LoRA or tenant: not one token matches."""
    other = root_digest(KEY, replace(IDENTITY, **{field: "other"}))
    tokens = range(200)
    assert matched_tokens(build_chain(KEY, ROOT, tokens), build_chain(KEY, other, tokens)) == 0


def test_root_encoding_is_unambiguous() -> None:
    """Moving characters from one field to the next gives another root."""
    assert root_digest(KEY, Identity("ab", "c", "", "", "")) != root_digest(
        KEY, Identity("a", "bc", "", "", "")
    )


def test_root_depends_on_the_key() -> None:
    """Two deployments have nothing in common."""
    assert root_digest(bytes(32), IDENTITY) != ROOT


def test_media_separates_from_its_segment_on() -> None:
    """The same placeholder tokens with another image match only up to the segment where it starts."""
    tokens = [5] * 256
    held = build_chain(KEY, ROOT, tokens, [MediaItem(130, b"cat")])
    wanted = build_chain(KEY, ROOT, tokens, [MediaItem(130, b"dog")])
    assert matched_tokens(held, wanted) == 128
    assert matched_tokens(held, build_chain(KEY, ROOT, tokens)) == 128


def test_media_position_counts() -> None:
    """The same image one token further on is another input."""
    chains = {build_chain(KEY, ROOT, [5] * 64, [MediaItem(start, b"cat")]).segments for start in (0, 1, 63)}
    assert len(chains) == 3


def test_media_bytes_cannot_pass_for_tokens() -> None:
    """A tail with an item differs from the longer tail whose tokens spell the item's bytes."""
    with_item = build_chain(KEY, ROOT, [1], [MediaItem(0, b"")])
    spelled = build_chain(KEY, ROOT, [4, 1, 0, 0])
    assert with_item.tail != spelled.tail


def test_media_after_the_tokens_does_not_count() -> None:
    """A chain over a prompt's first tokens is the same whatever images come after them."""
    tokens = list(range(100))
    assert build_chain(KEY, ROOT, tokens, [MediaItem(100, b"cat")]) == build_chain(KEY, ROOT, tokens)


def test_media_order_does_not_count() -> None:
    """Items are taken by position, in whatever order they are given."""
    items = [MediaItem(3, b"cat"), MediaItem(1, b"dog")]
    assert build_chain(KEY, ROOT, [0] * 9, items) == build_chain(KEY, ROOT, [0] * 9, items[::-1])


@pytest.mark.parametrize("code", ["I", "H", "Q"])
def test_packed_numbers_are_the_same_tokens(code: str) -> None:
    """However wide they are packed; and the array stays as it is."""
    tokens = [number % 60_000 for number in range(0, 3_000_000, 20_011)]
    packed = array(code, tokens)
    assert build_chain(KEY, ROOT, packed) == build_chain(KEY, ROOT, tokens)
    assert packed == array(code, tokens)


def test_refuses_what_is_no_token() -> None:
    """A number that no token id can be is an error, never a digest of something else."""
    for tokens in ([-1], [2**32]):
        with pytest.raises(OverflowError):
            build_chain(KEY, ROOT, tokens)
    with pytest.raises(ValueError, match="starts at token -1"):
        build_chain(KEY, ROOT, [1], [MediaItem(-1, b"cat")])


@pytest.mark.parametrize("key", [b"", b"short", bytes(65)])
def test_refuses_a_weak_key(key: bytes) -> None:
    """An empty or short key is refused: without a key anyone could make digests."""
    with pytest.raises(UserError):
        build_chain(key, ROOT, [1])
    with pytest.raises(UserError):
        root_digest(key, IDENTITY)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("token_count", {"token_count": -1}),
        ("token_count", {"token_count": MAX_CHAIN_TOKENS + 1}),
        ("segments", {"token_count": 64}),
        ("segments", {"segments": bytes(17)}),
        ("tail", {"token_count": 128}),
        ("tail", {"tail": b""}),
        ("tail", {"tail": bytes(15)}),
        ("root", {"root": b""}),
    ],
)
def test_inconsistent_lengths_are_a_peers_fault(field: str, changes: dict[str, object]) -> None:
    """Lengths that do not fit the token count cannot become a Chain, and the error names the field."""
    good = build_chain(KEY, ROOT, range(130))
    with pytest.raises(ProtocolError) as caught:
        replace(good, **changes)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: vector["name"])
def test_bytes_never_change(vector: dict[str, object]) -> None:
    """Engines of two versions understand each other: the digests are those on file."""
    root = root_digest(bytes.fromhex(VECTORS["key"]), Identity(**VECTORS["identity"]))
    media = [MediaItem(start, bytes.fromhex(digest)) for start, digest in vector["media"]]  # type: ignore[attr-defined]
    chain = build_chain(bytes.fromhex(VECTORS["key"]), root, vector["tokens"], media)  # type: ignore[arg-type]
    assert root.hex() == VECTORS["root"]
    assert (chain.segments.hex(), chain.tail.hex()) == (vector["segments"], vector["tail"])
