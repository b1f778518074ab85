"""The weights of `tiny`: random, fixed by a seed, and shaped so that greedy output is a good oracle."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SEED = 20
LAYERS = 4
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 32
HIDDEN = 256
INTERMEDIATE = 512
MAX_POSITION = 32_768
ATTENTION_GAIN = 3.0
OUTPUT_GAIN = 2.0
LOGIT_SCALE = 20.0
OTHER_ROWS_SCALE = 0.1
_WORD = re.compile("Ġ[a-z]+")


def write_tiny_weights(tokens: Sequence[str], target: Path) -> dict[str, Any]:
    """Write the tiny model's weights to `target` as safetensors; its configuration comes back."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(SEED)

    def normal(rows: int, columns: int, gain: float = 1.0) -> Any:
        return (
            rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)
        ).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": rng.standard_normal((len(tokens), HIDDEN), dtype=np.float32),
        "model.norm.weight": np.ones(HIDDEN, dtype=np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            prefix + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN, ATTENTION_GAIN),
            prefix + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM, OUTPUT_GAIN),
            prefix + "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    head = normal(len(tokens), HIDDEN, LOGIT_SCALE)
    words = np.array([_WORD.fullmatch(token) is not None for token in tokens])
    head[~words] *= np.float32(OTHER_ROWS_SCALE)
    weights["lm_head.weight"] = head
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITION,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
