"""The errors of zerofx that are not plainly about one argument."""


class GraphError(RuntimeError):
    """The program is broken: a pass, or the capture, left a rule of the IR unmet."""


class StepError(ValueError):
    """The step cannot be compiled as written: says what, why, and what to change."""
