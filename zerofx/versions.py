"""The versions of torch that work; imported before anything that needs one of them."""

from __future__ import annotations

import torch

__version__ = "0.1.0"

OLDEST, NEWEST = (2, 11), (2, 15)


def check_torch_version(version: str = torch.__version__) -> None:
    """Refuse a torch that capture has not been proven on.

    Raises: RuntimeError naming the versions that work.
    """
    major_minor = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not OLDEST <= major_minor <= NEWEST:
        raise RuntimeError(
            f"zerofx works with torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and this "
            f"is torch {version}: it relies on how Dynamo traces a whole training step, which "
            "other versions do differently. Install one of these, e.g. `pip install torch==2.13.0`."
        )
