"""Keep parameters and moments narrower than their update computes: a rewrite of its graph.

An update is traced in the dtype it computes in.  Here its graph is given what is stored instead:
reads are widened where they enter, and what has changed is narrowed where it is written back, all
in the one kernel that the update is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.codegen.rewrite.rounding import (
    LOW,
    decode_blocks,
    encode_blocks,
    in_blocks,
    random_bits,
    round_stochastically,
    scale_of,
)
from zerofx.codegen.trace.functions import add_call, example
from zerofx.codegen.trace.nested import Slot
from zerofx.codegen.trace.trace import Update
from zerofx.ir.wires import num_blocks

aten = torch.ops.aten

MASTER = "zerofx.master"
"""The state that holds a low-precision parameter in float32."""
SCALE = ".scale"
"""The suffix of the state that holds the scales of a moment's blocks."""
NATIVE = "zerofx.native_dtypes"
"""The state that says of which dtype the moments are that are kept in another."""
UPDATES = "zerofx.num_updates"
"""The state that counts updates which round at random, where the optimizer has no ``step``."""
ADDED = frozenset((MASTER, UPDATES))
"""The states that a state dict has besides the optimizer's own."""

FEWEST_CODED = 4096
"""Moments of smaller parameters are never kept in eight bits, as in Dettmers et al. 2022."""


@dataclass(frozen=True)
class Precision:
    """The user's choice of how an optimizer's numbers are kept; see ``Options``."""

    master_weights: bool = False
    stochastic_rounding: bool = False
    moment_dtype: torch.dtype | None = None
    rounding_seed: int = 0

    @classmethod
    def of(cls, options: Any) -> Precision:
        """Return the choice that these ``Options`` make."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    @property
    def is_plain(self) -> bool:
        """Return whether everything is kept as the optimizer itself would."""
        return not (self.master_weights or self.stochastic_rounding or self.moment_dtype)

    @property
    def draws(self) -> bool:
        """Return whether updates round at random, of some parameters."""
        return self.stochastic_rounding or self.moment_dtype is not None

    def draws_for(self, parameter: torch.dtype, numel: int) -> bool:
        """Return whether updates of such a parameter, of so many elements on all ranks, do."""
        narrows = self.moment_storage(parameter, numel) is not self.compute_dtype(parameter)
        return narrows or self.rounds_parameter(parameter)

    def rounds_parameter(self, parameter: torch.dtype) -> bool:
        """Return whether they round the parameter itself."""
        return self.stochastic_rounding and parameter is torch.bfloat16

    @property
    def description(self) -> list[str]:
        """Lines that ranks compare: those of one group must keep their numbers alike."""
        if self.is_plain:
            return []
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ["optimizer " + " ".join(f"{name}={value}" for name, value in values)]

    def compute_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype that the update of such a parameter computes in."""
        return torch.float32 if parameter in LOW and not self.is_plain else parameter

    def keeps_master(self, parameter: torch.dtype) -> bool:
        return self.master_weights and parameter in LOW

    def native_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of moments in a state dict: torch's for the trained parameter."""
        if self.moment_dtype is None and not self.master_weights:
            return parameter
        return self.compute_dtype(parameter)

    def moment_storage(self, parameter: torch.dtype, numel: int) -> torch.dtype:
        """Return the dtype that moments are kept in; ``numel`` counts all ranks' elements."""
        if self.moment_dtype is torch.int8 and numel < FEWEST_CODED:
            return self.compute_dtype(parameter)
        if self.moment_dtype is not None:
            return self.moment_dtype
        return parameter if self.stochastic_rounding else self.compute_dtype(parameter)


@dataclass(frozen=True)
class Stored:
    """The dtypes that one update's inputs are stored in; None is the dtype it computes in.

    ``moments`` are the names of states and the dtypes that they are kept in.
    """

    parameter: torch.dtype
    gradient: torch.dtype
    compute: torch.dtype
    keeps_master: bool
    has_master: bool
    rounds_parameter: bool
    moments: tuple[tuple[str, torch.dtype], ...]

    @property
    def draws(self) -> bool:
        return self.rounds_parameter or bool(self.moments)

    @property
    def in_blocks(self) -> bool:
        return any(dtype is torch.int8 for _, dtype in self.moments)

    @property
    def extras(self) -> list[str]:
        """The further inputs of the rewritten graph, after the numbers, in order."""
        names = [MASTER] if self.has_master else []
        names += [name + SCALE for name, dtype in self.moments if dtype is torch.int8]
        return names + (["offset", "key"] if self.draws else [])


def rewritten(update: Update, stored: Stored, positions: Mapping[str, int]) -> Update:
    """Make an update of what is stored out of one of what it computes with.

    Before (``compute`` float32)::

        mul_ = mul_(parameter, a);  ...;  addcdiv_(mul_, exp_avg, b);  return [exp_avg]

    After, for a bfloat16 parameter with a master and a bfloat16 moment::

        resume_master = resume_master(master, parameter);  widen = to(exp_avg, float32)
        mul_ = mul_(resume_master, a);  ...;  addcdiv_(mul_, widen, b)
        copy_(master, resume_master);  copy_(parameter, to(resume_master, bfloat16))
        bits = random_bits(parameter, offset, key, 7);  copy_(exp_avg, round(widen, bits))
        return [exp_avg, master]

    ``positions`` says which of the graph's inputs a state is.  In blocks (int8) every tensor is
    [blocks, block] and a scale [blocks].  States that the update makes are left as it makes them.
    """
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    old = list(update.graph_module.graph.nodes)
    inputs = update.graph_module.graph.find_nodes(op="placeholder")
    num_dims = 2 if stored.in_blocks else 1

    def copy(node: fx.Node) -> None:
        env[node] = graph.node_copy(node, env.__getitem__)
        value = node.meta.get("val")
        if torch.is_tensor(value):
            env[node].meta["val"] = example(num_dims if value.dim() else 0, value.dtype)

    for node in inputs:
        copy(node)
    words = {name: name.removeprefix("zerofx.").replace(".", "_") for name in stored.extras}
    extras = {name: graph.placeholder(word) for name, word in words.items()}
    numbers = {"offset": example(0, torch.int64), "key": example(0, torch.int32)}
    for name, node in extras.items():
        dims = 1 if name.endswith(SCALE) else num_dims
        node.meta["val"] = numbers.get(name, example(dims, torch.float32))
    parameter, gradient, *_ = inputs
    moments = {name: inputs[positions[name]] for name, _ in stored.moments}
    kept = {node: env[node] for node in (parameter, gradient, *moments.values())}
    dtypes = (stored.parameter, stored.gradient, *(dtype for _, dtype in stored.moments))
    for node, dtype in zip(kept.values(), dtypes, strict=True):
        node.meta["val"] = example(num_dims, dtype)

    def call(function: Any, *args: Any) -> fx.Node:
        return add_call(graph, function, *args)

    def fitting(value: fx.Node, dtype: torch.dtype) -> fx.Node:
        return value if value.meta["val"].dtype is dtype else call(cast, value, dtype)

    if stored.has_master:
        env[parameter] = call(resume_master, extras[MASTER], kept[parameter])
    for name, dtype in stored.moments:
        if dtype is torch.int8:
            env[moments[name]] = call(decode_blocks, kept[moments[name]], extras[name + SCALE])
    for node in kept:
        env[node] = fitting(env[node], stored.compute)

    length: fx.Node | None = None
    for node in old:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is aten.sym_size.int and node.args[0] is parameter:
            env[node] = length = call(aten.sym_numel.default, kept[parameter])
            continue
        copy(node)
        if length is not None and length in env[node].all_input_nodes:
            env[node] = call(shaped_like, env[node], kept[parameter])

    def bits(name: str) -> fx.Node:
        stream = zlib.crc32(name.encode())
        return call(random_bits, kept[parameter], extras["offset"], extras["key"], stream)

    def narrowed(value: fx.Node, name: str) -> fx.Node:
        return call(round_stochastically, fitting(value, torch.float32), bits(name))

    output = update.graph_module.graph.output_node()
    results = [env[value] if isinstance(value, fx.Node) else value for value in output.args[0]]
    state, templates = dict(update.state), {}
    if stored.has_master:
        call(aten.copy_.default, extras[MASTER], env[parameter])
    if stored.keeps_master:
        master = extras[MASTER] if stored.has_master else env[parameter]
        templates[MASTER] = Slot(len(results))
        results.append(master)
    if stored.rounds_parameter:
        call(aten.copy_.default, kept[parameter], narrowed(env[parameter], "parameter"))
    elif stored.parameter != stored.compute:
        call(aten.copy_.default, kept[parameter], fitting(env[parameter], stored.parameter))
    # Every stored moment is narrowed before any is written: one may be computed from another.
    writes = []
    for name, dtype in stored.moments:
        slot = state.get(name)
        if not isinstance(slot, Slot):
            continue  # the optimizer has dropped it
        value = results[slot.index]
        if dtype is torch.int8:
            value = fitting(value, torch.float32)
            scale = call(scale_of, value)
            codes = call(encode_blocks, value, scale, bits(name))
            writes += [(extras[name + SCALE], scale), (kept[moments[name]], codes)]
            templates[name + SCALE] = Slot(len(results))
            results.append(extras[name + SCALE])
        else:
            writes.append((kept[moments[name]], narrowed(value, name)))
        results[slot.index] = kept[moments[name]]
    for target, value in writes:
        call(aten.copy_.default, target, value)
    graph.output(results)
    others = len(inputs) - len(update.shards)
    are_shards = (name not in ("offset", "key") for name in stored.extras)
    places = enumerate(stored.extras, len(inputs))
    return replace(
        update,
        graph_module=fx.GraphModule(update.graph_module, graph),
        shards=(*update.shards, *[False] * others, *are_shards),
        gradient_dtype=stored.gradient,
        scales=tuple(place for place, name in places if name.endswith(SCALE)),
        state=tuple((state | templates).items()),
        clones_gradient=update.clones_gradient and stored.gradient == stored.compute,
    )


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype)


def shaped_like(flat: Tensor, other: Tensor) -> Tensor:
    """View what was made flat in the shape of what stands for the parameter."""
    return flat.view(other.shape)


def resume_master(master: Tensor, parameter: Tensor) -> Tensor:
    """A parameter's value before an update: its master's, unless somebody has written to it.

    A new tensor.  The parameter is its master, rounded; where it is not, it is what counts.
    """
    # By bits: Inductor leaves out a cast to fewer of them that is followed by one to more.
    wide = parameter.to(master.dtype)
    if parameter.dtype is torch.bfloat16:  # whose bits are a float32's: three times as fast
        raw = master.view(torch.int32)
        rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) & -65536  # to nearest, ties to even
        return torch.where(rounded == wide.view(torch.int32), master, wide)
    rounded = master.to(parameter.dtype).view(torch.int16)
    return torch.where(rounded == parameter.view(torch.int16), master, wide)


# Between updates


def narrow(value: Tensor, dtype: torch.dtype, bits: Tensor) -> tuple[Tensor, Tensor | None]:
    """A flat moment as it is kept, and the scales of its blocks if it is kept in those."""
    value = value.to(torch.float32)
    if dtype is not torch.int8:
        return round_stochastically(value, bits), None
    codes = torch.empty(value.shape, dtype=torch.int8, device=value.device)
    scale = torch.empty(num_blocks(len(value)), dtype=torch.float32, device=value.device)
    for rows, blocks in in_blocks(len(value)):
        part = value[rows].view(len(range(*blocks.indices(len(scale)))), -1)
        scale[blocks] = scale_of(part)
        codes[rows].view(part.shape).copy_(
            encode_blocks(part, scale[blocks], bits[rows].view(part.shape))
        )
    return codes, scale


def widen(state: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state as its optimizer would keep it; the master stays."""
    return {name: widened(state, name) for name in widened_dtypes(state)}


def widened_dtypes(state: Mapping[str, Any]) -> dict[str, torch.dtype | None]:
    """The names that ``widen`` gives, each with its dtype; None if it is no tensor."""
    native = state.get(NATIVE, {})
    return {
        name: native.get(name, getattr(value, "dtype", None))
        for name, value in state.items()
        if name != NATIVE and not is_scale(name, native)
    }


def is_scale(name: str, native: Mapping[str, Any]) -> bool:
    """Return whether a state is the scales of another one's blocks."""
    return name.endswith(SCALE) and name.removesuffix(SCALE) in native


def widened(
    state: Mapping[str, Any], name: str, read: Callable[[Any], Any] = lambda value: value
) -> Any:
    """One of what ``widen`` gives.  ``read`` fetches what ``state`` holds only a stand-in for."""
    native = state.get(NATIVE, {})
    value = read(state[name])
    if name in native and value.dtype is torch.int8:
        scale = read(state[name + SCALE])
        parts = [
            decode_blocks(value[rows].view(len(scale[blocks]), -1), scale[blocks]).view(-1)
            for rows, blocks in in_blocks(len(value))
        ]
        value = torch.cat(parts) if parts else value.new_empty(0, dtype=torch.float32)
    return value.to(native[name]) if name in native else value
