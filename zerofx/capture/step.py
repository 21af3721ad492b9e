"""From the graph Dynamo hands over to one flat aten program whose inputs have names and roles.

Capture marks every gradient that backward hands to a parameter with ``zerofx::gradient``,
so that passes never guess which tensor is a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.graph import updates
from zerofx.ir.interface import InputRole, set_input_role
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.source import source_line


@dataclass(frozen=True)
class CapturedStep:
    """One traced step before any pass: flat aten, its inputs and results labelled.

    ``constants`` is how many of the program's first inputs are tensors that tracing lifted out
    of the user's code; the others are the arguments of the Dynamo graph, in order.
    """

    gm: fx.GraphModule
    table: ParameterTable
    tensors: tuple[nn.Parameter, ...]
    buffers: tuple[torch.Tensor, ...]
    constants: int
    num_backwards: int

    @property
    def optimizers(self) -> tuple[int, ...]:
        """Handles of the optimizers whose steps the program runs."""
        return tuple(
            dict.fromkeys(
                node.args[2] for node in self.gm.graph.nodes if node.target is ops.optimizer_step
            )
        )


class StepCapture:
    """Reads one Dynamo graph, marks its gradients and lowers it to aten."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        rank: int,
        world_size: int,
        find_parameter: Callable[[torch.Tensor], nn.Parameter | None],
    ):
        self.gm = gm
        self.inputs = list(inputs)
        self.placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        names = _names_in_scope({id(value) for value in self.inputs})
        self._register_parameters(names, rank, world_size, find_parameter)
        self.num_backwards = sum(_is_backward_call(node) for node in gm.graph.nodes)
        self._check()
        self._mark_gradients()
        self.gradient_outputs = self._find_gradient_outputs()
        _detach_outputs(gm)
        gm.recompile()

    def _register_parameters(self, names, rank, world_size, find_parameter) -> None:
        """Give each parameter its index, and each input its role."""
        owners = {id(p.grad): p for _, p in names.values() if p.grad is not None}
        owners |= {
            id(p.grad): p for p in self.inputs if isinstance(p, nn.Parameter) and p.grad is not None
        }
        tensors: list[nn.Parameter] = []
        infos: list[ParameterInfo] = []
        index_of: dict[int, int] = {}

        def index(parameter: nn.Parameter, source: str) -> int:
            if id(parameter) not in index_of:
                index_of[id(parameter)] = len(tensors)
                name = names[id(parameter)][0] if id(parameter) in names else _readable(source)
                infos.append(_describe(len(tensors), name, parameter, rank, world_size))
                tensors.append(parameter)
            return index_of[id(parameter)]

        roles = []
        for node, value in zip(self.placeholders, self.inputs, strict=True):
            source = compat.source_name(node)
            owner = None
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                owner = owners[id(value)] if id(value) in owners else find_parameter(value)
            if isinstance(value, nn.Parameter):
                compat.guard_identity(node)
                roles.append(InputRole("parameter", index(value, source)))
            elif owner is not None:
                roles.append(InputRole("gradient", index(owner, source)))
            elif isinstance(value, torch.Tensor) and "._buffers[" in source:
                roles.append(InputRole("buffer"))
            elif not isinstance(value, torch.Tensor) and ".size()" not in source:
                roles.append(InputRole("number"))
            else:
                roles.append(InputRole("other"))
        self.roles = tuple(roles)
        self.tensors = tuple(tensors)
        self.table = ParameterTable(tuple(infos))
        self.buffers = tuple(
            value for role, value in zip(roles, self.inputs, strict=True) if role.kind == "buffer"
        )
        self.index_of_input = {
            node: role.parameter
            for node, role in zip(self.placeholders, roles, strict=True)
            if role.kind == "parameter"
        }

    def _check(self) -> None:
        """Refuse what cannot be compiled as written, with the remedy."""
        devices: dict[torch.device, str] = {}
        for info in self.table:
            devices.setdefault(info.device, info.name)
        if len(devices) > 1:
            (first, first_name), (second, second_name) = list(devices.items())[:2]
            raise StepError(
                f"parameter {second_name!r} is on {second} and {first_name!r} on {first}: all "
                "parameters of a step must be on one device. Move the model with "
                f"model.to({str(first)!r}) before building the optimizer."
            )
        for info, parameter in zip(self.table, self.tensors, strict=True):
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise StepError(
                    f"parameter {info.name!r} has gradient hooks, which would not run inside the "
                    "compiled step. Remove them, and do their work on p.grad after backward()."
                )
        self._check_memory_is_own()
        written = [_readable(name) for name in compat.modified_sources()]
        if any("param_groups" in name and ".params[" not in name for name in written):
            raise StepError(
                "the step sets a hyperparameter in optimizer.param_groups, but Python's writes "
                "happen after the compiled program, which has updated with the old value by then. "
                "Set it before the call, or call a learning-rate scheduler after it."
            )
        for node in self.gm.graph.nodes:
            if node.target == torch.lstm and any(d.type == "cpu" for d in devices):
                raise StepError(
                    "nn.LSTM on a CPU cannot be traced by torch: its kernel returns a workspace "
                    f"that tracing does not know. Use nn.GRU, or a GPU.{_location(node)}"
                )
            if "_get_data_attr" in str(node.target) and node.args[0] in self.index_of_input:
                self._check_data(node)
            if _makes_sparse_gradients(node):
                raise StepError(
                    "an embedding with sparse=True makes sparse gradients, which cannot be "
                    f"averaged or sharded. Use sparse=False.{_location(node)}"
                )
            if (
                node.target is ops.optimizer_step.overloadpacket
                or node.target is ops.optimizer_step
            ):
                self._check_optimizer(node)
        self._check_results()

    def _check_data(self, node: fx.Node) -> None:
        """Refuse writing through ``p.data``: the write would reach freed memory."""
        for user in node.users:
            in_place = user.op == "call_method" and str(user.target).endswith("_")
            if in_place or user.target is operator.setitem:
                name = self.table[self.index_of_input[node.args[0]]].name
                raise StepError(
                    f"the step writes to parameter {name!r} through .data, which tracing cannot "
                    "see as a write to the parameter. Write to the parameter itself under "
                    f"torch.no_grad().{_location(user)}"
                )

    def _check_results(self) -> None:
        """Refuse a result that shares memory with a parameter, which may be freed between steps."""
        owners = {
            node.meta["example_value"].untyped_storage()._cdata: node
            for node in self.index_of_input
        }
        (results,) = self.gm.graph.output_node().args
        for result in results:
            value = result.meta.get("example_value") if isinstance(result, fx.Node) else None
            if not isinstance(value, torch.Tensor) or result in self.index_of_input:
                continue
            if self.num_backwards == 0 and value.grad_fn is not None:
                raise StepError(
                    "the function returns a value to differentiate, and has no backward(): the "
                    "whole step is one program, and its parameters' values are gone when it "
                    "returns. Call loss.backward() and optimizer.step() inside the compiled "
                    f"function; for evaluation, call it under torch.no_grad().{_location(result)}"
                )
            owner = owners.get(value.untyped_storage()._cdata)
            if owner is not None:
                name = self.table[self.index_of_input[owner]].name
                raise StepError(
                    f"the step returns a view of parameter {name!r}, whose memory belongs to the "
                    f"compiled step. Return a copy: .clone().{_location(result)}"
                )

    def _check_memory_is_own(self) -> None:
        """Refuse an input that looks into a parameter's memory: it would not see it sharded."""
        owners = {
            _address(parameter): info
            for info, parameter in zip(self.table, self.tensors, strict=True)
        }
        for node, role, value in zip(self.placeholders, self.roles, self.inputs, strict=True):
            if role.kind not in ("buffer", "other") or not isinstance(value, torch.Tensor):
                continue
            info = owners.get(_address(value)) if value.numel() else None
            if info is not None:
                raise StepError(
                    f"{_readable(compat.source_name(node))!r} shares memory with parameter "
                    f"{info.name!r}, which will be sharded or updated on its own. Give it memory "
                    "of its own with clone(), or use the parameter itself."
                )

    def _check_optimizer(self, node: fx.Node) -> None:
        parameters = node.args[0]
        if not parameters and self.num_backwards == 0:
            raise StepError(
                "optimizer.step() runs, but no parameter has a gradient and the step has no "
                "backward(). Call loss.backward() before optimizer.step(), in the same step or in "
                f"one that ran before.{_location(node)}"
            )
        if not parameters:
            raise StepError(
                "optimizer.step() runs, but none of the optimizer's parameters got a gradient from "
                "backward(): they are not the parameters the loss depends on. Build the optimizer "
                "from this model's parameters(), after any .to(), copy or replacement of them."
                f"{_location(node)}"
            )
        for parameter in parameters:
            if parameter not in self.index_of_input:
                raise StepError(
                    f"the optimizer updates {parameter.name!r}, which is not an nn.Parameter made "
                    "outside the step: only those can be sharded. Wrap the tensor in nn.Parameter."
                    f"{_location(node)}"
                )
        found_inf = _argument(node, 3, "found_inf")
        indices = [self.index_of_input[parameter] for parameter in parameters]
        node.args, node.kwargs = (*node.args[:3], found_inf, indices), {}

    def _mark_gradients(self) -> None:
        """Insert ``zerofx::gradient`` after each gradient of a parameter."""
        graph = self.gm.graph
        for call in [node for node in graph.nodes if _is_backward_call(node)]:
            if _argument(call, 4, "create_graph"):
                continue  # differentiated again: it is not the gradient the optimizer sees
            wanted = call.args[1] if len(call.args) > 1 else call.kwargs["inputs"]
            wanted = wanted if isinstance(wanted, (tuple, list)) else [wanted]
            for item in list(call.users):
                parameter = self.index_of_input.get(wanted[item.args[1]])
                if parameter is None or item.meta.get("example_value") is None:
                    continue
                with graph.inserting_after(item):
                    marker = graph.call_function(ops.gradient, (item, parameter))
                marker.meta = dict(item.meta)
                item.replace_all_uses_with(marker, lambda user, marker=marker: user is not marker)

    def _find_gradient_outputs(self) -> dict[int, int]:
        """Return the results that Dynamo stores as a parameter's ``.grad``, by position."""
        index_of = {node.name: index for node, index in self.index_of_input.items()}
        slots = compat.gradient_assignments()
        (results,) = self.gm.graph.output_node().args
        found = {}
        for position, result in enumerate(results):
            owner = slots.get(result.name) if isinstance(result, fx.Node) else None
            if owner is not None and owner in index_of:
                found[position] = index_of[owner]
        return found

    def _check_positions(self, nodes: list[fx.Node]) -> None:
        """AOTAutograd passes inputs that share memory as one, if one is written: roles shift."""
        for node, value in zip(nodes, self.inputs, strict=False):
            fake = node.meta.get("val")
            if isinstance(value, torch.Tensor) != isinstance(fake, torch.Tensor):
                break
            if isinstance(value, torch.Tensor) and (
                value.dtype != fake.dtype or value.dim() != fake.dim()
            ):
                break
        else:
            if len(nodes) == len(self.inputs):
                return
        raise StepError(
            "two tensors that the step is called with share memory, and the step writes to one of "
            "them. Pass a clone() of one."
        )

    def lower(self, compiler: Callable[[CapturedStep], Callable]) -> Callable:
        """Lower to aten and give the captured step to ``compiler``; return AOT's callable."""

        def on_aten(gm: fx.GraphModule, _fake_inputs) -> Callable:
            nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
            constants = len(nodes) - len(self.roles)
            self._check_positions(nodes[constants:] if constants >= 0 else [])
            all_roles = (InputRole("other"),) * constants + self.roles
            for node, role in zip(nodes, all_roles, strict=True):
                set_input_role(node, role)
                if role.parameter >= 0:
                    node._rename(f"{role.kind}_{self.table[role.parameter].name}")
            gm.graph.output_node().meta["zerofx_gradients"] = self.gradient_outputs
            compat.tag_backward_nodes(gm)
            gm.graph.output_node().meta["zerofx_updates"] = updates(gm.graph)
            return compiler(
                CapturedStep(
                    gm=gm,
                    table=self.table,
                    tensors=self.tensors,
                    buffers=self.buffers,
                    constants=constants,
                    num_backwards=self.num_backwards,
                )
            )

        return compat.trace_to_aten(self.gm, self.inputs, on_aten)


def _names_in_scope(inputs: set[int]) -> dict[int, tuple[str, nn.Parameter]]:
    """Qualified names of the parameters that the step reads, from the modules it can see.

    A module variable's name is put in front only if several modules are used.
    """
    used: dict[str, dict[str, nn.Parameter]] = {}
    seen: set[int] = set()
    for variable, value in _with_items(compat.locals_being_compiled()):
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


def _readable(source: str) -> str:
    """``L['self'].model._modules['head']._parameters['weight']`` -> ``self.model.head.weight``."""
    for noise in ("._modules", "._parameters", "._buffers", ".__dict__"):
        source = source.replace(noise, "")
    if source.startswith(("L['", "G['")):
        source = source[3:].replace("']", "", 1)
    return source.replace("['", ".").replace("']", "")


def _describe(
    index: int, name: str, parameter: nn.Parameter, rank: int, world_size: int
) -> ParameterInfo:
    info = ParameterInfo(
        index=index,
        name=name,
        shape=tuple(parameter.shape),
        stride=tuple(parameter.stride()),
        dtype=parameter.dtype,
        device=parameter.device,
        requires_grad=parameter.requires_grad,
        world_size=world_size,
        rank=rank,
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


def _address(tensor: torch.Tensor) -> int | tuple[str, int]:
    """Return the address of a tensor's memory; of one without, the identity of its storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else ("no memory", storage._cdata)


def _is_backward_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.autograd.grad


def _argument(node: fx.Node, position: int, name: str) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name)


def _makes_sparse_gradients(node: fx.Node) -> bool:
    functional = torch.nn.functional
    return bool(
        (node.target is functional.embedding and _argument(node, 6, "sparse"))
        or (node.target is functional.embedding_bag and _argument(node, 7, "sparse"))
        or (node.target is torch.embedding_bag and _argument(node, 5, "sparse"))
    )


def _location(node: fx.Node) -> str:
    """The user's line a Dynamo node comes from, on a line of its own."""
    line = source_line(node)
    return f"\n  at {line}" if line else ""


def _detach_outputs(gm: fx.GraphModule) -> None:
    """Detach results: their graph has been consumed by the step's own backward."""
    if not any(_is_backward_call(node) for node in gm.graph.nodes):
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
