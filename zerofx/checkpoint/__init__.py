"""Checkpoints in torch's distributed format: saved by any ranks, loaded by any others."""

from zerofx.checkpoint.background import Saving
from zerofx.checkpoint.errors import CheckpointError, MismatchError
from zerofx.checkpoint.folders import latest
from zerofx.checkpoint.loading import load, resume
from zerofx.checkpoint.saving import save

__all__ = ["CheckpointError", "MismatchError", "Saving", "latest", "load", "resume", "save"]
