"""Variants of the tiny model, made at test time: one that sees images, and LoRA adapters for it.

They share tiny's language weights, so greedy output stays a function of the whole history, and they are as
small as the code paths allow: what is tested is which KV is taken for which request, not what a model knows.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

from kvloop.local.models import resolve_model
from kvloop.local.tiny import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS

_LANGUAGE = "model.text_model."
_RENAMED_TOKENS = {
    "<jupyter_start>": "<image>",
    "<jupyter_text>": "<fake_token_around_image>",
    "<jupyter_code>": "<end_of_utterance>",
}
IMAGE_PIXELS = 112
PATCH_PIXELS = 14
IMAGE_TOKENS = (IMAGE_PIXELS // PATCH_PIXELS) ** 2
_VISION_HIDDEN = 64
ADAPTER_RANK = 8
_ADAPTER_GAIN = 2.0


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter with random weights in PEFT's format, on every projection of attention."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"q_proj": (query, HIDDEN), "k_proj": (kv, HIDDEN), "v_proj": (kv, HIDDEN)}
    shapes["o_proj"] = (HIDDEN, query)
    weights = {}
    for layer in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            module = f"base_model.model.{_LANGUAGE}layers.{layer}.self_attn.{name}."
            down = rng.standard_normal((ADAPTER_RANK, columns)) / columns**0.5
            up = rng.standard_normal((rows, ADAPTER_RANK)) * _ADAPTER_GAIN / ADAPTER_RANK**0.5
            weights[module + "lora_A.weight"] = down.astype(np.float32)
            weights[module + "lora_B.weight"] = up.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": sorted(shapes),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _vision_weights() -> dict[str, Any]:
    """A vision tower of one layer: pixels in, vectors of the size of token embeddings out."""
    import numpy as np

    rng = np.random.default_rng(0)
    hidden = _VISION_HIDDEN

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)

    tower = "model.vision_model."
    layer = tower + "encoder.layers.0."
    matrices = {
        layer + "mlp.fc1": (2 * hidden, hidden),
        layer + "mlp.fc2": (hidden, 2 * hidden),
        tower + "embeddings.patch_embedding": (hidden, 3, PATCH_PIXELS, PATCH_PIXELS),
    }
    matrices |= {layer + f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
    weights = {
        tower + "embeddings.position_embedding.weight": normal(IMAGE_TOKENS, hidden),
        "model.connector.modality_projection.proj.weight": normal(HIDDEN, hidden),
    }
    for name, shape in matrices.items():
        weights[name + ".weight"] = normal(*shape)
        weights[name + ".bias"] = np.zeros(shape[0], dtype=np.float32)
    for name in (layer + "layer_norm1", layer + "layer_norm2", tower + "post_layernorm"):
        weights[name + ".weight"] = np.ones(hidden, dtype=np.float32)
        weights[name + ".bias"] = np.zeros(hidden, dtype=np.float32)
    return weights


def _write_tokenizer(tiny: Path, folder: Path) -> int:
    """Tiny's tokenizer with the tokens around images in unused ones' places; the image token's id."""
    for file in tiny.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            text = file.read_text()
            if file.name == "tokenizer.json":
                for unused, token in _RENAMED_TOKENS.items():
                    text = text.replace(f'"{unused}"', f'"{token}"')
            (folder / file.name).write_text(text)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return int(vocabulary["<image>"])


def write_vision_model(folder: Path) -> Path:
    """An Idefics3 model: tiny's language weights, a random vision tower, `IMAGE_TOKENS` tokens an image."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    tiny = Path(resolve_model("tiny").location)
    weights = {
        name.replace("model.", _LANGUAGE, 1) if name.startswith("model.") else name: weight
        for name, weight in load_file(tiny / "model.safetensors").items()
    }
    save_file(weights | _vision_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    image_token = _write_tokenizer(tiny, folder)
    vision = {
        "hidden_size": _VISION_HIDDEN,
        "intermediate_size": 2 * _VISION_HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": IMAGE_PIXELS,
        "patch_size": PATCH_PIXELS,
    }
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": json.loads((tiny / "config.json").read_text()),
        "vision_config": vision,
        "image_token_id": image_token,
        "scale_factor": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": IMAGE_PIXELS},
        "max_image_size": {"longest_edge": IMAGE_PIXELS},
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS}
    files = {"config": config, "preprocessor_config": images, "processor_config": processor}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value, indent=1))
    return folder


def image_part(seed: int) -> dict[str, Any]:
    """A content part with an image of random pixels, the same for the same seed."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()},
    }
