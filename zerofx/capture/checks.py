"""Refuses steps that cannot be compiled as they are written."""

from __future__ import annotations

import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from zerofx import compat
from zerofx.capture import substitutes
from zerofx.codegen.trace.arguments import is_own, is_torchs, own_attributes
from zerofx.codegen.trace.independence import counts_in_groups
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.reach import reached
from zerofx.ir.source import source_line
from zerofx.runtime.parameters.guarded import check_dense, refuse_gradient_hooks

if TYPE_CHECKING:
    from zerofx.capture.step import StepCapture

REMEDY = "Read optimizer.state_dict() after the call, which has whole states."


def check_step(step: StepCapture) -> None:
    """Refuse what cannot be compiled as written, with the remedy.

    Raises: StepError.
    """
    devices: dict[torch.device, str] = {}
    for info in step.table:
        devices.setdefault(info.device, info.name)
    if len(devices) > 1:
        (first, first_name), (second, second_name) = list(devices.items())[:2]
        raise StepError(
            f"parameter {second_name!r} is on {second} and {first_name!r} on {first}: all "
            "parameters of a step must be on one device. Move the model with "
            f"model.to({str(first)!r}) before building the optimizer."
        )
    for info, parameter in zip(step.table, step.tensors, strict=True):
        check_dense(parameter, info.name)
        refuse_gradient_hooks(parameter, info.name)
    _check_memory_is_own(step)
    _check_writes(step)
    _check_numbers(step)
    if step.mesh.world_size > 1:
        _check_plain_tensors(step)
    for node in step.gm.graph.nodes:
        if node.target == torch.lstm and any(d.type == "cpu" for d in devices):
            raise StepError(
                "nn.LSTM on a CPU cannot be traced by torch: its kernel returns a workspace "
                f"that tracing does not know. Use nn.GRU, or a GPU.{_location(node)}"
            )
        if is_backward_call(node) and argument(node, 4, "create_graph"):
            _check_differentiated_again(node)
            _check_own_backwards(step.gm, node)
        if "_get_data_attr" in str(node.target) and node.args[0] in step.index_of_input:
            _check_data(step, node)
        if node.target is torch.Tensor.set_ and node.args[0] in step.index_of_input:
            _check_assigned_data(step, node)
        if node.target in _EMBEDDINGS and argument(node, 3, "max_norm") is not None:
            raise StepError(
                "an embedding with max_norm writes to its weight in its forward pass. Leave "
                "max_norm out, and write weight.copy_(weight.renorm(2, 0, max_norm)) under "
                f"torch.no_grad() before it.{_location(node)}"
            )
        if _makes_sparse_gradients(node):
            raise StepError(
                "an embedding with sparse=True makes sparse gradients, which cannot be "
                f"averaged or sharded. Use sparse=False.{_location(node)}"
            )
        if _is_update(node):
            _check_optimizer(step, node)
    _check_steps_are_of_the_same(step)
    _check_results(step)


def _check_steps_are_of_the_same(step: StepCapture) -> None:
    """Refuse steps of one optimizer that update different parameters, and count in its groups.

    Updates do not say which step they are of: it is another one where a parameter is updated again.
    """
    steps: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in filter(_is_update, step.gm.graph.nodes):
        steps[node.args[2]].append(node)
    for handle, nodes in steps.items():
        if all(set(node.args[0]) == set(nodes[0].args[0]) for node in nodes):
            continue
        optimizer = substitutes.optimizer_of(handle)
        if counts_in_groups(optimizer):
            name = type(optimizer).__name__
            raise StepError(
                f"{name}.step changes numbers of its param_groups, and the step calls it "
                f"{len(nodes)} times for different parameters: which numbers an update reads "
                f"cannot be told then. Have an optimizer for each, or let {name} count in the "
                f"state of each parameter.{_location(nodes[-1])}"
            )


def _check_writes(step: StepCapture) -> None:
    """Refuse writes to what an update reads when it runs: they happen after the program.

    Python's are refused wherever they are, those to tensors before the update.
    """
    attributes = compat.dynamo.modified_objects()
    written = set(attributes)
    inputs: defaultdict[int | None, set[int]] = defaultdict(set)
    for node, value in zip(step.placeholders, step.inputs, strict=True):
        inputs[fake_memory(node)].add(id(value))
    inputs.pop(None, None)  # no tensors
    for node in step.gm.graph.nodes:
        written.update(*(inputs.get(fake_memory(operand), ()) for operand in _written(node)))
        if not _is_update(node):
            continue
        optimizer = substitutes.optimizer_of(node.args[2])
        assigned = attributes.get(id(optimizer), set())
        is_read = not assigned.isdisjoint(("param_groups", "state"))
        is_read |= _has_methods_of_its_own(optimizer) and any(map(is_own, assigned))
        if is_read or written & _read_by(optimizer):
            raise StepError(
                f"the step sets a hyperparameter or a state of {type(optimizer).__name__}, but "
                "this happens after the compiled program, which has updated with the old value by "
                "then. Set it before the call, or call a learning-rate scheduler after it."
                f"{_location(node)}"
            )


def _check_numbers(step: StepCapture) -> None:
    """Refuse a number whose type a result gets, as Dynamo passes it as a tensor and Python not.

    So it does with NumPy's: the product of one and a loss in float32 would be float64.  One that
    Python draws is of another type when the program runs than when it is traced (2.13).
    """
    numbers = {node: node for node in step.placeholders if compat.dynamo.is_number(node)}
    for drawn in numbers:
        if compat.dynamo.source_name(drawn).startswith("random_value") and drawn.users:
            raise StepError(
                "the step computes with a random number that it draws in Python, which torch "
                "takes for a tensor, of another type than the number has. Draw it with torch "
                "(torch.rand), or before the call and give it as an argument."
                f"{_location(next(iter(drawn.users)))}"
            )
    for node in step.gm.graph.nodes if numbers else ():
        value = node.meta.get("example_value")
        tensors = {
            source: its
            for source in node.all_input_nodes
            if isinstance(its := source.meta.get("example_value"), torch.Tensor)
        }
        given = [source for source in tensors if source in numbers]
        if not given or not isinstance(value, torch.Tensor):
            continue
        others = [its.dtype for source, its in tensors.items() if source not in numbers]
        if not others:  # computed of numbers alone: one too
            numbers[node] = numbers[given[0]]
            continue
        mine = functools.reduce(torch.promote_types, (tensors[source].dtype for source in given))
        meant = functools.reduce(torch.promote_types, others)
        if mine.is_floating_point and not (meant.is_floating_point or meant.is_complex):
            meant = torch.get_default_dtype()
        if value.dtype != meant and value.dtype in (mine, torch.promote_types(mine, meant)):
            how = f"the result is {value.dtype}, and without torch.compile {meant}"
        elif value.dtype == meant in _HALVES and next(iter(tensors)) in given:  # a kernel's way
            how = f"it is rounded to {meant} first, and not without torch.compile"
        else:
            continue
        source_text = compat.dynamo.source_name(numbers[given[0]])
        name = readable(source_text.removeprefix("___from_numpy(").removesuffix(")"))
        raise StepError(
            f"the step computes with {name!r}, a number of NumPy's, which torch takes for a "
            f"tensor: {how}. Pass float({name}), or a tensor of the type that you "
            f"mean.{_location(node)}"
        )


_HALVES = (torch.bfloat16, torch.float16)


def _has_methods_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its class has methods that torch's have not, which may read its attributes."""
    return any(
        inspect.isroutine(value) or isinstance(value, property)
        for base in type(optimizer).__mro__[:-1]
        if not is_torchs(base)
        for name, value in vars(base).items()
        if name != "__init__"
    )


def _read_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the objects that an update may read when it runs, but for parameters."""
    own = own_attributes(optimizer).values() if _has_methods_of_its_own(optimizer) else ()
    groups, states = optimizer.param_groups, list(optimizer.state.values())
    inner = [item for one in (*groups, *states) if isinstance(one, dict) for item in one.values()]
    return set(map(id, (groups, *groups, *states, *inner, *own)))


def fake_memory(node: fx.Node) -> int | None:
    """Return what the memory of a node's tensor goes by; None if it has none of its own."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return compat.tensors.storage_key(value)
    except NotImplementedError:  # a sparse tensor, or one in a program that vmap runs
        return None


def _check_differentiated_again(call: fx.Node) -> None:
    """Refuse ``backward(create_graph=True)``, whose gradients become ``p.grad``."""
    copies = (user for item in call.users for user in item.users if user.target == "copy_")
    if any(copy.args[0].target is torch.empty_like for copy in copies):
        raise StepError(
            "backward(create_graph=True) leaves gradients in p.grad that are differentiated "
            "again, before they could be averaged over ranks. Take those with "
            "torch.autograd.grad(loss, parameters, create_graph=True), and call backward() "
            f"without it on what the optimizer is to minimise.{_location(call)}"
        )


def _check_own_backwards(gm: fx.GraphModule, call: fx.Node) -> None:
    """Refuse to differentiate again what an ``autograd.Function`` says its gradient is.

    Dynamo traces its backward without gradients (2.11 to 2.15): it would count as constant.
    """
    own = {
        node
        for part in gm.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if is_own_function(node)
    }
    if not own:
        return
    within = {name for name, part in gm.named_children() if own & set(_nodes_in(part))}
    for node in reached([call], lambda node: node.all_input_nodes):
        if node in own or (node.op == "get_attr" and node.target in within):
            raise StepError(
                "the step differentiates a gradient again (create_graph=True) that an "
                "autograd.Function computes: torch.compile takes what its backward returns for "
                "constant. Write the function with torch's operations, or compute that gradient "
                f"so that it needs no other.{_location(node)}"
            )


def _nodes_in(part: Any) -> Iterator[fx.Node]:
    for one in part.modules():
        if isinstance(one, fx.GraphModule):
            yield from one.graph.nodes


def is_own_function(call: fx.Node) -> bool:
    """Return whether a node calls a ``torch.autograd.Function``."""
    return str(call.target) == "autograd_function_apply"


def _check_data(step: StepCapture, node: fx.Node) -> None:
    """Refuse writing through ``p.data``: the write would reach freed memory."""
    for user in node.users:
        if node in _written(user):
            name = step.table[step.index_of_input[node.args[0]]].name
            raise StepError(
                f"the step writes to parameter {name!r} through .data, which tracing cannot "
                "see as a write to the parameter. Write to the parameter itself under "
                f"torch.no_grad().{_location(user)}"
            )


def _check_plain_tensors(step: StepCapture) -> None:
    """Refuse training a plain tensor by hand, on several ranks: its gradient is this rank's own.

    What the step is called with, each rank may change as it likes.
    """
    calls = filter(is_backward_call, step.gm.graph.nodes)
    differentiated = {node for call in calls for _, node in gradients_from(call)}
    for node, role in zip(step.placeholders, step.roles, strict=True):
        if role.kind != "other" or role.is_argument or node not in differentiated:
            continue
        for user in node.users:
            if node in _written(user):
                raise StepError(
                    f"the step trains {readable(compat.dynamo.source_name(node))!r}, which is not "
                    "an nn.Parameter made outside the step: only gradients of those are averaged "
                    f"over ranks. Wrap the tensor in nn.Parameter.{_location(user)}"
                )


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a call of Dynamo's graph writes to in place."""
    written: list[fx.Node] = []
    name = getattr(node.target, "__name__", str(node.target))
    is_operator = getattr(node.target, "__module__", "") == operator.add.__module__  # and_, or_
    in_place = name.endswith("_") and not name.endswith("__") and not is_operator
    if in_place or node.target in {operator.setitem, *compat.dynamo.AUGMENTED_ASSIGNMENTS}:
        fx.node.map_arg(node.args[:1], written.append)
    return written


def _check_assigned_data(step: StepCapture, node: fx.Node) -> None:
    """Refuse ``p.data = value`` of another shape: shards are cut by the one that there was."""
    info = step.table[step.index_of_input[node.args[0]]]
    assigned = node.args[1].meta.get("example_value")
    if isinstance(assigned, torch.Tensor) and tuple(assigned.shape) != info.shape:
        raise StepError(
            f"the step gives parameter {info.name!r}, of shape {list(info.shape)}, data of shape "
            f"{list(assigned.shape)}, which its shards cannot hold. Do so before the first call. "
            "bitsandbytes does so on a CPU in evaluation, unless its modules have "
            f"support_avx512bf16_for_cpu = False.{_location(node)}"
        )


def _check_results(step: StepCapture) -> None:
    """Refuse a result that shares memory with a parameter, which may be freed between steps."""
    owners = {
        node.meta["example_value"].untyped_storage()._cdata: node for node in step.index_of_input
    }
    (results,) = step.gm.graph.output_node().args
    for result in results:
        value = result.meta.get("example_value") if isinstance(result, fx.Node) else None
        if not isinstance(value, torch.Tensor) or result in step.index_of_input:
            continue
        if step.num_backwards == 0 and value.grad_fn is not None:
            raise StepError(
                "the function returns a value to differentiate, and has no backward(): the "
                "whole step is one program, and its parameters' values are gone when it "
                "returns. Call loss.backward() and optimizer.step() inside the compiled "
                f"function; for evaluation, call it under torch.no_grad().{_location(result)}"
            )
        for user in result.users:
            if user.target is torch.Tensor.set_ and user.args[0] in step.index_of_input:
                name = step.table[step.index_of_input[user.args[0]]].name
                raise StepError(
                    f"the step gives parameter {name!r} a tensor by .data =, and keeps that tensor "
                    "(in what it returns, or in a state), where a parameter's memory belongs to "
                    "the compiled step. Write parameter.copy_(tensor) under torch.no_grad()."
                    f"{_location(result)}"
                )
        owner = owners.get(value.untyped_storage()._cdata)
        if owner is not None:
            name = step.table[step.index_of_input[owner]].name
            raise StepError(
                f"the step returns a view of parameter {name!r}, whose memory belongs to the "
                f"compiled step. Return a copy: .clone().{_location(result)}"
            )


def _check_memory_is_own(step: StepCapture) -> None:
    """Refuse an input that looks into a parameter's memory: it would not see it sharded."""
    owners = {
        _address(parameter): info for info, parameter in zip(step.table, step.tensors, strict=True)
    }
    for node, role, value in zip(step.placeholders, step.roles, step.inputs, strict=True):
        if role.kind not in ("buffer", "other") or not isinstance(value, torch.Tensor):
            continue
        info = owners.get(_address(value)) if value.numel() else None
        if info is not None:
            raise StepError(
                f"{readable(compat.dynamo.source_name(node))!r} shares memory with parameter "
                f"{info.name!r}, which will be sharded or updated on its own. Give it memory "
                "of its own with clone(), or use the parameter itself."
            )


def _check_optimizer(step: StepCapture, node: fx.Node) -> None:
    parameters = node.args[0]
    if not parameters and step.num_backwards == 0:
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
        if parameter not in step.index_of_input:
            raise StepError(
                f"the optimizer updates {parameter.name!r}, which is not an nn.Parameter made "
                "outside the step: only those can be sharded. Wrap the tensor in nn.Parameter."
                f"{_location(node)}"
            )
    twice = [one for one in dict.fromkeys(parameters) if parameters.count(one) > 1]
    if twice:
        name = step.table[step.index_of_input[twice[0]]].name
        raise StepError(
            f"the optimizer has parameter {name!r} more than once, as lists of the parameters of "
            "modules that share a weight have it: a step updates a shard once. Give it each "
            f"parameter once: list(dict.fromkeys(parameters)).{_location(node)}"
        )
    found_inf = argument(node, 3, "found_inf")
    indices = [step.index_of_input[parameter] for parameter in parameters]
    node.args, node.kwargs = (*node.args[:3], found_inf, indices), {}


def refuse_reads_of_states(gm: fx.GraphModule, inputs: Sequence[Any], stage: int) -> None:
    """Check Dynamo's graph of a step and what its path depends on.

    From stage 1 on, states are this rank's shards, and a step's own update replaces what it finds
    whole.  At every stage, a step is traced once, before its first update has made any state.

    Raises: StepError.
    """
    if stage > 0:
        _refuse_values(inputs)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, inputs, strict=True))
    for node in gm.graph.nodes:
        if _is_update(node):
            parameters = [given[operand] for operand in node.args[0] if operand in given]
            _refuse_looks(substitutes.optimizer_of(node.args[2]), parameters)


def _refuse_values(inputs: Sequence[Any]) -> None:
    given = {id(value) for value in inputs if isinstance(value, torch.Tensor)}
    for optimizer in substitutes.known_optimizers():
        for state in list(optimizer.state.values()):
            for name, value in state.items() if isinstance(state, dict) else ():
                if id(value) in given and not (name == "step" and value.dim() == 0):
                    raise StepError(
                        f"the step reads optimizer.state[...][{name!r}] of "
                        f"{type(optimizer).__name__}, of which every rank keeps its shard alone, "
                        f"flat and as its last update has left it. {REMEDY}"
                    )


def _refuse_looks(optimizer: torch.optim.Optimizer, parameters: Iterable[Any]) -> None:
    if all(parameter in optimizer.state for parameter in parameters):
        return
    if any(owner is optimizer for owner in compat.dynamo.owners_looked_into("state")):
        raise StepError(
            f"the step looks into the state of {type(optimizer).__name__}, which its own "
            "optimizer.step() is the first to fill: a step is traced before it runs, and has "
            f"seen nothing there. {REMEDY}"
        )


def readable(source: str) -> str:
    """``L['self'].model._modules['head']._parameters['weight']`` -> ``self.model.head.weight``."""
    for noise in ("._modules", "._parameters", "._buffers", ".__dict__"):
        source = source.replace(noise, "")
    if source.startswith(("L['", "G['")):
        source = source[3:].replace("']", "", 1)
    return source.replace("['", ".").replace("']", "")


def _address(tensor: torch.Tensor) -> int | tuple[str, int]:
    """Return the address of a tensor's memory; of one without, the identity of its storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else ("no memory", storage._cdata)


def _is_update(node: fx.Node) -> bool:
    return node.target in (ops.optimizer_step, ops.optimizer_step.overloadpacket)


def is_backward_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.autograd.grad


def gradients_from(call: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the gradients that a call of backward has for its inputs, each with its input."""
    wanted = argument(call, 1, "inputs")
    wanted = wanted if isinstance(wanted, (tuple, list)) else [wanted]
    for item in list(call.users):
        if item.meta.get("example_value") is not None:
            yield item, wanted[item.args[1]]


def argument(node: fx.Node, position: int, name: str) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name)


_EMBEDDINGS = {torch.nn.functional.embedding: 6, torch.nn.functional.embedding_bag: 7}
"""Each takes ``sparse`` at this position."""


def _makes_sparse_gradients(node: fx.Node) -> bool:
    position = {**_EMBEDDINGS, torch.embedding_bag: 5}.get(node.target)
    return position is not None and bool(argument(node, position, "sparse"))


def _location(node: fx.Node) -> str:
    """The user's line a Dynamo node comes from, on a line of its own."""
    line = source_line(node)
    return f"\n  at {line}" if line else ""
