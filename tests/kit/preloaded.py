"""What a rank of the tests needs, imported once: ranks are forked from a process that has it.

Of a rank's life in a short test most was importing torch, and all ranks import the same (3.7 s of a
processor against 0.1 s; 2 cores, November 2026).
"""

import sympy.combinatorics.permutations  # noqa: F401
import sympy.tensor.tensor  # noqa: F401
import torch._export.db  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401
import torch.export._trace  # noqa: F401

import tests.conftest  # noqa: F401
import zerofx.backend  # noqa: F401
