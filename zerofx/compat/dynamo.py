"""Dynamo: what it learned while tracing, its cache of programs, errors on their way to users."""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._dynamo.config
import torch._dynamo.exc
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.misc import NewGlobalVariable

AUGMENTED_ASSIGNMENTS = {
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
"""Lists what Python calls for ``x += y`` and its like."""

DATA_ASSIGNMENT = getattr(torch.ops.aten, "shallow_copy_data_", None)
"""Stands for ``p.data = value`` in Dynamo's graph from 2.14 on; up to 2.13 ``set_`` does."""


def count_write_less(tensor: torch.Tensor) -> None:
    """Have autograd take the last write to a tensor for none, as one by ``p.data = value`` is."""
    count = tensor._version - 1
    torch._C._autograd._unsafe_set_version_counter((tensor,), (max(count, 0),))


def why_not_compiled() -> str | None:
    """Return the reason why Dynamo would run a compiled function eagerly now, or None."""
    if torch._C._len_torch_dispatch_stack() > 0:
        mode = torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)
        return f"a dispatch mode ({type(mode).__name__}) is active"
    stance = torch._dynamo.eval_frame._stance.stance
    if stance not in ("default", "fail_on_recompile"):
        return f"torch.compiler.set_stance({stance!r}) is in force"
    return None


def saves_through_hooks() -> bool:
    """Return whether ``saved_tensors_hooks`` are in force.  For 2.11 to 2.15."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _translator_of_function() -> Any:
    """Dynamo's translator of the function being compiled, and not of one it calls."""
    translator = InstructionTranslator.current_tx()
    return getattr(translator.output, "root_tx", translator)


def locals_being_compiled() -> dict[str, Any]:
    """Local and closure variables of the function that Dynamo is compiling; globals last."""
    root = _translator_of_function()
    return {**dict(root.f_globals), **dict(root.f_locals)}


def code_being_compiled() -> CodeType:
    """The code object of the function that Dynamo is compiling."""
    return _translator_of_function().f_code


def arguments_being_compiled() -> tuple[str, ...]:
    """How Dynamo's expressions for what the function being compiled is called with begin."""
    code = code_being_compiled()
    has_rest = bool(code.co_flags & inspect.CO_VARARGS) + bool(
        code.co_flags & inspect.CO_VARKEYWORDS
    )
    number = code.co_argcount + code.co_kwonlyargcount + has_rest
    return tuple(f"L['{name}']" for name in code.co_varnames[:number] if name != "self")


def arguments_of_call() -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return what the compiled function is called with whose context is being entered.

    Dynamo hands it to no backend; its wrapper (2.11 to 2.15) has it as ``args`` and ``kwargs``.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch._dynamo.eval_frame.__file__:
            known = frame.f_locals
            if "args" in known and "kwargs" in known:
                return known["args"], known["kwargs"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def compiled_callable(function: Any) -> Any:
    """Return what ``torch.compile`` has made of a function or a module; None if nothing.

    Of a module that was compiled in place (``module.compile()``), what its calls go to.
    """
    if isinstance(function, torch._dynamo.eval_frame.OptimizedModule):
        return function
    if isinstance(function, torch.nn.Module):
        return getattr(function, "_compiled_call_impl", None)
    return function if hasattr(function, "_torchdynamo_orig_callable") else None


def recompile_limit() -> int:
    """Return the most programs that torch compiles of one function, outside our tracing."""
    return torch._dynamo.config.recompile_limit


def forget_unless_in_use(code: CodeType) -> None:
    """Empty Dynamo's cache for a function of which it has only entries that it has invalidated.

    Call it while the function is not being called.  With a compilation under way, in whatever
    thread, nothing is done.  Can go when Dynamo removes what it invalidates.
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
    """Dynamo's expression for a graph input, such as ``L['model']._modules['head']``."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    return getattr(source, "name", placeholder.name)


def is_number(placeholder: torch.fx.Node) -> bool:
    """Return whether a graph input stands for a number, of NumPy's or drawn, as a tensor."""
    argument = placeholder.meta.get("grapharg")
    example = placeholder.meta.get("example_value")
    is_tensor = isinstance(example, torch.Tensor) and example.dim() == 0
    return is_tensor and bool(getattr(argument, "pass_arg_as_tensor", False))


def modified_objects() -> dict[int, set[str]]:
    """The objects that the function being compiled writes to, by id; which attributes of each."""
    effects = InstructionTranslator.current_tx().output.side_effects
    return {
        address: set(effects.store_attr_mutations.get(variable, ()))
        for address, variable in effects.id_to_variable.items()
        if effects.is_modified(variable)
    }


def owners_looked_into(attribute: str) -> list[Any]:
    """The objects whose attribute the path of the function being compiled depends on.

    Dynamo's guards name them by expressions in the function's scopes; None is one whose expression
    cannot be told here, being over what only the guards' own scope has.
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
            except Exception:
                found.append(None)
    return found


def _ID_MATCH(builder: GuardBuilder, guard: Any) -> None:  # noqa: N802 - guards go by this name
    """``GuardBuilder.ID_MATCH``, which on 2.11 prints the object: freed memory would be read."""
    with mock.patch.object(torch.nn.Parameter, "__repr__", object.__repr__):
        builder.ID_MATCH(guard)


def guard_identity(placeholder: torch.fx.Node) -> None:
    """Let the code being compiled hold only for this very object, and not for one like it.

    Dynamo guards a module's parameters by shape and dtype.
    """
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is not None:
        install_guard(source.make_guard(_ID_MATCH))


def gradient_assignments() -> dict[str, str]:
    """Graph results that the function being compiled stores as a tensor's ``.grad``.

    Returns the name of the result's node -> the name of the graph input it belongs to.
    Dynamo's record of pending attribute writes is the only place that knows.
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


def attribute_assignments() -> dict[str, str]:
    """Graph results that the function being compiled stores in an attribute or a global variable.

    Returns Dynamo's expression for where -> the name of the result's node.
    """
    effects = InstructionTranslator.current_tx().output.side_effects
    found = {}
    for owner, attributes in effects.store_attr_mutations.items():
        try:
            base = owner.source.name
        except (AttributeError, NotImplementedError):
            continue  # an object that the function makes
        for attribute, value in attributes.items():
            if isinstance(value, TensorVariable):
                is_global = isinstance(owner, NewGlobalVariable)
                found[base if is_global else f"{base}.{attribute}"] = value.as_proxy().node.name
    return found


def pass_through_dynamo(error: Exception) -> Exception:
    """An error of the same type that Dynamo raises to the user as it is.

    Dynamo wraps what a backend raises in ``BackendCompilerFailed``, save its own
    ``ShortenTraceback``: the error returned is both.
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


def explain_refusal(explained: Callable[[str], str], recompile_limit: str) -> None:
    """Rewrite Dynamo's refusal on its way to the user, if there is one; or add words to it."""
    error = sys.exc_info()[1]
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        if recompile_limit not in getattr(error, "__notes__", ()):
            error.add_note(recompile_limit)
    elif isinstance(error, torch._dynamo.exc.Unsupported):
        error.args = (explained(str(error)), *error.args[1:])
