"""The file tier: buckets of flat tensors in scratch files, read ahead of their use.

``FileStore`` moves buckets between files and memory, ``HostCache`` keeps as many in memory as a
bound allows.  The files are scratch and never a checkpoint.  Linux only.
"""

from zerofx.runtime.files.host_cache import HostCache
from zerofx.runtime.files.layout import BucketLayout, Field
from zerofx.runtime.files.store import FileStore
from zerofx.runtime.files.transfers import Operation

__all__ = ["BucketLayout", "Field", "FileStore", "HostCache", "Operation"]
