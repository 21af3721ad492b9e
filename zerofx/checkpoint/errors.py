"""What goes wrong with checkpoints."""

from __future__ import annotations


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
