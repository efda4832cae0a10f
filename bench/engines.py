"""Ours and its peers behind one call: tokens out, seconds spent decoding, rounds, time to the first token. All run greedily."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

import mlx_gemma_mtp
from mlx_gemma_mtp import Auto, Sampling
from mlx_gemma_mtp.calibration import calibrate_with
from mlx_gemma_mtp.checkpoint import read_tensors
from mlx_gemma_mtp.config import load_target_config
from mlx_gemma_mtp.hub import drafter_id, find, hub_id

GREEDY = Sampling(temperature=0)
PEERS = ("mlx-lm", "mlx-vlm")
WARM = 8  # tokens after which a generation has all its graphs


@dataclass
class Run:
    """One generation.

    times: seconds from the start to each token.  rounds: that yielded all but the first.
    peak_bytes: most memory beyond what was live before.  round_bytes: most beyond what was live after WARM tokens.
    """

    tokens: list[int]
    times: list[float]
    rounds: int
    peak_bytes: int
    round_bytes: int
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def first_seconds(self) -> float:
        """To the first token, prompt included."""
        return self.times[0]

    @property
    def milliseconds_per_token(self) -> float:
        """Of all tokens after the first."""
        return 1000 * (self.times[-1] - self.times[0]) / max(len(self.tokens) - 1, 1)

    def milliseconds_per_round(self, skipped: int = 0) -> float:
        """Of the rounds after the first `skipped` + 1 tokens, as if all rounds yielded alike."""
        rounds = self.rounds * (len(self.tokens) - 1 - skipped) / max(len(self.tokens) - 1, 1)
        return 1000 * (self.times[-1] - self.times[skipped]) / max(rounds, 1e-9)


def timed(tokens: Iterator[int], stream: mx.Stream | None = None) -> Run:
    """A Run of tokens that are made as they are asked for; waits for what was left running, on `stream` too."""
    mx.synchronize()
    mx.reset_peak_memory()
    live = warm = mx.get_active_memory()
    out, times, peak, start = [], [], 0, time.perf_counter()
    for token in tokens:
        out.append(token)
        times.append(time.perf_counter() - start)
        if len(out) == WARM:
            peak, warm = mx.get_peak_memory(), mx.get_active_memory()
            mx.reset_peak_memory()
    later = mx.get_peak_memory()
    mx.synchronize()
    if stream is not None:
        mx.synchronize(stream)
    return Run(out, times, len(out) - 1, max(peak, later) - live, later - warm)


class Ours:
    """draft_length: as in `Pair.generate`."""

    def __init__(self, pair: mlx_gemma_mtp.Pair, draft_length, name: str):
        self.pair, self.draft_length, self.name = pair, draft_length, name

    def run(self, prompt: list[int], count: int) -> Run:
        stream = self.pair.stream(
            prompt, max_tokens=count, draft_length=self.draft_length, sampling=GREEDY, ignore_eos=True, reuse=False
        )
        run = timed(token for piece in stream for token in piece.tokens)
        stats = stream.completion().stats
        run.rounds, run.accepted_by_position = stats.rounds, stats.accepted_by_position
        return run


class MlxLm:
    """mlx-lm's plain generation."""

    name = "mlx-lm plain"

    def __init__(self, target: Path):
        from mlx_lm.utils import load_model

        self.model = in_float32(load_model(target, model_config=load_target_config(target))[0])

    def run(self, prompt: list[int], count: int) -> Run:
        from mlx_lm.generate import generate_step, generation_stream

        steps = generate_step(mx.array(prompt), self.model, max_tokens=count)
        return timed((int(token) for token, _ in steps), generation_stream)


class MlxVlm:
    """mlx-vlm 0.7.10, plain (draft_length 0) or with its MTP rounds."""

    def __init__(self, target, drafter, draft_length: int):
        self.target, self.drafter, self.draft_length = target, drafter, draft_length
        self.name = f"mlx-vlm MTP K={draft_length}" if draft_length else "mlx-vlm plain"

    def run(self, prompt: list[int], count: int) -> Run:
        from mlx_vlm.generate.ar import generate_step, generation_stream

        options = {"draft_model": self.drafter, "draft_kind": "mtp", "draft_block_size": self.draft_length + 1}
        steps = generate_step(
            mx.array([prompt]), self.target, None, None, max_tokens=count, temperature=0.0,
            **(options if self.draft_length else {}),
        )  # fmt: skip
        run = timed((int(token) for token, _ in steps), generation_stream)
        if self.draft_length:
            run.rounds = len(self.drafter.accept_lens)
        return run


def in_float32(model):
    """The model in the type that ours has: float32 on a CPU, its own elsewhere."""
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def parting(tokens: list[int], reference: list[int]) -> int:
    """Index of the first token that differs."""
    return next((i for i, (a, b) in enumerate(zip(tokens, reference)) if a != b), min(len(tokens), len(reference)))


@dataclass
class Loaded:
    """Everything that is measured, each loaded once. None: left out."""

    pair: mlx_gemma_mtp.Pair
    mlx_lm: MlxLm | None = None
    mlx_vlm_target: object = None
    mlx_vlm_drafter: object = None

    def ours(self, lengths: list) -> list[Ours]:
        return [Ours(self.pair, k, f"ours K={k}" if k not in (0, "auto") else f"ours {k or 'plain'}") for k in lengths]

    def peers(self, lengths: list[int]) -> list:
        """mlx-lm, and mlx-vlm as `mlx_vlm` gives it."""
        return [*([self.mlx_lm] if self.mlx_lm else []), *self.mlx_vlm(lengths)]

    def mlx_vlm(self, lengths: list[int]) -> list[MlxVlm]:
        """At those draft lengths that can be had; 0 is plain."""
        drafter = self.mlx_vlm_drafter
        possible = [k for k in lengths if self.mlx_vlm_target is not None and (k == 0 or drafter is not None)]
        return [MlxVlm(self.mlx_vlm_target, drafter, k) for k in possible]


def load(target: str | Path, drafter: str | Path = "auto", peer_drafter: str | None = None, peers=PEERS) -> Loaded:
    """Ours, knowing nothing of earlier runs, and the peers that are there; of one that cannot be loaded, says why.

    target, drafter: as in `mlx_gemma_mtp.load`.  peer_drafter: mlx-vlm's, a directory or id in Hugging Face's form; None
    for the same drafter.
    """
    directory, own_drafter = find(target, drafter)
    loaded = Loaded(forgetful(mlx_gemma_mtp.load(directory, own_drafter)))
    if "mlx-lm" in peers:
        with left_out("mlx-lm"):
            loaded.mlx_lm = MlxLm(directory)
    if "mlx-vlm" in peers:
        with left_out("mlx-vlm"):
            from mlx_vlm.utils import load_model

            loaded.mlx_vlm_target = in_float32(load_model(directory))
        with left_out("mlx-vlm's MTP"):
            loaded.mlx_vlm_drafter = load_peer_drafter(peer_drafter or unconverted(own_drafter, str(target)))
    return loaded


def forgetful(pair: mlx_gemma_mtp.Pair) -> mlx_gemma_mtp.Pair:
    """The pair, whose automatic draft length starts from nothing."""
    pair.auto = Auto(calibrate=calibrate_with(pair.engine))
    return pair


def unconverted(drafter: Path, target: str) -> str:
    """The drafter itself, or the one on the hub that it was made of: a converted one has its tokens in another order."""
    if not any(name.startswith("head.") for name in read_tensors(drafter)):
        return str(drafter)
    if found := drafter_id(hub_id(target) or target):
        return found
    raise ValueError("a converted drafter has its tokens in another order: name the one it was made of by --peer-drafter")


def load_peer_drafter(directory: str):
    """mlx-vlm's drafter, made to draft as many tokens as asked for: else it takes a number above its own as a hint."""
    from mlx_vlm.speculative.drafters import load_drafter

    drafter = in_float32(load_drafter(directory)[0])
    drafter.prefer_requested_block_size = True
    return drafter


@contextlib.contextmanager
def left_out(name: str):
    """A peer may fail in any way: the rest is measured without it."""
    try:
        yield
    except Exception as error:
        print(f"{name} is left out: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
