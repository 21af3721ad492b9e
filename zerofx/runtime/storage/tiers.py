"""The file tiers of a process: one for each set of directories, closed when nothing uses it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

from zerofx.errors import StepError
from zerofx.runtime.storage.disk.system import SystemCalls
from zerofx.runtime.storage.host import HostMemory
from zerofx.runtime.storage.tier import FileTier


class FileTiers:
    """The file tiers of this process, one for each set of directories.

    One is closed, and its files are removed, when nothing that uses it is left: no compiled
    function and no optimizer with states there.  ``system`` is for tests.
    """

    def __init__(self, host: HostMemory) -> None:
        self.system: SystemCalls | None = None
        self._host = host
        self._tiers: weakref.WeakValueDictionary[tuple[str, ...], FileTier] = (
            weakref.WeakValueDictionary()
        )

    @property
    def is_empty(self) -> bool:
        return not self._tiers

    def open(
        self,
        directories: Sequence[str],
        cache_bytes: int | None,
        checksums: bool,
        ranks_here: int,
    ) -> FileTier:
        """The tier of these directories.

        Raises: FileTierError for a directory that cannot be used, StepError if the tier has been
        opened with other options.
        """
        key = tuple(os.path.realpath(directory) for directory in directories)
        tier = self._tiers.get(key)
        if tier is None:
            tier = FileTier(
                directories, cache_bytes, checksums, ranks_here, self._host, self.system
            )
            self._tiers[key] = tier
        elif (tier.given_cache_bytes, tier.checksums) != (cache_bytes, checksums):
            raise StepError(
                f"offload_cache_bytes={cache_bytes} and offload_checksums={checksums} are not what "
                f"another function of this process has opened {', '.join(directories)} with: "
                f"{tier.given_cache_bytes} and {tier.checksums}. Give all of them the same."
            )
        return tier
