"""Gemma 4 with its Multi-Token-Prediction drafters on Apple Silicon."""

from .draft_length import Fixed, Heuristic
from .errors import CheckpointError, DoesNotFit, MtpError, OptionError, PairMismatch, PromptError
from .hub import load
from .pair import Completion, Pair, Piece, Stream

__version__ = "0.1.0"
__all__ = [
    "CheckpointError", "Completion", "DoesNotFit", "Fixed", "Heuristic", "MtpError", "OptionError", "Pair",
    "PairMismatch", "Piece", "PromptError", "Stream", "load",
]  # fmt: skip
