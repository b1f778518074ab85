"""Whatever KV depends on changes the root or a segment, and what cannot be proven takes no part."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.connector.adapters import MAX_ADAPTERS, Adapters
from kvloop.connector.identity import IdentityOf, media_of
from kvloop.core.chain import build_chain, root_digest

KEY = bytes(32)
HF_CONFIG = {
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "id2label": {0: "no", 1: "yes"},
    "dtype": "bfloat16",
    "_name_or_path": "somewhere",
}


class HfConfig:
    """A model's own configuration, as transformers gives it."""

    def __init__(self, **changes: Any) -> None:
        self.fields = HF_CONFIG | changes

    def to_dict(self) -> dict[str, Any]:
        """As transformers' configurations do."""
        return self.fields


def engine(
    hf_config: dict[str, Any] | None = None, cache: Any = None, lora_config: Any = None, **model: Any
) -> IdentityOf:
    """The identities of an engine that differs from the plain one as named."""
    plain_model = {
        "model": "org/model",
        "revision": None,
        "dtype": "float32",
        "quantization": None,
        "max_model_len": 4096,
        "hf_config": HfConfig(**(hf_config or {})),
        "multimodal_config": None,
    }
    plain_cache = {"cache_dtype": "auto", "block_size": 32, "enable_prefix_caching": False}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**plain_model | model),
        cache_config=SimpleNamespace(**plain_cache | (cache or {})),
        lora_config=lora_config,
    )
    return IdentityOf(config)


def request(**changes: Any) -> Any:
    """A plain request that differs as named."""
    skips = changes.pop("skips_prefix_cache", False)
    plain = {
        "prompt_token_ids": list(range(300)),
        "prompt_embeds": None,
        "pooling_params": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "get_skip_reading_prefix_cache": lambda: skips,
    }
    return SimpleNamespace(**plain | changes)


def lora(folder: Path, number: int = 1, *, name: str = "sql", in_place: bool = False) -> Any:
    """A LoRA adapter as requests name it, loaded as the `number`th."""
    return SimpleNamespace(lora_name=name, lora_path=str(folder), lora_int_id=number, load_inplace=in_place)


def write_lora(folder: Path, weights: bytes = b"weights", config: str = "{}") -> Path:
    """The files of an adapter."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


HASH = "c1" * 32


def image(
    offset: int = 10, identifier: str = "cat", mm_hash: str | None = HASH, length: int = 4, **changes: Any
) -> Any:
    """A multimodal item."""
    position = SimpleNamespace(offset=offset, length=length)
    fields = {"modality": "image", "identifier": identifier, "mm_hash": mm_hash, "mm_position": position}
    return SimpleNamespace(**fields | changes)


def root(of: IdentityOf, asked: Any) -> bytes:
    """The first link of a request's chain."""
    return root_digest(KEY, of(asked))


def test_equal_engines_and_requests_have_one_root() -> None:
    """Two processes with the same settings prove to each other."""
    assert root(engine(), request()) == root(engine(), request())


ROPE = {"rope_type": "default", "rope_theta": 20000.0}
OTHER_ENGINES = {
    "model": engine(model="org/other"),
    "revision": engine(revision="v2"),
    "hf override": engine(hf_config={"rope_parameters": ROPE}),
    "dtype": engine(dtype="bfloat16"),
    "quantization": engine(quantization="fp8"),
    "cache dtype": engine(cache={"cache_dtype": "fp8"}),
    "block size": engine(cache={"block_size": 64}),
}


@pytest.mark.parametrize("kind", OTHER_ENGINES)
def test_engines_that_differ_prove_nothing_to_each_other(kind: str) -> None:
    """Model, revision, overrides, number formats and block size are in the root."""
    roots = {root(of, request()) for of in (*OTHER_ENGINES.values(), engine())}
    assert len(roots) == len(OTHER_ENGINES) + 1
    assert root(OTHER_ENGINES[kind], request()) != root(engine(), request())


def test_what_is_not_arithmetic_does_not_split_a_deployment() -> None:
    """Where a model lies, who saved it and the dtype it was saved in say nothing about KV."""
    vision = {"hidden_size": 8, "transformers_version": "4.1"}
    one = engine(hf_config={"_name_or_path": "/a", "transformers_version": "4", "vision_config": vision})
    other = engine(hf_config={"dtype": "float16", "vision_config": {"hidden_size": 8}})
    assert root(one, request()) == root(other, request())
    assert root(engine(max_model_len=1024), request()) == root(engine(max_model_len=2048), request())


def test_the_longest_prompt_counts_where_rope_depends_on_it() -> None:
    """vLLM chooses LongRoPE's factors by `max_model_len`: such KV differs from the first token on."""
    rope = {"rope_parameters": {"rope_type": "longrope"}}
    short, long = engine(hf_config=rope, max_model_len=4096), engine(hf_config=rope, max_model_len=131072)
    assert root(short, request()) != root(long, request())


def test_a_configuration_of_any_shape_has_a_digest() -> None:
    """Numbers as names beside strings, objects as values, nested lists."""
    odd = {"mixed": {0: "a", "b": [1, {2: object}]}, "thing": complex(1, 2)}
    assert root(engine(hf_config=odd), request()) == root(engine(hf_config=odd), request())
    changed = odd | {"mixed": {0: "a", "b": [1, {2: int}]}}
    assert root(engine(hf_config=odd), request()) != root(engine(hf_config=changed), request())


OTHER_REQUESTS = {
    "salt": request(cache_salt="tenant-a"),
    "another salt": request(cache_salt="tenant-b"),
}


def test_requests_under_another_salt_have_roots_of_their_own() -> None:
    """Every one of them, and none is the plain one's."""
    roots = {root(engine(), other) for other in (*OTHER_REQUESTS.values(), request())}
    assert len(roots) == len(OTHER_REQUESTS) + 1


def test_an_adapter_is_the_content_of_its_files(tmp_path: Path) -> None:
    """Other weights or another configuration are another adapter; another name or place is not."""
    one = write_lora(tmp_path / "one")
    adapters = {
        "plain": request(),
        "one": request(lora_request=lora(one)),
        "weights": request(lora_request=lora(write_lora(tmp_path / "weights", b"others"), 2)),
        "config": request(lora_request=lora(write_lora(tmp_path / "config", config='{"r": 8}'), 3)),
        "salt": request(lora_request=lora(one), cache_salt="tenant-a"),
    }
    of = engine()
    assert len({root(of, asked) for asked in adapters.values()}) == len(adapters)
    copy = lora(write_lora(tmp_path / "copy"), 4, name="poems")
    assert root(engine(), request(lora_request=copy)) == root(of, adapters["one"])
    assert all(of.why_not(asked) is None for asked in adapters.values())


def test_an_adapter_that_is_loaded_again_is_read_again(tmp_path: Path) -> None:
    """vLLM draws a new number at each loading; between two loadings the first digest stands, as the weights
    do."""
    of = engine()
    first = root(of, request(lora_request=lora(write_lora(tmp_path), 1)))
    write_lora(tmp_path, b"others")
    assert root(of, request(lora_request=lora(tmp_path, 1))) == first
    assert root(of, request(lora_request=lora(tmp_path, 2))) != first


def test_how_an_engine_runs_adapters_is_in_their_roots(tmp_path: Path) -> None:
    """Number format, modules, towers: only for requests that name one."""
    asked = request(lora_request=lora(write_lora(tmp_path)))
    plain = {"lora_dtype": "float16", "target_modules": None, "enable_tower_connector_lora": False}
    changes: list[dict[str, Any]] = [
        {},
        {"lora_dtype": "bfloat16"},
        {"target_modules": ["q_proj"]},
        {"enable_tower_connector_lora": True},
    ]
    engines = [engine(lora_config=SimpleNamespace(**plain | change)) for change in changes]
    assert len({root(of, asked) for of in engines}) == len(engines)
    assert len({root(of, request()) for of in (*engines, engine())}) == 1


def test_an_adapter_that_is_not_fixed_or_not_readable_takes_no_part(tmp_path: Path) -> None:
    """One that vLLM loads in place may be another at any time; of one that is not here nothing is known."""
    of = engine()
    folder = write_lora(tmp_path / "here")
    assert of.why_not(request(lora_request=lora(folder))) is None
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "adapter_config.json").mkdir(parents=True)
    for adapter in (
        lora(folder, in_place=True),
        lora(tmp_path / "gone", 2),
        lora(tmp_path / "empty", 3),
        lora(tmp_path / "folder", 4),
        lora(Path("owner/not-in-the-hub-s-cache"), 5),
        lora(Path("no hub's name, and no folder"), 6),
    ):
        assert of.why_not(request(lora_request=adapter)) == "adapter_not_fixed"


def test_adapters_are_bounded(tmp_path: Path) -> None:
    """However often adapters are loaded, so many digests are kept, and each is right."""
    adapters = Adapters()
    write_lora(tmp_path)
    digests = {adapters.digest(lora(tmp_path, number)) for number in range(MAX_ADAPTERS + 5)}
    assert len(digests) == 1
    assert len(adapters._digests) == MAX_ADAPTERS


def chain_with(*features: Any) -> bytes:
    """The digests of 300 tokens with these items among them."""
    asked = request(mm_features=list(features))
    chain = build_chain(KEY, bytes(16), asked.prompt_token_ids, media_of(asked))
    return chain.segments + chain.tail


@pytest.mark.parametrize(
    "other",
    [
        image(identifier="dog"),
        image(mm_hash="c2" * 32),
        image(mm_hash=None),
        image(length=5),
        image(offset=11),
        image(modality="video"),
    ],
)
def test_an_item_s_content_kind_place_and_length_are_in_its_segment(other: Any) -> None:
    """The same placeholder tokens with another image behind them prove nothing."""
    assert chain_with(image()) == chain_with(image())
    assert chain_with(other) != chain_with(image()) != chain_with()


def test_an_item_changes_nothing_before_the_segment_where_it_starts() -> None:
    """What came before it stays proven."""
    plain, with_image = chain_with(), chain_with(image(offset=150))
    assert plain[:32] == with_image[:32]
    assert plain[32:48] != with_image[32:48]


def test_items_are_taken_in_prompt_order() -> None:
    """In whatever order vLLM lists them."""
    first, second = image(offset=3), image(offset=40, identifier="dog")
    assert chain_with(first, second) == chain_with(second, first)
    assert [item.start_token for item in media_of(request(mm_features=[second, first]))] == [3, 40]


def test_a_plain_request_takes_part() -> None:
    """So does one with a salt, or with images that vLLM has hashed."""
    for asked in (request(), *OTHER_REQUESTS.values(), request(mm_features=[image()])):
        assert engine().why_not(asked) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_token_ids": None}, "prompt_embeds"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"pooling_params": object()}, "pooling"),
        ({"skips_prefix_cache": True}, "skips_prefix_cache"),
    ],
)
def test_what_cannot_be_proven_or_must_be_computed_is_declined(changes: dict[str, Any], reason: str) -> None:
    """By name: embeddings, pooling, prompt log-probabilities."""
    assert engine().why_not(request(**changes)) == reason


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "hashed"),
    [(4, True, True), (4, False, True), (0, True, True), (0, False, False)],
)
def test_items_that_vllm_only_numbers_are_declined(cache_gb: int, prefix_caching: bool, hashed: bool) -> None:
    """With both caches off an image's name is a counter of its process, which another process counts too."""
    media = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    of = engine(multimodal_config=media, cache={"enable_prefix_caching": prefix_caching})
    assert of.why_not(request(mm_features=[image()])) == (None if hashed else "media_not_hashed")
    assert of.why_not(request()) is None


@pytest.mark.parametrize("name", ["holiday", "", None, HASH.upper(), HASH + "0", HASH[:-1]])
def test_items_that_a_client_named_are_declined(name: str | None) -> None:
    """vLLM takes a client's name for the content's hash, and two images may go by one name."""
    assert engine().why_not(request(mm_features=[image(mm_hash=HASH * 2)])) is None
    assert engine().why_not(request(mm_features=[image(), image(mm_hash=name)])) == "media_named"
