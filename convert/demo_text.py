"""The text of the demo pair, the Python standard library of the running interpreter, and a tokenizer for it."""

import hashlib
import io
import random
import re
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL_TOKENS = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>",
    "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
]  # fmt: skip
PAD, EOS, BOS, TURN_END, TOOL_RESPONSE = 0, 1, 2, 5, 13
VOCABULARY = 1536
SKIPPED = {"test", "tests", "site-packages", "encodings", "pydoc_data", "lib2to3", "turtledemo", "__pycache__"}
SYSTEM_TEXTS = ["You write Python.", "Complete the function.", "You are a helpful assistant."]


def standard_library():
    """[(module path such as "json/decoder.py", source)] of the running interpreter, sorted, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED & set(name.parts):
            continue
        try:
            source = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if len(source) > 500:
            modules.append((name.as_posix(), source.expandtabs(8).rstrip() + "\n"))
    return modules


def is_held_out(name):
    """Whether a module is kept out of training: one in sixteen, by the hash of its path, so on any machine the same."""
    return hashlib.sha256(name.encode()).digest()[0] % 16 == 0


def split_definitions(source):
    """The source cut before every top-level def, class and decorator."""
    return [part for part in re.split(r"\n(?=(?:async def|def|class|@)[ \w])", source) if part.strip()]


def as_chat(definition, randomness):
    """A chat whose user turn is the first line of a function and whose model turn is the function; None if no function."""
    if not re.match(r"def \w+\([^\n]*\):\n", definition) or len(definition) > 4000:
        return None
    signature = definition.split("\n", 1)[0]
    system = f"<|turn>system\n{randomness.choice(SYSTEM_TEXTS)}<turn|>\n" if randomness.random() < 0.3 else ""
    return f"{system}<|turn>user\n{signature}<turn|>\n<|turn>model\n{definition.strip()}<turn|>\n"


def documents(modules, seed):
    """Shuffled training documents: every module whole and once more in pieces; some functions also as chats."""
    randomness = random.Random(seed)
    texts = []
    for _, source in modules:
        texts.append(source)
        for definition in split_definitions(source):
            if randomness.random() < 0.5:
                texts.append(definition.strip() + "\n")
            chat = as_chat(definition, randomness)
            if chat and randomness.random() < 0.5:
                texts.append(chat)
    randomness.shuffle(texts)
    return texts


def sentencepiece_pieces(texts, count):
    """`count` byte-pair pieces in the order in which sentencepiece learned them, single characters last."""
    import sentencepiece

    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n") if line.strip()),
        model_writer=file, model_type="bpe", vocab_size=count + 1 + 256, byte_fallback=True, character_coverage=0.9999,
        split_digits=True, allow_whitespace_only_pieces=True, remove_extra_whitespaces=False, add_dummy_prefix=False,
        normalization_rule_name="identity", bos_id=-1, eos_id=-1, unk_id=0, num_threads=1, minloglevel=2,
        max_sentence_length=100000,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    return [model.id_to_piece(i) for i in range(len(model)) if not (model.is_unknown(i) or model.is_byte(i))]


def make_tokenizer(texts):
    """A tokenizers.Tokenizer of Gemma's kind: byte fallback, spaces as ▁, no prefix; line ends are tokens of their own."""
    fixed = SPECIAL_TOKENS + [f"<0x{byte:02X}>" for byte in range(256)] + ["\n", "\n\n", "\n\n\n"]
    pieces = sentencepiece_pieces(texts, VOCABULARY - len(fixed))
    vocabulary = {token: i for i, token in enumerate(fixed + pieces)}
    assert len(vocabulary) == VOCABULARY
    rank = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        cuts = [cut for cut in cuts if cut[0] in rank and cut[1] in rank]
        merges += sorted(cuts, key=lambda cut: (rank[cut[0]], rank[cut[1]]))
    tokenizer = Tokenizer(models.BPE(
        vocabulary, [("\n", "\n"), ("\n\n", "\n")] + merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # fmt: skip
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def token_stream(tokenizer, texts):
    """All documents as one int32 array: <bos> document <eos> <bos> document … (a chat ends with its turn instead)."""
    ids = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [BOS, *encoding.ids] + ([EOS] if TURN_END not in encoding.ids else [])
    return np.array(ids, dtype=np.int32)
