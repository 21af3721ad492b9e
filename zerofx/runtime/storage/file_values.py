"""Values of a step that are in files between forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zerofx.runtime.storage.disk import BucketLayout, Field
from zerofx.runtime.storage.file_bucket import FiledBucket, Left


class ValueBucket(FiledBucket):
    """Room for one value at a time, of at most ``num_bytes``.

    ``memory`` is where it lies while somebody uses it, uint8[num_bytes].
    """

    what = "activations"
    outlives_steps = False

    def __init__(self, tier: Any, name: str, num_bytes: int) -> None:
        super().__init__(tier, name)
        self.num_bytes = num_bytes
        self.memory: Tensor | None = None

    @property
    def layout(self) -> BucketLayout:
        return BucketLayout(self.name, (Field(_FIELD, torch.uint8, self.num_bytes),))

    def arrive(self, views: Mapping[str, Tensor]) -> None:
        self.memory = views[_FIELD]

    def leave(self, views: Mapping[str, Tensor]) -> Left:
        self.memory = None
        return Left.NEW


_FIELD = "value"
