"""Checkpoints in torch's distributed format: saved by any ranks, loaded by any others.

``saving`` collects ``contents``, as ``pieces`` of tensors, and writes them to ``folders``.
``loading`` is ``matching`` the ``metadata`` with the model, and ``reading`` files into ``targets``.
``barrier`` keeps the ranks together.
"""

from zerofx.checkpoint.barrier import Saving
from zerofx.checkpoint.folders import latest
from zerofx.checkpoint.loading import load, resume
from zerofx.checkpoint.safetensors import export_safetensors, load_safetensors
from zerofx.checkpoint.saving import save
from zerofx.errors import CheckpointError, MismatchError

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
