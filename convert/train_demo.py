"""Trains the demo pair from the Python standard library of the running interpreter, and nothing else.

    python -m mlx_gemma_mtp.convert.train_demo --out DIR [--work DIR] [--seed N]

Four stages, each resumed after a kill: tokenizer, target, drafter (see distill.py), report. The target has the
structure of Gemma 4 E2B (per-layer embeddings, shared keys and values, double-wide MLPs, sliding and full layers, soft
cap); the pair is written as Hugging Face directories, so nothing in this project treats it in a special way.

About an hour on two idle cores. On Linux preload a fast BLAS and keep it to one thread per worker, for instance
LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 OPENBLAS_NUM_THREADS=1: the one in MLX's wheel is 30
times slower. The same seed, machine and number of workers give the same pair.
"""

import argparse
import hashlib
import io
import json
import platform
import random
import re
import sysconfig
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tqdm import tqdm

from mlx_gemma_mtp import load
from mlx_gemma_mtp.config import load_drafter_config
from mlx_gemma_mtp.drafter import Drafter
from mlx_gemma_mtp.target import Target

from .distill import Tuner, describe, held_out_prompts, measure_acceptance, measure_first_rounds
from .texts import continue_prompts
from .trainable import save_drafter
from .training import (
    ParallelGradients,
    Recorder,
    fast_exp,
    load_checkpoint,
    make_optimizer,
    save_checkpoint,
    training_math,
)
from .tuning import Run, Settings

SPECIAL_TOKENS = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>",
    "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
]  # fmt: skip
PAD, EOS, BOS, TURN_END, TOOL_RESPONSE = 0, 1, 2, 5, 13
VOCABULARY = 1536
SKIPPED = {"test", "tests", "site-packages", "encodings", "pydoc_data", "lib2to3", "turtledemo", "__pycache__"}
SYSTEM_TEXTS = ["You write Python.", "Complete the function.", "You are a helpful assistant."]

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
COMMON_CONFIG = dict(
    model_type="gemma4_text", vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
    global_head_dim=64, sliding_window=64, max_position_embeddings=4096, rms_norm_eps=1e-6, rope_parameters=ROPE,
    attention_k_eq_v=False, attention_bias=False, attention_dropout=0.0, enable_moe_block=False, num_experts=None,
    top_k_experts=None, moe_intermediate_size=None, hidden_activation="gelu_pytorch_tanh", initializer_range=0.02,
    use_cache=True, use_bidirectional_attention=None, tie_word_embeddings=True,
    bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
)  # fmt: skip
TARGET_CONFIG = COMMON_CONFIG | dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_kv_shared_layers=4, use_double_wide_mlp=True,
    hidden_size_per_layer_input=32, vocab_size_per_layer_input=VOCABULARY, final_logit_softcapping=30.0,
    layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 2,
)  # fmt: skip
DRAFTER_CONFIG = COMMON_CONFIG | dict(
    hidden_size=96, intermediate_size=384, num_hidden_layers=4, num_kv_shared_layers=4, use_double_wide_mlp=False,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, final_logit_softcapping=None,
    layer_types=[SLIDING, SLIDING, SLIDING, FULL],
)  # fmt: skip
KV_OWNERS = TARGET_CONFIG["num_hidden_layers"] - TARGET_CONFIG["num_kv_shared_layers"]
CLUSTERS, SCORED_CLUSTERS = 48, 8

# Text -----------------------------------------------------------------------------------------------------------------


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


# Tokenizer ------------------------------------------------------------------------------------------------------------


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


# Target ---------------------------------------------------------------------------------------------------------------


class Lookahead(nn.Module):
    """Predicts the token after next from a hidden state and the next token; used in training only, then thrown away.

    Its small loss makes the target keep in its hidden state what a drafter will need.
    Source: Gloeckle et al. 2024; DeepSeek-V3 2024 (section 2.2).
    """

    def __init__(self, hidden_size):
        super().__init__()
        self.gate = nn.Linear(2 * hidden_size, 2 * hidden_size, bias=False)
        self.up = nn.Linear(2 * hidden_size, 2 * hidden_size, bias=False)
        self.down = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)

    def __call__(self, hidden, embedding):
        """hidden [B, T, D] after the final norm, embedding [B, T, D] of the following token. Returns [B, T, D]."""
        x = mx.concatenate([embedding, hidden], axis=-1)
        return self.norm(hidden + self.down(gemma4_text.geglu(self.gate(x), self.up(x))))


class Trainee(nn.Module):
    """The target and its throw-away lookahead."""

    def __init__(self):
        super().__init__()
        names = gemma4_text.ModelArgs.__dataclass_fields__
        self.target = gemma4_text.Model(
            gemma4_text.ModelArgs(**{k: v for k, v in TARGET_CONFIG.items() if k in names}))  # fmt: skip
        self.lookahead = Lookahead(TARGET_CONFIG["hidden_size"])
        mx.eval(self.state)  # rotary frequencies too: arrays left lazy here could not be used in another thread

    def losses(self, tokens):
        """tokens [B, T+2]. Returns (mean negative log likelihood of the next token, of the one after)."""
        body = self.target.model
        hidden = body(tokens[:, :-2], cache=[Recorder() for _ in range(KV_OWNERS)])  # [B, T, D]
        following = body.embed_tokens(tokens[:, 1:-1]) * body.embed_scale
        further = self.lookahead(hidden, following)
        head = body.embed_tokens.as_linear
        return negative_log_likelihood(head(hidden), tokens[:, 1:-1]), negative_log_likelihood(head(further), tokens[:, 2:])


def negative_log_likelihood(logits, tokens, cap=30.0):
    """logits [..., V] before the soft cap, tokens [...]. The cap bounds them, so that no maximum need be subtracted."""
    logits = gemma4_text.logit_softcap(cap, logits)
    chosen = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return (mx.log(fast_exp(logits).sum(-1)) - chosen).mean()


def target_batch(stream, step, seed, tokens_per_step=4096, long=1024, short=256):
    """[rows, length + 2] windows of the stream; every fifth batch holds long ones. Depends on (seed, step) alone."""
    length = long if step % 5 == 4 else short
    randomness = np.random.default_rng([seed, step])
    starts = randomness.integers(0, len(stream) - length - 2, tokens_per_step // length)
    return mx.array(np.stack([stream[s : s + length + 2] for s in starts]))


def train_target(stream, held_out, work, seed, steps, workers):
    """Trains the target for `steps` steps, from its checkpoint in `work` if there is one. Returns the Trainee."""
    mx.random.seed(seed)
    trainee, optimizer = Trainee(), make_optimizer(0.02, 0.003, steps)
    parameters, progress = trainee.trainable_parameters(), {"step": 0, "seconds": 0.0, "curve": []}
    checkpoint = Path(work) / "target_checkpoint.safetensors"
    if checkpoint.exists():
        parameters, progress = load_checkpoint(checkpoint, optimizer)

    def make_loss():
        model = Trainee()

        def loss(parameters, tokens):
            model.update(parameters)
            following, further = model.losses(tokens)
            return following + 0.2 * further

        return loss

    gradients = ParallelGradients(make_loss, workers)
    started = saved = time.time()
    with training_math(), tqdm(total=steps, initial=progress["step"], desc="target", mininterval=5) as bar:
        for step in range(progress["step"], steps):
            loss, gradient = gradients(parameters, target_batch(stream, step, seed))
            parameters = optimizer.apply_gradients(gradient, parameters)
            mx.eval(parameters, optimizer.state)
            bar.update()
            if step % 10 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if (step + 1) % 100 == 0 or step + 1 == steps:
                trainee.update(parameters)
                progress["curve"].append([step + 1, loss.item(), *target_loss(trainee, held_out)])
                tqdm.write(f"step, loss, held-out loss (next, after next): {progress['curve'][-1]}")
            if time.time() - saved > 60 or step + 1 == steps:
                saved = time.time()
                state = progress | {"step": step + 1, "seconds": progress["seconds"] + saved - started}
                save_checkpoint(checkpoint, parameters, optimizer, state)
    gradients.close()
    trainee.update(parameters)
    return trainee


def target_loss(trainee, held_out, rows=16, length=512):
    """Held-out losses (next token, the one after) on windows spread evenly over the held-out stream."""
    starts = np.linspace(0, len(held_out) - length - 2, rows).astype(int)
    with training_math():
        losses = [trainee.losses(mx.array(held_out[None, s : s + length + 2])) for s in starts]
        mx.eval(losses)
    return [sum(loss[i].item() for loss in losses) / rows for i in range(2)]


# Drafter --------------------------------------------------------------------------------------------------------------


def balanced_clusters(table: np.ndarray, clusters: int, seed: int, rounds: int = 15) -> np.ndarray:
    """Rows of `table` [V, D] in `clusters` groups of equal size around common directions. Returns ids [clusters, V / C]."""
    directions = table / np.linalg.norm(table, axis=1, keepdims=True)
    centers = directions[np.random.default_rng(seed).choice(len(table), clusters, replace=False)]
    for _ in range(rounds):
        similarity = directions @ centers.T
        members: list[list[int]] = [[] for _ in range(clusters)]
        placed = np.zeros(len(table), bool)
        for pair in np.argsort(-similarity, axis=None, kind="stable"):  # the closest pairs first
            row, cluster = divmod(int(pair), clusters)
            if not placed[row] and len(members[cluster]) < len(table) // clusters:
                members[cluster].append(row)
                placed[row] = True
        centers = np.stack([directions[rows].mean(0) for rows in members])
    return np.array([sorted(rows) for rows in members])


def write_untrained_drafter(directory: Path, target: Target, seed: int) -> None:
    """A drafter to start from: random layers, output table and clusters taken from the target's embeddings."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "dtype": "bfloat16",
        "backbone_hidden_size": TARGET_CONFIG["hidden_size"], "num_centroids": CLUSTERS, "use_ordered_embeddings": True,
        "centroid_intermediate_top_k": SCORED_CLUSTERS, "tie_word_embeddings": True, "text_config": DRAFTER_CONFIG,
    }  # fmt: skip
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json",
               {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"})  # fmt: skip
    mx.random.seed(seed)
    drafter = Drafter(load_drafter_config(directory)[1], CLUSTERS)
    table = np.array(target.embed_tokens.weight.astype(mx.float32))
    ordering = balanced_clusters(table, CLUSTERS, seed)
    directions = np.linalg.svd(table, full_matrices=False)[2][: DRAFTER_CONFIG["hidden_size"]]
    rows = (table @ directions.T)[ordering]  # [C, V / C, d]
    drafter.head.tokens.weight = mx.array(rows)
    drafter.head.centroids.weight = mx.array(rows.mean(1))
    drafter.head.ordering = mx.array(ordering.astype(np.int32))
    save_drafter(drafter, directory, directory, mx.bfloat16)


def drafter_stream(target: Target, stream: np.ndarray, work: Path, seed: int, prompts: int, tokens: int) -> np.ndarray:
    """Half source text, half the target's own greedy continuations of it: in decoding, a drafter reads those."""
    file = work / "continuations.npy"
    if not file.exists():
        randomness = np.random.default_rng([seed, 1])
        beginnings = []
        for start in randomness.integers(0, len(stream) - 200, prompts):
            window = stream[start : start + randomness.integers(24, 128)]
            beginnings.append([BOS] + [int(t) for t in window if t > EOS and t != BOS])
        with tqdm(total=prompts, desc="continuations", mininterval=5) as bar:
            texts = continue_prompts(target, beginnings, tokens, done=bar.update)
        np.save(file, np.array([token for text in texts for token in text], np.int32))
    continuations = np.load(file)
    return np.concatenate([continuations, stream[: len(continuations)]])


def train_drafter(target: Target, out: Path, work: Path, stream, held_out: list, settings: Settings, workers: int) -> dict:
    """Writes out/drafter and returns the tuner's report."""
    start = work / "untrained"
    if not (start / "model.safetensors").exists():
        write_untrained_drafter(start, target, settings.seed)
    tokenizer = load(out / "target", None).tokenizer
    prompts = held_out_prompts(held_out, BOS, count=24, length=128)
    run = Run(target, start, stream, settings, work / "drafter", workers)
    report = Tuner(target, start, tokenizer, prompts, settings, out / "drafter").run(run, evaluations=3)
    (out / "drafter" / "distill.json").rename(work / "distill.json")
    return report


# The pair -------------------------------------------------------------------------------------------------------------

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools %}{{ raise_exception('the demo pair knows no tools') }}{% endif -%}
{%- macro text(content) -%}
    {%- if content is string %}{{ content | trim }}{% else -%}
    {%- for part in content %}{{ part['text'] | trim }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- macro without_thoughts(content) -%}
    {%- for part in content.split('<channel|>') %}{{ part.split('<|channel>')[0] }}{% endfor -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0]['role'] in ['system', 'developer'] -%}
{%- if has_system or enable_thinking -%}
    {{- '<|turn>system\n' -}}
    {%- if enable_thinking %}{{ '<|think|>\n' }}{% endif -%}
    {%- if has_system %}{{ text(messages[0]['content']) }}{% endif -%}
    {{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
    {%- if message['role'] == 'assistant' or message['role'] == 'model' -%}
        {{- '<|turn>model\n' + (without_thoughts(text(message['content'])) | trim) + '<turn|>\n' -}}
    {%- else -%}
        {{- '<|turn>' + message['role'] + '\n' + text(message['content']) + '<turn|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif -%}
"""


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_target(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """out/target as a Hugging Face directory: bfloat16 weights, configuration, tokenizer, chat template."""
    out = out / "target"
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace("model.", "model.language_model.", 1): array.astype(mx.bfloat16)
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(out / "model.safetensors"), tensors, {"format": "pt"})
    stop_ids = [EOS, TURN_END, TOOL_RESPONSE]
    write_json(out / "config.json", {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
        "vocab_size": VOCABULARY, "eos_token_id": stop_ids[:2], "tie_word_embeddings": True, "text_config": TARGET_CONFIG,
    })  # fmt: skip
    write_json(out / "generation_config.json", {
        "bos_token_id": BOS, "eos_token_id": stop_ids, "pad_token_id": PAD, "do_sample": False,
    })  # fmt: skip
    names = ["sot", "eot", "soc", "eoc", "think", "std", "etd", "stc", "etc", "str", "etr", "escape"]
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>",
        "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "padding_side": "left",
        "model_max_length": TARGET_CONFIG["max_position_embeddings"],
        "extra_special_tokens": {f"{name}_token": token for name, token in zip(names, SPECIAL_TOKENS[4:], strict=True)},
    })  # fmt: skip
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def measure_pair(out: Path, held_out: list) -> dict:
    """Greedy acceptance on the held-out modules: the finished files, loaded as a user loads them.

    acceptance: 96 tokens after 128 of context, at two places of every module.  first_rounds: one round after 128 tokens
    of the source itself, at 200 places.
    """
    pair = load(out)
    continued, ids = [], []
    for _, source in held_out:
        tokens = pair.tokenizer.encode(source, raw=True)[1:]
        ids += tokens
        continued += [[BOS, *tokens[max(0, end - 128) : end]] for end in (len(tokens) // 3, 2 * len(tokens) // 3)]
    places = np.linspace(0, len(ids) - 128, 200).astype(int)
    return {
        "acceptance": measure_acceptance(pair, continued, 4, 96),
        "first_rounds": measure_first_rounds(pair, [[BOS, *ids[start : start + 128]] for start in places], 4),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="directory for the finished pair")
    parser.add_argument("--work", help="directory for checkpoints (default: OUT/work)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-steps", type=int, default=950)
    parser.add_argument("--drafter-steps", type=int, default=600)
    parser.add_argument("--continuations", type=int, default=2048, help="prompts the target continues for the drafter")
    parser.add_argument("--workers", type=int, default=2, help="threads that share a batch")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    work = Path(options.work) if options.work else out / "work"
    work.mkdir(parents=True, exist_ok=True)

    modules = standard_library()
    training = [module for module in modules if not is_held_out(module[0])]
    held_out = [module for module in modules if is_held_out(module[0])]
    tokenizer_file = work / "tokenizer.json"
    if not tokenizer_file.exists():
        make_tokenizer([source for _, source in training]).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    texts = documents(training, options.seed)
    stream = token_stream(tokenizer, texts)
    held_out_stream = token_stream(tokenizer, [source for _, source in held_out])
    print(f"{len(training)} modules, {len(stream):,} tokens in {len(texts)} documents; {len(held_out)} modules held out, "
          f"{len(held_out_stream):,} tokens")  # fmt: skip

    trainee = train_target(stream, held_out_stream, work, options.seed, options.target_steps, options.workers)
    losses = target_loss(trainee, held_out_stream)
    write_target(trainee.target, tokenizer, out)
    target = load(out / "target", None, dtype="float32").target  # what is drafted for is what was written, rounding included

    drafts = drafter_stream(target, stream, work, options.seed, options.continuations, tokens=160)
    settings = Settings(options.drafter_steps, length=512, rows=4, anchors=512, rate=0.02, seed=options.seed)
    report = train_drafter(target, out, work, drafts, [held_out_stream.tolist()], settings, options.workers)
    record = {
        "python": platform.python_version(), "seed": options.seed, "workers": options.workers,
        "target_steps": options.target_steps, "drafter_steps": options.drafter_steps,
        "training_tokens": len(stream), "held_out_loss": round(losses[0], 4),
        "held_out_modules": [name for name, _ in held_out],
        "drafter_before": report["before"],
    } | measure_pair(out, held_out)  # fmt: skip
    write_json(out / "training.json", record)
    print(f"target: held-out loss {losses[0]:.3f} per token; pair: {describe(record['acceptance'])}; "
          f"in the first round after source text {describe(record['first_rounds'])}")  # fmt: skip


if __name__ == "__main__":
    main()
