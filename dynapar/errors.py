"""The errors that users meet: one root, one class for each kind of mistake.

Every message has three parts: what is wrong, with its value; what was expected; what to do.
"""


class DynaparError(Exception):
    """Anything that dynapar raises on purpose; the command line prints it as one line."""

    exit_code = 2
    """Of the command line: 2 for bad input, 1 for a check that failed."""


class ConfigError(DynaparError, ValueError):
    """A configuration has an unknown key, a wrong type or a value out of range."""


class ModelError(DynaparError, ValueError):
    """A model is unknown, or its configuration lacks what is needed."""


class CostsError(DynaparError, ValueError):
    """A costs file cannot be read, or is of another version."""


class SourceError(DynaparError, ValueError):
    """A source of samples cannot be opened, is empty, or does not fit its index."""


class SampleError(DynaparError, ValueError):
    """One sample is malformed or cannot be loaded."""


class PlanError(DynaparError, ValueError):
    """The samples of a step cannot be placed on the ranks, or a plan breaks its contract."""


class EmptyStepError(PlanError):
    """A step has no samples: there is nothing to plan, to run or to divide the loss by."""


class ControlError(DynaparError, RuntimeError):
    """The ranks disagree about what to run."""


class CheckpointError(DynaparError, RuntimeError):
    """A checkpoint is incomplete or belongs to another run."""


class CheckFailedError(DynaparError, RuntimeError):
    """A check that the user asked for did not hold."""

    exit_code = 1
