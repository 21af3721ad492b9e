"""Dynamo's tracing of whole steps: the patches that hold while one of our functions is called."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._dynamo.callback
import torch._dynamo.config
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._dynamo.variables import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import CONSTANT_VARIABLE_NONE, ConstantVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from zerofx.compat.aot import is_traced
from zerofx.compat.dynamo import AUGMENTED_ASSIGNMENTS, pass_through_dynamo
from zerofx.errors import StepError


def forward_call_context() -> None:
    """Let a backend put a context around every call of the functions it compiles.

    Dynamo reads ``backend_ctx_ctor`` off the backend, but ``torch.compile`` hides ours in a
    ``_TorchCompileWrapper`` inside a ``WrapBackendDebug``.  A backend without ``call_context``
    is left as it is.
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
    """The innermost backend that a Dynamo translator compiles for."""
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


Patch = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def whole_step_tracing(
    backend: Any,
    substitutes: Substitutes,
    met: Callable[..., Any] = lambda value, *_: value,
    begins: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Make Dynamo hand over forward, backward and update as one graph, for ``backend`` only.

    While the context is open, and only while Dynamo is compiling in it: ``loss.backward()`` is
    traced (``trace_autograd_ops``), the given methods of optimizers and scalers are traced from
    their substitutes, a loss may be returned undetached, log calls are left out, and a graph
    break is an error.  Everything is put back when a compilation ends, so that other backends see
    torch as it is.  ``met`` is called with modules that are called and the names of arguments, and
    returns the modules to call in their place; and with optimizers whose own methods are traced.
    What it raises goes to the user.  ``begins`` is called when a compilation begins.
    """
    handler = torch._dynamo.callback.callback_handler
    undo: list[contextlib.ExitStack] = []

    thread = threading.get_ident()

    def on_start(_args: Any) -> None:
        if threading.get_ident() != thread:
            return  # another thread's compilation, of a function that may not be ours
        begins()
        stack = contextlib.ExitStack()
        undo.append(stack)  # first: one that raises leaves what has been entered to be put back
        stack.enter_context(
            torch._dynamo.config.patch(
                trace_autograd_ops=True,
                allow_rnn=True,
                skip_nnmodule_hook_guards=False,  # a hook that is added later has to run
                ignore_logging_functions=_logging_functions(),
                side_effect_replay_policy="info" if _is_told_of_side_effects() else "silent",
            )
        )
        for patch in (
            _substituting(OptimizerVariable, backend, substitutes, met),
            _substituting(UserDefinedObjectVariable, backend, substitutes, met),
            _seeing_modules(backend, met),
            _undetached_outputs(backend),
            _own_none(),
            _modules_of_classes(),
            _gradients_of_subclasses(),
            _own_augmented_assignment(),
            _backward_past_modes(),
            _no_gradient_hooks_on_inputs(backend),
        ):
            stack.enter_context(patch)

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


def _is_told_of_side_effects() -> bool:
    """Return whether somebody reads what a function's writes to attributes come from.

    Each costs a walk up the stack: a fifteenth of what 24 layers take to be traced.
    """
    log = logging.getLogger("torch._dynamo.side_effects.__side_effects")
    return log.isEnabledFor(logging.DEBUG) or is_traced()


def _logging_functions() -> set[Callable[..., Any]]:
    """Return the methods of loggers: models warn in forward, and that is not worth a refusal.

    Libraries add methods of their own (``warning_once``) to ``logging.Logger``.
    """
    names = ("debug", "info", "warning", "error", "critical", "exception", "log")
    return {
        function
        for name, function in vars(logging.Logger).items()
        if name in names or name.endswith("_once")
    }


def _substituting(
    variable_class: type, backend: Any, substitutes: Substitutes, met: Callable[..., Any]
) -> Patch:
    """Answer attribute look-ups of the substituted methods with the substitutes.

    ``var_getattr`` up to 2.14, ``tp_getattro_impl`` from 2.15.  Class-level wrappers of the methods
    themselves fail once a scheduler has wrapped the instance's ``step``.

    Dynamo forgets what a function sets on an optimizer, so optimizers are made known to its side
    effects, as its builder does with other objects.
    """
    name = "tp_getattro_impl" if hasattr(variable_class, "tp_getattro_impl") else "var_getattr"
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

    return mock.patch.object(variable_class, name, look_up)


def _modules_of_classes() -> Patch:
    """Answer ``type(parameter).__module__.startswith(...)``, as peft asks.

    For torch 2.11 to 2.15, which know where a class is defined of others than torch's alone.
    """
    original = GetAttrVariable.call_method

    def call_method(self, tx, name, args, kwargs):
        of = getattr(self.obj, "value", None)
        if self.name == "__module__" and isinstance(of, type):
            return ConstantVariable.create(of.__module__).call_method(tx, name, args, kwargs)
        return original(self, tx, name, args, kwargs)

    return mock.patch.object(GetAttrVariable, "call_method", call_method)


def _gradients_of_subclasses() -> Patch:
    """Answer ``p.grad`` of a parameter that has a class of its own, as bitsandbytes' have.

    For torch 2.11 to 2.15, which refuse it of all subclasses of tensors.
    """
    name = "var_getattr" if hasattr(TensorVariable, "var_getattr") else "tp_getattro_impl"
    original = getattr(TensorWithTFOverrideVariable, name)

    def look_up(self, tx, attribute):
        if attribute == "grad" and issubclass(self.class_type, torch.nn.Parameter):
            return getattr(TensorVariable, name)(self, tx, attribute)
        return original(self, tx, attribute)

    return mock.patch.object(TensorWithTFOverrideVariable, name, look_up)


def _has_method_of(value: Any, owner: type | str, attribute: str) -> bool:
    """Return whether an object is an ``owner``, or has this method from the class of that name."""
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
    nor what anything but a scheduler has put in its place.
    """
    if isinstance(owner, str):
        return substitute
    if owner is not torch.optim.Optimizer or attribute != "step":
        is_own = attribute in vars(value)
        is_overridden = is_own or getattr(type(value), attribute) is not getattr(owner, attribute)
        return None if is_overridden else substitute
    own = type(value).step
    instead = vars(value).get("step", own)
    is_scheduled = hasattr(instead, "_wrapped_by_lr_sched")
    if "param_groups" not in vars(value):
        return own if is_scheduled else None
    return substitute if is_scheduled or getattr(instead, "__func__", instead) is own else None


def _telling(met: Callable[..., Any], *values: Any) -> Any:
    """Call ``met``, and have Dynamo let through what it raises."""
    try:
        return met(*values)
    except Exception as error:
        raise pass_through_dynamo(error) from None


def _seeing_modules(backend: Any, met: Callable[..., Any]) -> Patch:
    """Call in the place of each module that is called what ``met`` returns, for ``backend``.

    That is the module, or the one that it has as ``module``.
    """
    original = UnspecializedNNModuleVariable.call_function

    def call_function(self, tx, args, kwargs):
        if backend_in_use(tx) is backend and _telling(met, self.value, kwargs) is not self.value:
            return self.var_getattr(tx, "module").call_function(tx, args, kwargs)
        return original(self, tx, args, kwargs)

    return mock.patch.object(UnspecializedNNModuleVariable, "call_function", call_function)


def _own_none() -> Patch:
    """Give each ``p.grad`` that is None a constant of its own.

    Dynamo writes where ``p.grad`` came from onto the one None that all share; the end of the
    function then restores other parameters' gradients from there, and a later function that returns
    None what it finds there.  For 2.11 to 2.15; ``var_getattr`` up to 2.14.
    """
    name = "var_getattr" if "var_getattr" in vars(TensorVariable) else "tp_getattro_impl"
    original = getattr(TensorVariable, name)

    def look_up(self, tx, attribute):
        result = original(self, tx, attribute)
        if result is CONSTANT_VARIABLE_NONE:
            source, result.source = result.source, None
            return ConstantVariable(None, source=source)
        return result

    return mock.patch.object(TensorVariable, name, look_up)


def _own_augmented_assignment() -> Patch:
    """Let ``p -= x`` leave ``p`` the input that it is.

    Dynamo takes its result for another tensor, and loses what is then stored as its ``grad``.
    """
    original = BuiltinVariable.call_function

    def call_function(self, tx, args, kwargs):
        result = original(self, tx, args, kwargs)
        if self.fn in AUGMENTED_ASSIGNMENTS and type(result) is TensorVariable:
            target = args[0].realize()
            if (
                type(target) is TensorVariable
                and target.as_proxy().node.op == "placeholder"
                and target.requires_grad == result.requires_grad
            ):
                return target
        return result

    return mock.patch.object(BuiltinVariable, "call_function", call_function)


def _backward_past_modes() -> Patch:
    """Trace ``loss.backward()`` though a torch-function mode is on, as for a default device.

    Dynamo then traces Python's ``Tensor.backward``, which it refuses, and forgets its own rule.
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

    return mock.patch.object(TensorVariable, "call_method", call_method)


def _no_gradient_hooks_on_inputs(backend: Any) -> Patch:
    """Refuse a hook that a function adds to the gradient of what it is given, as parameters are.

    Dynamo adds it behind the graph, which has the backward pass in it, and forgets one that the
    function removes again.  Seen in torch 2.13; a version without this method is left alone.
    """
    original = getattr(TensorVariable, "_method_register_hook", None)
    if original is None:
        return contextlib.nullcontext()

    def register(self, tx, name, *args, **kwargs):
        if self.source and backend_in_use(tx) is backend:
            line = tx.frame_summary()
            raise pass_through_dynamo(
                StepError(
                    f"{name} on a parameter, or on what the step is given, would not run inside "
                    "the compiled step. Do the hook's work on p.grad, after backward() and before "
                    f"the update.\n  at {line.filename}:{line.lineno}: {line.line}"
                )
            )
        return original(self, tx, name, *args, **kwargs)

    return mock.patch.object(TensorVariable, "_method_register_hook", register)


@contextlib.contextmanager
def _undetached_outputs(backend: Any) -> Iterator[None]:
    """Allow ``return loss``: capture detaches the outputs of a step with a backward.

    So it does not matter either that one depends on what has been given ``requires_grad_()``, as
    models with frozen embeddings have it for activation checkpointing; from 2.13 torch looks.
    """

    def unless_detached(name: str) -> Patch:
        original = getattr(OutputGraph, name)

        def validate(self, rv, tx):
            if backend_in_use(tx) is not backend or not self.autograd_grad_consumed_grad_fns:
                return original(self, rv, tx)
            return None

        return mock.patch.object(OutputGraph, name, validate)

    names = "_validate_outputs_safe_for_autograd_nodes _check_requires_grad_intermediate_outputs"
    with contextlib.ExitStack() as stack:
        for name in names.split():
            if hasattr(OutputGraph, name):
                stack.enter_context(unless_detached(name))
        yield
