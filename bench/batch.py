"""Tokens per second of a batch of unequal rows: ours beside the same prompts one after the other, and mlx-vlm's batches.

    python -m bench.batch PAIR [--rows 1 4 8] [--tokens 48] [--drafts 0 3 auto]

PAIR: a directory with target/ and drafter/. Greedy; prompts are 40 to 200 random ids. Runs alternate, and every row
is compared with the same row alone (at the first of the draft lengths) before a time is reported. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

import mlx_gemma_mtp
from bench.engines import GREEDY, Loaded, MlxVlm, Ours, load, parting
from bench.machine import check_blas
from mlx_gemma_mtp.command import exit_code

SHORTEST, LONGEST = 40, 200  # tokens of a prompt


@dataclass
class BatchRun:
    """tokens: by row.  seconds: of all.  prefill_seconds: of these, until every row had its first token."""

    tokens: list[list[int]]
    seconds: float
    prefill_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Prompts included."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Without prompts and first tokens."""
        return sum(len(row) - 1 for row in self.tokens) / (self.seconds - self.prefill_seconds)


class Alone:
    """Ours, one prompt after the other."""

    def __init__(self, pair: mlx_gemma_mtp.Pair, draft_length):
        self.engine = Ours(pair, draft_length, f"ours alone {draft_length}")
        self.name = self.engine.name

    def run(self, prompts: list[list[int]], count: int) -> BatchRun:
        runs = [self.engine.run(prompt, count) for prompt in prompts]
        first = sum(run.first_seconds for run in runs)
        return BatchRun([run.tokens for run in runs], sum(run.times[-1] for run in runs), first)


class OursBatch:
    """Ours, all prompts at once."""

    def __init__(self, pair: mlx_gemma_mtp.Pair, draft_length):
        self.pair, self.draft_length, self.name = pair, draft_length, f"ours batch {draft_length}"

    def run(self, prompts: list[list[int]], count: int) -> BatchRun:
        start = time.perf_counter()
        done = self.pair.generate_batch(
            prompts, max_tokens=count, draft_length=self.draft_length, sampling=GREEDY, ignore_eos=True, rows=len(prompts)
        )
        seconds = time.perf_counter() - start
        return BatchRun([row.tokens for row in done], seconds, max(row.stats.prefill_seconds for row in done))


class NeverStops:
    """What mlx-vlm asks of a tokenizer, for rows that end by their length alone."""

    @property
    def stopping_criteria(self) -> "NeverStops":
        return self

    def add_eos_token_ids(self, ids) -> None:
        pass

    def __call__(self, token: int) -> bool:
        return False


class MlxVlmBatch:
    """mlx-vlm 0.7.10's BatchGenerator, which its server runs: plain or with its MTP rounds."""

    def __init__(self, engine: MlxVlm):
        self.engine, self.name = engine, f"mlx-vlm batch {engine.draft_length}"

    def run(self, prompts: list[list[int]], count: int) -> BatchRun:
        from mlx_vlm.generate.ar import BatchGenerator

        target, drafts, rows = self.engine.target, self.engine.draft_length, len(prompts)
        drafting = {"draft_model": self.engine.drafter, "draft_kind": "mtp", "draft_block_size": drafts + 1}
        start = time.perf_counter()
        generator = BatchGenerator(
            target.language_model, NeverStops(), prefill_batch_size=rows, completion_batch_size=rows, compute_logprobs=False,
            **(drafting if drafts else {}),
        )  # fmt: skip
        inputs = [target.get_input_embeddings(mx.array([prompt])).to_dict() for prompt in prompts]
        known = [{name: value for name, value in row.items() if value is not None} for row in inputs]
        tokens = {uid: [] for uid in generator.insert(prompts, count, prompt_kwargs=known)}
        prefill_seconds = 0.0
        while generator.has_work:
            for response in generator.next()[1]:
                tokens[response.uid].append(response.token)
            if not prefill_seconds and all(tokens.values()):
                prefill_seconds = time.perf_counter() - start
        seconds = time.perf_counter() - start
        generator.close()
        return BatchRun(list(tokens.values()), seconds, prefill_seconds)


def batch_engines(loaded: Loaded, drafts: list) -> list:
    """Ours alone and in batches with every draft length, then mlx-vlm's with those that are numbers."""
    found = [Alone(loaded.pair, k) for k in drafts] + [OursBatch(loaded.pair, k) for k in drafts]
    return found + [MlxVlmBatch(engine) for engine in loaded.mlx_vlm([k for k in drafts if k != "auto"])]


def random_prompts(rows: int) -> list[list[int]]:
    """Prompts of random length; those of fewer rows are among those of more."""
    lengths = mx.random.randint(SHORTEST, LONGEST + 1, (32,), key=mx.random.key(0)).tolist()
    return [[2, *mx.random.randint(20, 1000, (n - 1,), key=mx.random.key(n)).tolist()] for n in lengths[:rows]]


def compare(runs: list[BatchRun], reference: list[list[int]]) -> dict:
    """How many rows are as in the reference, and where the others part from it: {row: index of the token}."""
    parted = {}
    for run in runs:
        for row, (ours, theirs) in enumerate(zip(run.tokens, reference, strict=True)):
            if ours != theirs:
                parted[row] = parting(ours, theirs)
    return {"same_rows": len(reference) - len(parted), "parted": parted}


def measure(loaded: Loaded, rows: list[int], tokens: int, drafts: list, repeats: int = 3) -> dict:
    """Times every engine with every number of rows.

    drafts: draft lengths, numbers or "auto".  repeats: timed runs of each, after one that makes graphs and kernels.
    Returns the settings and `lines`, one per number of rows and engine: medians in tokens per second, and what `compare` says.
    """
    engines, lines = batch_engines(loaded, drafts), []
    for count in rows:
        prompts = random_prompts(count)
        runs = {engine.name: [] for engine in engines}
        for _ in range(1 + repeats):
            for engine in engines:
                runs[engine.name].append(engine.run(prompts, tokens))
        reference = runs[engines[0].name][0].tokens
        for name, (_, *timed) in runs.items():
            line = {"rows": count, "engine": name} | compare(timed, reference)
            line["tokens_per_second"] = statistics.median(run.tokens_per_second for run in timed)
            line["decode_tokens_per_second"] = statistics.median(run.decode_tokens_per_second for run in timed)
            lines.append(line)
            show(line)
    return {"tokens": tokens, "prompt_tokens": [len(p) for p in random_prompts(max(rows))], "lines": lines}


def show(line: dict) -> None:
    print(
        f"{line['rows']} rows  {line['engine']:<18} {line['same_rows']}/{line['rows']} rows as alone"
        f"{line['tokens_per_second']:>9.2f} tokens/s with prompts{line['decode_tokens_per_second']:>9.2f} decoding",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.batch", description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path, help="directory with target/ and drafter/")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8], help="rows of a batch (1 4 8)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a row (48)")
    parser.add_argument(
        "--drafts",
        type=lambda text: text if text == "auto" else int(text),
        nargs="+",
        default=[0, 3, "auto"],
        help="numbers or auto",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each (3)")
    options = parser.parse_args()
    if min(options.tokens, options.repeats) < 1:
        parser.error("--tokens and --repeats must be at least 1")
    check_blas()
    loaded = load(options.pair, peers=["mlx-vlm"])
    print(json.dumps(measure(loaded, options.rows, options.tokens, options.drafts, options.repeats)))


if __name__ == "__main__":
    sys.exit(exit_code(main))
