"""A process group whose other ranks are not there: torch's own, for tests.  torch 2.11 to 2.15.

Can go when ``torch.distributed`` has a public one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def init_fake_group(rank: int, world_size: int) -> None:
    """Begin the default group, as one rank of so many; collectives leave what they are given."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
