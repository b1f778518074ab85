"""A model with sliding-window layers: it runs, and its turns take no part in reuse.

There a prefix of the block list is not the KV of a prefix of the tokens, so the connector fails closed.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloop.core.handle import Handle
from kvloop.local.models import resolve_model
from kvloop.local.stack import Stack
from kvloop.local.stack_config import StackConfig
from kvloop.wire.handle import HANDLE_VERSION, encode_handle
from tests.e2e.conftest import run_stack
from tests.e2e.test_histories import assistant, opening, user
from tests.e2e.turns import Pair

MODEL_NAME = "hybrid"


def build_model(folder: Path) -> Path:
    """A random model with windowed and full attention layers, and the tiny model's tokenizer."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tiny = Path(resolve_model("tiny").location)
    vocabulary = json.loads((tiny / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=256,
        max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    for file in tiny.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A pair of engines with the hybrid model."""
    model = build_model(tmp_path_factory.mktemp(MODEL_NAME))
    flags = ("--max-model-len", "2048", "--dtype", "float32", "--served-model-name", MODEL_NAME)
    yield from run_stack(request, StackConfig(model=str(model), router=False, engine_flags=flags))


def test_hybrid_model_is_declined(hybrid: Stack) -> None:
    """Both hops work, nothing is retained, and a handle is not followed, whatever it says."""
    pair = Pair(hybrid.prefill[0], hybrid.decode[0], MODEL_NAME)
    messages = opening("windows", words=100)
    first = pair.turn(messages)
    assert first.filed is None
    messages = [*messages, assistant(first.text), user("And?")]
    decode = hybrid.decode[0]
    handle = Handle(
        HANDLE_VERSION, decode.engine_id, "x", "y", "127.0.0.1", decode.control_port, 1, 1, 1, 300, 1
    )
    key = (hybrid.folder / "secret").read_bytes().strip()
    second = pair.turn(messages, {"kvloop_handle": encode_handle(handle, key)})
    assert (second.returned, second.reason) == (0, "not_reusable")
    assert "cannot be reused" in hybrid.prefill[0].log_tail(400)
