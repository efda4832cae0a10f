"""What a user can cause. Every message says what happened, with which values, and what to do."""


class MtpError(Exception):
    """Base of all errors below: a mistake a user can mend, never a bug of ours."""


class CheckpointError(MtpError):
    """A directory that is no loadable Gemma 4 checkpoint: missing, truncated, or of another kind."""


class PairMismatch(MtpError):
    """A target and a drafter that do not belong together."""


class DoesNotFit(MtpError):
    """Weights that are larger than the memory of this machine."""


class PromptError(MtpError):
    """A prompt that cannot be run: empty, longer than the context, or not text."""


class OptionError(MtpError):
    """An option with a value that means nothing."""


class OutputError(MtpError):
    """A place that cannot be written to: taken, full, or being written already."""


class HubError(MtpError):
    """A model that is not on this machine and cannot be downloaded."""
