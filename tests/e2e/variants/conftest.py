"""One pair of engines with everything at once that changes what KV depends on or how it comes to be.

The model sees images and is a folder of its own, both engines have LoRA adapters and take new ones while
they run, and decode drafts tokens by n-gram lookup. No prefix cache on either side.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloop.local.stack import Stack
from kvloop.local.stack_config import StackConfig
from tests.e2e.conftest import BLOCK_TOKENS, CLAIM_TIMEOUT_MS, run_stack
from tests.e2e.turns import Pair
from tests.e2e.variants.models import ADAPTER_RANK, write_adapter, write_vision_model

MODEL = "seeing"
ADAPTERS = ("sql", "poems")
BLOCKS = 2048
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="package")
def variant_stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """The engines; they go when this package's tests have run."""
    folder = tmp_path_factory.mktemp("variants")
    adapters = [f"{name}={write_adapter(folder / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    flags = ("--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS), "--dtype", "float32")
    flags += ("--num-gpu-blocks-override", str(BLOCKS), "--served-model-name", MODEL)
    # Its chat template is tiny's, which knows nothing of images: vLLM puts their places into the text.
    flags += ("--chat-template-content-format", "string")
    flags += ("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(ADAPTER_RANK))
    flags += ("--no-enable-prefix-caching", "--lora-modules", *adapters)
    yield from run_stack(
        request,
        StackConfig(
            model=str(write_vision_model(folder / MODEL)),
            router=False,
            engine_flags=flags,
            decode_flags=("--no-async-scheduling", "--speculative-config", json.dumps(DRAFTS)),
            engine_extra={"kvloop_claim_timeout_ms": CLAIM_TIMEOUT_MS},
            env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        ),
    )


def under(stack: Stack, model: str = MODEL) -> Pair:
    """The engines, asked for `model`: the base model or an adapter."""
    return Pair(stack.prefill[0], stack.decode[0], model)


@pytest.fixture
def pair(variant_stack: Stack) -> Pair:
    """The engines, asked for the base model."""
    return under(variant_stack)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test writes adapters of its own."""
    return tmp_path
