"""The file tier: buckets of flat tensors in scratch files, read ahead of their use.

``FileStore`` moves buckets between files and memory, ``HostCache`` keeps as many in memory as a
bound allows.  The files are scratch and never a checkpoint.  Linux only.
"""

from zerofx.runtime.storage.disk.host_cache import HostCache
from zerofx.runtime.storage.disk.layout import BucketLayout, Key, Part
from zerofx.runtime.storage.disk.store import FileStore
from zerofx.runtime.storage.disk.transfers import Operation

__all__ = ["BucketLayout", "FileStore", "HostCache", "Key", "Operation", "Part"]
