"""SmolLM2's tokenizer out of its GGUF file, in the files that vLLM and transformers read.

It is a byte-level BPE that splits digits first and then as GPT-2 does. The chat template is the model's own,
extended where it was silent: null content, tools, tool calls and tool results, in the form that vLLM's
`hermes` parser reads. For plain messages it renders what the original renders, character for character.
"""

import json
from pathlib import Path
from typing import Any

_CONTROL_TOKEN = 3


def chat_template() -> str:
    """The Jinja template beside this file."""
    return Path(__file__).with_name("chat_template.jinja").read_text()


def write_tokenizer(fields: Any, target: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into `target`.

    `fields` is `gguf.GGUFReader.fields`.

    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"].contents(),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"].contents()],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"].contents()],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"].contents()],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"].contents()],
        "chat_template": chat_template(),
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (target / "chat_template.jinja").write_text(chat_template())
