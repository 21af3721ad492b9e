"""AOTAutograd: from Dynamo's graph to aten, checkpoints, hints of sizes, structured traces."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch.utils.checkpoint
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import _get_qualified_name

from zerofx.compat.outline import outlined
from zerofx.errors import GraphError


def _grad(*arguments: Any, **named: Any) -> Any:
    """Call ``torch.autograd.grad``, and set ``meta["autograd_backward"]`` of all that it traces.

    For 2.11 to 2.15: up to 2.12 torch sets it nowhere, and then not where the backward of an
    ``autograd.Function`` is.
    """
    mode = get_proxy_mode()
    if mode is None:
        return torch.autograd.grad(*arguments, **named)
    nodes = mode.tracer.graph.nodes
    last = next(iter(reversed(nodes)), None)
    found = torch.autograd.grad(*arguments, **named)
    for node in reversed(nodes):
        if node is last:
            break
        node.meta["autograd_backward"] = True
    return found


def checkpointed_nodes(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Forward nodes that ``torch.utils.checkpoint`` wants recomputed in backward.

    What may draw random numbers is left out, such as an attention whose dropout is on: eager torch
    puts the generators' states back, and a program draws anew.
    """
    policies = torch.utils.checkpoint.CheckpointPolicy
    wanted = (policies.MUST_RECOMPUTE, policies.PREFER_RECOMPUTE)
    found = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.meta.get("autograd_backward"):
            continue
        if node.meta.get("recompute") in wanted and not may_draw(node):
            found.add(node)
    for node in gm.graph.nodes:
        if node.target is operator.getitem and node.args[0] not in found:
            found.discard(node)  # part of a kept result
        elif node in found and any(_leaves_region(node, user) for user in node.users):
            found.discard(node)  # a checkpointed function's result is what it saves
    return found


def forget_checkpoints(node: torch.fx.Node) -> None:
    """Take the tags of ``torch.utils.checkpoint`` off a node: Inductor would obey them again.

    It refuses those on an attention, whose dropout might draw.
    """
    for tag in ("recompute", "ac_graph_id"):
        node.meta.pop(tag, None)


def is_kept_by_policy(node: torch.fx.Node) -> bool:
    """Return whether a selective checkpoint's policy says to keep a node's result."""
    policies = torch.utils.checkpoint.CheckpointPolicy
    return node.meta.get("recompute") in (policies.MUST_SAVE, policies.PREFER_SAVE)


def graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Return a module of a graph whose Python code is made when somebody calls or reads it."""
    return _LazyGraphModule(root, graph)


def size_hint(size: int | torch.SymInt) -> int:
    """A size as it was when captured, without a guard on it; 0 if it depends on data."""
    return int(scalar_hint(size) or 0)


def scalar_hint(value: Any) -> Any:
    """A symbolic number as it was when captured, without a guard; anything else as it is."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return value.node.hint if isinstance(value, symbols) else value


def trace_program(name: str, text: Callable[[], str]) -> None:
    """Add a program's text to torch's structured trace, if there is one: tlparse shows it."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
    )


def is_traced() -> bool:
    """Return whether torch writes a structured trace; while it compiles, when it has found out.

    Its handler leaves with the first record if there is nowhere to write to.
    """
    logging = torch._logging._internal
    return any(isinstance(h, logging.LazyTraceHandler) for h in logging.trace_log.handlers)


def _leaves_region(node: torch.fx.Node, user: torch.fx.Node) -> bool:
    if user.meta.get("autograd_backward"):
        return False
    return user.meta.get("ac_graph_id") != node.meta.get("ac_graph_id") or (
        user.meta.get("recompute") is None
    )


def may_draw(node: torch.fx.Node) -> bool:
    """Return whether a node may draw random numbers, which other libraries' operators do not tell.

    Attention without dropout carries the tag too.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace in _TELLING and torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given.get("dropout_p", 0.0) != 0.0


_TELLING = ("aten", "prims", "zerofx", "_c10d_functional", "bitsandbytes")
"""Namespaces whose operators are tagged if they draw; none of bitsandbytes' draws (0.50)."""


def trace_to_aten(gm: torch.fx.GraphModule, inputs: list[Any], compiler: Callable) -> Callable:
    """Lower Dynamo's graph to functional aten and give it to ``compiler(gm, fake_inputs)``.

    Input mutations stay in the graph as ``copy_`` at its end.
    """

    def no_backward_graph(_gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable:
        raise GraphError("AOTAutograd split the step in two: a result still wants a gradient.")

    for part in [part for part in gm.modules() if isinstance(part, torch.fx.GraphModule)]:
        for node in part.graph.nodes:
            if node.target is torch.autograd.grad:
                node.target = _grad
        part.recompile()
    with _own_recomputation(), outlined(gm):
        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=compiler,
            bw_compiler=no_backward_graph,
            decompositions=list_operators(),
            keep_inference_input_mutations=True,
        )


@dataclass(frozen=True)
class Around:
    """Does around a program what AOTAutograd does; inputs and results go by positions.

    It counts a version of the inputs that the program has ``written``, and returns an input itself
    as a result that is one: ``given``, result -> input.
    """

    written: tuple[int, ...]
    given: tuple[tuple[int, int], ...]

    def run(self, program: Callable[[list[Any]], list[Any]]) -> Callable:
        """Return what AOTAutograd would make of a program; without autocast, if it is on now."""
        not_cast = without_autocast()

        def run(*inputs: Any) -> list[Any]:
            values = list(inputs)
            own = [(result, values[position]) for result, position in self.given]
            torch.autograd.graph.increment_version([values[at] for at in self.written])
            del inputs
            with torch.no_grad(), not_cast():
                results = program(values)
            for result, value in own:
                results[result] = value
            return results

        return run


def without_autocast() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what turns autocast off, as AOTAutograd does, if it is on now; and nothing if not."""
    is_cast = torch._C._is_any_autocast_enabled()
    return torch._C._DisableAutocast if is_cast else contextlib.nullcontext


def inputs_written_around() -> list[int]:
    """Return which inputs AOTAutograd itself writes to after the program that it has compiled."""
    metadata = TracingContext.get().fw_metadata
    assert metadata is not None, "while AOTAutograd calls the compiler"
    return list(metadata.mutated_inp_runtime_indices)


def around() -> Around | None:
    """Return what AOTAutograd does around the program that it is having compiled.

    None if it does more: writes to inputs, makes views of results again, sets whether gradients are
    recorded.  Private: its metadata, alike from 2.11 to 2.15.
    """
    metadata = TracingContext.get().fw_metadata
    assert metadata is not None, "while AOTAutograd calls the compiler"
    kinds = (OutputType.non_alias, OutputType.is_input)
    does_more = (
        metadata.num_mutated_inp_runtime_indices
        or metadata.num_intermediate_bases
        or metadata.dynamic_outputs
        or metadata.tokens
        or metadata.is_rng_op_functionalized
        or metadata.grad_enabled_mutation is not None
        or any(info.output_type not in kinds for info in metadata.output_info)
        or any(info.mutates_metadata for info in metadata.input_info)
    )
    if does_more:
        return None
    given = (
        (at, info.base_idx)
        for at, info in enumerate(metadata.output_info)
        if info.output_type is OutputType.is_input
    )
    return Around(tuple(metadata.mutated_graph_handled_indices_seen_by_autograd), tuple(given))


def name_of_function(function: Callable) -> str:
    """Return the dotted name that a traced graph has for a function."""
    name = _get_qualified_name(function)
    return name if "." in name else f"builtins.{name}"


def settings() -> list[Any] | None:
    """Return what the tracing of a graph depends on beside it, as plain values.

    None if somebody has given torch's operators code of their own.
    """
    flags = [
        flag for flag in dir(torch._C) if flag.startswith("_get_") and flag.endswith(_FLAGS_END)
    ]
    kernels = "".join(
        torch._C._dispatch_dump(name)
        for name in sorted(torch._C._dispatch_get_all_op_names())
        if name.startswith("aten::")
    )
    root = kernels.partition("registered at ")[2].partition("/build/")[0]
    own = (f"{root}/", os.path.join(os.path.dirname(torch.__file__), ""))
    if not all(place.startswith(own) for place in _REGISTERED.findall(kernels)):
        return None
    device = torch.accelerator.current_accelerator(check_available=True)
    kind = "" if device is None else str(torch.get_device_module(device).get_device_name())
    autocasts = ("cpu", *([device.type] if device is not None else []))
    return [
        str(torch.__version__),
        hashlib.sha256(kernels.encode()).hexdigest(),
        kind,
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch._C._len_torch_function_stack(),
        torch.is_inference_mode_enabled(),
        [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in autocasts],
        torch.is_autocast_cache_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch._functorch.config.get_hash(),
        _order_of_einsum(),
        [(flag, value_of(flag)) for flag in flags],
        torch._C._get_deterministic_algorithms(),
        list(torch._C._get_sdp_priority_order()),
    ]


def _order_of_einsum() -> tuple[Any, ...]:
    """Return what the order depends on in which a product of three or more is taken."""
    of = torch.backends.opt_einsum
    version = getattr(of.get_opt_einsum(), "__version__", "") if of.is_available() else ""
    return version, of.enabled, of.strategy


def value_of(flag: str) -> Any:
    """Return what a getter of torch's does; None where it raises, as for TF32 by its new name."""
    try:
        return getattr(torch._C, flag)()
    except RuntimeError:
        return None


_FLAGS_END = ("_enabled", "_deterministic", "_reduction", "_tf32", "_benchmark", "_warn_only")

_REGISTERED = re.compile("registered at (.*)")


def modules_traced() -> list[Any]:
    """Return the modules whose functions run by their names while a graph is traced.

    Private: where torch's Python functions find its operators (2.11 to 2.15).
    """
    operators = ("_nn", "_linalg", "_fft", "_special")
    return [
        torch,
        torch.functional,
        torch.nn.functional,
        torch.autograd,
        torch.fft,
        torch.linalg,
        torch.special,
        torch.overrides,
        torch._VF,
        torch._tensor,
        torch._C,
        *(getattr(torch._C, name) for name in operators),
    ]


@functools.cache
def list_operators() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Decompositions of the ``_foreach_*`` operators into one operator per tensor.

    Each has a kernel that does just that, for tensors no fast kernel takes.  Can go when torch's
    own decomposition tables cover them.
    """
    slow = torch._C.DispatchKey.CompositeExplicitAutograd
    table: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        name, _, overload = qualified.removeprefix("aten::").partition(".")
        if not name.startswith("_foreach_") or "out" in overload:
            continue
        one = getattr(getattr(torch.ops.aten, name), overload or "default")
        if one.has_kernel_for_dispatch_key(slow):
            table[one] = functools.partial(one._op_dk, slow)
    # These two kernels write in place and read a number, which tracing forbids.
    table[torch.ops.aten._foreach_zero.default] = lambda tensors: [*map(torch.zeros_like, tensors)]
    table[torch.ops.aten._foreach_add.Tensor] = lambda tensors, other, alpha=1: [
        torch.add(tensor, other, alpha=alpha) for tensor in tensors
    ]
    return table


def _own_recomputation() -> contextlib.AbstractContextManager[None]:
    """Keep AOTAutograd from honouring checkpoints itself, where it tries to (from 2.12).

    Its pass takes attention without dropout for a random draw and refuses it.
    """
    config = torch._functorch.config
    if not hasattr(config, "remat_using_tags_for_fwd_loss_bwd_graph"):
        return contextlib.nullcontext()
    return config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False)
