"""Ours and its peers behind one call: tokens out, seconds spent decoding, rounds, time to the first token. All run greedily."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

import mlx_gemma_mtp
from mlx_gemma_mtp import Sampling
from mlx_gemma_mtp.config import load_target_config
from mlx_gemma_mtp.hub import find

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

    def __init__(self, target: Path):
        from mlx_lm.utils import load_model

        self.model, _ = load_model(target, model_config=load_target_config(target))
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

    def __init__(self, target, drafter, draft_length: int):
        self.target, self.drafter, self.draft_length = target, drafter, draft_length
        self.name = f"mlx-vlm MTP K={draft_length}" if draft_length else "mlx-vlm plain"

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


@dataclass
class Loaded:
    """Everything that is measured, each loaded once. mlx_vlm: its target and drafter; None as mlx_lm: left out."""

    pair: mlx_gemma_mtp.Pair
    mlx_lm: MlxLm | None = None
    mlx_vlm: tuple | None = None

    def ours(self, lengths: list) -> list[Ours]:
        return [Ours(self.pair, k, f"ours K={k}" if k not in (0, "auto") else f"ours {k or 'plain'}") for k in lengths]

    def peers(self, lengths: list[int]) -> list:
        """mlx-lm's plain decoding, and mlx-vlm at these draft lengths (0: plain)."""
        found = [] if self.mlx_lm is None else [self.mlx_lm]
        return found + ([] if self.mlx_vlm is None else [MlxVlm(*self.mlx_vlm, k) for k in lengths])


def load(target: str | Path, drafter: str | Path = "auto", peer_drafter: str | None = None, peers: bool = True) -> Loaded:
    """Ours and the peers that are there; one that cannot be loaded is left out, and why is said.

    target, drafter: as in `mlx_gemma_mtp.load`.  peer_drafter: mlx-vlm's, a directory or id in Hugging Face's form; None
    for the same drafter.
    """
    directory, own_drafter = find(target, drafter)
    loaded = Loaded(mlx_gemma_mtp.load(directory, own_drafter))
    if not peers:
        return loaded
    try:
        loaded.mlx_lm = MlxLm(directory)
    except Exception as error:
        print(f"mlx-lm is left out: {describe(error)}", file=sys.stderr)
    try:
        from mlx_vlm.speculative.drafters import load_drafter
        from mlx_vlm.utils import load_model

        loaded.mlx_vlm = load_model(directory), load_drafter(str(peer_drafter or own_drafter))[0]
    except Exception as error:
        print(f"mlx-vlm is left out: {describe(error)} (pip install mlx-vlm==0.7.10)", file=sys.stderr)
    return loaded


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
