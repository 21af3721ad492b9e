"""The errors of zerofx that are not plainly about one argument."""


class GraphError(RuntimeError):
    """The program is broken: a pass, or the capture, left a rule of the IR unmet."""


class ValidationError(GraphError):
    """A pass has changed what the step computes: says which, and where it shows first."""


class OrderError(RuntimeError):
    """A running step uses memory in no order: says which, which two accesses, what is missing."""


class StepError(ValueError):
    """The step cannot be compiled as written: says what, why, and what to change."""


class BudgetError(StepError):
    """The step does not fit ``memory_budget``: says what it needs.

    ``needed`` are the bytes of a budget that it would fit, or about that; None where nobody knows.
    """

    def __init__(self, message: str, needed: int | None = None) -> None:
        super().__init__(message)
        self.needed = needed


class NoValuesError(RuntimeError):
    """Something needs values that this rank does not hold: says whose, and how to have them."""


class CommandError(ValueError):
    """A command of ``python -m zerofx`` cannot do what it is asked: says why, and what to do."""


class FileTierError(RuntimeError):
    """A directory or a file of the file tier failed: says which, why, and what to do.

    ``path``, ``bucket``, ``offset`` (bytes into the file) and ``errno`` where there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        bucket: str | None = None,
        offset: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.bucket = bucket
        self.offset = offset
        self.errno = errno


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or fitted: says which, why, and what to do.

    Every rank raises it, whichever it happened on.
    """


class MismatchError(CheckpointError):
    """A checkpoint is of other tensors than the model or the optimizer: says which, all of them."""


class NewerFormatError(CheckpointError):
    """A checkpoint was written by a newer zerofx, which this one cannot read."""


class RankError(CheckpointError):
    """Another rank failed, or does not answer: says which rank, and what it says."""
