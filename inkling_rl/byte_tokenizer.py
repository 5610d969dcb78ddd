"""The byte-level tokenizer of the tiny models: 256 bytes and Inkling's special tokens, in 271 ids.

A Hugging Face fast tokenizer without merges, written out as files; the embedding table is padded to 512 rows, of which
500 have logits, as the released one is padded. Not the released tokenizer.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from inkling_rl import chat

SPECIAL_TOKENS = (
    chat.ENDOFTEXT,
    chat.MESSAGE_USER,
    chat.MESSAGE_MODEL,
    chat.MESSAGE_SYSTEM,
    chat.MESSAGE_TOOL,
    chat.CONTENT_TEXT,
    chat.CONTENT_IMAGE,
    chat.END_SAMPLING,
    chat.CONTENT_THINKING,
    chat.END_MESSAGE,
    chat.CONTENT_TOOL_ERROR,
    chat.CONTENT_XML,
    chat.CONTENT_INVOKE_TOOL_JSON,
    chat.CONTENT_INVOKE_TOOL_TEXT,
    chat.IMAGE_PLACEHOLDER,
)
PAD_TOKEN_ID = 256
EOS_TOKEN_ID = 256 + SPECIAL_TOKENS.index(chat.END_SAMPLING)
IMAGE_TOKEN_ID = 256 + SPECIAL_TOKENS.index(chat.IMAGE_PLACEHOLDER)
VOCAB_SIZE = 512
UNPADDED_VOCAB_SIZE = 500
MASK_TOKEN_ID = UNPADDED_VOCAB_SIZE  # the draft's mask: an embedding row that exists because the table is padded


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in Hugging Face's ByteLevel coder, by byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = {byte: chr(byte) for byte in printable}
    for n, byte in enumerate(b for b in range(256) if b not in stand_in):
        stand_in[byte] = chr(256 + n)
    return [stand_in[byte] for byte in range(256)]


@cache
def tokenizer_files() -> dict[str, str]:
    """Tokenizer of the tiny models: file name -> content. Ids 0-255 are bytes, then the special tokens."""
    special = [
        {"id": 256 + n, "content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False}
        for n, token in enumerate(SPECIAL_TOKENS)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_alphabet())},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "eos_token": chat.END_SAMPLING,
        "pad_token": chat.ENDOFTEXT,
        "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in (chat.END_SAMPLING, chat.ENDOFTEXT)],
        "clean_up_tokenization_spaces": False,
    }
    generation = {"eos_token_id": [EOS_TOKEN_ID], "pad_token_id": PAD_TOKEN_ID, "do_sample": True, "temperature": 1.0}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, indent=1),
        "generation_config.json": json.dumps(generation, indent=1),
        "chat_template.jinja": files("inkling_rl").joinpath("chat_template.jinja").read_text(encoding="utf-8"),
    }
