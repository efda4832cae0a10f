"""What was learned of a pair on this machine: what rounds cost, how often drafts are accepted. Counts and seconds only."""

from dataclasses import dataclass, field

LONGEST = 8  # draft positions whose acceptance is followed
BINS, TRUSTED = 8, 10
DOUBTED = 3
SHORT = 1024  # tokens of context below which its length is not told apart


def octave(context: int) -> int:
    """Which table of costs a context length in tokens belongs to: one per doubling."""
    return max(context, SHORT).bit_length()


@dataclass
class Costs:
    """Seconds of rounds of one number of rows at about one context length.

    verify_seconds: of a pass by width T.  draft_seconds: of one draft step.  measured: rounds that this rests on.
    """

    verify_seconds: dict[int, float]
    draft_seconds: float
    measured: int = 0

    def cost(self, width: int, drafts: int) -> float:
        """Seconds of a round that verifies `width` tokens and makes `drafts` new drafts."""
        known = sorted(self.verify_seconds)
        above = min((w for w in known if w >= width), default=known[-1])
        below = max((w for w in known if w <= width), default=known[0])
        seconds = self.verify_seconds[below]
        if above > below:
            seconds += (self.verify_seconds[above] - seconds) * (width - below) / (above - below)
        return seconds + drafts * self.draft_seconds

    def learn(self, width: int, drafts: int, seconds: float) -> None:
        """Moves the estimate towards a measured round, by at most half of it: other programs use the machine too."""
        expected, weight = self.cost(width, drafts), max(0.1, 1 / (self.measured + 2))
        error = min(max(seconds - expected, -0.5 * expected), 0.5 * expected)
        if width not in self.verify_seconds:
            self.verify_seconds[width] = self.cost(width, 0)
        share = drafts * self.draft_seconds / expected
        change = weight * error / expected
        self.draft_seconds *= 1 + change * share
        # A longer context or a hot device makes every width dearer, not only the one that was played.
        for other in self.verify_seconds:
            self.verify_seconds[other] *= 1 + change * (1 + share) * (1 if other == width else 0.5)
        self.measured += 1


@dataclass
class Knowledge:
    """Kept between generations.

    costs: by number of rows and octave of the context length.
    acceptance: by position, given that the earlier drafts were accepted.
    by_confidence: acceptance of drafts by the drafter's largest probability, in BINS bins.
    seen, seen_by_confidence: how many outcomes each of these rests on.
    """

    costs: dict[tuple[int, int], Costs] = field(default_factory=dict)
    acceptance: list[float] = field(default_factory=lambda: [0.7] * LONGEST)
    by_confidence: list[float] = field(default_factory=lambda: [(i + 0.5) / BINS for i in range(BINS)])
    seen: list[int] = field(default_factory=lambda: [0] * LONGEST)
    seen_by_confidence: list[int] = field(default_factory=lambda: [0] * BINS)

    def costs_at(self, rows: int, context: int) -> Costs:
        """The costs of `rows` rows at `context` tokens; those of the nearest case known, where there are none yet."""
        key = rows, octave(context)
        if key not in self.costs:
            distance = lambda other: abs(other[0].bit_length() - rows.bit_length()) + abs(other[1] - key[1])
            nearest = self.costs[min(self.costs, key=distance)]
            self.costs[key] = Costs(dict(nearest.verify_seconds), nearest.draft_seconds)
        return self.costs[key]

    def learn_outcome(self, position: int, outcome: float, confidence: float | None) -> None:
        """One draft. outcome: 1 accepted, 0 not, or what is expected of it."""
        _learn(self.acceptance, self.seen, min(position, LONGEST - 1), outcome)
        if confidence is not None:
            _learn(self.by_confidence, self.seen_by_confidence, _bin(confidence), outcome)

    def doubt(self) -> None:
        """Makes what was learned of acceptance count for few outcomes: the text may have changed since."""
        self.seen = [min(count, DOUBTED) for count in self.seen]

    def shift(self, first: int, change: float) -> None:
        """Moves the acceptance of position `first` and all later ones."""
        for position in range(first, LONGEST):
            self.acceptance[position] = min(max(self.acceptance[position] + change, 0.01), 0.99)

    def chance(self, position: int, confidence: float) -> float:
        """Probability that a draft is accepted, given that those before it are: a drafter's confidence must earn trust."""
        index = _bin(confidence)
        if self.seen_by_confidence[index] >= TRUSTED:
            return self.by_confidence[index]
        return self.acceptance[min(position, LONGEST - 1)]

    def expected_tokens(self, length: int) -> float:
        """Tokens a round of draft length `length` yields."""
        total, product = 1.0, 1.0
        for probability in self.acceptance[:length]:
            product *= probability
            total += product
        return total


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1) if 0 <= confidence <= 1 else 0


def _learn(values: list[float], seen: list[int], index: int, outcome: float) -> None:
    values[index] += max(0.02, 1 / (seen[index] + 2)) * (outcome - values[index])
    seen[index] += 1
