"""What is no tensor, in a checkpoint: pickles that run no code when they are read."""

from __future__ import annotations

import functools
import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class Encoded:
    """A value as it will be in the file, which torch.distributed.checkpoint then leaves whole.

    It would take dicts apart and write their keys as text, and forget empty ones.
    """

    data: bytes


def encode(value: Any, name: str) -> Encoded:
    """Pickle ``value`` as ``torch.save`` does, if it can be read again without running code.

    Raises: ValueError, naming it ``name``, if it cannot.
    """
    if type(value) in (bool, float, type(None)) or (type(value) is int and abs(value) < 2**63):
        return _encoded_number(value, repr(value))
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        decode(buffer.getvalue(), name)
    except (CheckpointError, pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} is a {type(value).__name__} that cannot be read again without running code "
            f"from the file ({str(error).splitlines()[0]}), which zerofx.load never does. Give "
            "numbers, text, tensors, and lists, tuples and dicts of them, such as an object's "
            "state_dict()."
        ) from error
    return Encoded(buffer.getvalue())


@functools.lru_cache(maxsize=1024, typed=True)
def _encoded_number(value: Any, _text: str) -> Encoded:
    """Many parameters have the same counts and values.  The text tells 0.0 from -0.0."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return Encoded(buffer.getvalue())


def decode(data: bytes, name: str) -> Any:
    """Read what ``encode`` or ``torch.save`` has written; tensors come to the CPU.

    Raises: CheckpointError for a pickle that asks for code to be run, or for no pickle at all.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        unsafe = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        raise CheckpointError(
            f"{name} is not plain data: {' '.join(unsafe.split())[:300]}. zerofx.load runs no code "
            "from files. If you trust the file, name the class with "
            "torch.serialization.add_safe_globals."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{name} cannot be read: {error}. The file is damaged: load another checkpoint."
        ) from error
