"""Checkpoints in torch's distributed format: saved by any ranks, loaded by any others."""

from zerofx.checkpoint.background import Saving
from zerofx.checkpoint.errors import CheckpointError, MismatchError
from zerofx.checkpoint.exports import export_safetensors, load_safetensors
from zerofx.checkpoint.folders import latest
from zerofx.checkpoint.loading import load, resume
from zerofx.checkpoint.saving import save

__all__ = [
    "CheckpointError",
    "MismatchError",
    "Saving",
    "export_safetensors",
    "latest",
    "load",
    "load_safetensors",
    "resume",
    "save",
]
