"""Every ``zerofx::`` operator, once: its schema, its fake implementation and its rules.

Captured programs contain ``gradient`` and ``optimizer_step``; passes replace these by the
others.  None of them has a real kernel here: lowering binds each to the runtime of one
compiled function, so that no operator needs process-wide state.
"""

from __future__ import annotations

import torch
from torch import fx

from zerofx.ir.interface import recorded
from zerofx.ir.mesh import DATA
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.roles import Role, role
from zerofx.ir.rules import FILES, LINK, TO_DEVICE, TO_HOST, UPDATES, argument, at, define, rules
from zerofx.ir.rules import is_ours as is_ours
from zerofx.ir.sizes import hinted_bytes, value_bytes
from zerofx.ir.wires import check_parts, quantized_bytes, wire_length

HOST = "host"
"""The place that is no device's: host memory."""

UPDATE_STREAMS = 7
"""The streams that AdamW reads and writes: a gradient, the value and both moments twice."""


def _operand_bytes(node: fx.Node) -> int:
    return value_bytes(node.args[0])


def _is_of_gradient(reduction: fx.Node) -> bool:
    return role(reduction) == Role.REDUCE_GRADIENT


def _shared_bytes(node: fx.Node, table: ParameterTable) -> int:
    """Bytes of equal shares: ranks predict alike, whose shards differ in length."""
    itemsize = node.args[0][0].meta["val"].dtype.itemsize
    return sum(table[index].share_numel * itemsize for index in node.args[1])


def _update_bytes(node: fx.Node, table: ParameterTable) -> float:
    value, index = node.args[0], node.args[3]
    if isinstance(index, int) and value.meta["val"].shape == table[index].shape:
        return UPDATE_STREAMS * table[index].nbytes
    infos = [table[each] for each in ([index] if isinstance(index, int) else index)]
    return sum(UPDATE_STREAMS * info.nbytes / info.world_size for info in infos)


def _bytes_both_ways(node: fx.Node, table: ParameterTable) -> int:
    return value_bytes(node) + _operand_bytes(node)


def _uncaptured_update(node: fx.Node) -> str:
    if argument(node, "found_inf") is not None:
        return "the host reads found_inf, and computes the update's numbers"
    return "the host computes the update's numbers at every call"


_UNCAPTURED_WAITS = {
    UPDATES: "the host waits until its threads have updated",
    FILES: "the host waits for files",
}

# What operators that reduce have in common, and those that update in host memory.
_REDUCES = {"lane": LINK, "starts": True, "reduces": True, "uniform": True}
_UPDATES_ON_HOST = {
    "lane": UPDATES,
    "starts": True,
    "carries": _update_bytes,
    "updates": lambda node: tuple(node.args[2:4]),
    "uncaptured": "the host's threads update",
}


@define("gradient(Tensor grad, int parameter) -> Tensor", uniform=True, holds="gradients")
def gradient(grad, parameter):
    """Mark a gradient where backward hands it to ``p.grad``: local to the rank until reduced."""
    return torch.empty_like(grad)


@define(
    "optimizer_step(Tensor[] params, Tensor[] grads, int optimizer, Tensor? found_inf=None,"
    " int[] parameters=[]) -> Tensor[]",
    updates=lambda node: (node.args[2], node.args[4]),
)
def optimizer_step(params, grads, optimizer, found_inf=None, parameters=()):
    """The new values of ``params`` after the step of the optimizer with this handle.

    ``parameters`` holds their indices in the parameter table; capture fills it in.
    """
    return [torch.empty_like(p) for p in params]


@define("count(Tensor number, str of, Tensor? total=None) -> Tensor")
def count(number, of, total=None):
    """Mark what a loss is divided by, until capture has found what it is a number of.

    ``of`` says who says so: ``local`` and ``global`` are the user's words, ``found`` is any other
    divisor, and ``mean`` how many elements a mean has, of which ``total`` is the sum.
    """
    return torch.empty_like(number)


@torch.library.register_kernel(count, None)
def _count_itself(number, of, total=None):
    """Return the number: constants are traced with it, and other compilers count nothing."""
    return number.clone()


@define("loss_part(Tensor value, str of, int backward=-1) -> Tensor", backward=(None, None))
def loss_part(value, of, backward=-1):
    """Mark the ``loss`` of a call of backward, or a value that stays ``per_rank``."""
    return torch.empty_like(value)


@torch.library.register_kernel(loss_part, None)
def _part_itself(value, of, backward=-1):
    """Return the value, for other compilers."""
    return value.clone()


@define("over_ranks(Tensor value, str reduction) -> Tensor", uniform=True)
def over_ranks(value, reduction):
    """Add up what the ranks have, or average it; until ``global_loss`` says when."""
    return torch.empty_like(value)


@define("has_data(ScalarType dtype, Device device, str why_not='') -> Tensor")
def has_data(dtype, device, why_not=""):
    """One, 0-dim; zero in a call of a rank that has no batch, and goes through another's again.

    ``why_not`` is why no rank may do so.
    """
    return torch.empty((), dtype=dtype, device=device)


@define("end_without_data(Tensor ranks) -> ()", acts=True)
def end_without_data(ranks):
    """End the call on all ranks if ``ranks``, the number of those that have data, is zero.

    Only a rank without a batch looks: where one has a batch, nobody ends.
    """
    return None


@define(
    "all_reduce_start(Tensor input, str reduction, str axis='data') -> Tensor",
    **_REDUCES,
    sends=_operand_bytes,
    rounds=lambda node: 2 if _is_of_gradient(node) else 1,
    traffic=lambda node: "reductions" if _is_of_gradient(node) else "scalars",
    holds=lambda node: "gradients" if _is_of_gradient(node) else "temporaries",
)
def all_reduce_start(input, reduction, axis=DATA):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@define(
    "reduce_scatter_start(Tensor flat, str reduction, int world_size, str axis='data') -> Tensor",
    **_REDUCES,
    sends=_operand_bytes,
    traffic=lambda node: "reductions",
    holds=lambda node: "gradients" if _is_of_gradient(node) else "temporaries",
)
def reduce_scatter_start(flat, reduction, world_size, axis=DATA):
    """Reduce a flat [world_size * n] buffer over an axis's ranks; each keeps its own [n] of it."""
    return flat.new_empty(flat.shape[0] // world_size)


@define(
    "all_to_all_start(Tensor parts, int world_size, str axis='data') -> Tensor",
    lane=LINK,
    starts=True,
    uniform=True,  # once it has been summed, which is all that may be done with it
    sends=_operand_bytes,
    traffic=lambda node: "reductions",
    holds="gradients",
)
def all_to_all_start(parts, world_size, axis=DATA):
    """Send each of an axis's ranks its part of a flat [world_size * n] buffer.

    Each receives the parts that are for it, in the order of the ranks that they come from.
    """
    check_parts(world_size, parts.shape[0])
    return torch.empty_like(parts)


@define(
    "all_gather_start(Tensor shard, int world_size, str axis='data') -> Tensor",
    lane=LINK,
    starts=True,
    gathers=True,
    uniform=True,
    sends=value_bytes,
    traffic=lambda node: "reductions" if _is_of_gradient(node) else "gathers",
    holds="gathered parameters",
)
def all_gather_start(shard, world_size, axis=DATA):
    """Concatenate the flat [n] shards of an axis's ranks to [world_size * n]."""
    return shard.new_empty(shard.shape[0] * world_size)


@define(
    "refill_start(Tensor shard, int[] parameters, int world_size, bool is_new=False,"
    " str axis='data') -> Tensor",
    lane=LINK,
    starts=True,
    gathers=True,
    uniform=True,
    sends=value_bytes,
    traffic=lambda node: "gathers",
)
def refill_start(shard, parameters, world_size, is_new=False, axis=DATA):
    """Have the second shard of these parameters, [world_size * n] of [n] that ranks keep.

    It is gathered over an axis if a parameter has changed since it was last, or ``is_new`` as an
    update of this program has made it; else it is what was gathered then, and nothing travels.
    """
    return shard.new_empty(shard.shape[0] * world_size)


@define(
    "wait(Tensor started) -> Tensor",
    waits=True,
    shares=lambda node: [node.args[0]],
    acts=lambda node: waits_on(node) != LINK,
    uncaptured=lambda node: _UNCAPTURED_WAITS.get(waits_on(node), ""),
)
def wait(started):
    """The result of a ``*_start``, complete: its argument's memory.

    Of a collective, a copy between places, an update in host memory or a read from files, which
    ``waits_on`` tells apart.  States and shards that are read from files lie where updates and
    copies expect them: it returns what stands for them, and they are there until they are evicted.
    """
    return torch.empty_like(started)


@define(
    "quantize(Tensor flat, str code, int parts=1, int[] parameters=[]) -> Tensor",
    memory_bytes=_bytes_both_ways,
    holds="staging",
)
def quantize(flat, code, parts=1, parameters=()):
    """The wire of a flat [parts * n] buffer: what travels in its place, each part by itself.

    ``ir/wires.py`` says what is in it.  With ``parameters`` the buffer is of their bucket, all of
    it or shards, and what it holds besides them is taken for zeros.
    """
    check_parts(parts, flat.shape[0])
    nbytes = quantized_bytes(flat.shape[0] // parts, code)
    return flat.new_empty(parts * nbytes, dtype=torch.uint8)


@define(
    "dequantize(Tensor wire, str code, int parts, int numel, ScalarType dtype) -> Tensor",
    memory_bytes=_bytes_both_ways,
    holds=lambda node: "gradients" if _is_of_gradient(node) else "gathered parameters",
)
def dequantize(wire, code, parts, numel, dtype):
    """The flat [parts * numel] values of a wire, of parts that have been quantised apart."""
    check_parts(parts, wire.shape[0], quantized_bytes(numel, code))
    return wire.new_empty(parts * numel, dtype=dtype)


@define(
    "dequantize_sum(Tensor received, str code, int parts, int numel, str reduction,"
    " ScalarType dtype) -> Tensor",
    memory_bytes=_bytes_both_ways,
    reduces=True,
    holds="gradients",
)
def dequantize_sum(received, code, parts, numel, reduction, dtype):
    """The flat [numel] sum of the parts that ranks have sent, each a wire of so many values.

    They are added in float32, in their order; a ``mean`` is then divided by the number of all
    ranks, whichever of them have sent one.
    """
    check_parts(parts, received.shape[0], wire_length(numel, code))
    return received.new_empty(numel, dtype=dtype)


@define(
    "fill_up(Tensor flat, int[] parameters, int numel) -> Tensor",
    memory_bytes=_bytes_both_ways,
    holds="gradients",
)
def fill_up(flat, parameters, numel):
    """A bucket's flat buffer, or shards of it, in [numel] elements: with zeros besides these."""
    return flat.new_empty(numel)


@define(
    "correct(Tensor flat, int[] parameters, int numel, str axis='data', Tensor? scale=None,"
    " Tensor? rest=None) -> Tensor",
    memory_bytes=_bytes_both_ways,
    holds="gradients",
)
def correct(flat, parameters, numel, axis=DATA, scale=None, rest=None):
    """What ``fill_up`` gives, in float32, and what this rank's wires over the axis have lost of it.

    That is what ``keep_error`` has kept for these parameters, or a ``rest`` that it has yet to
    keep; times the ``scale`` of the loss.
    """
    return flat.new_empty(numel, dtype=torch.float32)


@define(
    "rounding_error(Tensor exact, Tensor wire, str code, int parts, Tensor? scale=None) -> Tensor",
    memory_bytes=_bytes_both_ways,
    holds="gradients",
)
def rounding_error(exact, wire, code, parts, scale=None):
    """What a wire has lost of the values that it was made of, divided by the ``scale``.

    Zero where that is no number: it was added to nothing that an update may use.
    """
    return torch.empty_like(exact)


@define(
    "keep_error(Tensor rest, Tensor[] sums, int[] parameters, str axis='data',"
    " Tensor? found_inf=None) -> ()",
    memory_bytes=lambda node, table: 2 * _operand_bytes(node),
    acts=True,
)
def keep_error(rest, sums, parameters, axis=DATA, found_inf=None):
    """Keep what was lost of these parameters' gradients, unless a scaler has ``found_inf``.

    ``sums`` are what was lost of means that this rank has summed for all along the axis.
    """
    return None


@define("free(Tensor gathered) -> ()", acts=True, gives_up=True)
def free(gathered):
    """Release a gathered buffer now, whoever still holds a view of it."""
    return None


@define("take_shard(Tensor whole, int parameter, int shard_numel, str axis='') -> Tensor")
def take_shard(whole, parameter, shard_numel, axis=""):
    """This rank's flat [n] range of a whole tensor laid out like the parameter.

    With an ``axis``, here and below, that of what is cut over this axis of a mesh alone.
    """
    return whole.new_empty(shard_numel)


@define("mask_padding(Tensor shard, int parameter, float identity, str axis='') -> Tensor")
def mask_padding(shard, parameter, identity, axis=""):
    """The shard with what lies past the parameter's end replaced by ``identity``.

    An empty shard becomes one ``identity``, so that reductions have something to reduce.
    """
    return shard.new_empty(max(shard.shape[0], 1))


@define(
    "pack(Tensor[] shards, int[] parameters, int numel, str axis='') -> Tensor",
    shares=lambda node: node.args[0],
)
def pack(shards, parameters, numel, axis=""):
    """This rank's flat [numel] shard of a bucket, from its parameters' shards of it.

    The same memory if they are views of their bucket's buffer.
    """
    return shards[0].new_empty(numel)


@define(
    "flatten_bucket(Tensor[] wholes, int[] parameters, int numel) -> Tensor",
    memory_bytes=lambda node, table: 2 * hinted_bytes(node),
    holds="gradients",
)
def flatten_bucket(wholes, parameters, numel):
    """A bucket's whole flat [numel] buffer, padded, with a copy of each of these tensors."""
    return wholes[0].new_empty(numel)


@define(
    "update(Tensor(a!) values, Tensor grad, int optimizer, int parameter,"
    " Tensor? found_inf=None) -> Tensor(a!)",
    memory_bytes=_update_bytes,
    updates=lambda node: (node.args[2], [node.args[3]]),
    uncaptured=_uncaptured_update,
)
def update(values, grad, optimizer, parameter, found_inf=None):
    """Run the optimizer's update in place, with this rank's states.

    ``values`` is the flat shard, or at stage 0 the whole parameter.
    """
    return torch.empty_like(values)


@define(
    "update_together(Tensor(a!)[] values, Tensor[] grads, int optimizer, int[] parameters,"
    " Tensor? found_inf=None, str work='', Tensor[]? coefficients=None, int? norm=None)"
    " -> Tensor(a!)[]",
    memory_bytes=_update_bytes,
    updates=lambda node: tuple(node.args[2:4]),
    uncaptured=_uncaptured_update,
)
def update_together(
    values, grads, optimizer, parameters, found_inf=None, work="", coefficients=None, norm=None
):
    """Run several updates of one optimizer as one.

    ``work`` is what is done to each gradient first: Python statements, from ``gradient`` and the
    0-dim ``coefficient``, ``coefficient_1``, ... to the result that they return.  With a ``norm``
    as many numbers follow the new values: the sums of the squares of what the updates are given,
    in float32.  They are right in total: it may all be in one of them.
    """
    squares = [values[0].new_empty((), dtype=torch.float32) for _ in values]
    return [*map(torch.empty_like, values), *(squares if norm is not None else ())]


@define("write_back(Tensor gathered, Tensor(a!)[] wholes, int[] parameters) -> ()")
def write_back(gathered, wholes, parameters):
    """Copy a bucket's new values, of these parameters, to where the whole parameters lie.

    Where they lie in the bucket that was gathered, updates and gathers have written them already:
    nothing reads an old value after its update.
    """
    return None


@define(
    "reduce_bucket_start(Tensor[] wholes, int[] parameters, int numel, str reduction,"
    " int world_size, str axis='data') -> Tensor",
    **_REDUCES,
    sends=lambda node: node.args[2] * node.meta["val"].dtype.itemsize,
    traffic=lambda node: "reductions",
    holds="gradients",
)
def reduce_bucket_start(wholes, parameters, numel, reduction, world_size, axis=DATA):
    """Reduce what ``flatten_bucket`` would copy into one buffer, from where it lies."""
    return wholes[0].new_empty(numel // world_size)


@define(
    "all_reduce_bucket_start(Tensor[] wholes, int[] parameters, int numel, str reduction,"
    " str axis='data') -> Tensor",
    **_REDUCES,
    sends=value_bytes,
    rounds=lambda node: 2,
    traffic=lambda node: "reductions",
    holds="gradients",
)
def all_reduce_bucket_start(wholes, parameters, numel, reduction, axis=DATA):
    """Reduce the gradients of a bucket's parameters to one flat [numel] buffer, on all ranks.

    Each is at its parameter's place in the bucket, in the order of its dimensions.
    """
    return wholes[0].new_empty(numel)


@define(
    "on_owners(Tensor[] values, Tensor[] grads, int optimizer, int[] parameters, int[] owners,"
    " int flops, Tensor? found_inf=None, *, bool own_step=False) -> Tensor[]",
    flops=lambda node: node.args[5],
    uncaptured=_uncaptured_update,
)
def on_owners(
    values, grads, optimizer, parameters, owners, flops, found_inf=None, *, own_step=False
):
    """Run what of these updates needs a parameter whole, each on the rank that is its owner.

    Takes this rank's flat shards, and returns its shards of what ``update`` then takes in place of
    the gradients.  Communicates twice, in here: to the owners and back.  ``flops`` is what the
    rank computes that has most to do.  What really travels may be of a narrower dtype.

    ``own_step``: owners run the optimizer's step as it is, once, on the parameters that they own.
    Parameters travel too then, and ``update`` takes their new values.  At stage 0 each rank runs it
    on all of them, whole, and nothing travels.
    """
    return [torch.empty_like(grad) for grad in grads]


@define(
    "copy_start(Tensor[] values, int[] parameters, str place, int slot=-1) -> Tensor",
    lane=lambda node: TO_HOST if node.args[2] == HOST else TO_DEVICE,
    starts=True,
    carries=lambda n, table: _shared_bytes(n, table) if n.args[1] else hinted_bytes(n),
    holds=lambda node: "staging" if node.args[1] else "activations",
    uncaptured="the host looks for room in its memory, and asks when a copy has left it",
)
def copy_start(values, parameters, place, slot=-1):
    """Start copying to host memory, or to the device that ``place`` names.

    Flat values of these ``parameters``, one behind the other; or one value of no parameter, of any
    shape and strides, which it keeps.  Once its wait is over, such a value's memory on the device
    may be used again.  ``slot`` is the number of the staging buffer in host memory, which is kept
    from step to step and grows with what it holds.
    """
    device = "cpu" if place == HOST else place
    if not parameters:
        (value,) = values
        return value.new_empty_strided(value.shape, value.stride(), device=device)
    return values[0].new_empty(sum(value.shape[0] for value in values), device=device)


@define(
    "copy_start.shards(Tensor[] values, int[] parameters, Tensor(a!)[] shards) -> Tensor(a!)[]",
    lane=TO_HOST,
    starts=True,
    carries=_shared_bytes,
    uncaptured="the host waits until shards are in its memory",
)
def copy_start_shards(values, parameters, shards):
    """Start copying flat values on a device to the shards of these parameters in host memory."""
    return [torch.empty_like(shard) for shard in shards]


@define(
    "update_start(Tensor(a!) values, Tensor grads, int optimizer, int[] parameters,"
    " Tensor? found_inf=None) -> Tensor(a!)",
    **_UPDATES_ON_HOST,
)
def update_start(values, grads, optimizer, parameters, found_inf=None):
    """Start the updates of neighbouring shards in host memory, in place, beside the step.

    Both tensors are what ``copy_start`` gave, with a part for each of ``parameters``, one behind
    the other: they may be on their way still, and are updated when they have arrived.
    """
    return torch.empty_like(values)


@define(
    "update_start.shards(Tensor(a!)[] values, Tensor grads, int optimizer, int[] parameters,"
    " Tensor? found_inf=None) -> Tensor(a!)[]",
    **_UPDATES_ON_HOST,
)
def update_start_shards(values, grads, optimizer, parameters, found_inf=None):
    """The same of a bucket's shards that are kept in host memory, where they lie."""
    return [torch.empty_like(shard) for shard in values]


@define(
    "fetch_start(Tensor? evicted, str what, int[] parameters=[], int? optimizer=None,"
    " int nbytes=0) -> Tensor",
    lane=FILES,
    starts=True,
    carries=lambda node, table: hinted_bytes(node),
    uncaptured="the host's threads read files",
)
def fetch_start(evicted, what, parameters=(), optimizer=None, nbytes=0):
    """Start reading from files, to host memory, ``what`` files may hold.

    That is a ``value`` that has been ``evicted``, strides and all; ``states`` of an optimizer, if
    they are there; or ``shards``.  Of these it returns what stands for them, and ``nbytes`` is what
    plans take them for: of equal shares, and AdamW's moments.
    """
    return torch.empty(nbytes, dtype=torch.uint8) if evicted is None else torch.empty_like(evicted)


@define(
    "evict(Tensor there, str what, int[] parameters=[], int? optimizer=None, bool changed=True)"
    " -> Tensor",
    lane=FILES,
    acts=True,
    gives_up=lambda node: argument(node, "what") == "value" and not argument(node, "changed"),
    carries=lambda node, table: hinted_bytes(node.args[0]) if argument(node, "changed") else 0,
    uncaptured="the host's threads write files",
)
def evict(there, what, parameters=(), optimizer=None, changed=True):
    """Let go of what is in host memory: from here on files may have to hold it.

    Files have it already if it has not ``changed``; a value that is let go of like that is never
    fetched again.  A write begins when something else needs the memory, and what is read into that
    waits for it, not the program.  Returns what stands for a value.
    """
    return torch.empty_like(there)


@define(
    "wait.shards(Tensor(a)[] started) -> Tensor(a)[]",
    waits=True,
    acts=True,
    uncaptured=lambda node: _UNCAPTURED_WAITS.get(waits_on(node), ""),
)
def wait_shards(started):
    """The same of shards that are kept in host memory and have been written to."""
    return [torch.empty_like(shard) for shard in started]


def lane(node: fx.Node) -> str:
    """The lane that a node keeps busy beside the step's compute; empty for none."""
    return at(rules(node).lane, node)


def starts(node: fx.Node) -> bool:
    """Return whether a node starts something that goes on beside the step until its wait."""
    return rules(node).starts


def is_collective(node: fx.Node) -> bool:
    """Return whether a node starts what ranks do together."""
    return starts(node) and lane(node) == LINK


def hops_of(wait: fx.Node) -> list[fx.Node]:
    """The starts that a gather consists of, one for each axis that it goes over; the last first."""
    hops = [wait.args[0]]
    while role(shard := hops[-1].args[0]) == Role.GATHER_SHARD:
        hops.append(shard.args[0])
    return hops


def gathered_from(wait: fx.Node) -> fx.Node:
    """The shard that a gather puts together."""
    return hops_of(wait)[-1].args[0]


def num_ranks(node: fx.Node, world_size: int) -> int:
    """The number of ranks that take part in a collective; of ranks along one axis, all do."""
    mesh = recorded(node.graph).mesh
    return world_size if mesh is None else mesh.size(argument(node, "axis"))


def num_shards(graph: fx.Graph, world_size: int) -> int:
    """The number of ranks that a tensor is cut over; of ranks along one axis, all of them."""
    mesh = recorded(graph).mesh
    return world_size if mesh is None else mesh.num_shards


def is_move(node: fx.Node) -> bool:
    """Return whether a node starts a copy between a device and the host."""
    return starts(node) and lane(node) in (TO_HOST, TO_DEVICE)


def updates_on_host(node: fx.Node) -> bool:
    """Return whether a node starts updates of shards in host memory."""
    return starts(node) and lane(node) == UPDATES


def is_wait(node: fx.Node) -> bool:
    """Return whether a node waits for something that goes on beside the step."""
    return rules(node).waits


def wait_of(start: fx.Node) -> fx.Node:
    """The wait for what a node starts."""
    return next(filter(is_wait, start.users))


def waits_on(node: fx.Node) -> str:
    """The lane of what a node waits for; empty if it waits for nothing that was started."""
    return lane(node.args[0]) if is_wait(node) and starts(node.args[0]) else ""


def acts(node: fx.Node) -> bool:
    """Return whether a node counts though nobody reads its result, and though it writes to none."""
    return at(rules(node).acts, node)


def holds(node: fx.Node) -> str:
    """The kind of memory that a node's result is; empty if its readers say."""
    return at(rules(node).holds, node)


def gives_up(node: fx.Node) -> bool:
    """Return whether nothing is to be read any more of the first operand's memory."""
    return at(rules(node).gives_up, node)
