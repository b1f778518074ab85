"""What a request's KV depends on besides its tokens, and which requests never take part in reuse.

KV at a position is a function of the token prefix and of: the model's weights and configuration, the KV
cache's number format and block shape, the LoRA adapter, multimodal inputs, and (as a matter of isolation,
not of arithmetic) the cache salt. All of it goes into the digest chain's root or into the segment where
an item starts, so two engines that differ in any of it prove nothing to each other and the turn is
recomputed.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvloop.connector.adapters import Adapters
from kvloop.core.chain import Identity, MediaItem

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_NOT_ARITHMETIC = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
_MEDIA_HASH = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
"""What vLLM's hashers make of an item's content (blake3 or SHA-256, or SHA-512). A client may give an item a
name instead, and vLLM then hashes nothing."""


def _plain(value: Any) -> Any:
    """`value` in JSON's own types, without what says nothing about arithmetic."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items() if name not in _NOT_ARITHMETIC}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _config_digest(vllm_config: "VllmConfig") -> str:
    """A digest over the model's own configuration, e.g. rope scaling set by `--hf-overrides`."""
    model = vllm_config.model_config
    encoded = json.dumps(_plain(model.hf_config.to_dict()), sort_keys=True)
    if "longrope" in encoded:  # vLLM takes its long or its short factors by the longest prompt allowed
        encoded += f" at most {model.max_model_len}"
    return hashlib.blake2b(encoded.encode(), digest_size=16).hexdigest()


def _lora_settings(vllm_config: "VllmConfig") -> str:
    """What an engine does to every adapter: the number format it runs in, and which modules take part."""
    lora_config = vllm_config.lora_config
    if lora_config is None:
        return ""
    modules = sorted(lora_config.target_modules) if lora_config.target_modules else None
    return f"{lora_config.lora_dtype}/{modules}/{lora_config.enable_tower_connector_lora}"


class IdentityOf:
    """Maps a vLLM request to the identity its KV was computed under. One per engine."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        model = vllm_config.model_config
        cache = vllm_config.cache_config
        self._model = str(model.model)
        self._revision = f"{model.revision or ''}/{_config_digest(vllm_config)}"
        self._kv_layout = f"{model.dtype}/{cache.cache_dtype}/{model.quantization or ''}/{cache.block_size}"
        self._adapters = Adapters()
        self._lora_settings = _lora_settings(vllm_config)
        # Without a cache to look them up in, vLLM numbers multimodal items instead of hashing them, and two
        # engines give different images the same number.
        media = model.multimodal_config
        self._media_are_hashed = bool(
            media is None or media.mm_processor_cache_gb or cache.enable_prefix_caching
        )

    def __call__(self, request: "Request") -> Identity:
        """The identity of `request`'s KV. Only for requests that `why_not` says nothing against."""
        lora = request.lora_request
        return Identity(
            model=self._model,
            revision=self._revision,
            kv_layout=self._kv_layout,
            lora="" if lora is None else f"{self._adapters.digest(lora)}/{self._lora_settings}",
            salt=request.cache_salt or "",
        )

    def why_not(self, request: "Request") -> str | None:
        """The reason for which `request` takes no part in reuse, or None where it may.

        Prompt embeddings have no token ids to prove; prompt log-probabilities need every position computed
        here; a multimodal item that is not hashed proves nothing, nor does one that goes by a name which its
        client gave it; an adapter whose weights may be others by now is no adapter in particular.
        """
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "prompt_embeds"
        if request.pooling_params is not None:
            return "pooling"
        if request.get_skip_reading_prefix_cache():
            return "skips_prefix_cache"
        if request.mm_features and not self._media_are_hashed:
            return "media_not_hashed"
        if not all(_MEDIA_HASH.fullmatch(feature.mm_hash or "") for feature in request.mm_features):
            return "media_named"
        if request.lora_request is not None and self._adapters.digest(request.lora_request) is None:
            return "adapter_not_fixed"
        return None


def media_of(request: "Request") -> list[MediaItem]:
    """The request's multimodal items, each with the digest of its identity and shape, in prompt order."""
    items = []
    for feature in request.mm_features:
        position = feature.mm_position
        name: Any = (feature.modality, feature.identifier, feature.mm_hash, position.length)
        digest = hashlib.blake2b(repr(name).encode(), digest_size=16).digest()
        items.append(MediaItem(start_token=position.offset, digest=digest))
    return sorted(items, key=lambda item: item.start_token)
