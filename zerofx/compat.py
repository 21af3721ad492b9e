"""The only importer of torch's private modules.

Each name says which versions it is for and when it can go.  Supported: torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import logging
import operator
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any, TypeVar

import sympy
import torch
import torch._dynamo
import torch._dynamo.callback
import torch._dynamo.config
import torch._dynamo.exc
import torch._functorch.config
import torch.fx.traceback
import torch.utils.checkpoint
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import CONSTANT_VARIABLE_NONE, ConstantVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.distributed_c10d import _get_default_store
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    handle_sym_dispatch,
    make_fx,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.printers import PythonPrinter

from zerofx.errors import GraphError


def forward_call_context() -> None:
    """Let a backend put a context around every call of the functions it compiles.

    Dynamo reads ``backend_ctx_ctor`` off the backend, but ``torch.compile`` hides ours in a
    ``_TorchCompileWrapper`` inside a ``WrapBackendDebug``.  A backend without ``call_context``
    is left as it is.  For 2.11 to 2.15; can go when ``_TorchCompileWrapper`` forwards
    ``backend_ctx_ctor`` itself.
    """
    original = WrapBackendDebug.__init__
    if getattr(original, "_zerofx", False):
        return

    def __init__(self, unconfigured_compiler_fn, compiler_name):
        original(self, unconfigured_compiler_fn, compiler_name)
        backend = getattr(unconfigured_compiler_fn, "compiler_fn", unconfigured_compiler_fn)
        if hasattr(backend, "call_context"):
            arguments = getattr(unconfigured_compiler_fn, "kwargs", {})
            self.backend_ctx_ctor = backend.call_context(arguments)

    __init__._zerofx = True  # type: ignore[attr-defined]
    WrapBackendDebug.__init__ = __init__


def backend_in_use(translator: Any) -> Any:
    """The innermost backend that a Dynamo translator compiles for.

    ``compiler_fn`` and ``_torchdynamo_orig_backend`` are for 2.11 to 2.15; can go with the patches
    below, which ask whether the backend is theirs.
    """
    backend = translator.output.compiler_fn
    while True:
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(
            backend, "compiler_fn", None
        )
        if inner is None or inner is backend:
            return backend
        backend = inner


# A method of a class, and the plain Python function Dynamo traces in its place.  A class of a
# library that may not be there goes by its name.
Substitutes = Mapping[type | str, Mapping[str, Callable[..., Any]]]


@contextlib.contextmanager
def whole_step_tracing(
    backend: Any, substitutes: Substitutes, met: Callable[[Any], None] = lambda value: None
) -> Iterator[None]:
    """Make Dynamo hand over forward, backward and update as one graph, for ``backend`` only.

    While the context is open, and only while Dynamo is compiling in it: ``loss.backward()`` is
    traced (``trace_autograd_ops``), the given methods of optimizers and scalers are traced from
    their substitutes, a loss may be returned undetached, log calls are left out, and a graph
    break is an error.  Everything is put back when a compilation ends, so that other backends see
    torch as it is.  ``met`` is called with modules that are called, and with optimizers whose own
    methods are traced: what it raises goes to the user.

    Dynamo's options and the callbacks around a compilation are for 2.11 to 2.15; they can go when
    a backend may choose options for the functions it compiles.
    """
    handler = torch._dynamo.callback.callback_handler
    undo: list[contextlib.ExitStack] = []

    thread = threading.get_ident()

    def on_start(_args: Any) -> None:
        if threading.get_ident() != thread:
            return  # another thread's compilation, of a function that may not be ours
        stack = contextlib.ExitStack()
        stack.enter_context(
            torch._dynamo.config.patch(
                trace_autograd_ops=True,
                allow_rnn=True,
                ignore_logging_functions=_logging_functions(),
            )
        )
        for variable_class in (OptimizerVariable, UserDefinedObjectVariable):
            stack.enter_context(_substituting(variable_class, backend, substitutes, met))
        stack.enter_context(_seeing_modules(backend, met))
        stack.enter_context(_undetached_outputs(backend))
        stack.enter_context(_own_none())
        stack.enter_context(_own_augmented_assignment())
        stack.enter_context(_backward_past_modes())
        undo.append(stack)

    def on_end(_args: Any) -> None:
        if undo and threading.get_ident() == thread:
            undo.pop().close()

    handler.start_callbacks.append(on_start)
    handler.end_callbacks.append(on_end)
    try:
        # The first applies once something has been traced, the others before.
        limits = torch._dynamo.config.patch(
            fail_on_recompile_limit_hit=True,
            recompile_limit=sys.maxsize,  # the backend has a count of its own
            accumulated_recompile_limit=sys.maxsize,
        )
        with torch._dynamo.error_on_graph_break(True), limits:
            yield
    finally:
        handler.start_callbacks.remove(on_start)
        handler.end_callbacks.remove(on_end)
        while undo:
            undo.pop().close()


def _logging_functions() -> set[Callable[..., Any]]:
    """What loggers are called with: models warn in forward, and that is not worth a refusal.

    Libraries add methods of their own (``warning_once``) to ``logging.Logger``.
    """
    names = ("debug", "info", "warning", "error", "critical", "exception", "log")
    return {
        function
        for name, function in vars(logging.Logger).items()
        if name in names or name.endswith("_once")
    }


@contextlib.contextmanager
def _substituting(
    variable_class: type, backend: Any, substitutes: Substitutes, met: Callable[[Any], None]
) -> Iterator[None]:
    """Answer attribute look-ups of the substituted methods with the substitutes.

    ``var_getattr`` up to 2.14, ``tp_getattro_impl`` from 2.15; can go when Dynamo lets a backend
    substitute methods.  Class-level wrappers of the methods themselves fail once a scheduler has
    wrapped the instance's ``step``.

    Dynamo forgets what a function sets on an optimizer, so optimizers are made known to its side
    effects (2.11 to 2.15; can go when its builder does that, as for other objects).
    """
    name = "tp_getattro_impl" if hasattr(variable_class, "tp_getattro_impl") else "var_getattr"
    inherited = name not in variable_class.__dict__
    original = getattr(variable_class, name)

    def look_up(self, tx, attribute):
        value = getattr(self, "value", None)
        if variable_class is OptimizerVariable and backend_in_use(tx) is backend:
            effects = tx.output.side_effects
            if value not in effects:
                effects.track_object_existing(value, self)
            if effects.has_pending_mutation_of_attr(self, attribute):
                return original(self, tx, attribute)
            if attribute == "param_groups":  # its own way turns the user's `capturable` on
                return getattr(super(variable_class, self), name)(tx, attribute)
        for owner, methods in substitutes.items():
            if attribute in methods and _has_method_of(value, owner, attribute):
                if backend_in_use(tx) is not backend:
                    break
                function = _function_for(value, owner, attribute, methods[attribute])
                if function is not methods[attribute] and isinstance(value, torch.optim.Optimizer):
                    _telling(met, value)
                if function is None:
                    break  # the user's own method says what happens
                try:
                    return UserMethodVariable(UserFunctionVariable(function), self)
                except Exception:  # before 2.15 it takes the plain function
                    return UserMethodVariable(function, self)
        return original(self, tx, attribute)

    setattr(variable_class, name, look_up)
    try:
        yield
    finally:
        if inherited:
            delattr(variable_class, name)
        else:
            setattr(variable_class, name, original)


def _has_method_of(value: Any, owner: type | str, attribute: str) -> bool:
    """Whether an object is an ``owner``, or has this method from the class of that name."""
    if isinstance(owner, type):
        return isinstance(value, owner)
    method = getattr(type(value), attribute, None)
    name = f"{getattr(method, '__module__', '')}.{getattr(method, '__qualname__', '')}"
    return name == f"{owner}.{attribute}"


def _function_for(
    value: Any, owner: type | str, attribute: str, substitute: Callable[..., Any]
) -> Callable[..., Any] | None:
    """The function to trace for a method that ``owner`` implements; None for the object's own.

    Every optimizer has its own ``step``, which ``update`` runs.  A wrapper's is not one of these,
    nor what anything but a scheduler has put in its place.  The scheduler's mark is for 2.11 to
    2.15; can go when schedulers leave ``step`` alone.
    """
    if isinstance(owner, str):
        return substitute
    if owner is not torch.optim.Optimizer or attribute != "step":
        is_overridden = getattr(type(value), attribute) is not getattr(owner, attribute)
        return None if is_overridden else substitute
    own = type(value).step
    instead = vars(value).get("step", own)
    is_scheduled = hasattr(instead, "_wrapped_by_lr_sched")
    if "param_groups" not in vars(value):
        return own if is_scheduled else None
    return substitute if is_scheduled or getattr(instead, "__func__", instead) is own else None


def _telling(met: Callable[[Any], None], value: Any) -> None:
    """Call ``met``, and have Dynamo let through what it raises."""
    try:
        met(value)
    except Exception as error:
        raise pass_through_dynamo(error) from None


@contextlib.contextmanager
def _seeing_modules(backend: Any, met: Callable[[Any], None]) -> Iterator[None]:
    """Call ``met`` with each module that is called, for ``backend``.

    For 2.11 to 2.15; can go when Dynamo tells a backend which modules a function calls.
    """
    original = UnspecializedNNModuleVariable.call_function

    def call_function(self, tx, args, kwargs):
        if backend_in_use(tx) is backend:
            _telling(met, self.value)
        return original(self, tx, args, kwargs)

    UnspecializedNNModuleVariable.call_function = call_function
    try:
        yield
    finally:
        UnspecializedNNModuleVariable.call_function = original


@contextlib.contextmanager
def _own_none() -> Iterator[None]:
    """Give each ``p.grad`` that is None a constant of its own.

    Dynamo writes where ``p.grad`` came from onto the one None that all share; the end of the
    function then restores other parameters' gradients from there.  For 2.11 to 2.14; from 2.15
    attributes are looked up elsewhere, and copied.
    """
    original = TensorVariable.__dict__.get("var_getattr")
    if original is None:
        yield
        return

    def var_getattr(self, tx, name):
        result = original(self, tx, name)
        if result is CONSTANT_VARIABLE_NONE:
            source, result.source = result.source, None
            return ConstantVariable(None, source=source)
        return result

    TensorVariable.var_getattr = var_getattr
    try:
        yield
    finally:
        TensorVariable.var_getattr = original


_AUGMENTED_ASSIGNMENTS = {
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


@contextlib.contextmanager
def _own_augmented_assignment() -> Iterator[None]:
    """Let ``p -= x`` leave ``p`` the input that it is.

    Dynamo takes its result for another tensor, and loses what is then stored as its ``grad``.
    For 2.11 to 2.15; can go when Dynamo knows that ``p.__isub__`` returns ``p``.
    """
    original = BuiltinVariable.call_function

    def call_function(self, tx, args, kwargs):
        result = original(self, tx, args, kwargs)
        if self.fn in _AUGMENTED_ASSIGNMENTS and type(result) is TensorVariable:
            target = args[0].realize()
            if (
                type(target) is TensorVariable
                and target.as_proxy().node.op == "placeholder"
                and target.requires_grad == result.requires_grad
            ):
                return target
        return result

    BuiltinVariable.call_function = call_function
    try:
        yield
    finally:
        BuiltinVariable.call_function = original


@contextlib.contextmanager
def _backward_past_modes() -> Iterator[None]:
    """Trace ``loss.backward()`` though a torch-function mode is on, as for a default device.

    Dynamo then traces Python's ``Tensor.backward``, which it refuses, and forgets its own rule.
    For 2.11 to 2.15; can go when ``trace_autograd_ops`` works under ``torch.set_default_device``.
    """
    original = TensorVariable.call_method

    def call_method(self, tx, name, args, kwargs):
        if name != "backward":
            return original(self, tx, name, args, kwargs)
        modes = tx.symbolic_torch_function_state
        enabled, modes.torch_function_mode_enabled = modes.torch_function_mode_enabled, False
        try:
            return original(self, tx, name, args, kwargs)
        finally:
            modes.torch_function_mode_enabled = enabled

    TensorVariable.call_method = call_method
    try:
        yield
    finally:
        TensorVariable.call_method = original


def why_not_compiled() -> str | None:
    """What would make Dynamo run a compiled function eagerly right now; None if nothing does.

    The stack of dispatch modes and the stance are for 2.11 to 2.15; can go when torch can be
    asked whether it would compile.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        mode = torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)
        return f"a dispatch mode ({type(mode).__name__}) is active"
    stance = torch._dynamo.eval_frame._stance.stance
    if stance not in ("default", "fail_on_recompile"):
        return f"torch.compiler.set_stance({stance!r}) is in force"
    return None


@contextlib.contextmanager
def _undetached_outputs(backend: Any) -> Iterator[None]:
    """Allow ``return loss``: capture detaches the outputs.

    For 2.11 to 2.15; can go when Dynamo lets such a graph out.
    """
    name = "_validate_outputs_safe_for_autograd_nodes"
    original = getattr(OutputGraph, name)

    def validate(self, rv, tx):
        if backend_in_use(tx) is not backend:
            return original(self, rv, tx)
        return None

    setattr(OutputGraph, name, validate)
    try:
        yield
    finally:
        setattr(OutputGraph, name, original)


def _translator_of_function() -> Any:
    """Dynamo's translator of the function being compiled, and not of one it calls.

    For 2.11 to 2.15; can go when Dynamo tells a backend whose code it compiles.
    """
    translator = InstructionTranslator.current_tx()
    return getattr(translator.output, "root_tx", translator)


def locals_being_compiled() -> dict[str, Any]:
    """Local and closure variables of the function that Dynamo is compiling; globals last."""
    root = _translator_of_function()
    return {**dict(root.f_globals), **dict(root.f_locals)}


def code_being_compiled() -> CodeType:
    """The code object of the function that Dynamo is compiling."""
    return _translator_of_function().f_code


def recompile_limit() -> int:
    """How many programs of a function torch compiles at most, outside of ``whole_step_tracing``.

    For 2.11 to 2.15; can go with Dynamo's limit.
    """
    return torch._dynamo.config.recompile_limit


def forget_unless_in_use(code: CodeType) -> None:
    """Empty Dynamo's cache for a function of which it has only entries that it has invalidated.

    Call it while the function is not being called.  With a compilation under way, in whatever
    thread, nothing is done.  ``_debug_get_cache_entry_list`` and ``reset_code`` are for 2.11 to
    2.15; can go when Dynamo removes what it invalidates.
    """
    if not compile_lock.acquire(blocking=False):
        return
    try:
        entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
        if entries and all(entry.code is None for entry in entries):
            torch._C._dynamo.eval_frame.reset_code(code)
    finally:
        compile_lock.release()


def source_name(placeholder: torch.fx.Node) -> str:
    """Dynamo's expression for a graph input, such as ``L['model']._modules['head']``.

    ``meta["grapharg"]`` is for 2.11 to 2.15; can go when a graph says where its inputs are from.
    """
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    return getattr(source, "name", placeholder.name)


def modified_sources() -> list[str]:
    """Dynamo's expressions for the objects that the function being compiled writes to.

    Objects that it builds itself have none: their ``TempLocalSource`` refuses to be named.  For
    2.11 to 2.15; can go when Dynamo tells a backend of writes outside the graph.
    """
    side_effects = InstructionTranslator.current_tx().output.side_effects
    names = []
    for variable in side_effects.id_to_variable.values():
        if variable.source is not None and side_effects.is_modified(variable):
            with contextlib.suppress(NotImplementedError):
                names.append(variable.source.name)
    return names


def owners_looked_into(attribute: str) -> list[Any]:
    """The objects whose attribute the path of the function being compiled depends on.

    Dynamo's guards name them by expressions in the function's scopes.  For 2.11 to 2.15; can go
    when Dynamo tells a backend what the function has read.
    """
    output = InstructionTranslator.current_tx().output
    scopes = {"L": output.local_scope, "G": output.global_scope}
    expressions = {getattr(guard, "name", "") for guard in output.guards}
    found = []
    for expression in sorted(filter(lambda name: isinstance(name, str), expressions)):
        owner, _, last = expression.rpartition(".")
        if last == attribute:
            try:
                found.append(eval(owner, dict(scopes)))
            except Exception:  # an expression over what only the guards' own scope has
                continue
    return found


def _ID_MATCH(builder: GuardBuilder, guard: Any) -> None:  # noqa: N802 - guards go by this name
    """``GuardBuilder.ID_MATCH``, which on 2.11 prints the object: freed memory would be read."""
    printed = torch.nn.Parameter.__repr__
    torch.nn.Parameter.__repr__ = object.__repr__
    try:
        builder.ID_MATCH(guard)
    finally:
        torch.nn.Parameter.__repr__ = printed


def guard_identity(placeholder: torch.fx.Node) -> None:
    """Let the code being compiled hold only for this very object, and not for one like it.

    Dynamo guards a module's parameters by shape and dtype.  For 2.11 to 2.15; can go when a
    backend may ask for a guard.
    """
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is not None:
        install_guard(source.make_guard(_ID_MATCH))


def gradient_assignments() -> dict[str, str]:
    """Graph results that the function being compiled stores as a tensor's ``.grad``.

    Returns the name of the result's node -> the name of the graph input it belongs to.
    Dynamo's record of pending attribute writes is the only place that knows.  For 2.11 to 2.15;
    can go when the graph's outputs say what they are stored as.
    """
    translator = InstructionTranslator.current_tx()
    found = {}
    for owner, attributes in translator.output.side_effects.store_attr_mutations.items():
        gradient = attributes.get("grad")
        try:
            found[gradient.as_proxy().node.name] = owner.as_proxy().node.name
        except (AttributeError, NotImplementedError):
            continue  # p.grad = None, or not a tensor's attribute
    return found


def tag_backward_nodes(gm: torch.fx.GraphModule) -> None:
    """Set ``meta["autograd_backward"]`` where torch 2.11 and 2.12 do not; can go with them."""
    for node in gm.graph.nodes:
        stack = node.meta.get("source_fn_stack")
        if stack and stack[-1][1] is torch.autograd.grad:
            node.meta["autograd_backward"] = True


def checkpointed_nodes(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Forward nodes that ``torch.utils.checkpoint`` wants recomputed in backward.

    The tags ``meta["recompute"]``, a ``CheckpointPolicy``, and ``meta["ac_graph_id"]`` are for 2.11
    to 2.15; can go when torch documents them.  Random draws are left out, with what reads their
    state, and so is an attention whose dropout is on.
    """
    policies = torch.utils.checkpoint.CheckpointPolicy
    wanted = (policies.MUST_RECOMPUTE, policies.PREFER_RECOMPUTE)
    found = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.meta.get("autograd_backward"):
            continue
        if node.meta.get("recompute") in wanted and not draws_randomly(node):
            found.add(node)
    for node in gm.graph.nodes:
        if node.target is operator.getitem and node.args[0] not in found:
            found.discard(node)  # part of a kept result
        elif node in found and any(_leaves_region(node, user) for user in node.users):
            found.discard(node)  # a checkpointed function's result is what it saves
    return found


def forget_checkpoints(node: torch.fx.Node) -> None:
    """Take the tags of ``torch.utils.checkpoint`` off a node: Inductor would obey them again.

    It refuses those on an attention, whose dropout might draw.  For 2.11 to 2.15; can go when the
    tags are documented.
    """
    for tag in ("recompute", "ac_graph_id"):
        node.meta.pop(tag, None)


def is_kept_by_policy(node: torch.fx.Node) -> bool:
    """Whether a selective checkpoint's policy says to keep a node's result.

    The tag is for 2.11 to 2.15; can go with ``checkpointed_nodes``.
    """
    policies = torch.utils.checkpoint.CheckpointPolicy
    return node.meta.get("recompute") in (policies.MUST_SAVE, policies.PREFER_SAVE)


def size_hint(size: int | torch.SymInt) -> int:
    """A size as it was when captured, without a guard on it; 0 if it depends on data.

    ``node.hint`` is for 2.11 to 2.15; can go when torch documents a way to ask.
    """
    return size if isinstance(size, int) else int(size.node.hint or 0)


def scalar_hint(value: Any) -> Any:
    """A symbolic number as it was when captured, without a guard; anything else as it is.

    ``node.hint`` as above.
    """
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return value.node.hint if isinstance(value, symbols) else value


def trace_program(name: str, text: Callable[[], str]) -> None:
    """Add a program's text to torch's structured trace, if there is one: tlparse shows it.

    For 2.11 to 2.15; can go when ``torch._logging.trace_structured`` is public.
    """
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
    )


def is_traced() -> bool:
    """Whether torch writes a structured trace; while it compiles, when it has found out.

    Its handler leaves with the first record if there is nowhere to write to.  For 2.11 to 2.15;
    can go when torch has a public way to ask.
    """
    logging = torch._logging._internal
    return any(isinstance(h, logging.LazyTraceHandler) for h in logging.trace_log.handlers)


def _leaves_region(node: torch.fx.Node, user: torch.fx.Node) -> bool:
    if user.meta.get("autograd_backward"):
        return False
    return user.meta.get("ac_graph_id") != node.meta.get("ac_graph_id") or (
        user.meta.get("recompute") is None
    )


def draws_randomly(node: torch.fx.Node) -> bool:
    """Whether a node draws random numbers: attention without dropout carries the tag too.

    The name of the argument is for 2.11 to 2.15; can go when torch tags calls.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = (
                node.args[position]
                if position < len(node.args)
                else node.kwargs.get("dropout_p", argument.default_value)
            )
            return value != 0.0
    return True


def trace_to_aten(gm: torch.fx.GraphModule, inputs: list[Any], compiler: Callable) -> Callable:
    """Lower Dynamo's graph to functional aten and give it to ``compiler(gm, fake_inputs)``.

    Input mutations stay in the graph as ``copy_`` at its end.  For 2.11 to 2.15; can go when
    AOTAutograd has a public entry that keeps them.
    """

    def no_backward_graph(_gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable:
        raise GraphError("AOTAutograd split the step in two: a result still wants a gradient.")

    with _own_recomputation():
        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=compiler,
            bw_compiler=no_backward_graph,
            decompositions=_list_operators(),
            keep_inference_input_mutations=True,
        )


@functools.cache
def _list_operators() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Decompositions of the functional ``_foreach_*`` operators into one operator per tensor.

    Each has a kernel that does just that, for tensors no fast kernel takes.  For 2.11 to 2.15;
    can go when torch's own decomposition tables cover them.
    """
    slow = torch._C.DispatchKey.CompositeExplicitAutograd
    table: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
    for name in _list_operator_names():
        if name.endswith("_"):
            continue  # functionalisation has replaced those that write in place
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            operator_ = getattr(packet, overload)
            if "out" not in overload and operator_.has_kernel_for_dispatch_key(slow):
                table[operator_] = functools.partial(operator_._op_dk, slow)
    # These two kernels write in place and read a number, which tracing forbids.
    table[torch.ops.aten._foreach_zero.default] = lambda tensors: [*map(torch.zeros_like, tensors)]
    table[torch.ops.aten._foreach_add.Tensor] = lambda tensors, other, alpha=1: [
        torch.add(tensor, other, alpha=alpha) for tensor in tensors
    ]
    return table


def _list_operator_names() -> list[str]:
    schemas = torch._C._jit_get_all_schemas()
    names = {schema.name.removeprefix("aten::") for schema in schemas}
    return sorted(name for name in names if name.startswith("_foreach_"))


def _own_recomputation() -> contextlib.AbstractContextManager[None]:
    """Keep AOTAutograd from honouring checkpoints itself, where it tries to (from 2.12).

    Its pass takes attention without dropout for a random draw and refuses it.
    """
    config = torch._functorch.config
    if not hasattr(config, "remat_using_tags_for_fwd_loss_bwd_graph"):
        return contextlib.nullcontext()
    return config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False)


# A context in which new tensors are real although a compilation is under way.  For 2.11 to 2.15,
# until torch exports it.
real_tensors = unset_fake_temporarily


def fake_tensors() -> FakeTensorMode:
    """Make tensors without elements; real ones may be mixed with them.

    For 2.11 to 2.15; can go when torch has a public way to run on shapes alone.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor.  For 2.11 to 2.15, until torch exports the class."""
    return isinstance(value, FakeTensor)


# For tensors that guard themselves: runtime/guarded.py.  The context is documented under this name
# in 2.11 to 2.15; can go when torch exports it.
without_torch_function = torch._C.DisableTorchFunctionSubclass


# For tensors whose making is deferred: deferred/.

# Also without modes, which a recorder must not call for what it does itself.  For 2.11 to 2.15; can
# go when torch exports it.
without_function_modes = torch._C.DisableTorchFunction

# Where a recorder is active and something has to be done at once.  For 2.11 to 2.15, as above.
without_dispatch_modes = _disable_current_modes


# For errors on their way to the user: backend.py.


def pass_through_dynamo(error: Exception) -> Exception:
    """An error of the same type that Dynamo raises to the user as it is.

    Dynamo wraps what a backend raises in ``BackendCompilerFailed``, save its own
    ``ShortenTraceback``: the error returned is both.  For 2.11 to 2.15; can go when a backend's
    errors reach the user unwrapped.
    """
    shorten = torch._dynamo.exc.ShortenTraceback
    if isinstance(error, shorten):
        return error
    kind = type(error)
    bases = (shorten,) if issubclass(shorten, kind) else (kind, shorten)
    both: Any = type(kind.__name__, bases, {"__module__": kind.__module__})
    copy = both.__new__(both, *error.args)  # which has its args from here
    with contextlib.suppress(TypeError):  # a constructor of another shape, or that asks for more
        kind.__init__(copy, *error.args)
    if isinstance(error, OSError):  # which args do not have
        copy.filename = error.filename
    copy.first_useful_frame = None
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy.with_traceback(error.__traceback__)


def explain_refusal(graph_break: str, recompile_limit: str) -> None:
    """Add words to Dynamo's refusal on its way to the user, if there is one.

    Its exceptions are for 2.11 to 2.15; they can go when a backend may word Dynamo's refusals.
    """
    error = sys.exc_info()[1]
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        words = recompile_limit
    elif isinstance(error, torch._dynamo.exc.Unsupported):
        words = graph_break
    else:
        return
    if words not in getattr(error, "__notes__", ()):
        error.add_note(words)


# For agreement between ranks: backend.py and runtime/whole.py.


def agreement_store(group: torch.distributed.ProcessGroup) -> torch.distributed.Store:
    """The key-value store that a group's ranks share, under a prefix of the group's own.

    The prefix holds the ranks too: groups cut from one mesh may share a name.  For 2.11 to
    2.15; can go when torch has a public way to a process group's store.
    """
    ranks = ",".join(map(str, torch.distributed.get_process_group_ranks(group)))
    return torch.distributed.PrefixStore(f"zerofx/{group.group_name}/{ranks}", _get_default_store())


def world_store() -> torch.distributed.Store | None:
    """The store that all ranks of this run share; None if there is but this process.

    For 2.11 to 2.15, as above.
    """
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.PrefixStore("zerofx", _get_default_store()) if is_there else None


def timeout_s(group: torch.distributed.ProcessGroup) -> float:
    """How long a collective of a gloo group may take.

    For 2.11 to 2.15; can go when torch has a public way to a group's timeout.
    """
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


# For optimizers' hooks: runtime/whole.py.


def has_global_optimizer_hooks() -> bool:
    """Whether hooks are registered around every optimizer's step of the process.

    For 2.11 to 2.15; can go when torch can be asked.
    """
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


# For tensors that gloo's threads read and write: runtime/communication.py.


def is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether C++ code holds this very tensor too.

    ``_use_count`` is for 2.11 to 2.15; can go when gloo drops its tensors without the GIL.
    """
    return tensor._use_count() > 1


# For buffers used again: runtime/buffers.py.


def is_storage_held(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor has this memory, or anything else in C++ besides its one Python object.

    ``_storage_Use_Count`` is for 2.11 to 2.15; can go when torch has a public count.
    """
    return torch._C._storage_Use_Count(storage._cdata) > 1


# For parameters that move into their bucket's memory: runtime/bucket_memory.py.


def is_memory_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor has this one's memory too, or anything else in C++.

    ``_storage_Use_Count`` is for 2.11 to 2.15; can go when torch has a public count.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2  # it, and Python


# For updates traced from optimizers: codegen/.


DATA_DEPENDENT_ERRORS = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
"""What a trace raises where it needs a tensor's value.  For 2.11 to 2.15, until they are public."""


# Public in all but name; for 2.11 to 2.15, until torch.utils exports it.
DispatchMode = TorchDispatchMode

SYMBOLIC_SCALARS = (torch.SymFloat, torch.SymInt)


class ScalarEnvironment(ShapeEnv):
    """Makes symbolic scalars that know their current value, and collects guards on them.

    ``conversions`` lists the expressions that ``float()``, ``int()`` or C code turned into plain
    Python numbers, each with the frame that asked; ``derived`` the scalars made by ``derive``.
    For 2.11 to 2.15: goes if torch offers scalar inputs to ``make_fx``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conversions: list[tuple[sympy.Expr, FrameType | None]] = []
        self.derived: list[tuple[sympy.Expr, Callable[..., float], list[Any]]] = []
        self._num_scalars = 0

    def evaluate_expr(self, orig_expr, *args, **kwargs):
        # A branch evaluates a Boolean; anything else is about to become a Python number.
        if not isinstance(orig_expr, sympy.logic.boolalg.Boolean) and orig_expr.free_symbols:
            self.conversions.append((orig_expr, sys._getframe(1)))
        return super().evaluate_expr(orig_expr, *args, **kwargs)

    def scalar(self, value: float | int) -> torch.SymFloat | torch.SymInt:
        """A symbolic scalar whose value is now ``value``."""
        source = ConstantSource(f"zerofx_scalar_{self._num_scalars}")
        self._num_scalars += 1
        symbol = self.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        make = self.create_symfloatnode if isinstance(value, float) else self.create_symintnode
        return make(symbol, hint=value, source=source)

    def derive(self, function: Callable[..., float], arguments: Sequence[Any]) -> torch.SymFloat:
        """``function(*arguments)`` as a new symbolic scalar, recorded in ``derived``."""
        hints = [a.node.hint if isinstance(a, SYMBOLIC_SCALARS) else a for a in arguments]
        if any(hint is None for hint in hints):
            return self.create_unbacked_symfloat()
        result = self.scalar(float(function(*hints)))
        self.derived.append((expression(result), function, [expression(a) for a in arguments]))
        return result

    def fake_tensors(self) -> FakeTensorMode:
        """A mode whose tensors have static shapes and scalars of this environment."""
        return FakeTensorMode(shape_env=self, allow_non_fake_inputs=True, static_shapes=True)


def expression(scalar: Any) -> Any:
    """The sympy expression of a symbolic scalar; a plain number is its own.

    ``node.expr`` is for 2.11 to 2.15; can go with ``ScalarEnvironment``.
    """
    return scalar.node.expr if isinstance(scalar, SYMBOLIC_SCALARS) else scalar


def python_source(expr: Any) -> str:
    """A sympy expression as Python source over the names of its symbols.

    ``PythonPrinter`` is for 2.11 to 2.15: sympy's own does not know torch's functions.  Can go with
    ``ScalarEnvironment``.
    """
    return PythonPrinter().doprint(expr) if isinstance(expr, sympy.Basic) else repr(expr)


def guard_sources(env: ScalarEnvironment) -> list[str]:
    """The conditions under which a trace holds, as Python expressions.

    ``ShapeEnv.guards`` is for 2.11 to 2.15; can go with ``ScalarEnvironment``.
    """
    return [python_source(guard.expr) for guard in env.guards]


def record_scalar_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call ``function`` on symbolic scalars and record it as a node of the current trace.

    For 2.11 to 2.15; can go when ``make_fx`` records ``math`` functions.
    """
    return handle_sym_dispatch(function, arguments, {})


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, fake ones too, while they live.

    ``_cdata`` is for 2.11 to 2.15; can go when a fake storage has a public identity.
    """
    return tensor.untyped_storage()._cdata


def trace_operations(function: Callable[..., Any], inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Record the aten operations and scalar arithmetic of ``function(*inputs)`` as a graph.

    ``make_fx`` by this path, and ``_allow_non_fake_inputs``, are for 2.11 to 2.15; can go when
    torch exports a tracer of operations.
    """
    with compile_lock:  # fx patches itself for a whole process; Dynamo holds this lock then
        with torch.fx.traceback.preserve_node_meta():
            return make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)


def outside_of_modes() -> contextlib.AbstractContextManager:
    """What runs inside is not seen by dispatch modes, AOTAutograd's watch of a first call included.

    ``_disable_current_modes`` is for 2.11 to 2.15; can go if torch exports it.
    """
    return _disable_current_modes()


def settings_of_traces() -> Hashable | None:
    """What else of this thread's and torch's settings ``trace_operations`` depends on.

    None where more than these may have a say: inside a mode, a function transform or autocast.
    The modes' stacks, dispatch keys and configurations are for 2.11 to 2.15; can go when torch
    exports a tracer of operations.
    """
    if (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return None
    modules = map(sys.modules.get, _CONFIGURATIONS)
    return (
        repr(torch._C._get_torch_function_state()),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.compiler.is_compiling(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        *(module and module.get_hash() for module in modules),
    )


_CONFIGURATIONS = (
    "torch.fx.experimental._config",
    "torch._functorch.config",
    "torch._dynamo.config",
    "torch._inductor.config",  # an operation on bfloat16 asks it for emulate_precision_casts
)


def traced_node(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that stands for a tensor in the trace under way; None if it is not in it.

    ``get_proxy_mode`` and ``get_proxy_slot`` are for 2.11 to 2.15; can go when torch exports a
    tracer of operations.
    """
    mode = get_proxy_mode()
    proxy: Any = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    return proxy.proxy.node if proxy is not None else None


def set_source_line(text: str) -> None:
    """Give the nodes recorded from here on this line as their ``stack_trace``.

    For 2.11 to 2.15; can go when torch documents ``torch.fx.traceback``.
    """
    torch.fx.traceback.set_stack_trace([text])


# For lowering: lower.py, regions.py.


def is_higher_order(target: Any) -> bool:
    """Whether an operator takes programs as arguments, as ``torch.cond`` does.

    For 2.11 to 2.15; can go when torch exports the class.
    """
    return isinstance(target, torch._ops.HigherOrderOperator)


def mark_emptied(placeholder: torch.fx.Node) -> None:
    """Let the compiled graph empty the list that it is given here, as it consumes what is in it.

    ``meta["steal_arg"]`` is for 2.11 to 2.15; can go when ``compile_fx`` returns a function that
    takes a list.
    """
    placeholder.meta["steal_arg"] = True


IN_ORDER = {"reorder_for_locality": False}
"""Settings of Inductor that keep a program's order, as in training and not as in inference.

Weight gradients late, next to what communicates them, keep alive what they are made of.
"""


def compile_with_inductor(
    gm: torch.fx.GraphModule, inputs: list[list[Any]], donated: Sequence[int] = ()
) -> Callable:
    """Compile an aten graph for these very inputs, in lists; returns a function of those.

    The memory of inputs at the positions ``donated`` may be written to, as that of what backward
    alone reads: nobody else has it, and nobody reads it later.

    ``compile_fx`` and not ``compile_fx_inner``, which skips passes that dropout needs.  In a
    thread of its own: the caller's runs inside AOT's runtime, with dispatch keys masked that
    tracing needs.  Under a tracing context with a shape environment, without which Inductor
    leaves its disk cache alone.  For 2.11 to 2.15; can go when torch has a public compiler of
    aten graphs.
    """
    # Not at the top: only this lowering needs it, and the import takes 1.6 to 2.0 s (2.11, 2.13
    # and 2.15 on two busy CPU cores, November 2026).
    from torch._inductor.compile_fx import compile_fx

    fakes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)

    def static(value: Any) -> Any:
        """AOTAutograd takes sizes for symbols otherwise, and fails if one is a view's offset."""
        is_tensor = isinstance(value, torch.Tensor)
        return fakes.from_tensor(value, static_shapes=True) if is_tensor else value

    def compile_region() -> Callable:
        with torch.no_grad(), tracing(TracingContext(fakes)):
            examples = [list(map(static, values)) for values in inputs]
            return compile_fx(gm, examples, config_patches=IN_ORDER, **_donating(donated))

    return _in_thread_of_its_own(compile_region)


def _in_thread_of_its_own(function: Callable[[], Any]) -> Any:
    """Call it there with the settings of this thread: Inductor's are per context, in some versions.

    It is for ``compile_fx`` and goes with it.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(contextvars.copy_context().run, function).result()


def _donating(donated: Sequence[int]) -> dict[str, Any]:
    """Arguments of ``compile_fx`` that make Inductor reuse the memory of inputs at positions.

    It does so in what is called a backward, where it looks in the tracing context for which.  That
    is no part of its caches' keys, so the inputs are renamed.  For 2.11 to 2.15; can go with
    ``compile_with_inductor``.
    """
    if not donated:
        return {}
    from torch._inductor.compile_fx import compile_fx_inner

    def compile_donated(
        gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable:
        placeholders = gm.graph.find_nodes(op="placeholder")
        for position in donated:
            placeholders[position]._rename(f"donated_{position}")
            placeholders[position].target = placeholders[position].name
        gm.recompile()
        TracingContext.get().fw_metadata.bw_donated_idxs = list(donated)
        return compile_fx_inner(gm, inputs, **{**options, "is_backward": True})

    return {"inner_compile": compile_donated}


def compile_for_any_length(gm: torch.fx.GraphModule) -> Callable:
    """Compile a graph over tensors of one shape, and of its length, when it is first called."""
    return CompiledForAnyLength(gm)


def ready_to_run(function: Callable, inputs: Sequence[Any]) -> Callable:
    """What runs such inputs without compiling anything, in any thread."""
    if isinstance(function, CompiledForAnyLength):
        return function.ready(*inputs)
    return function


class CompiledForAnyLength:
    """A graph over tensors of one shape, and of its length, compiled by Inductor for all shapes.

    Tensors are 0-dim, or flat and of one length; or of two dimensions, and flat ones then have as
    many elements as those have rows.  Lengths of 0 and 1 are no other program.  The first call
    with other dtypes or devices compiles, in a thread of its own and by ``compile_fx`` for the
    reasons above; through ``torch.compile`` a length of 1 is compiled apart, and every call checks
    guards.  On a CPU, what is compiled runs without Python's lock.  The symbolic contexts are for
    2.11 to 2.15; can go with ``compile_with_inductor``.
    """

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self._gm = gm
        self._compiled: dict[tuple, Callable] = {}

    def __call__(self, *inputs: Any) -> Any:
        return self.ready(*inputs)(*inputs)

    def ready(self, *inputs: Any) -> Callable:
        """What runs inputs of these dtypes, devices and dimensions: compiled now, if it is new."""
        kinds = tuple((tensor.dtype, tensor.device, tensor.dim()) for tensor in inputs)
        if kinds not in self._compiled:
            compile_now = functools.partial(self._compile, inputs)
            self._compiled[kinds] = _in_thread_of_its_own(compile_now)
        return self._compiled[kinds]

    def _compile(self, inputs: Sequence[Any]) -> Callable:
        from torch._inductor.compile_fx import compile_fx

        fakes = FakeTensorMode(shape_env=ShapeEnv())
        in_rows = any(tensor.dim() == 2 for tensor in inputs)
        # What AOTAutograd finds in its cache meets no inner compiler, which has a cache too.
        uncached = torch._functorch.config.patch(enable_autograd_cache=False)
        with torch.no_grad(), tracing(TracingContext(fakes)), uncached:
            examples = [_of_any_length(tensor, in_rows, fakes) for tensor in inputs]
            return compile_fx(self._gm, examples, inner_compile=_compile_sums_last)


_SUMS = {torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList}


def _compile_sums_last(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable:
    """``compile_fx_inner``, behind writes to inputs what sums: Inductor then has one loop for both.

    It puts no pointwise loop into that of a sum that it has come to before.  For 2.11 to 2.15; can
    go with ``compile_for_any_length``.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    late: dict[torch.fx.Node, None] = {}
    for node in gm.graph.nodes:
        if node.target in _SUMS or any(operand in late for operand in node.all_input_nodes):
            late[node] = None
    for node in late:
        if node.op != "output":
            gm.graph.output_node().prepend(node)
    gm.recompile()
    compiled = compile_fx_inner(gm, inputs, **options)
    _let_go_of_the_lock(compiled)
    return compiled


def _let_go_of_the_lock(compiled: Any) -> None:
    """Have the C++ kernels of a graph that Inductor has compiled run without Python's lock.

    Its own bindings hold it.  A kernel is ``extern "C"``, so ``ctypes`` can call it in the same
    library, and that lets go of the lock.  Python's threads then run beside a kernel, which takes
    milliseconds.  For 2.11 to 2.15; can go when Inductor's bindings release the lock.
    """
    runner = getattr(compiled, "compiled_fn_runner", None)
    call = runner.call if runner is not None else compiled.current_callable
    names = getattr(call, "__func__", call).__globals__
    for name, kernel in list(names.items()):
        library = getattr(getattr(kernel, "__self__", None), "__file__", None)
        if library is not None and getattr(kernel, "__name__", "") == "kernel":
            names[name] = _WithoutLock(kernel, library)


class _WithoutLock:
    """A kernel as Inductor's binding of it: takes tensors, for their memory, and integers."""

    def __init__(self, binding: Callable, library: str) -> None:
        self._binding = binding
        self._kernel = ctypes.CDLL(library).kernel
        self._kernel.restype = None

    def __call__(self, *arguments: Any) -> None:
        if self._kernel.argtypes is None:
            known = {torch.Tensor: ctypes.c_void_p, int: ctypes.c_int64}
            kinds = [known.get(type(argument)) for argument in arguments]
            if None in kinds:  # a float, of a width that only its C++ says
                return self._binding(*arguments)
            self._kernel.argtypes = kinds
        self._kernel(*(a if type(a) is int else a.data_ptr() for a in arguments))
        return None


def _of_any_length(tensor: torch.Tensor, in_rows: bool, fakes: FakeTensorMode) -> torch.Tensor:
    """Stands for tensors like this one, of lengths that are nothing else's and worth threads."""
    sizes = (2**12 + 3, 2**8 + 3)[: tensor.dim()] if in_rows else (2**20 + 3,)[: tensor.dim()]
    example = torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
    return fakes.from_tensor(example, symbolic_context=context)


# For tensors that stand for others: checkpoint/pieces.py.


Subclass = TypeVar("Subclass", bound=torch.Tensor)


def tensor_without_memory(
    kind: type[Subclass], shape: tuple[int, ...], dtype: torch.dtype
) -> Subclass:
    """A tensor of this class, on the CPU, that has a shape and nothing else.

    For 2.11 to 2.15; can go when torch has a public way to make a wrapper subclass.
    """
    return torch.Tensor._make_wrapper_subclass(kind, torch.Size(shape), dtype=dtype)
