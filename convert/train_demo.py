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
import platform
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from mlx_gemma_mtp import load
from mlx_gemma_mtp.config import load_drafter_config
from mlx_gemma_mtp.drafter import Drafter
from mlx_gemma_mtp.target import Target

from .demo_target import COMMON_CONFIG, FULL, SLIDING, TARGET_CONFIG, target_loss, train_target, write_json, write_target
from .demo_text import BOS, EOS, documents, is_held_out, make_tokenizer, standard_library, token_stream
from .distill import Tuner, describe, held_out_prompts, measure_acceptance, measure_first_rounds
from .texts import continue_prompts
from .trainable import save_drafter
from .tuning import Run, Settings

DRAFTER_CONFIG = COMMON_CONFIG | dict(
    hidden_size=96, intermediate_size=384, num_hidden_layers=4, num_kv_shared_layers=4, use_double_wide_mlp=False,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, final_logit_softcapping=None,
    layer_types=[SLIDING, SLIDING, SLIDING, FULL],
)  # fmt: skip
CLUSTERS, SCORED_CLUSTERS = 48, 8


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
