"""The only importer of torch's private modules: one module for each part of torch.

A name is for torch 2.11 to 2.15, and goes when torch has a public way, unless it says otherwise.
"""

from zerofx.compat import (
    aot,
    compile_cache,
    cpp_kernels,
    dynamo,
    inductor,
    other_device,
    rehearsal,
    scalars,
    tensors,
    tracing,
)

__all__ = [
    "aot",
    "compile_cache",
    "cpp_kernels",
    "dynamo",
    "inductor",
    "other_device",
    "rehearsal",
    "scalars",
    "tensors",
    "tracing",
]
