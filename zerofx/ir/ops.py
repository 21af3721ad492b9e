"""Every ``zerofx::`` operator: its schema and its fake implementation, once.

Captured programs contain ``gradient`` and ``optimizer_step``; passes replace these by the
others.  None of them has a real kernel here: lowering binds each to the runtime of one
compiled function, so that no operator needs process-wide state.
"""

from __future__ import annotations

import torch

NAMESPACE = "zerofx"
_library = torch.library.Library(NAMESPACE, "DEF")


def _define(schema: str):
    """Define an operator and register the decorated function as its fake implementation."""

    def register(fake):
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.split("(", 1)[0]
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return register


@_define("gradient(Tensor grad, int parameter) -> Tensor")
def gradient(grad, parameter):
    """Mark a gradient where backward hands it to ``p.grad``: local to the rank until reduced."""
    return torch.empty_like(grad)


@_define(
    "optimizer_step(Tensor[] params, Tensor[] grads, int optimizer, Tensor? found_inf=None,"
    " int[] parameters=[]) -> Tensor[]"
)
def optimizer_step(params, grads, optimizer, found_inf=None, parameters=()):
    """The new values of ``params`` after the step of the optimizer with this handle.

    ``parameters`` holds their indices in the parameter table; capture fills it in.
    """
    return [torch.empty_like(p) for p in params]


@_define("all_reduce_start(Tensor input, str reduction) -> Tensor")
def all_reduce_start(input, reduction):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@_define("reduce_scatter_start(Tensor flat, str reduction, int world_size) -> Tensor")
def reduce_scatter_start(flat, reduction, world_size):
    """Reduce a flat [world_size * n] buffer over the ranks; each keeps its own [n] of it."""
    return flat.new_empty(flat.shape[0] // world_size)


@_define("all_gather_start(Tensor shard, int world_size) -> Tensor")
def all_gather_start(shard, world_size):
    """Concatenate every rank's flat [n] shard to [world_size * n]."""
    return shard.new_empty(shard.shape[0] * world_size)


@_define("wait(Tensor started) -> Tensor")
def wait(started):
    """The result of a ``*_start``, complete.  The same memory as its argument."""
    return torch.empty_like(started)


@_define("free(Tensor gathered) -> ()")
def free(gathered):
    """Release a gathered buffer now, whoever still holds a view of it."""
    return None


@_define("take_shard(Tensor whole, int parameter, int shard_numel) -> Tensor")
def take_shard(whole, parameter, shard_numel):
    """This rank's flat [n] range of a whole tensor laid out like the parameter."""
    return whole.new_empty(shard_numel)


@_define("mask_padding(Tensor shard, int parameter, float identity) -> Tensor")
def mask_padding(shard, parameter, identity):
    """The shard with what lies past the parameter's end replaced by ``identity``.

    An empty shard becomes one ``identity``, so that reductions have something to reduce.
    """
    return shard.new_empty(max(shard.shape[0], 1))


@_define("pack(Tensor[] shards, int[] parameters, int numel) -> Tensor")
def pack(shards, parameters, numel):
    """This rank's flat [numel] shard of a bucket, from its parameters' shards of it.

    The same memory if they are views of their bucket's buffer.
    """
    return shards[0].new_empty(numel)


@_define("flatten_bucket(Tensor[] wholes, int[] parameters, int numel) -> Tensor")
def flatten_bucket(wholes, parameters, numel):
    """A bucket's whole flat [numel] buffer, padded, with a copy of each of these tensors."""
    return wholes[0].new_empty(numel)


@_define(
    "update(Tensor(a!) values, Tensor grad, int optimizer, int parameter,"
    " Tensor? found_inf=None) -> Tensor(a!)"
)
def update(values, grad, optimizer, parameter, found_inf=None):
    """Run the optimizer's update in place, with this rank's states.

    ``values`` is the flat shard, or at stage 0 the whole parameter.
    """
    return torch.empty_like(values)


@_define("gradient_squares(Tensor updated) -> Tensor")
def gradient_squares(updated):
    """What an update adds to the squares of a norm of gradients, in float32.

    Only in programs that are being lowered, where updates have a ``norm``.  What updates that run
    together add is right in total: it may all be one's.
    """
    return updated.new_empty((), dtype=torch.float32)


@_define(
    "on_owners(Tensor[] values, Tensor[] grads, int optimizer, int[] parameters, int[] owners,"
    " int flops, Tensor? found_inf=None) -> Tensor[]"
)
def on_owners(values, grads, optimizer, parameters, owners, flops, found_inf=None):
    """Run what of these updates needs a parameter whole, each on the rank that is its owner.

    Takes this rank's flat shards, and returns its shards of what ``update`` then takes in place of
    the gradients.  Communicates twice, in here: to the owners and back.  ``flops`` is what the
    rank computes that has most to do.  What really travels may be of a narrower dtype.
    """
    return [torch.empty_like(grad) for grad in grads]


@_define("to_host_start(Tensor[] pieces, int[] parameters, int slot) -> Tensor")
def to_host_start(pieces, parameters, slot):
    """Start copying flat tensors on a device, one behind the other, to host memory.

    To the staging buffer number ``slot``, which is kept from step to step.  ``parameters`` are
    those that the pieces are of.
    """
    return pieces[0].new_empty(sum(piece.shape[0] for piece in pieces), device="cpu")


@_define("to_device_start(Tensor[] pieces, int[] parameters, Device device) -> Tensor")
def to_device_start(pieces, parameters, device):
    """Start copying flat tensors in host memory, one behind the other, to a device."""
    return pieces[0].new_empty(sum(piece.shape[0] for piece in pieces), device=device)


@_define("offload_start(Tensor value, int slot) -> Tensor")
def offload_start(value, slot):
    """Start copying a value of any shape and strides from its device to host memory.

    To the staging buffer number ``slot``, which is kept from step to step and grows with the value.
    Once ``wait_move`` has waited for it, the value's memory on the device may be used again.
    """
    return value.new_empty_strided(value.shape, value.stride(), device="cpu")


@_define("reload_start(Tensor host, Device device) -> Tensor")
def reload_start(host, device):
    """Start copying what ``offload_start`` has moved back to a device, strides and all."""
    return host.new_empty_strided(host.shape, host.stride(), device=device)


@_define("wait_move(Tensor started) -> Tensor")
def wait_move(started):
    """What a move has copied, complete; its argument's memory."""
    return torch.empty_like(started)


@_define("states_from_file_start(int optimizer, int[] parameters, int nbytes) -> Tensor")
def states_from_file_start(optimizer, parameters, nbytes):
    """Start reading the optimizer's states of these parameters from files, if they are there.

    What it returns stands for them.  ``nbytes`` is what plans take them for, as passes do not know
    what an optimizer keeps: AdamW's moments of an equal share.
    """
    return torch.empty(nbytes, dtype=torch.uint8)


@_define("wait_file(Tensor started) -> Tensor")
def wait_file(started):
    """What a ``*_from_file_start`` reads, in host memory; its argument's memory.

    Of states and shards, which lie where updates and moves expect them, it returns what stands for
    them: they are there until the ``*_to_file`` that reads this.
    """
    return torch.empty_like(started)


@_define("states_to_file(Tensor states, int optimizer, int[] parameters) -> ()")
def states_to_file(states, optimizer, parameters):
    """Let go of states, changed or newly made: from here on files may have to hold them.

    A write begins when another bucket needs their memory, and what is read into that waits for it,
    not the program.
    """
    return None


@_define("shards_from_file_start(int[] parameters, int nbytes) -> Tensor")
def shards_from_file_start(parameters, nbytes):
    """Start reading the shards of these parameters, which are kept on the host, from files.

    What it returns stands for them.  ``nbytes`` is what plans take them for: equal shares.
    """
    return torch.empty(nbytes, dtype=torch.uint8)


@_define("shards_to_file(Tensor shards, int[] parameters, bool changed) -> ()")
def shards_to_file(shards, parameters, changed):
    """Let go of shards as ``states_to_file`` does; files have them already if not ``changed``."""
    return None


@_define("value_to_file(Tensor value) -> Tensor")
def value_to_file(value):
    """Let go of what ``offload_start`` has copied to host memory; return what stands for it."""
    return torch.empty_like(value)


@_define("value_from_file_start(Tensor filed) -> Tensor")
def value_from_file_start(filed):
    """Start reading what ``value_to_file`` has let go of, strides and all."""
    return torch.empty_like(filed)


@_define("drop_value(Tensor value) -> ()")
def drop_value(value):
    """Give up a value that has been read from files: it is not written again."""
    return None


@_define(
    "update_on_host_start(Tensor(a!) values, Tensor grads, int optimizer, int[] parameters,"
    " Tensor? found_inf=None) -> Tensor(a!)"
)
def update_on_host_start(values, grads, optimizer, parameters, found_inf=None):
    """Start the updates of neighbouring shards in host memory, in place, beside the step.

    Both tensors are what ``to_host_start`` gave, with a part for each of ``parameters``, one behind
    the other: they may be on their way still, and are updated when they have arrived.
    """
    return torch.empty_like(values)


@_define("wait_update(Tensor started) -> Tensor")
def wait_update(started):
    """The new values that ``update_on_host_start`` has made; its argument's memory."""
    return torch.empty_like(started)


@_define("store_start(Tensor[] pieces, int[] parameters, Tensor(a!)[] shards) -> Tensor(a!)[]")
def store_start(pieces, parameters, shards):
    """Start copying flat tensors on a device to shards that are kept in host memory.

    ``parameters`` are those of the shards.  Returns these, for ``wait_store``.
    """
    return [torch.empty_like(shard) for shard in shards]


@_define(
    "update_kept_start(Tensor(a!)[] shards, Tensor grads, int optimizer, int[] parameters,"
    " Tensor? found_inf=None) -> Tensor(a!)[]"
)
def update_kept_start(shards, grads, optimizer, parameters, found_inf=None):
    """Start the updates of a bucket's shards that are kept in host memory, as above.

    ``grads`` is flat, with a part for each of them.  Returns the shards, for ``wait_store``.
    """
    return [torch.empty_like(shard) for shard in shards]


@_define("wait_store(Tensor(a)[] started) -> Tensor(a)[]")
def wait_store(started):
    """The shards that are being written to, complete; its argument's memory."""
    return [torch.empty_like(shard) for shard in started]


HOST_UPDATES = (update_on_host_start, update_kept_start)
"""What updates shards in host memory, beside the step."""

MOVES = (to_host_start, to_device_start, store_start)
"""What copies parts of a bucket between a device and the host, on this rank alone."""

ACTIVATION_MOVES = (offload_start, reload_start)
"""What copies one value there and back."""

TO_HOST = (to_host_start, offload_start)
"""What copies to a staging buffer in host memory."""

TO_DEVICE = (to_device_start, reload_start)

FROM_FILE = (states_from_file_start, shards_from_file_start, value_from_file_start)
"""What reads from files, for ``wait_file`` to wait for."""

TO_FILE = (states_to_file, shards_to_file, value_to_file)
"""What may be written to files from there on."""

WAITS = (wait, wait_move, wait_store, wait_update, wait_file)
"""What waits for something that goes on beside the step."""

STARTS = (all_reduce_start, reduce_scatter_start, all_gather_start)


def is_move(target) -> bool:
    """Whether ``target`` starts a copy between a device and the host."""
    return target in MOVES or target in ACTIVATION_MOVES


def is_ours(target) -> bool:
    """Whether ``target`` is a ``zerofx::`` operator."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE
