"""How many tokens to draft in the next round. Knows counts, not models."""

from dataclasses import dataclass
from typing import Protocol

from .cache import MAX_DRAFT_LENGTH
from .errors import OptionError


class Controller(Protocol):
    """The draft length of one generation."""

    draft_length: int

    def observe(self, drafted: int, accepted: list[int]) -> None:
        """Told after every round: draft tokens verified, and how many of them each row accepted."""


def check(length: int) -> int:
    """`length` itself. Raises OptionError when it is no draft length."""
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= MAX_DRAFT_LENGTH:
        raise OptionError(f"draft length {length!r}: give a number from 0 (plain decoding) to {MAX_DRAFT_LENGTH}, or heuristic")
    return length


@dataclass(frozen=True)
class Fixed:
    """The same draft length in every round; 0 is plain decoding."""

    draft_length: int

    def __post_init__(self):
        check(self.draft_length)

    def begin(self) -> Controller:
        return self

    def observe(self, drafted: int, accepted: list[int]) -> None:
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

    def begin(self) -> Controller:
        return _HeuristicController(self.start)


@dataclass
class _HeuristicController:
    draft_length: int

    def observe(self, drafted: int, accepted: list[int]) -> None:
        change = 2 if all(n == drafted for n in accepted) else -1
        self.draft_length = min(max(self.draft_length + change, 1), MAX_DRAFT_LENGTH)


Policy = Fixed | Heuristic


def as_policy(draft_length: "int | str | Policy | None", configured: int | None) -> Policy:
    """The policy a user means: a number, "heuristic", a policy itself, or None for the default.

    configured: draft length named by the drafter's generation_config.json, if any.
    """
    match draft_length:
        case None:
            return Fixed(min(configured or 4, MAX_DRAFT_LENGTH))
        case "heuristic":
            return Heuristic(min(configured or 5, MAX_DRAFT_LENGTH))
        case Fixed() | Heuristic():
            return draft_length
        case _:
            return Fixed(draft_length)
