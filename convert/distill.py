"""Tunes a drafter on the distributions of its target: a fine-tuned or quantized target drifts from the drafter it came with.

    python -m mlx_gemma_mtp.convert.distill --pair DIR --data FILE|DIR|- --out DIR [--minutes M | --steps N] [--rank R]
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from mlx.utils import tree_flatten
from tqdm import tqdm

from mlx_gemma_mtp.checkpoint import read_json, read_tensors
from mlx_gemma_mtp.command import exit_code
from mlx_gemma_mtp.config import check_pair, load_drafter_config
from mlx_gemma_mtp.drafter import load_drafter
from mlx_gemma_mtp.errors import OptionError
from mlx_gemma_mtp.hub import find, load
from mlx_gemma_mtp.pair import Pair
from mlx_gemma_mtp.sampling import Sampling
from mlx_gemma_mtp.target import Target
from mlx_gemma_mtp.tokenizer import Tokenizer

from .texts import DataError, Document, continue_prompts, read_documents, split_held_out
from .trainable import copy_drafter, save_drafter, stored_dtype
from .tuning import Run, Settings


def measure_acceptance(pair: Pair, prompts: list[list[int]], draft_length: int, max_tokens: int = 64) -> dict:
    """Decodes every prompt greedily. Returns rounds, acceptance_length and acceptance_by_position (shares of rounds)."""
    rounds, accepted = 0, [0] * draft_length
    for prompt in prompts:
        options = {"max_tokens": max_tokens, "draft_length": draft_length, "ignore_eos": True}
        stats = pair.generate(prompt, sampling=Sampling(temperature=0), **options).stats
        rounds += stats.rounds
        for position, count in enumerate(stats.accepted_by_position):
            accepted[position] += count
    return {
        "rounds": rounds,
        "acceptance_length": round(1 + sum(accepted) / rounds, 4),
        "acceptance_by_position": [round(count / rounds, 4) for count in accepted],
    }


def measure_first_rounds(pair: Pair, prompts: list[list[int]], draft_length: int) -> dict:
    """As measure_acceptance, but one round after each prompt only.

    Long greedy texts of a small model repeat themselves, which is easily drafted; these contexts are all real text.
    """
    accepted = [0] * draft_length
    for prompt in prompts:
        stream = pair.stream(
            prompt,
            max_tokens=2 * draft_length + 2,
            draft_length=draft_length,
            sampling=Sampling(temperature=0),
            ignore_eos=True,
        )
        next(stream)  # the token of the prompt's own pass, which has no drafts
        for position in range(len(next(stream).tokens) - 1):
            accepted[position] += 1
        stream.close()
    return {
        "rounds": len(prompts),
        "acceptance_length": round(1 + sum(accepted) / len(prompts), 4),
        "acceptance_by_position": [round(count / len(prompts), 4) for count in accepted],
    }


def held_out_prompts(held_out: list[list[int]], bos_id: int | None, count: int, length: int) -> list[list[int]]:
    """`count` prompts of at most `length` tokens, spread evenly over the held-out documents."""
    stream = [token for ids in held_out for token in ids]
    length = max(1, min(length, len(stream) - 1))
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    begin = [] if bos_id is None else [bos_id]
    return [begin + [t for t in stream[s : s + length] if t != bos_id] for s in sorted(set(starts.tolist()))]


def memory_bytes(target: Target, settings: Settings, drafter_weights: int, workers: int) -> int:
    """What training takes at most, roughly: weights, optimizer, and the distributions over the vocabulary."""
    weights = sum(array.nbytes for _, array in tree_flatten(target.model.parameters()))
    distributions = settings.rows * settings.anchors * target.args.vocab_size * 4 * (3 * settings.draft_length + 4)
    per_token = 4 * 100 * target.args.hidden_size * target.args.num_hidden_layers
    return weights + drafter_weights * 4 * (4 + 2 * workers) + distributions + settings.rows * settings.length * per_token


def fit_anchors(target: Target, settings: Settings, budget: int) -> Settings:
    """The settings with as many anchors as keep the distributions over the vocabulary within `budget` bytes."""
    each = settings.rows * target.args.vocab_size * 4 * (3 * settings.draft_length + 4)
    return replace(settings, anchors=max(1, min(settings.length, budget // each)))


class Tuner:
    """A Run whose drafter is measured by decoding now and then; the best one is kept in `out`, the source's to start with."""

    def __init__(self, target: Target, source: Path, tokenizer: Tokenizer, prompts: list, settings: Settings, out: Path):
        self.target, self.source, self.tokenizer = target, source, tokenizer
        self.prompts, self.settings, self.out = prompts, settings, out
        self.dtype = stored_dtype(source)

    def measure(self, directory: Path) -> dict:
        pair = Pair(self.target, load_drafter(directory, self.target.dtype), self.tokenizer, directory.name)
        return measure_acceptance(pair, self.prompts, self.settings.draft_length)

    def run(self, run: Run, evaluations: int = 4) -> dict:
        """Trains to the end. Returns the report: acceptance before, after, and of the drafter that was kept."""
        progress, steps = run.progress, self.settings.steps
        if "before" not in progress:
            progress["before"] = progress["best"] = self.measure(self.source)
            progress["evaluations"] = [[0, progress["before"]["acceptance_length"]]]
            copy_drafter(self.source, self.out)
            run.save()
        print(f"before: {describe(progress['before'])}", file=sys.stderr)
        due = {steps * i // evaluations for i in range(1, evaluations + 1)}
        with tqdm(total=steps, initial=progress["step"], desc="distill", disable=None) as bar:
            for step, loss in run.steps():
                bar.update()
                bar.set_postfix(loss=f"{loss:.4f}", acceptance=progress["evaluations"][-1][1], refresh=False)
                if step in due:
                    self._evaluate(run, step)
        run.gradients.close()
        print(f"after:  {describe(progress['after'])}", file=sys.stderr)
        report = {name: progress[name] for name in ("before", "after", "best", "evaluations", "curve")}
        report |= {"settings": asdict(self.settings), "kept": "source" if report["best"] == report["before"] else "tuned"}
        (self.out / "distill.json").write_text(json.dumps(report, indent=1))
        return report

    def _evaluate(self, run: Run, step: int) -> None:
        candidate = run.checkpoint.parent / "candidate"
        save_drafter(run.fused(), self.source, candidate, self.dtype)
        run.progress["after"] = measured = self.measure(candidate)
        run.progress["evaluations"].append([step, measured["acceptance_length"]])
        if measured["acceptance_length"] > run.progress["best"]["acceptance_length"]:
            run.progress["best"] = measured
            copy_drafter(candidate, self.out)
        run.save()


def describe(measured: dict) -> str:
    by_position = " ".join(f"{share:.0%}" for share in measured["acceptance_by_position"])
    return f"{measured['acceptance_length']:.3f} tokens per round in {measured['rounds']} rounds (by position {by_position})"


def draw_curve(report: dict, path: Path) -> bool:
    """Loss and held-out acceptance over steps as a PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4))
    losses = figure.subplots()
    losses.plot(*zip(*report["curve"], strict=True), color="tab:blue", linewidth=0.8)
    losses.set(xlabel="step", ylabel="loss")
    acceptance = losses.twinx()
    acceptance.plot(*zip(*report["evaluations"], strict=True), color="tab:red", marker="o")
    acceptance.set_ylabel("held-out acceptance length")
    figure.savefig(path, dpi=120)
    return True


def training_sequences(target: Target, tokenizer: Tokenizer, documents: list[Document], continuation: int) -> list[list[int]]:
    """Ids of every document; prompts with the target's continuation."""
    prompts = [d.ids for d in documents if d.is_prompt]
    if not prompts:
        return [d.ids for d in documents]
    with tqdm(total=len(prompts), desc="continue prompts", disable=None) as bar:
        texts = iter(continue_prompts(target, prompts, continuation, tokenizer.stop_ids, done=bar.update))
    return [next(texts) if d.is_prompt else d.ids for d in documents]


def seconds_per_step(target: Target, source: Path, stream: np.ndarray, settings: Settings, workers: int) -> float:
    """Measured on a run that is thrown away; the first step, which compiles, does not count."""
    run = Run(target, source, stream, replace(settings, steps=4), Path("/nonexistent"), workers)
    times = [time.time() for _ in run.steps(save_seconds=1e9)]
    run.gradients.close()
    return (times[-1] - times[0]) / (len(times) - 1)


def distill(options: argparse.Namespace) -> dict:
    """The command, with parsed options. Raises MtpError."""
    directory, source = find(options.pair, options.drafter or "auto")
    out = Path(options.out)
    if out.resolve() == source.resolve():
        raise OptionError(f"--out {out} is the drafter to be tuned: give another directory")
    if "quantization" in read_json(source / "config.json") and not options.rank:
        raise OptionError(f"{source} is quantized: give --rank, or tune the drafter it was made from")
    plain = load(directory, None)
    target, tokenizer = plain.target, plain.tokenizer
    check_pair(target.args, load_drafter_config(source)[1])
    documents = read_documents(options.data, tokenizer)
    sequences = training_sequences(target, tokenizer, documents, options.continuation)
    stream, held_out = split_held_out(sequences)
    length = min(options.length, len(stream))
    if length <= options.draft_length + 1:
        raise DataError(f"{options.data} holds {len(stream)} tokens to train on: give at least {options.draft_length + 2}")
    settings = fit_anchors(target, Settings(options.steps or 0, length, options.rows, length, options.draft_length,
                                            options.rate, options.rank, options.seed), options.memory << 30)  # fmt: skip
    weights = sum(t.size for t in read_tensors(source).values())
    print(f"{len(stream):,} tokens to train on, {sum(map(len, held_out)):,} held out; about "
          f"{memory_bytes(target, settings, weights, options.workers) / 1e9:.1f} GB of memory", file=sys.stderr)  # fmt: skip
    if not options.steps:
        settings = replace(settings, steps=planned_steps(options, out, target, source, stream, settings))
    prompts = held_out_prompts(held_out, tokenizer.bos_id, options.prompts, options.length)
    run = Run(target, source, stream, settings, out / "work", options.workers)
    report = Tuner(target, source, tokenizer, prompts, settings, out).run(run)
    if not draw_curve(report, out / "curve.png"):
        print('no curve.png: pip install "mlx-gemma-mtp[train]" for matplotlib', file=sys.stderr)
    return report


def planned_steps(options, out: Path, target: Target, source: Path, stream: np.ndarray, settings: Settings) -> int:
    """Steps that take --minutes; written down, so that a resumed run has the same schedule."""
    plan = out / "work" / "plan.json"
    if plan.exists():
        return json.loads(plan.read_text())["steps"]
    each = seconds_per_step(target, source, stream, settings, options.workers)
    steps = max(4, round(options.minutes * 60 / each))
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(json.dumps({"steps": steps, "seconds_per_step": each}))
    return steps


def report_of(report: dict) -> None:
    """Prints what was kept."""
    kept = "the tuned drafter" if report["kept"] == "tuned" else "no gain: the drafter it started from"
    print(f"kept {kept}: {describe(report['best'])}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mlx_gemma_mtp.convert.distill", description=__doc__.split("\n")[0])
    parser.add_argument("--pair", required=True, help="directory with target/ and drafter/, or a target with --drafter")
    parser.add_argument("--drafter", help="directory of the drafter to start from (default: the pair's)")
    parser.add_argument("--data", required=True, help="text or .jsonl file, a directory of them, or - for standard input")
    parser.add_argument("--out", required=True, help="directory for the tuned drafter; a killed run goes on from it")
    time_or_steps = parser.add_mutually_exclusive_group()
    time_or_steps.add_argument("--minutes", type=float, default=10.0, help="how long to train (default 10)")
    time_or_steps.add_argument("--steps", type=int, help="how many steps to train")
    parser.add_argument("--rank", type=int, help="train low-rank deltas of this rank instead of the weights")
    parser.add_argument("--length", type=int, default=256, help="tokens of a training window (default 256)")
    parser.add_argument("--rows", type=int, default=8, help="windows per step (default 8)")
    parser.add_argument("--draft-length", type=int, default=4, help="chained draft steps (default 4)")
    parser.add_argument("--rate", type=float, default=0.005, help="peak learning rate (default 0.005)")
    parser.add_argument("--continuation", type=int, default=128, help="tokens the target adds to a prompt (default 128)")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts to measure acceptance on (default 24)")
    parser.add_argument("--memory", type=int, default=2, help="GiB for distributions over the vocabulary (default 2)")
    parser.add_argument("--workers", type=int, default=1, help="threads that share a batch, of use on a CPU (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return exit_code(lambda: report_of(distill(options)), "interrupted: the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
