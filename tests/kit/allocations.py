"""What torch's CPU allocator gives and takes back, as its profiler tells."""

from __future__ import annotations

import torch


class Allocations:
    """Every allocation that torch's CPU allocator made in a with block: (time in ns, bytes)."""

    def __enter__(self) -> Allocations:
        self.profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self.profile.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.profile.__exit__(*error)
        events = self.profile.profiler.kineto_results.events()
        self.changes = sorted(
            (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
        )

    def sizes(self, spans=None) -> list[int]:
        """Sizes of the allocations, in order; of those within ``spans`` of time if given."""
        return [
            nbytes
            for at, nbytes in self.changes
            if nbytes > 0 and (spans is None or any(start <= at <= end for start, end in spans))
        ]

    @property
    def peak_nbytes(self) -> int:
        """The most that was alive at once of what was allocated in the block."""
        alive = most = 0
        for _, change in self.changes:
            alive += change
            most = max(most, alive)
        return most
