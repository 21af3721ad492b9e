"""Tells which results take no memory of their own once Inductor compiles regions.

It computes elementwise work where that is read, in one kernel with its reader, and writes a
kernel's result over an input that nobody reads later.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zerofx.ir.aliases import is_view
from zerofx.ir.regions import numbered, shared_by_layers
from zerofx.ir.sizes import hinted_bytes

aten = torch.ops.aten

# Beside those that torch calls pointwise: what Inductor takes apart into such and into sums, and
# what it reads element by element.
_COMPUTED_WHERE_READ = {
    *(aten.native_layer_norm, aten.native_layer_norm_backward),
    *(aten.native_group_norm, aten.native_group_norm_backward),
    *(aten.native_batch_norm, aten.native_batch_norm_backward),
    aten._native_batch_norm_legit_functional,
    *(aten._softmax, aten._softmax_backward_data),
    *(aten._log_softmax, aten._log_softmax_backward_data),
    *(aten.nll_loss_backward, aten.mse_loss),
    *(aten.embedding, aten.gather, aten.index, aten.constant_pad_nd),
    *(aten.slice_backward, aten.select_backward, aten._to_copy, aten.clone, aten.expand),
    *(aten.arange, aten.full, aten.full_like, aten.zeros_like, aten.ones_like),
    *(aten.new_zeros, aten.new_ones, aten.scalar_tensor),
}
_SUMS = {
    *(aten.sum, aten.mean, aten.amax, aten.var_mean),
    *(aten.nll_loss_forward, aten.max_pool2d_with_indices),
}


class Fusion:
    """Finds what Inductor fuses in a program, and what it writes over.

    An estimate: what Inductor does depends on more, as on how often a value is read.
    """

    def __init__(self, nodes: Sequence[fx.Node]):
        self.regions: Mapping[fx.Node, int] = dict(numbered(nodes))
        self._shared = shared_by_layers(nodes, self.regions)

    def is_computed_where_read(self, node: fx.Node) -> bool:
        """Return whether a result is nowhere in memory: kernels of its region alone read it."""
        return (
            node in self.regions
            and _is_elementwise(node)
            and bool(node.users)
            and (isinstance(node.meta.get("val"), torch.Tensor) or _has_one_result(node))
            and self._is_read_by_kernels(node.users, self.regions[node])
        )

    def _is_read_by_kernels(self, users: Iterable[fx.Node], region: int) -> bool:
        for user in users:
            if self.regions.get(user) != region:
                return False
            if is_view(user) or user.target is operator.getitem:
                if not self._is_read_by_kernels(user.users, region):
                    return False
            elif not self.is_kernel(user):
                return False
        return True

    def is_kernel(self, node: fx.Node) -> bool:
        """Return whether Inductor writes code for a node, and calls no library."""
        return node in self.regions and (_is_elementwise(node) or _packet(node) in _SUMS)

    def layouts(self) -> dict[fx.Node, dict[fx.Node, tuple[int, ...]]]:
        """The strides of operands that are others for a CPU: of convolutions, channels last."""
        found: dict[fx.Node, dict[fx.Node, tuple[int, ...]]] = {}
        for node in self.regions:
            if _packet(node) is aten.convolution:
                strides = {one: _channels_last(one) for one in node.all_input_nodes}
                found[node] = {one: wanted for one, wanted in strides.items() if wanted}
        return found

    def is_copied(self, operand: fx.Node) -> bool:
        """Return whether an operand is needed in the layout that it was made in, beside another."""
        region = self.regions.get(operand)
        return region is None or any(
            self.regions.get(user) != region or _packet(user) is not aten.convolution
            for user in operand.users
        )

    def widened(self) -> dict[fx.Node, int]:
        """The bytes of a batch norm's gradient in float32: made once, and read three times.

        If it lies in memory in fewer bits, or is as wide itself, it is read as it is.
        """
        found = {}
        for node in self.regions:
            if _packet(node) is aten.native_batch_norm_backward:
                gradient = node.args[0]
                is_narrow = gradient.meta["val"].dtype in (torch.bfloat16, torch.float16)
                if is_narrow and self.is_computed_where_read(gradient):
                    found[node] = 2 * hinted_bytes(gradient)
        return found

    def may_overwrite(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether a node's result may take a region's result that nobody reads later.

        What layers share is left to the last one as it is left to the others.
        """
        return self.is_kernel(node) and source in self.regions and source not in self._shared


def _has_one_result(node: fx.Node) -> bool:
    """Return whether of several results only the first is read: a norm that is computed again."""
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def _channels_last(node: fx.Node) -> tuple[int, ...] | None:
    """The strides of an operand with its channels last; None if they are its own."""
    value = node.meta.get("val")
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(getattr(value, "ndim", 0))
    if layout is None or value.is_contiguous(memory_format=layout):
        return None
    return torch.empty_like(value, memory_format=layout).stride()


def calls_library(node: fx.Node) -> bool:
    """Return whether a node is a product, convolution or attention: a call also if compiled."""
    return _packet(node) in flop_registry


def _is_elementwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or _packet(node) in _COMPUTED_WHERE_READ


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)
