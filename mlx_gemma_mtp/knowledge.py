"""What was learned of a pair on this machine: what rounds cost, how often drafts are accepted. Counts and seconds only."""

from dataclasses import dataclass, field

LONGEST = 8  # draft positions whose acceptance is followed: the longest automatic draft length
BINS, TRUSTED = 8, 10  # bins of a drafter's confidence, and outcomes after which one is believed
DOUBTED = 3  # outcomes that all earlier ones count for once a text may have changed
NEW = 8  # rounds in which a table of costs that was copied moves as a whole
FIRST_PROBE, LAST_PROBE = 16, 256  # rounds between two tries of drafting while it does not pay
SHORT = 1024  # the context lengths up to twice this share a table


def octave(context: int) -> int:
    """Which table of costs a context length in tokens belongs to: one per doubling."""
    return max(context, SHORT).bit_length()


@dataclass
class Costs:
    """Seconds of rounds of one number of rows at about one context length.

    verify_seconds: of a pass by width T.  draft_seconds: of one draft step.  measured: rounds that this rests on.
    played: by width, the value of `measured` when it was last played.
    """

    verify_seconds: dict[int, float]
    draft_seconds: float
    measured: int = 0
    played: dict[int, int] = field(default_factory=dict)

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
        expected, stale = self.cost(width, drafts), self.measured - self.played.get(width, 0)
        weight = max(0.1, 1 / (self.measured + 2), min(0.5, stale / 100))
        error = min(max(seconds - expected, -0.5 * expected), 0.5 * expected)
        if width not in self.verify_seconds:
            self.verify_seconds = self.verify_seconds | {width: self.cost(width, 0)}
        share = drafts * self.draft_seconds / expected
        change = weight * error / expected
        self.draft_seconds *= 1 + change * share
        # A longer context or a hot device makes every width dearer, not only the one that was played.
        others = 1.0 if self.measured < NEW else 0.5
        self.verify_seconds = {  # a new one: other streams may be reading
            w: s * (1 + change * (1 + share) * (1.0 if w == width else others)) for w, s in self.verify_seconds.items()
        }
        self.measured += 1
        self.played = self.played | {width: self.measured}


@dataclass
class Knowledge:
    """Kept between generations.

    costs: by number of rows and octave of the context length.
    acceptance: by position, given that the earlier drafts were accepted.
    by_confidence: acceptance of drafts by the drafter's largest probability, in BINS bins.
    seen, seen_by_confidence: how many outcomes each of these rests on.
    probe_interval: rounds of plain decoding after which drafting is tried again, doubled whenever it did not pay.
    rounds: observed in this process.
    """

    costs: dict[tuple[int, int], Costs] = field(default_factory=dict)
    acceptance: list[float] = field(default_factory=lambda: [0.7] * LONGEST)
    by_confidence: list[float] = field(default_factory=lambda: [(i + 0.5) / BINS for i in range(BINS)])
    seen: list[int] = field(default_factory=lambda: [0] * LONGEST)
    seen_by_confidence: list[int] = field(default_factory=lambda: [0] * BINS)
    probe_interval: int = FIRST_PROBE
    rounds: int = 0

    def costs_at(self, rows: int, context: int) -> Costs:
        """The costs of `rows` rows at `context` tokens; those of the nearest case known, where there are none yet."""
        key = rows, octave(context)
        if key not in self.costs:
            distance = lambda other: abs(other[0].bit_length() - rows.bit_length()) + abs(other[1] - key[1])
            nearest = self.costs[min(list(self.costs), key=distance)]
            self.costs[key] = Costs(dict(nearest.verify_seconds), nearest.draft_seconds)
        return self.costs[key]

    def learn_outcome(self, position: int, accepted: bool, confidence: float | None) -> None:
        """One verified draft; confidence: the drafter's largest probability, if it is known."""
        position = min(position, LONGEST - 1)
        self.acceptance[position] += _weight(self.seen[position]) * (accepted - self.acceptance[position])
        self.seen[position] += 1
        if confidence is not None:
            index = _bin(confidence)
            self.by_confidence[index] += _weight(self.seen_by_confidence[index]) * (accepted - self.by_confidence[index])
            self.seen_by_confidence[index] += 1

    def expect_outcome(self, position: int, chance: float) -> None:
        """A draft that was not worth verifying, and would have been accepted with this chance."""
        position = min(position, LONGEST - 1)
        self.acceptance[position] += _weight(self.seen[position]) * (chance - self.acceptance[position])

    def doubt(self) -> None:
        """Makes what was learned of acceptance count for few outcomes: the text may have changed since."""
        self.seen = [min(count, DOUBTED) for count in self.seen]

    def shift(self, first: int, change: float) -> None:
        """Adds `change` to the acceptance of position `first` and all later ones."""
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


def _weight(seen: int) -> float:
    """Of an outcome after so many: all count alike at first, then the newest fifty or so."""
    return max(0.02, 1 / (seen + 2))
