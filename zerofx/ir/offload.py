"""Questions about what leaves the device: copies, updates in host memory, and files."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import is_kept_on_host, readers
from zerofx.ir.roles import parameter_of
from zerofx.ir.rules import FILES, TO_DEVICE, TO_HOST
from zerofx.ir.sizes import hinted_bytes

aten = torch.ops.aten


@dataclass(frozen=True)
class UpdateOperands:
    """The operands of one parameter's update: the nodes that hold its value and gradient.

    Of an update on the host, those on the device that have been copied there, but for a value that
    is kept there.
    """

    parameter: int
    value: fx.Node
    gradient: fx.Node


def operands_of_updates(node: fx.Node) -> list[UpdateOperands]:
    """Return the operands of the updates that a node runs, by parameter; none for other nodes."""
    if node.target is ops.update:
        return [UpdateOperands(node.args[3], *node.args[:2])]
    if node.target is ops.update_together:
        operands = zip(node.args[3], *node.args[:2], strict=True)
        return [UpdateOperands(*each) for each in operands]
    if not ops.updates_on_host(node):
        return []
    values = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args[0].args[0]
    pieces = zip(node.args[3], values, node.args[1].args[0], strict=True)
    return [UpdateOperands(*piece) for piece in pieces]


def updated_parameter(node: fx.Node) -> int | None:
    """The parameter whose updated shard a node is; None for what no update on the device made."""
    if node.target is ops.update:
        return node.args[3]
    together = node.args[0] if node.target is operator.getitem else None
    if isinstance(together, fx.Node) and together.target is ops.update_together:
        parameters = together.args[3]
        return parameters[node.args[1]] if node.args[1] < len(parameters) else None
    return None


def brought_from(node: fx.Node) -> fx.Node | None:
    """The shard in host memory that a node on the device is a copy of; None for others."""
    if node.target is not aten.slice.Tensor or ops.waits_on(node.args[0]) != TO_DEVICE:
        return None
    (values, parameters, *_), index = node.args[0].args[0].args, parameter_of(node)
    if index not in parameters or not is_kept_on_host(values[0]):
        return None
    return values[parameters.index(index)]


def copies_activation(node: fx.Node) -> bool:
    """Return whether a node starts copying a value of no parameter, there or back."""
    return node.target is ops.copy_start and not node.args[1]


def copies_to_device(node: fx.Node) -> bool:
    return node.target is ops.copy_start and ops.lane(node) == TO_DEVICE


def is_staged(node: fx.Node) -> bool:
    """Return whether a node starts copying to a staging buffer in host memory."""
    return node.target is ops.copy_start and ops.lane(node) == TO_HOST


def slot_of(start: fx.Node) -> int:
    """Number of the staging buffer that a copy to the host writes to; -1 if it has none yet."""
    return ops.argument(start, "slot")


def staging_bytes(
    graph: fx.Graph, counts: Callable[[fx.Node], bool] = lambda start: True
) -> dict[int, int]:
    """The staging buffers in host memory that a program's copies use, by number.  Units: bytes.

    Symbolic sizes count as they were when captured.  What files hold meanwhile has none.
    """
    staging: dict[int, int] = {}
    for node in graph.nodes:
        if is_staged(node) and counts(node) and not goes_to_file(node):
            slot = slot_of(node)
            staging[slot] = max(staging.get(slot, 0), hinted_bytes(node))
    return staging


def staged_until(start: fx.Node) -> fx.Node:
    """The last node that reads the staging buffer of a copy to the host.

    What is started reads it until its wait.
    """
    found = readers(start)
    waits = {wait for reader in found if ops.starts(reader) for wait in reader.users}
    return max({start} | found | waits)


def assign_slots(
    starts: Sequence[fx.Node], choose: Callable[[fx.Node, list[int], list[int]], int | None]
) -> int:
    """Number staging buffers behind those there are: none is written to before it has been read.

    ``choose`` is given a start, the buffers that are free where it stands and the bytes of all, and
    returns one of the free, or None for a new one.  Return how many there are.
    """
    nodes = starts[0].graph.nodes if starts else ()
    first = max((slot_of(node) for node in nodes if is_staged(node)), default=-1) + 1
    last_readers: list[fx.Node] = []
    sizes: list[int] = []
    for start in starts:
        free = [slot for slot, reader in enumerate(last_readers) if reader < start]
        slot = choose(start, free, sizes)
        if slot is None:
            slot = len(last_readers)
            last_readers.append(start)
            sizes.append(0)
        last_readers[slot] = staged_until(start)
        sizes[slot] = max(sizes[slot], hinted_bytes(start))
        start.update_arg(3, first + slot)
    return len(last_readers)


def is_fetch(node: fx.Node, what: str) -> bool:
    """Return whether a node starts reading ``states``, ``shards`` or a ``value`` from files."""
    return node.target is ops.fetch_start and node.args[1] == what


def uses_of_files(graph: fx.Graph) -> list[fx.Node]:
    """The nodes where something that files may hold has to be in host memory, in order.

    A ``wait`` for what is read, a ``copy_start`` of a value that is let go of there.
    """
    return [node for node in graph.nodes if ops.waits_on(node) == FILES or goes_to_file(node)]


def goes_to_file(start: fx.Node) -> bool:
    """Return whether a node starts copying to host memory what is then let go of to files."""
    return is_staged(start) and any(
        user.target is ops.evict for wait in start.users for user in wait.users
    )


def released_at(use: fx.Node) -> fx.Node:
    """The node that lets go of what is in host memory from one of ``uses_of_files`` on."""
    holder = use if ops.is_wait(use) else next(iter(use.users))
    (release,) = (user for user in holder.users if user.target is ops.evict)
    return release


def changes_files(release: fx.Node) -> bool:
    """Return whether what a node lets go of may have to be written to files."""
    return ops.argument(release, "changed")
