"""A tokenizer of 512 entries in the form of Gemma's: special tokens, every byte, printable ASCII, a few words."""

import json
from pathlib import Path

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|think|>"]
MARKERS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
MARKERS += ["<|tool>", "<tool|>"]
TEMPLATE = (
    "{{ bos_token }}{% if enable_thinking %}<|turn>system\n<|think|>\n<turn|>\n{% endif %}"
    "{% for m in messages %}<|turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
EOT = SPECIAL.index("<turn|>")


def write_tokenizer(directory: Path, template: str | None = TEMPLATE, markers: bool = False) -> None:
    """Adds tokenizer.json, tokenizer_config.json and chat_template.jinja to a target's directory.

    markers: with the special tokens of thoughts and tools, as the last ids.
    """
    more = MARKERS if markers else []
    pieces = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *map(chr, range(33, 127)), "é", "日"]
    merges = [("a", "b"), ("ab", "c"), ("\u2581", "a"), ("\u2581", "ab"), ("t", "h"), ("th", "e"), ("\u2581", "the")]
    pieces += ["".join(m) for m in merges]
    pieces += [f"<unused{i}>" for i in range(512 - len(pieces) - len(more))] + more
    replace = lambda a, b: {"type": "Replace", "pattern": {"String": a}, "content": b}
    content = {
        "version": "1.0",
        "added_tokens": [
            dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"id": i, "content": t, "special": True}
            for i, t in enumerate(pieces) if t in SPECIAL + more
        ],
        "normalizer": replace(" ", "\u2581"),
        "decoder": {"type": "Sequence", "decoders": [replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True,
            "vocab": {t: i for i, t in enumerate(pieces)}, "merges": [list(m) for m in merges],
        },
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(content))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = special | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (directory / "chat_template.jinja").write_text(template)
