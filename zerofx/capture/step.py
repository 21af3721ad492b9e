"""From the graph Dynamo hands over to one flat aten program whose inputs have names and roles.

Capture marks every gradient that backward hands to a parameter with ``zerofx::gradient``,
so that passes never guess which tensor is a gradient.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat
from zerofx.capture.batch_norm import spread_batch_norms
from zerofx.capture.checks import (
    argument,
    check_step,
    fake_memory,
    gradients_from,
    is_backward_call,
    readable,
)
from zerofx.capture.divisors import mark_losses, weigh_losses, without_marks
from zerofx.capture.losses import count_ranks, spread_losses
from zerofx.capture.substitutes import is_loss_scale
from zerofx.compat.compile_cache import turn_to_compile
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.graph import copied_module, updates
from zerofx.ir.interface import META, InputRole, recorded, set_input_role
from zerofx.ir.key import (
    NoKeyError,
    described,
    described_code,
    described_graph,
    described_package,
    described_tensor,
    key_of,
)
from zerofx.ir.mesh import Mesh
from zerofx.ir.packing import packed, unpacked
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.sizes import is_symbolic
from zerofx.options import Options
from zerofx.runtime.parameters.registry import REGISTRY

logger = logging.getLogger("zerofx")


@dataclass(frozen=True)
class CapturedStep:
    """One traced step before any pass: flat aten, its inputs and results labelled.

    ``traced`` is the program as it was traced, or makes it of what an earlier start has kept: what
    is captured does not depend on ranks.  ``replaced`` are the parameters whose gradient of before
    the call nothing reads, for another takes its place.  ``key`` stands for all that the program
    depends on, empty if there is no such text.
    """

    traced: Callable[[], fx.GraphModule]
    table: ParameterTable
    tensors: tuple[nn.Parameter, ...]
    buffers: tuple[torch.Tensor, ...]
    replaced: frozenset[int]
    num_backwards: int
    updates: Counter[tuple[int, int]]
    mesh: Mesh
    key: str = ""

    @cached_property
    def gm(self) -> fx.GraphModule:
        gm = self.traced()
        recorded(gm.graph).mesh = self.mesh if self.mesh.outer else None
        return gm

    @property
    def optimizers(self) -> tuple[int, ...]:
        """Handles of the optimizers whose steps the program runs."""
        return tuple(dict.fromkeys(optimizer for optimizer, _ in self.updates))

    def on(self, mesh: Mesh) -> CapturedStep:
        """The same step for other ranks."""
        cut = partial(replace, world_size=mesh.num_shards, rank=mesh.shard, parts=mesh.parts)
        table = ParameterTable(tuple(cut(info, assigned=None) for info in self.table))
        return replace(self, traced=lambda: copied_module(self.gm), table=table, mesh=mesh)


class StepCapture:
    """Reads one Dynamo graph, marks its gradients and lowers it to aten."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        mesh: Mesh,
        options: Options,
    ):
        self.gm, self.mesh, self.options = gm, mesh, options
        _set_assigned_data(gm)
        self.inputs = list(inputs)
        self.placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        names = _names_in_scope({id(value) for value in self.inputs})
        self._register_parameters(names, mesh)
        self.num_backwards = sum(is_backward_call(node) for node in gm.graph.nodes)
        check_step(self)
        if options.loss == "global":
            mark_losses(gm, self.index_of_input)
        else:
            without_marks(gm)
        if options.may_lack_data:
            weigh_losses(gm, self.index_of_input)
        if options.batch_norm == "global":
            spread_batch_norms(gm, options.may_lack_data)
        self._mark_gradients()
        self.gradient_outputs = self._find_gradient_outputs()
        self._copy_views_of_gradients()
        _detach_outputs(gm)
        gm.recompile()

    def _register_parameters(self, names, mesh: Mesh) -> None:
        """Give each parameter its index, and each input its role."""
        owners = {id(p.grad): p for _, p in names.values() if p.grad is not None}
        owners |= {
            id(p.grad): p for p in self.inputs if isinstance(p, nn.Parameter) and p.grad is not None
        }
        known: dict[int, tuple[ParameterInfo, nn.Parameter]] = {}

        def index(parameter: nn.Parameter, source: str) -> int:
            key = id(parameter)
            if key not in known:
                name = names[key][0] if key in names else readable(source)
                known[key] = _describe(len(known), name, parameter, mesh), parameter
            return known[key][0].index

        roles, arguments = [], compat.dynamo.arguments_being_compiled()
        assigned = compat.dynamo.attribute_assignments()
        (results,) = self.gm.graph.output_node().args
        position_of = {str(result): position for position, result in enumerate(results)}
        for node, value in zip(self.placeholders, self.inputs, strict=True):
            source = compat.dynamo.source_name(node)
            owner = None
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                owner = owners[id(value)] if id(value) in owners else _kept_for(value)
            if isinstance(value, nn.Parameter):
                compat.dynamo.guard_identity(node)
                roles.append(InputRole("parameter", index(value, source)))
            elif owner is not None:
                roles.append(InputRole("gradient", index(owner, source)))
            elif isinstance(value, torch.Tensor) and "._buffers[" in source:
                roles.append(InputRole("buffer"))
            elif not isinstance(value, torch.Tensor) and ".size()" not in source:
                roles.append(InputRole("number"))
            else:
                is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0
                is_scale = is_scalar and is_loss_scale(value)
                is_argument = source.startswith(arguments) and "._modules[" not in source
                becomes = position_of.get(assigned.get(source, ""), -1)
                roles.append(
                    InputRole(
                        "other",
                        is_loss_scale=is_scale,
                        is_argument=is_argument,
                        becomes=becomes,
                    )
                )
        self.roles = tuple(roles)
        self.tensors = tuple(parameter for _, parameter in known.values())
        self.table = ParameterTable(tuple(info for info, _ in known.values()))
        self.buffers = tuple(
            value for role, value in zip(roles, self.inputs, strict=True) if role.kind == "buffer"
        )
        paired = zip(self.placeholders, roles, strict=True)
        self.index_of_input = {n: role.parameter for n, role in paired if role.kind == "parameter"}

    def _mark_gradients(self) -> None:
        """Insert ``zerofx::gradient`` after each gradient of a parameter."""
        graph = self.gm.graph
        for call in [node for node in graph.nodes if is_backward_call(node)]:
            if argument(call, 4, "create_graph"):
                continue  # differentiated again: it is not the gradient the optimizer sees
            for item, wanted in gradients_from(call):
                parameter = self.index_of_input.get(wanted)
                if parameter is None:
                    continue
                with graph.inserting_after(item):
                    marker = graph.call_function(ops.gradient, (item, parameter))
                marker.meta = dict(item.meta)
                item.replace_all_uses_with(marker, lambda user, marker=marker: user is not marker)
                _take_for_its_copy(marker)

    def _find_gradient_outputs(self) -> dict[int, int]:
        """Return the results that Dynamo stores as a parameter's ``.grad``, by position."""
        index_of = {node.name: index for node, index in self.index_of_input.items()}
        slots = compat.dynamo.gradient_assignments()
        (results,) = self.gm.graph.output_node().args
        owners = {p: slots.get(r.name) for p, r in enumerate(results) if isinstance(r, fx.Node)}
        return {
            position: index_of[owner] for position, owner in owners.items() if owner in index_of
        }

    def _find_replaced(self) -> frozenset[int]:
        """Return the parameters whose ``.grad`` is stored, and was not looked at before."""
        seen = compat.dynamo.owners_looked_into("grad")
        if any(owner is None for owner in seen):
            return frozenset()
        seen_ids = set(map(id, seen))
        stored = set(self.gradient_outputs.values())
        return frozenset(index for index in stored if id(self.tensors[index]) not in seen_ids)

    def _copy_views_of_gradients(self) -> None:
        """Return copies where results are views of gradients, which are kept as shards."""
        output = self.gm.graph.output_node()
        roles = zip(self.placeholders, self.roles, strict=True)
        gradients = {node for node, role in roles if role.kind == "gradient"}
        gradients |= {output.args[0][position] for position in self.gradient_outputs}
        memory = {fake_memory(node) for node in gradients} - {None}

        def copied(node: fx.Node) -> fx.Node:
            if node in gradients or fake_memory(node) not in memory:
                return node
            with self.gm.graph.inserting_before(output):
                copy = self.gm.graph.call_method("clone", (node,))
            copy.meta = {**node.meta, "example_value": node.meta["example_value"].clone()}
            return copy

        output.args = fx.node.map_arg(output.args, copied)

    def _key(self) -> str:
        """Return what stands for all that lowering depends on; empty if there is no such text."""
        tensors = [value for value in self.inputs if isinstance(value, torch.Tensor)]
        of = self.options
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        begins = [tensor.storage_offset() for tensor in tensors]
        shared = [  # how those lie to each other that are in one memory
            (first := storages.index(storage), tensor.storage_offset() - begins[first])
            for storage, tensor in zip(storages, tensors, strict=True)
            if storages.count(storage) > 1
        ]
        try:
            settings = compat.aot.settings()
            if settings is None:
                raise NoKeyError("operators with code of their own")
            return key_of(
                _code(),
                described(settings),
                described_graph(self.gm, ("example_value", "stack_trace", "custom")),
                described(self.roles),
                described([(info.name, info.shape, info.stride) for info in self.table]),
                described((self.gradient_outputs, of.loss, of.uneven, of.batch_norm)),
                *(
                    described_tensor(t) if isinstance(t, torch.Tensor) else described(t)
                    for t in self.inputs
                ),
                described([(t.is_leaf, t._is_view()) for t in tensors]),
                described(shared),
            )
        except Exception as reason:  # whatever it is: the step is captured without
            logger.info("a start after this one captures the step anew: it has %s", reason)
            return ""

    def _check_positions(self, nodes: list[fx.Node]) -> None:
        """AOTAutograd passes inputs that share memory as one, if one is written: roles shift."""
        fakes = [node.meta.get("val") for node in nodes]
        if list(map(_kind, fakes)) != list(map(_kind, self.inputs)):
            raise StepError(
                "two tensors that the step is called with share memory, and the step writes to one "
                "of them. Pass a clone() of one."
            )

    def _check_written(self, constants: int) -> None:
        """Refuse what the program would not write to itself, but give back to be written."""
        for position in compat.aot.inputs_written_around():
            source = readable(compat.dynamo.source_name(self.placeholders[position - constants]))
            raise StepError(
                f"the step writes to {source!r}, which requires a gradient, in place through "
                ".detach() or .data, which is no write of the program's. Write to it itself "
                "under torch.no_grad()."
            )

    def lower(
        self,
        compiler: Callable[[CapturedStep], Callable],
        is_kept: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Callable:
        """Lower to aten and give the captured step to ``compiler``; return AOT's callable.

        If it ``is_kept``, an earlier start's program is taken that was captured of the same, or
        another rank's: one of them traces, and the others do ``meanwhile`` what they would later,
        and wait for what it keeps.
        """
        key = self._key() if is_kept else ""
        with contextlib.ExitStack() as turn:
            if key and not turn.enter_context(turn_to_compile(key, waits=False)):
                if compat.compile_cache.kept(key) is None:
                    meanwhile()
                with turn_to_compile(key):
                    pass  # what cannot be kept, all but the first trace at the same time
            return self._lower(compiler, key, turn)

    def _lower(
        self, compiler: Callable[[CapturedStep], Callable], key: str, turn: contextlib.ExitStack
    ) -> Callable:
        """Do so; ``turn`` is over before the compiler begins, which meets other ranks."""
        step = partial(
            CapturedStep,
            table=self.table,
            tensors=self.tensors,
            buffers=self.buffers,
            replaced=self._find_replaced(),
            num_backwards=self.num_backwards,
            mesh=self.mesh,
            key=key,
        )
        found = compat.compile_cache.kept(key) if key else None
        if found is not None:
            turn.close()
            updated, around, warnings, program = pickle.loads(found)
            for warning in warnings:
                logger.warning(warning)
            with compat.aot.without_autocast()():
                compiled = compiler(step(partial(_unpacked, program), updates=updated))
            return around.run(compiled)

        def on_aten(gm: fx.GraphModule, _fake_inputs) -> Callable:
            nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
            constants = len(nodes) - len(self.roles)  # inputs that tracing lifted out of the code
            self._check_positions(nodes[constants:] if constants >= 0 else [])
            self._check_written(constants)
            all_roles = (InputRole("other"),) * constants + self.roles
            for node, role in zip(nodes, all_roles, strict=True):
                set_input_role(node, role)
                if role.parameter >= 0:
                    node._rename(f"{role.kind}_{self.table[role.parameter].name}")
            recorded(gm.graph).gradients = self.gradient_outputs
            if self.options.loss == "global":
                spread_losses(gm)
            elif self.options.uneven:
                count_ranks(gm)
            updated = updates(gm.graph)
            recorded(gm.graph).updates = updated
            around = compat.aot.around() if key and not constants else None
            program = packed([gm.graph], META) if around is not None else None
            if program is not None:
                warnings = recorded(gm.graph).warnings
                kept = pickle.dumps((updated, around, warnings, program))
                compat.compile_cache.keep(key, kept)
            turn.close()
            return compiler(step(lambda: gm, updates=updated))

        return compat.aot.trace_to_aten(self.gm, self.inputs, on_aten)


def _set_assigned_data(gm: fx.GraphModule) -> None:
    """Write ``p.data = value`` as ``set_`` in Dynamo's graph, as torch does up to 2.13."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is compat.dynamo.DATA_ASSIGNMENT:
            node.target = torch.Tensor.set_
            with gm.graph.inserting_after(node):
                gm.graph.call_function(no_write, (node,)).meta = dict(node.meta)


def _take_for_its_copy(gradient: fx.Node) -> None:
    """``e = empty_like(p);  e.copy_(gradient)`` -> ``gradient``, which is as fresh and laid out so.

    Dynamo writes that for ``p.grad``, and AOTAutograd would trace both for each parameter.
    """
    (copy, *others) = gradient.users or (None,)
    if others or copy is None or copy.target != "copy_" or copy.args[1:] != (gradient,):
        return
    into = copy.args[0]
    if into.target is not torch.empty_like or into.kwargs or min(into.users) is not copy:
        return
    mine, its = (node.meta["example_value"] for node in (gradient, into))
    if is_symbolic(mine) or is_symbolic(its) or _layout(mine) != _layout(its):
        return
    graph, name = gradient.graph, into.name
    gradient.meta = into.meta
    copy.replace_all_uses_with(gradient)
    graph.erase_node(copy)
    into.replace_all_uses_with(gradient)
    graph.erase_node(into)
    gradient.name = name  # by which Dynamo's results go


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad


def no_write(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last write counts as none."""
    compat.dynamo.count_write_less(tensor)
    return tensor


def _unpacked(program: bytes) -> fx.GraphModule:
    (gm,), _ = unpacked(program)
    return gm


def _code() -> str:
    """Return text for the code of this package, and for what of torch's a trace runs by its name.

    As its files have it, and as its modules have it now: somebody may have replaced a function.
    """
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(_COMPILING) and module is not None
    ]
    return key_of(described_package(), described_code([*modules, *compat.aot.modules_traced()]))


_COMPILING = tuple(
    f"zerofx.{room}."
    for room in ("capture", "compiler", "passes", "codegen.rewrite", "verify", "ir")
)
"""Packages that have to do with what is captured, and with what passes make of it.

All of their modules are imported with the backend.
"""


def _kept_for(tensor: torch.Tensor) -> nn.Parameter | None:
    """The parameter whose stored gradient a tensor stands for."""
    bound = REGISTRY.keeper(tensor)
    return bound.parameter if bound is not None else None


def _kind(value: Any) -> tuple[torch.dtype, int] | None:
    return (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else None


def _names_in_scope(inputs: set[int]) -> dict[int, tuple[str, nn.Parameter]]:
    """Qualified names of the parameters that the step reads, from the modules it can see.

    A module variable's name is put in front only if several modules are used.
    """
    used: dict[str, dict[str, nn.Parameter]] = {}
    seen: set[int] = set()
    for variable, value in _with_items(compat.dynamo.locals_being_compiled()):
        if not isinstance(value, nn.Module) or id(value) in seen:
            continue
        seen.add(id(value))
        parameters = dict(value.named_parameters())
        if any(id(p) in inputs or id(p.grad) in inputs for p in parameters.values()):
            used[variable] = parameters
    names: dict[int, tuple[str, nn.Parameter]] = {}
    for variable, parameters in used.items():
        for name, parameter in parameters.items():
            qualified = f"{variable}.{name}" if len(used) > 1 else name
            names.setdefault(id(parameter), (qualified, parameter))
    return names


def _with_items(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables, and what those that are lists, tuples or dicts hold."""
    for variable, value in variables.items():
        yield variable, value
        if isinstance(value, (list, tuple)):
            yield from ((f"{variable}[{i}]", item) for i, item in enumerate(value))
        elif isinstance(value, dict):
            yield from ((f"{variable}[{key!r}]", item) for key, item in value.items())


def _describe(index: int, name: str, parameter: nn.Parameter, mesh: Mesh) -> ParameterInfo:
    info = ParameterInfo(
        index=index,
        name=name,
        shape=tuple(parameter.shape),
        stride=tuple(parameter.stride()),
        dtype=parameter.dtype,
        device=parameter.device,
        requires_grad=parameter.requires_grad,
        world_size=mesh.num_shards,
        rank=mesh.shard,
        parts=mesh.parts,
    )
    if parameter.dtype.is_complex:
        raise StepError(
            f"parameter {name!r} is {parameter.dtype}: complex parameters are not supported. "
            "Store the real view, torch.view_as_real(p), and make it complex in forward."
        )
    try:
        _ = info.storage_order
    except ValueError as error:
        raise StepError(
            f"parameter {name!r}: {error}. Give it memory of its own: p.data = p.data.contiguous()."
        ) from None
    return info


def _detach_outputs(gm: fx.GraphModule) -> None:
    """Detach results: their graph has been consumed by the step's own backward."""
    if not any(is_backward_call(node) for node in gm.graph.nodes):
        return
    output = gm.graph.output_node()

    def detach(node: fx.Node) -> fx.Node:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            return node
        with gm.graph.inserting_before(output):
            detached = gm.graph.call_method("detach", (node,))
        detached.meta = dict(node.meta)
        detached.meta["example_value"] = value.detach()
        return detached

    output.args = fx.node.map_arg(output.args, detach)
