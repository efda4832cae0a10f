"""What a generation cost, and what drafting gave."""

from dataclasses import asdict, dataclass, field

from .speculative import Round


@dataclass
class Stats:
    """Counts and seconds of one generation of one row.

    The pass that yields the first token belongs to the prompt: `prefill_seconds` is the time to the first token, and
    `rounds`, `drafted`, `accepted` count what came after it.
    accepted_by_position[i]: rounds in which draft token i was accepted.
    verified_histogram: rounds by draft tokens verified; 0 is plain decoding.
    reused_tokens: of the prompt, whose keys and values were kept from an earlier generation.
    estimated_gain: tokens per second over plain decoding's, from measured costs (automatic draft length only).
    """

    prompt_tokens: int
    reused_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    verified_histogram: dict[int, int] = field(default_factory=dict)
    estimated_gain: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_memory_bytes: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round yields: n + 1."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Tokens that were not reused / seconds to the first token."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def generation_tokens_per_second(self) -> float:
        """Tokens after the first / seconds after the first."""
        return max(self.generated_tokens - 1, 0) / self.decode_seconds if self.decode_seconds else 0.0

    def count(self, round_: Round, row: int) -> None:
        """Adds a round, but for a row that was finished before it."""
        accepted = round_.accepted[row]
        if accepted is None:
            return
        self.rounds += 1
        self.verified_histogram[round_.drafted] = self.verified_histogram.get(round_.drafted, 0) + 1
        self.drafted += round_.drafted
        self.accepted += accepted
        self.accepted_by_position += [0] * (round_.drafted - len(self.accepted_by_position))
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def as_dict(self) -> dict:
        return asdict(self) | {
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "generation_tokens_per_second": self.generation_tokens_per_second,
        }

    def _histogram(self) -> str:
        return ", ".join(f"{length} in {count} rounds" for length, count in sorted(self.verified_histogram.items()))

    def __str__(self) -> str:
        reused = f" ({self.reused_tokens} kept from before)" if self.reused_tokens else ""
        lines = [
            f"prompt      {self.prompt_tokens} tokens{reused}, {self.prompt_tokens_per_second:.1f} tokens/s",
            f"generation  {self.generated_tokens} tokens, {self.generation_tokens_per_second:.1f} tokens/s",
        ]
        if self.drafted:
            by_position = " ".join(f"{n / self.rounds:.0%}" for n in self.accepted_by_position)
            lines.append(
                f"drafting    {self.acceptance_length:.2f} tokens per round in {self.rounds} rounds, "
                f"{self.acceptance_rate:.0%} of drafts accepted (by position {by_position})"
            )
            lines.append(f"draft       lengths {self._histogram()}")
        if self.estimated_gain is not None:
            lines.append(f"gain        about {self.estimated_gain:.2f} times plain decoding")
        lines.append(f"memory      {self.peak_memory_bytes / 1e9:.2f} GB at peak")
        return "\n".join(lines)
