"""Tells AOTAutograd what a graph writes to, and what its results are, without what it computes.

AOTAutograd traces a graph twice, first only for this.  An outline has the writes to inputs and the
views that results are; whatever else they take is memory without elements.  What Dynamo's own run
of the graph has left in its examples must say the same, or the whole graph is traced.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch._functorch.aot_autograd
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerofx.compat.dynamo import AUGMENTED_ASSIGNMENTS
from zerofx.compat.scalars import SYMBOLIC_SCALARS
from zerofx.compat.tensors import storage_key, tensors_in

logger = logging.getLogger("zerofx")

EXAMPLE = "example_value"

_ASSIGNMENTS = {operator.setitem, *AUGMENTED_ASSIGNMENTS}

_KNOWN = ("aten", "prims", "zerofx")
"""Namespaces of operators that do nothing beside what their schemas say."""

_MODES = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)
"""Functions that set a mode which can be put back."""


class UnknownError(Exception):
    """There is no outline of the graph; the message says why."""


@contextlib.contextmanager
def outlined(gm: fx.GraphModule) -> Iterator[None]:
    """Have AOTAutograd learn from an outline of ``gm`` what it writes to and returns.

    Private: the function that runs a graph for that, alike from 2.11 to 2.15.  Can go when
    AOTAutograd takes from Dynamo what that knows.
    """
    module = torch._functorch.aot_autograd
    name = "run_functionalized_fw_and_collect_metadata"
    original = getattr(module, name)

    def collect(function: Callable, **named: Any) -> Callable[..., ViewAndMutationMeta]:
        def run(*inputs: Any) -> ViewAndMutationMeta:
            try:
                return _by_outline(gm, lambda: original(function, **named)(*inputs))
            except UnknownError as reason:
                logger.debug("a graph is traced twice: %s", reason)
            return original(function, **named)(*inputs)

        return run

    with mock.patch.object(module, name, collect):
        yield


def _by_outline(
    gm: fx.GraphModule, collect: Callable[[], ViewAndMutationMeta]
) -> ViewAndMutationMeta:
    """Return what ``collect`` finds with the outline in the graph's place.

    Raises: UnknownError if that cannot be trusted.
    """
    outline, whole = outline_of(gm.graph), gm._graph
    outline.owning_module = gm
    gm._graph = outline  # the property would make its code anew
    try:
        with _modes_put_back():
            found = collect()
    except Exception as error:
        raise UnknownError(f"the outline does not run: {error}") from error
    finally:
        gm._graph = whole
    _check(found, whole)
    return found


@contextlib.contextmanager
def _modes_put_back() -> Iterator[None]:
    """Leave the modes as they were, though a graph ends in an error within one that it has set."""
    is_on, depth = torch.is_grad_enabled(), _depth_of_autocast()
    try:
        yield
    except BaseException:
        torch._C._set_grad_enabled(is_on)
        while _depth_of_autocast() > depth:
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
        raise


def _depth_of_autocast() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def outline_of(graph: fx.Graph) -> fx.Graph:
    """Return a graph that writes to the same inputs, and whose results are of the same memory.

    Raises: UnknownError if it has functions that may do more than their names say, or inputs that
    share memory.
    """
    memory = {node: _memory_of(node) for node in graph.nodes}
    given, constant = _memory_of_inputs(memory)
    kept: set[fx.Node] = set()
    needed: set[fx.Node] = set()
    for node in reversed(memory):
        is_needed = node in needed and not _is_fresh(node, memory, given)
        if node.op in ("placeholder", "get_attr"):
            kept.add(node)
        elif node.op == "output" or is_needed or _may_act(node, memory, given, constant):
            kept.add(node)
            needed.update(node.all_input_nodes)
    outline = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    taken = set(given)
    for node in memory:
        if node in kept:
            copies[node] = outline.node_copy(node, copies.__getitem__)
        elif node in needed:
            if not taken.isdisjoint(memory[node]):
                raise UnknownError(f"{node.name} shares memory with another value")
            if free_unbacked_symbols(node.meta[EXAMPLE]):
                raise UnknownError(f"the sizes of {node.name} are known when it is computed")
            taken |= memory[node]
            copies[node] = outline.call_function(_memory_like(node.meta[EXAMPLE]))
            copies[node].meta = {EXAMPLE: node.meta[EXAMPLE]}
    return outline


def _memory_like(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what makes memory like a tensor's.  A graph takes no symbols as arguments."""
    named = {name: getattr(tensor, name) for name in ("dtype", "device", "requires_grad")}

    def memory() -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), **named)

    return memory


def _memory_of(node: fx.Node) -> set[int]:
    """Return what the memory of a node's tensors goes by.

    Raises: UnknownError if the node may do more than compute them.
    """
    target = node.target
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        raise UnknownError(f"{node.name} runs a program")
    if node.op == "call_function" and not _is_torchs(target):
        raise UnknownError(f"{node.name} is no function of torch")
    example = node.meta.get(EXAMPLE)
    if node.op == "get_attr" and not isinstance(example, torch.Tensor):
        raise UnknownError(f"{node.name} is a program")
    tensors = [example] if isinstance(example, torch.Tensor) else tensors_in(example)
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            raise UnknownError(f"{node.name} has tensors inside")
    try:
        return set(map(storage_key, tensors))
    except NotImplementedError:  # of a program that vmap runs
        raise UnknownError(f"{node.name} has no memory of its own") from None


def _is_torchs(target: Any) -> bool:
    """Return whether a function is one that does what its name says, and not a user's."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).partition(".")[0] in _KNOWN
    if isinstance(target, types.FunctionType):  # one that wraps another has its name
        return target.__globals__["__name__"].partition(".")[0] in ("torch", "zerofx")
    if not isinstance(target, types.BuiltinFunctionType | types.MethodDescriptorType):
        return False
    owner = getattr(target, "__objclass__", None)  # of a method
    module = str(getattr(target if owner is None else owner, "__module__", ""))
    return module.partition(".")[0] in ("torch", "_operator", "builtins", "math")


def _memory_of_inputs(memory: Mapping[fx.Node, set[int]]) -> tuple[set[int], set[int]]:
    """Return what the memory of inputs goes by, and of those that no gradient is taken of."""
    found: set[int] = set()
    constant: set[int] = set()
    for node, keys in memory.items():
        if node.op in ("placeholder", "get_attr"):
            if not found.isdisjoint(keys):
                raise UnknownError(f"{node.name} shares memory with another input")
            found |= keys
            if keys and not node.meta[EXAMPLE].requires_grad:
                constant |= keys
    return found, constant


def _may_act(
    node: fx.Node, memory: Mapping[fx.Node, set[int]], given: set[int], constant: set[int]
) -> bool:
    """Return whether a call sets a mode, or may write to an input.

    One that sets a mode, as one that turns gradients off, neither takes nor makes a tensor.  What
    no gradient is taken of may be written to by what has no name for that, as a batch norm.
    """
    read = set().union(*(memory[source] for source in node.all_input_nodes))
    if not (read or memory[node]):
        is_number = isinstance(
            node.meta.get(EXAMPLE), (*SYMBOLIC_SCALARS, torch.SymBool, int, float)
        )
        if not is_number and node.target not in _MODES:
            raise UnknownError(f"{node.name} sets a mode that cannot be put back")
        return True
    if not constant.isdisjoint(read):
        return True
    if given.isdisjoint(read):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_inplace = name.endswith("_") and not name.endswith("__")
    return is_inplace or target in _ASSIGNMENTS or "out" in node.kwargs


def _is_fresh(node: fx.Node, memory: Mapping[fx.Node, set[int]], given: set[int]) -> bool:
    """Return whether a tensor is in memory that the call which computes it has made."""
    if not isinstance(node.meta.get(EXAMPLE), torch.Tensor):
        return False
    maker = node
    while maker.target is operator.getitem and isinstance(maker.args[0], fx.Node):
        if isinstance(maker.args[0].meta.get(EXAMPLE), torch.Tensor):
            break
        maker = maker.args[0]
    read = (memory[source] for source in maker.all_input_nodes)
    return memory[node].isdisjoint(given.union(*read))


def _check(found: ViewAndMutationMeta, graph: fx.Graph) -> None:
    """Compare with what running the graph has done to its examples, in Dynamo.

    Raises: UnknownError if that is something else, or more than writes to inputs and new results.
    """
    examples = [node.meta.get(EXAMPLE) for node in graph.find_nodes(op="placeholder")]
    lifted = len(found.input_info) - len(examples)
    if lifted < 0 or any(info.mutates_data for info in found.input_info[:lifted]):
        raise UnknownError("inputs are others than the graph's")
    if found.num_intermediate_bases or found.tokens or found.grad_enabled_mutation is not None:
        raise UnknownError("results are views of each other, or modes are changed")
    given: set[int] = set()
    for info, example in zip(found.input_info[lifted:], examples, strict=True):
        is_written = isinstance(example, torch.Tensor) and example._version > 0
        if (is_written and not info.mutates_data) or info.mutates_metadata:
            raise UnknownError("an input is written to otherwise")
        if isinstance(example, torch.Tensor):
            given.add(storage_key(example))
    (results,) = graph.output_node().args
    for info, result in zip(found.output_info, results, strict=True):
        example = result.meta.get(EXAMPLE) if isinstance(result, fx.Node) else None
        if not isinstance(example, torch.Tensor):
            continue
        is_of_input = info.output_type in (OutputType.alias_of_input, OutputType.is_input)
        if is_of_input != (storage_key(example) in given):
            raise UnknownError("a result is of other memory")
        if not is_of_input and (
            info.output_type is not OutputType.non_alias
            or info.requires_grad != example.requires_grad
        ):
            raise UnknownError("a result is of another kind")
