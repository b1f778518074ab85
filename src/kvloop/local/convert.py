"""Makes a built-in model's folder: `python -m kvloop.local.convert NAME GGUF TARGET`.

It runs as a process of its own, so that the command that wanted the model neither imports these packages nor
keeps their memory. GGUF stores Llama's query and key projections with the two halves of each rotary pair
interleaved; the folder that vLLM reads has them one half after the other (llama.cpp's converter permutes,
this permutes back). Weights are written as float16: finer than bfloat16 at these magnitudes, and as small.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kvloop.local.models import SMOLLM2, TINY
from kvloop.local.tiny import write_tiny_weights
from kvloop.local.tokenizer import write_tokenizer

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def llama_config(fields: Any) -> dict[str, Any]:
    """`config.json` for the model that the GGUF file describes."""

    def field(name: str) -> Any:
        return fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),
        "vocab_size": field("llama.vocab_size"),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }


def _name(gguf_name: str) -> str:
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    _, layer, kind, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def _write_smollm2_weights(reader: Any, config: dict[str, Any], target: Path) -> None:
    import numpy as np
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        count = heads.get(tensor.name.split(".")[2]) if tensor.name.startswith("blk.") else None
        if count is not None:
            rows, columns = weight.shape
            weight = (
                weight.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
            )
        weights[_name(tensor.name)] = np.ascontiguousarray(weight, dtype=np.float16)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def convert(name: str, gguf: Path, target: Path) -> None:
    """Write the model's configuration, weights and tokenizer into the empty folder `target`."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    config = llama_config(reader.fields)
    if name == TINY:
        config |= write_tiny_weights(reader.fields["tokenizer.ggml.tokens"].contents(), target)
    else:
        _write_smollm2_weights(reader, config, target)
    write_tokenizer(reader.fields, target)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "do_sample": False,
    }
    (target / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    [_, wanted, source, destination] = sys.argv
    if wanted not in (SMOLLM2, TINY):
        sys.exit(f"no model is called {wanted!r}")
    convert(wanted, Path(source), Path(destination))
