"""Gemma 4 with its Multi-Token-Prediction drafters on Apple Silicon."""

from .draft_length import Auto, Fixed, Heuristic
from .errors import CheckpointError, DoesNotFit, MtpError, OptionError, PairMismatch, PromptError
from .hub import load
from .pair import Completion, Logprob, Pair, Piece, Stream
from .sampling import Sampling

__version__ = "0.1.0"
__all__ = [
    "Auto", "CheckpointError", "Completion", "DoesNotFit", "Fixed", "Heuristic", "Logprob", "MtpError", "OptionError",
    "Pair", "PairMismatch", "Piece", "PromptError", "Sampling", "Stream", "load",
]  # fmt: skip
