"""Gemma 4 with its Multi-Token-Prediction drafters on Apple Silicon."""

from .draft_length import Auto, Fixed, Heuristic
from .errors import (
    CheckpointError,
    DoesNotFit,
    HubError,
    MtpError,
    OptionError,
    OutputError,
    PairMismatch,
    PromptError,
)
from .hub import load
from .pair import Pair, Stream
from .sampling import Sampling
from .transcript import Completion, Logprob, Piece

__version__ = "0.1.0"
__all__ = [
    "Auto", "CheckpointError", "Completion", "DoesNotFit", "Fixed", "Heuristic", "HubError", "Logprob", "MtpError",
    "OptionError", "OutputError", "Pair", "PairMismatch", "Piece", "PromptError", "Sampling", "Stream", "load",
]  # fmt: skip
