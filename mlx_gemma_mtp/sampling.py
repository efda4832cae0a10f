"""Logits -> tokens: penalties, warps, and three rules by which draft tokens are accepted without changing the output.

* greedy: the target's most probable token.
* coupled: one Gumbel noise per (seed, position, token), the same for drafter and target; a draft token is accepted when it
  is what the target chooses. The text is a function of seed and target alone: but for floating-point ties it changes
  neither with the draft length nor with the drafter nor with the batch. Used when a seed is given: who gives one asks for
  reproducible text.
* residual: the draft is sampled from q, accepted with probability min(1, p / q), and replaced by a sample of the residual
  otherwise (Leviathan et al. 2023). Accepts about 15 % more tokens per round (measured on a trained pair at temperature 1,
  top-k 64, top-p 0.95: 2.55 against 2.21 at K = 4), but an adaptive draft length changes the text. Used without a seed.

All noise comes from a stateless hash, so no round depends on how many random numbers an earlier one drew. With top-k set
everything after the top-k works on those candidates alone: nothing sorts or scatters over the vocabulary (penalties
excepted, which write back the logits of the tokens seen).
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import mlx.core as mx
import numpy as np

from .errors import OptionError

DRAFT, ACCEPT, CHOOSE = 1, 2, 3  # streams of noise; coupled drafts use CHOOSE
PENALTY_CONTEXT = 64
COLDEST = 1e-4  # a temperature below is greedy: logits divided by less overflow
BLOCK = 64  # entries per block of the two-stage top-k


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. None means the checkpoint's own value (generation_config.json), or else no effect.

    temperature: 0 is greedy.  top_k: candidates kept, 0 for all.  top_p: smallest set of this probability.  min_p: least
    probability relative to the best.  repetition_penalty: divides positive logits of tokens seen, multiplies negative
    ones.  presence_penalty, frequency_penalty: subtracted once, and per occurrence.  penalty_context: how many of the last
    tokens, prompt included, count as seen.  logit_bias: added to the logits of token ids.  seed: makes the text
    reproducible. Order as in transformers: bias, penalties, temperature, top-k, top-p, min-p.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_context: int = PENALTY_CONTEXT
    logit_bias: dict[int, float] | None = None
    seed: int | None = None

    def __post_init__(self):
        def check(name: str, low: float, high: float, kind=(int, float)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high):
                raise OptionError(f"{name} {value!r}: give a number from {low} to {high}")

        check("temperature", 0, 100)
        check("top_k", 0, 1 << 20, int)
        check("top_p", 0, 1)
        check("min_p", 0, 1)
        check("repetition_penalty", 0.01, 100)
        check("presence_penalty", -100, 100)
        check("frequency_penalty", -100, 100)
        check("penalty_context", 1, 4096, int)
        check("seed", 0, (1 << 32) - 1, int)
        for name in ("presence_penalty", "frequency_penalty", "penalty_context"):
            if getattr(self, name) is None:
                raise OptionError(f"{name} None: leave it out or give a number")
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, dict) or not all(
            isinstance(v, (int, float)) and not isinstance(v, bool) and -math.inf <= v < math.inf for v in bias.values()
        ):
            raise OptionError(f"logit_bias {bias!r}: give a dictionary of token ids to numbers, -inf to forbid a token")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty not in (None, 1) or self.presence_penalty != 0 or self.frequency_penalty != 0

    def resolve(self, generation: dict) -> "Sampling":
        """With every None filled in from a generation_config.json, or with what has no effect."""
        greedy = not generation.get("do_sample", False)
        shipped = lambda name, default: default if generation.get(name) is None else generation[name]
        defaults = {
            "temperature": 0.0 if greedy else shipped("temperature", 1.0),
            "top_k": 0 if greedy else shipped("top_k", 50),  # 50: transformers' own default
            "top_p": 1.0 if greedy else shipped("top_p", 1.0),
            "min_p": 0.0 if greedy else shipped("min_p", 0.0),
            "repetition_penalty": shipped("repetition_penalty", 1.0),
            "logit_bias": {},
        }
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {n: defaults.get(n) if v is None else v for n, v in values.items()}
        if values["temperature"] < COLDEST:
            values["temperature"] = 0.0
        return Sampling(**values)


@dataclass(frozen=True)
class Method:
    """The part of Sampling that shapes a graph; everything else is an array.

    top_k: candidates kept, 0 for all.  is_mixed: rows differ in how many they keep.
    penalty_context: tokens the penalties look back, 0 for no penalties.
    logprobs: most probable tokens to report, None for no report.
    """

    rule: str = "greedy"
    top_k: int = 0
    has_top_p: bool = False
    has_min_p: bool = False
    is_mixed: bool = False
    penalty_context: int = 0
    logprobs: int | None = None


def method_of(rows: list[Sampling], vocab_size: int, logprobs: int | None) -> Method:
    """One method for resolved rows. A batch is coupled when any row has a seed: its text must not depend on the others."""
    sampled = [r for r in rows if r.temperature > 0]
    rule = "greedy" if not sampled else "coupled" if any(r.seed is not None for r in sampled) else "residual"
    unlimited = any(r.top_k == 0 or r.top_k >= vocab_size for r in sampled)
    # Sizes are rounded up, so that few values make few graphs: each row's own value is an array.
    up = lambda size: 1 << (size - 1).bit_length() if size else 0
    return Method(
        rule,
        0 if unlimited or not sampled else min(up(max(r.top_k for r in sampled)), vocab_size),
        any(r.top_p < 1 for r in sampled),
        any(r.min_p > 0 for r in sampled),
        bool(sampled) and len({(r.temperature == 0, r.top_k) for r in rows}) > 1,
        up(max((r.penalty_context for r in rows if r.has_penalties), default=0)),
        logprobs,
    )


def knobs_of(rows: list[Sampling], method: Method, vocab_size: int, suppressed: tuple[int, ...]) -> dict[str, mx.array]:
    """The arrays a method needs of resolved rows, [B] each; bias [B, V] (-inf where suppressed) only when there is any."""
    knobs = {}
    if method.rule != "greedy":
        # A greedy row among sampled ones keeps one candidate; "all" is the whole vocabulary.
        knobs["top_k"] = mx.array([1 if r.temperature == 0 else r.top_k or vocab_size for r in rows], mx.int32)
        knobs["temperature"] = mx.array([r.temperature or 1.0 for r in rows])
        # A running sum in float32 reaches 1 before the end of a vocabulary: "all" must be out of its reach.
        knobs["top_p"] = mx.array([2.0 if r.top_p >= 1 else float(r.top_p) for r in rows])
        knobs["is_greedy"] = mx.array([r.temperature == 0 for r in rows])
        knobs["min_p"] = mx.array([float(r.min_p) for r in rows])
        knobs["seed"] = mx.array([secrets.randbits(32) if r.seed is None else r.seed for r in rows], mx.uint32)
    if method.penalty_context:
        knobs["repetition"] = mx.array([float(r.repetition_penalty) for r in rows])
        knobs["presence"] = mx.array([float(r.presence_penalty) for r in rows])
        knobs["frequency"] = mx.array([float(r.frequency_penalty) for r in rows])
        knobs["context"] = mx.array([r.penalty_context for r in rows], mx.int32)
    if suppressed or any(r.logit_bias for r in rows):
        bias = np.zeros((len(rows), vocab_size), np.float32)
        for line, row in zip(bias, rows):
            for token, value in row.logit_bias.items():
                if not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise OptionError(f"logit_bias for token {token!r}: token ids go from 0 to {vocab_size - 1}")
                line[token] += value
            line[list(suppressed)] = -math.inf
        knobs["bias"] = mx.array(bias)
    return knobs


@dataclass(frozen=True)
class Sampler:
    """How the rows of one generation choose their tokens: the method, its arrays, and a user's own processors.

    processors: per row, functions from (tokens so far [n], logits [1, V]) to logits [1, V], as in mlx-lm.
    """

    method: Method = Method()
    knobs: dict[str, mx.array] = field(default_factory=dict)
    processors: tuple[tuple[Callable, ...], ...] = ()

    @staticmethod
    def of(rows: list[Sampling], vocab_size: int, suppressed=(), logprobs: int | None = None, processors=()) -> "Sampler":
        """For resolved rows. logprobs: how many of the most probable tokens to report, None for no report at all."""
        method = method_of(rows, vocab_size, logprobs)
        return Sampler(method, knobs_of(rows, method, vocab_size, suppressed), processors)


# --- noise -----------------------------------------------------------------------------------------------------------


def _mix(x: mx.array) -> mx.array:
    """A bijection of uint32 that changes half of the bits for any change. Source: C. Wellons' hash prospector, lowbias32."""
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return x ^ (x >> 16)


def uniform(seed: mx.array, position: mx.array, stream: int, ids: mx.array | None = None) -> mx.array:
    """Numbers in (0, 1). seed: [B].  position: [B, T].  ids: [B, T, C] adds an axis. Returns float32."""
    x = _mix(_mix(seed + mx.array(stream * 0x9E3779B9 & 0xFFFFFFFF, mx.uint32))[:, None] ^ position.astype(mx.uint32))
    if ids is not None:
        x = _mix(x[..., None] + _mix(ids.astype(mx.uint32) ^ mx.array(0x85EBCA6B, mx.uint32)))
    return mx.minimum((x.astype(mx.float32) + 0.5) * (1 / 4294967296), 1 - 2**-24)


def gumbel(seed: mx.array, position: mx.array, stream: int, ids: mx.array) -> mx.array:
    """Standard Gumbel noise [B, T, C]. log1p keeps the precision where it matters, at the large values."""
    return -mx.log(-mx.log1p(-uniform(seed, position, stream, ids)))


# --- logits -> distribution ------------------------------------------------------------------------------------------


def top_candidates(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of logits [..., V], in descending order, and their ids: two [..., count] arrays.

    In two stages: the largest entries lie in the blocks of the largest maxima. Partitioning the vocabulary at once would be
    a full sort on a GPU.
    """
    size = logits.shape[-1]
    blocks = -(-size // BLOCK)
    if blocks > 2 * count:
        padded = logits
        if more := blocks * BLOCK - size:
            padded = mx.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, more)], constant_values=-math.inf)
        padded = padded.reshape(*logits.shape[:-1], blocks, BLOCK)
        best = mx.argpartition(-padded.max(axis=-1), kth=count - 1, axis=-1)[..., :count]  # [..., count]
        ids = (best[..., None] * BLOCK + mx.arange(BLOCK)).reshape(*logits.shape[:-1], -1)
        logits = mx.take_along_axis(padded, best[..., None], axis=-2).reshape(ids.shape)
    else:
        ids = mx.broadcast_to(mx.arange(size), logits.shape)
    best = mx.argpartition(-logits, kth=min(count, size) - 1, axis=-1)[..., :count]
    values = mx.take_along_axis(logits, best, axis=-1)
    best = mx.take_along_axis(best, mx.argsort(-values, axis=-1), axis=-1)
    return mx.take_along_axis(logits, best, axis=-1), mx.take_along_axis(ids, best, axis=-1).astype(mx.int32)


def warp(logits: mx.array, knobs: dict, method: Method) -> tuple[mx.array, mx.array]:
    """Temperature, top-k, top-p, min-p. logits: [B, T, V].

    Returns log-probabilities [B, T, C], -inf for what a warp took out, and their ids [B, T, C].
    """
    column = lambda name: knobs[name][:, None, None]
    best = mx.argmax(logits, axis=-1, keepdims=True).astype(mx.int32) if method.is_mixed else None
    if method.top_k:
        logits, ids = top_candidates(logits, min(method.top_k, logits.shape[-1]))
        ordered = logits = logits.astype(mx.float32) / column("temperature")
        if method.is_mixed:  # of equal logits greedy decoding takes the first
            first = mx.arange(logits.shape[-1]) == 0
            ids = mx.where(column("is_greedy") & first, best, ids)
        ordered = logits = mx.where(mx.arange(logits.shape[-1]) < column("top_k"), logits, -math.inf)
    else:
        ids = mx.broadcast_to(mx.arange(logits.shape[-1]), logits.shape)
        logits = logits.astype(mx.float32) / column("temperature")
        ordered = -mx.sort(-logits, axis=-1) if method.has_top_p or method.is_mixed else logits
        if method.is_mixed:
            least = mx.take_along_axis(ordered, mx.minimum(column("top_k"), logits.shape[-1]) - 1, axis=-1)
            logits = mx.where(logits >= least, logits, -math.inf)
            logits = mx.where(column("is_greedy") & (ids != best), -math.inf, logits)
            ordered = mx.where(mx.arange(ordered.shape[-1]) < column("top_k"), ordered, -math.inf)
    if method.has_top_p:
        before = mx.cumsum(mx.softmax(ordered, axis=-1), axis=-1, inclusive=False)
        kept = mx.where(before < mx.maximum(column("top_p"), 1e-9), ordered, math.inf)
        logits = mx.where(logits >= kept.min(axis=-1, keepdims=True), logits, -math.inf)
    if method.has_min_p:
        least = logits.max(axis=-1, keepdims=True) + mx.log(column("min_p"))
        logits = mx.where(logits >= least, logits, -math.inf)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True), ids


def adjust(logits: mx.array, knobs: dict, method: Method, seen: mx.array | None) -> mx.array:
    """Bias and penalties. logits: [B, T, V].  seen: [B, T, C] ids before each position, newest last, -1 for none."""
    if "bias" in knobs:
        logits = logits + knobs["bias"][:, None].astype(logits.dtype)
    if not method.penalty_context:
        return logits
    column = lambda name: knobs[name][:, None, None]
    newest = mx.arange(seen.shape[-1]) >= seen.shape[-1] - knobs["context"][:, None, None]
    counted = mx.where(newest, seen, -1)
    ids = mx.maximum(seen, 0)
    counts = (counted[..., None, :] == ids[..., None]).sum(axis=-1)  # [B, T, C]
    old = mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32)
    new = mx.where(old > 0, old / column("repetition"), old * column("repetition"))
    new = new - column("presence") - column("frequency") * counts
    # Every occurrence of an id writes the same value, so the order of the writes does not matter.
    return mx.put_along_axis(logits, ids, mx.where(counts > 0, new, old).astype(logits.dtype), axis=-1)


# --- choosing and accepting ------------------------------------------------------------------------------------------


def accept(draft_tokens: mx.array, target_tokens: mx.array) -> mx.array:
    """Length of the accepted prefix of every row, greedy or coupled.

    draft_tokens: [B, K] ids.  target_tokens: [B, K+1] ids the target chose at the same positions.
    Returns n [B] int32, 0 <= n <= K.
    Source: Leviathan et al. 2023, greedy case of algorithm 1.
    """
    return _prefix(draft_tokens == target_tokens[:, :-1])


def _prefix(agrees: mx.array) -> mx.array:
    return mx.cumprod(agrees.astype(mx.int32), axis=1).sum(axis=1).astype(mx.int32)


def choose(logits: mx.array) -> mx.array:
    """The token of every position, greedily. logits: [..., V]. Returns ids [...] int32."""
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def _draw(log_weights: mx.array, ids: mx.array, seed: mx.array, position: mx.array, stream: int) -> mx.array:
    """A sample per position, by the Gumbel-max trick. log_weights, ids: [B, T, C].  position: [B, T]. Returns [B, T]."""
    best = mx.argmax(log_weights + gumbel(seed, position, stream, ids), axis=-1, keepdims=True)
    return mx.take_along_axis(ids, best, axis=-1)[..., 0].astype(mx.int32)


def draft_token(scores: mx.array, ids: mx.array | None, length: mx.array, index: int, knobs: dict, method: Method):
    """The drafter's token of one position.

    scores: [B, N].  ids: [B, N] they belong to, None for all of the vocabulary.
    length: [B] position of the pending token.  index: of the draft token after it.
    Returns token [B, 1], confidence [B, 1] (the largest probability, never that of the token drawn: a cut on it must not
    depend on the draw) and, for the residual rule, q as (log-probabilities, ids), [B, 1, C] each.
    """
    if method.rule == "greedy":
        best = choose(scores)[:, None]
        scores = scores.astype(mx.float32)
        confidence = mx.exp(mx.take_along_axis(scores, best, axis=1) - mx.logsumexp(scores, axis=1, keepdims=True))
        return best if ids is None else mx.take_along_axis(ids, best, axis=1), confidence, None
    log_q, kept = warp(scores[:, None], knobs, method)  # [B, 1, C]
    if ids is not None:
        kept = mx.take_along_axis(ids[:, None], kept, axis=-1)
    position, confidence = (length + (1 + index))[:, None], mx.exp(log_q.max(axis=-1))
    if method.rule == "coupled":
        return _draw(log_q, kept, knobs["seed"], position, CHOOSE), confidence, None
    # A position may be drafted in several rounds: noise of its own each time, or an old draw would touch later choices.
    position = position.astype(mx.uint32) ^ _mix(length.astype(mx.uint32))[:, None]
    return _draw(log_q, kept, knobs["seed"], position, DRAFT), confidence, (log_q, kept)


def select(logits: mx.array, drafts: mx.array, proposal, position: mx.array, knobs: dict, method: Method):
    """What a round emits.

    logits: [B, T, V] adjusted.  drafts: [B, T-1].  proposal: q of the drafts as `draft_token` gave it, [B, T-1, C] each
    (residual rule).  position: [B, T] of the tokens chosen.
    Returns n [B] accepted drafts, and tokens [B, T] of which the first n + 1 count.
    """
    if method.rule == "greedy":
        tokens = choose(logits)
        return accept(drafts, tokens), tokens
    log_p, ids = warp(logits, knobs, method)  # [B, T, C]
    if method.rule == "coupled":
        tokens = _draw(log_p, ids, knobs["seed"], position, CHOOSE)
        return accept(drafts, tokens), tokens
    return _accept_residual(log_p, ids, drafts, proposal, position, knobs["seed"], dense=method.top_k == 0)


def _accept_residual(log_p, ids, drafts, proposal, position, seed, dense: bool):
    """Leviathan et al. 2023, algorithm 1. dense: ids are the whole vocabulary in order."""
    rows, width = position.shape
    if width == 1:
        return mx.zeros((rows,), mx.int32), _draw(log_p, ids, seed, position, CHOOSE)
    log_q, q_ids = proposal
    probability = lambda logs, of: mx.where(of == drafts[..., None], mx.exp(logs), 0).sum(axis=-1)  # [B, K]
    p_draft, q_draft = probability(log_p[:, :-1], ids[:, :-1]), probability(log_q, q_ids)
    n = _prefix(uniform(seed, position[:, :-1], ACCEPT) * q_draft < p_draft)
    at = lambda array, index: mx.take_along_axis(array, index[:, None, None], axis=1)  # [B, 1, C]
    p, p_ids = mx.exp(at(log_p, n)), at(ids, n)
    # After K accepted drafts there is no q: the bonus token is a sample of p itself.
    last = mx.minimum(n, width - 2)
    q = mx.where((n < width - 1)[:, None, None], mx.exp(at(log_q, last)), 0)
    if dense:
        q = mx.put_along_axis(mx.zeros_like(p), at(q_ids, last), q, axis=-1)
    else:
        q = mx.where(p_ids[..., None] == at(q_ids, last)[..., None, :], q[..., None, :], 0).sum(axis=-1)
    residual = mx.maximum(p - q, 0)
    residual = mx.where(residual.sum(axis=-1, keepdims=True) > 0, residual, p)
    chosen = _draw(mx.log(residual), p_ids, seed, mx.take_along_axis(position, n[:, None], axis=1), CHOOSE)  # [B, 1]
    tokens = mx.concatenate([drafts, mx.zeros((rows, 1), mx.int32)], axis=1)
    return n, mx.where(mx.arange(width) == n[:, None], chosen, tokens)


def log_probabilities(logits: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Under the target itself, before bias, penalties and warps. logits: [B, T, V].  tokens: [B, T].

    Returns the tokens' log-probabilities [B, T], and those of the `top` most probable with their ids, [B, T, top].
    """
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logits, tokens[..., None], axis=-1) - total
    values, ids = top_candidates(logits, top) if top else (own[..., :0], tokens[..., None][..., :0])
    return own[..., 0], values - total if top else values, ids


# --- what penalties remember -----------------------------------------------------------------------------------------


def seen_tokens(history: mx.array, drafts: mx.array) -> mx.array:
    """Tokens before each position of a block: [B, T, C]. history: [B, C] through the pending token.  drafts: [B, T-1]."""
    context, width = history.shape[1], drafts.shape[1] + 1
    both = mx.concatenate([history, drafts], axis=1)
    return both[:, mx.arange(width)[:, None] + mx.arange(context)]


def remember(history: mx.array, tokens: mx.array, count: mx.array) -> mx.array:
    """history [B, C] after the first `count` [B] of tokens [B, T] were emitted."""
    both = mx.concatenate([history, tokens], axis=1)
    return mx.take_along_axis(both, count[:, None] + mx.arange(history.shape[1]), axis=1)
