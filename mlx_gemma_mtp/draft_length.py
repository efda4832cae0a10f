"""How many tokens to draft in the next round, and how many of the drafts in hand to verify."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from .cache import MAX_DRAFT_LENGTH
from .errors import OptionError
from .knowledge import FIRST_PROBE, LAST_PROBE, LONGEST, Knowledge

LENGTHS = (0, 1, 2, 3, 4, 6, LONGEST)  # few, since every length is a graph to trace


class Controller(Protocol):
    """The draft length of one generation."""

    draft_length: int
    wants_confidence: bool

    def verify(self, drafts: int, confidence: list[list[float]]) -> int:
        """How many of the drafts in hand are worth verifying. confidence: K per row; none unless wanted, or when it ended."""

    def observe(self, drafted: int, drafts: int, accepted: list[int | None], seconds: float | None, context: int) -> None:
        """Told after every round: draft tokens verified, new ones made, how many each row accepted, what it took.

        accepted: None for a row that had ended.  seconds: None when it could not be measured.  context: tokens that the
        longest row holds.
        """

    def gain(self) -> float | None:
        """Tokens per second over plain decoding's, as far as costs are known."""


def check(length: int) -> int:
    """`length` itself. Raises OptionError when it is no draft length."""
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= MAX_DRAFT_LENGTH:
        raise OptionError(
            f"draft length {length!r}: give a number from 0 (plain decoding) to {MAX_DRAFT_LENGTH}, auto, or heuristic"
        )
    return length


@dataclass(frozen=True)
class Fixed:
    """The same draft length in every round; 0 is plain decoding."""

    draft_length: int
    wants_confidence = False

    def __post_init__(self):
        check(self.draft_length)

    def begin(self, rows: int = 1, context: int = 0) -> Controller:
        return self

    def gain(self) -> None:
        return None

    def verify(self, drafts: int, confidence: list[list[float]]) -> int:
        return drafts

    def observe(self, drafted: int, drafts: int, accepted: list[int | None], seconds: float | None, context: int) -> None:
        pass


@dataclass(frozen=True)
class Heuristic:
    """Two more when every draft token was accepted, one less otherwise, never under one.

    start: the first draft length.
    Source: transformers, `num_assistant_tokens_schedule="heuristic"`.
    """

    start: int = 5

    def __post_init__(self):
        if check(self.start) < 1:
            raise OptionError("the heuristic starts from a draft length of at least 1: use 0 alone for plain decoding")

    def begin(self, rows: int = 1, context: int = 0) -> Controller:
        return _HeuristicController(self.start)


@dataclass
class _HeuristicController:
    draft_length: int
    wants_confidence = False

    def gain(self) -> None:
        return None

    def verify(self, drafts: int, confidence: list[list[float]]) -> int:
        return drafts

    def observe(self, drafted: int, drafts: int, accepted: list[int | None], seconds: float | None, context: int) -> None:
        if drafted:
            change = 2 if all(n in (drafted, None) for n in accepted) else -1
            self.draft_length = min(max(self.draft_length + change, 1), MAX_DRAFT_LENGTH)


@dataclass(frozen=True)
class Auto:
    """The draft length that yields most tokens per second, from measured costs and acceptances. 0 is plain decoding.

    knowledge: what is known of the pair, updated by every round.  calibrate: fills it with the costs of the lengths
    before the first round, unless they are known.
    """

    knowledge: Knowledge = field(default_factory=Knowledge)
    calibrate: Callable[[Knowledge], None] | None = None

    def begin(self, rows: int = 1, context: int = 0) -> Controller:
        """rows: of the batch.  context: tokens that its longest row holds."""
        if self.calibrate is not None and not self.knowledge.costs:
            self.calibrate(self.knowledge)
        return AutoController(self.knowledge, rows, context)


class AutoController:
    """Plays the best known length; while that is 0 it drafts again ever more rarely, to see whether the text has changed.

    Whether draft j is verified depends on confidences up to j and on earlier rounds only: under the residual rule anything
    that depends on draft j itself would bias the output. So drafts are verified up to the first that is not worth it,
    never by a look at later ones.
    """

    wants_confidence = True
    PROBE_ROUNDS = 2
    EXPLORE = 48  # rounds between two looks at a neighbouring length
    LOOK = 20  # rounds between two that verify everything: what is never verified is never learned

    def __init__(self, knowledge: Knowledge, rows: int = 1, context: int = 0):
        self.knowledge, self.costs = knowledge, knowledge.costs_at(rows, context)
        self.draft_length = self._best_length()
        self._confidence: list[list[float]] = []
        self._until_probe = max(FIRST_PROBE, knowledge.probe_interval // 4)  # another text, perhaps
        self._probing = 0
        self._seconds = self._plain_seconds = 0.0

    def gain(self) -> float | None:
        return self._plain_seconds / self._seconds if self._seconds else None

    def verify(self, drafts: int, confidence: list[list[float]]) -> int:
        self._confidence = confidence
        if drafts == 0 or self._probing or self.knowledge.rounds % self.LOOK == 0:
            return drafts
        rate = self._rate(self._best_length())
        widest = 0
        for row in confidence:
            product, count = 1.0, 0
            for position, sure in enumerate(row):
                product *= self.knowledge.chance(position, sure)
                if product < rate * self._slope(count, drafts):
                    break
                count += 1
            widest = max(widest, count)
        return next(length for length in (*LENGTHS, drafts) if widest <= length <= drafts)

    def observe(self, drafted: int, drafts: int, accepted: list[int | None], seconds: float | None, context: int) -> None:
        self.costs = self.knowledge.costs_at(len(accepted), context)
        self.knowledge.rounds += 1
        if seconds is not None:
            self.costs.learn(drafted + 1, drafts, seconds)
        running = [n for n in accepted if n is not None]
        self._seconds += self.costs.cost(drafted + 1, drafts) * len(running)
        self._plain_seconds += self.costs.cost(1, 0) * sum(n + 1 for n in running)
        self._learn_outcomes(drafted, accepted)
        self.draft_length = self._choose(drafted)

    def _learn_outcomes(self, drafted: int, accepted: list[int | None]) -> None:
        know = self.knowledge
        before = know.acceptance[drafted - 1]
        for row, count in enumerate(accepted):
            if count is None:
                continue
            sure = self._confidence[row] if row < len(self._confidence) else []
            for position in range(min(drafted, count + 1)):
                confidence = sure[position] if position < len(sure) else None
                know.learn_outcome(position, position < count, confidence)
            if count == drafted < len(sure):  # the first draft that was not worth verifying: what is known of its like
                know.expect_outcome(drafted, know.chance(drafted, sure[drafted]))
        if drafted:  # a text that becomes easier becomes so for the positions that were not verified, too
            know.shift(drafted, know.acceptance[drafted - 1] - before)
        self._confidence = []

    def _choose(self, drafted: int) -> int:
        """The next draft length. drafted: draft tokens that this round verified."""
        best = self._best_length()
        if best == 0 and self.draft_length:  # once at 0 little is learned: go there on more than noise
            other = self._best_length(LENGTHS[1:])
            best = other if self._rate(other) > 0.97 * self._rate(0) else 0
        if self._probing:
            self._probing -= drafted > 0
            if not self._probing:  # did it pay?
                interval = self.knowledge.probe_interval
                self._until_probe = max(interval // 2, FIRST_PROBE) if best else min(2 * interval, LAST_PROBE)
                self.knowledge.probe_interval = self._until_probe
                return best
            return best or self._probe_length()
        if best == 0:
            self._until_probe -= 1
            if self._until_probe <= 0:
                self._probing = self.PROBE_ROUNDS
                self.knowledge.doubt()
                return self._probe_length()
            return 0
        if self.knowledge.rounds % self.EXPLORE == 0:  # keeps the neighbours' costs and the next position's acceptance fresh
            index = LENGTHS.index(best)
            neighbours = [i for i in (index - 1, index + 1) if i < len(LENGTHS)]
            return LENGTHS[neighbours[(self.knowledge.rounds // self.EXPLORE) % len(neighbours)]]
        return best

    def _probe_length(self) -> int:
        return self._best_length(LENGTHS[1:3])

    def _best_length(self, lengths=LENGTHS) -> int:
        return max(lengths, key=self._rate)

    def _rate(self, length: int) -> float:
        """Tokens per second at a draft length."""
        return self.knowledge.expected_tokens(length) / self.costs.cost(length + 1, length)

    def _slope(self, count: int, drafts: int) -> float:
        """Seconds of verifying one draft more than `count`, where the cost is a step: the cheapest way up, per draft."""
        base = self.costs.cost(count + 1, 0)
        return min((self.costs.cost(more + 1, 0) - base) / (more - count) for more in range(count + 1, drafts + 1))


Policy = Fixed | Heuristic | Auto


def as_policy(draft_length: "int | str | Policy | None", configured: int | None, auto: Auto) -> Policy:
    """The policy a user means: a number, "auto" (None), "heuristic", or a policy itself.

    configured: draft length named by the drafter's generation_config.json, if any.  auto: the pair's own; Fixed(0)
    without a drafter.
    """
    if auto == Fixed(0) and draft_length not in (None, "auto", 0, auto):
        raise OptionError(f"draft length {draft_length!r} needs a drafter, and none is loaded: name one, or use 0")
    match draft_length:
        case None | "auto":
            return auto
        case "heuristic":
            return Heuristic(min(configured or 5, MAX_DRAFT_LENGTH))
        case Auto() if isinstance(auto, Auto):
            return replace(draft_length, calibrate=draft_length.calibrate or auto.calibrate)
        case Fixed() | Heuristic() | Auto():
            return draft_length
        case _:
            return Fixed(draft_length)
