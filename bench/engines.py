"""Ours and its peers behind one call: tokens out, seconds spent decoding, rounds, time to the first token.

Peers are optional: one that is not installed is left out by name. All run greedily; the pairs of the bench are float32.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

import mlx_gemma_mtp
from mlx_gemma_mtp import Sampling
from mlx_gemma_mtp.config import load_target_config

GREEDY = Sampling(temperature=0)


@dataclass
class Run:
    """first_seconds: to the first token, prompt included.  seconds: of all later tokens.  rounds: that yielded those."""

    tokens: list[int]
    first_seconds: float
    seconds: float
    rounds: int
    accepted_by_position: list[int]

    @property
    def milliseconds_per_token(self) -> float:
        return 1000 * self.seconds / max(len(self.tokens) - 1, 1)


class Ours:
    """draft_length: as in `Pair.generate`."""

    def __init__(self, pair: mlx_gemma_mtp.Pair, draft_length, name: str):
        self.pair, self.draft_length, self.name = pair, draft_length, name

    def run(self, prompt: list[int], count: int) -> Run:
        done = self.pair.generate(
            prompt, max_tokens=count, draft_length=self.draft_length, sampling=GREEDY, ignore_eos=True, reuse=False
        )
        stats = done.stats
        return Run(done.tokens, stats.prefill_seconds, stats.decode_seconds, stats.rounds, stats.accepted_by_position)


class MlxLm:
    """mlx-lm's plain generation."""

    name = "mlx-lm plain"

    def __init__(self, directory: Path):
        from mlx_lm.utils import load_model

        self.model, _ = load_model(directory / "target", model_config=load_target_config(directory / "target"))
        if mx.default_device() == mx.cpu:
            self.model.set_dtype(mx.float32)
            mx.eval(self.model.parameters())

    def run(self, prompt: list[int], count: int) -> Run:
        from mlx_lm.generate import generate_step

        start = time.perf_counter()
        steps = generate_step(mx.array(prompt), self.model, max_tokens=count)
        return timed((int(token) for token, _ in steps), start)


class MlxVlm:
    """mlx-vlm 0.7.10, plain (draft_length 0) or with its MTP rounds."""

    def __init__(self, directory: Path, draft_length: int, shared: "MlxVlm | None" = None):
        self.draft_length = draft_length
        self.name = f"mlx-vlm MTP K={draft_length}" if draft_length else "mlx-vlm plain"
        if shared is not None:
            self.target, self.drafter = shared.target, shared.drafter
            return
        from mlx_vlm.speculative.drafters import load_drafter
        from mlx_vlm.utils import load_model

        self.target = load_model(directory / "target")
        self.drafter, _ = load_drafter(str(directory / "drafter"))

    def run(self, prompt: list[int], count: int) -> Run:
        from mlx_vlm.generate.ar import generate_step

        options = {"draft_model": self.drafter, "draft_kind": "mtp", "draft_block_size": self.draft_length + 1}
        start = time.perf_counter()
        steps = generate_step(
            mx.array([prompt]), self.target, None, None, max_tokens=count, temperature=0.0,
            **(options if self.draft_length else {}),
        )  # fmt: skip
        run = timed((int(token) for token, _ in steps), start)
        if self.draft_length:
            run.rounds = len(self.drafter.accept_lens)
        return run


def timed(tokens, start: float) -> Run:
    """A Run of an iterator of tokens that was started at `start`."""
    out = [next(tokens)]
    first = time.perf_counter()
    out += tokens
    end = time.perf_counter()
    return Run(out, first - start, end - first, len(out) - 1, [])


def engines_of(directory: Path, lengths: list[int], peers: bool = True) -> list:
    """Ours plain, at every fixed length and automatic; then the peers that are there."""
    pair = mlx_gemma_mtp.load(directory)
    found = [Ours(pair, 0, "ours plain"), *(Ours(pair, k, f"ours K={k}") for k in lengths), Ours(pair, "auto", "ours auto")]
    if not peers:
        return found
    found.append(MlxLm(directory))
    try:
        plain = MlxVlm(directory, 0)
        found += [plain, *(MlxVlm(directory, k, plain) for k in (1, 2, 3, 4))]
    except ImportError:
        print("mlx-vlm is not installed: left out (pip install mlx-vlm==0.7.10)")
    return found
