"""What steps do to a gradient before its update, as works that a kernel takes over."""

import torch

from zerofx import compat
from zerofx.codegen.rewrite.gradient_work import GradientWork, may_be_work

BF16, FP16 = torch.bfloat16, torch.float16


def clip(gradient, coefficient):
    return gradient * coefficient


def unscale_and_clip(gradient, scale, coefficient):
    return gradient.float() * scale * coefficient


def clamp_and_drop(gradient, bound, skip):
    gradient = gradient.masked_fill(gradient.isnan(), 0.5).clamp(-3.0, 3.0)
    return torch.where(skip, bound, gradient * bound - 0.125).neg()


def traced(function, gradient_dtype, *coefficient_dtypes):
    """A function of a flat gradient and 0-dim coefficients as work of an update."""
    examples = [torch.empty(5, dtype=gradient_dtype, device="meta")]
    examples += [torch.empty((), dtype=dtype, device="meta") for dtype in coefficient_dtypes]
    graph = compat.scalars.trace_operations(function, examples).graph
    code = function.__code__
    gradient, *_ = graph.nodes
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    nodes = [node for node in nodes if node.meta["val"].dim()]
    assert all(map(may_be_work, nodes))
    for node in nodes:
        node.meta["stack_trace"] = (
            f'File "{code.co_filename}", line {code.co_firstlineno + 1}, in step'
        )
    work, coefficients = GradientWork.of(nodes, gradient)
    assert [node.op for node in coefficients] == ["placeholder"] * len(coefficient_dtypes)
    return work
