"""A training script run as one of many ranks, up to its first compiled call."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import inspect
import linecache
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing

from zerofx.backend import CompiledFunction, Stop, zero
from zerofx.capture.step import CapturedStep
from zerofx.checkpoint.barrier import Saving
from zerofx.compat.fake_ranks import init_fake_group
from zerofx.deferred.block import add_mode, never_made
from zerofx.deferred.ledger import LEDGER
from zerofx.devices import Device
from zerofx.errors import CommandError
from zerofx.options import environment
from zerofx.planning.loading import headers_alone, in_all_modules
from zerofx.planning.saving import nothing_written
from zerofx.planning.stand_in import answering_for, standing_in
from zerofx.planning.stopped import Stopped, StoppedCall, stop


def call_of(
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    ranks_of_node: int,
    device: Device | None = None,
    *,
    is_module: bool = False,
) -> StoppedCall:
    """Run a script until it calls a zero-compiled function; return that call.

    It runs as rank 0 of so many, with the environment that torchrun would set.  A process group
    that it begins has no other ranks.  Parameters, and what is computed of them, are recorded and
    not made; no checkpoint is written, and what it registers with ``atexit`` never runs.  All else
    that it does it does.  With a ``device`` torch says that the machine has such ones, and the call
    is as if made on one.  If it ``is_module``, ``script`` is a module's name, as ``python -m``
    takes it.

    Raises: CommandError if it never gets there, or reads values of parameters, or trains, before.
    """
    if not script.is_file() and not is_module:
        raise CommandError(
            f"{script} is no file: give the training script, as to torchrun, or a module behind -m"
        )
    folder = Path.cwd() if is_module else script.resolve().parent
    found: list[StoppedCall] = []
    refused: list[str] = []
    deferring: list[str] = []

    def refuse(what: str, why: str = _MOVE) -> NoReturn:
        refused.append(f"{_line_of(script)}: {what}, and a plan {why}")
        raise Refused(refused[-1])

    def start_processes(*_args: Any, **_options: Any) -> NoReturn:
        refuse("it starts processes of its own", _ONE_RANK)

    def note(function: CompiledFunction, step: CapturedStep) -> NoReturn:
        try:
            stop(function, step)
        except Stopped as stopped:
            found.append(stopped.call)
            LEDGER.on_read = lambda _memory: refuse("it reads values after its first compiled call")
            raise

    @contextlib.contextmanager
    def deferred_init(**_options: Any) -> Iterator[None]:
        deferring.append("deferred_init")
        yield

    words = f"{script} has come to its end and called no zero-compiled function."
    try:
        with contextlib.ExitStack() as patches:
            patches.enter_context(_left_as_it_was(folder))
            instead = {
                torch.multiprocessing.start_processes: start_processes,
                atexit.register: _dropping_own(folder),
            }
            patches.enter_context(in_all_modules(instead))
            patches.enter_context(_as_rank_0(ranks, ranks_of_node, note))
            patches.enter_context(mock.patch.object(sys, "argv", [str(script), *arguments]))
            patches.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
            package = sys.modules["zerofx"]
            patches.enter_context(mock.patch.object(package, "deferred_init", deferred_init))
            if device is not None:
                patches.enter_context(standing_in(device))
            patches.enter_context(headers_alone(is_elsewhere=device is not None))
            patches.enter_context(nothing_written())
            patches.enter_context(never_made(refuse))
            if device is not None:
                add_mode(answering_for(device, ranks_of_node))
            if is_module:
                runpy.run_module(str(script), run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        raise
    except SystemExit as ended:
        words = f"{script} has ended with {ended.code!r} before it called a zero-compiled function."
    except BaseException:
        if not found and not refused:  # else it is of what the script does at its end
            raise
    if not found and refused:
        raise CommandError(refused[0])
    if not found:
        raise CommandError(f"{words} {_NEEDED}")
    call = replace(found[0], makes_whole=not deferring)
    return call if device is None else call.on_device(device.kind)


_NEEDED = (
    'A plan is of the first call of what torch.compile(step, backend="zero") returned: see that '
    "the script gets there with these arguments."
)


_MOVE = (
    'never makes parameters. Do it in the function that torch.compile(step, backend="zero") is '
    "given or behind its first call, where a plan ends, or leave it out when it is planned."
)


_ONE_RANK = (
    "is of one rank, in this process. Give a script that trains as torchrun starts it: with RANK "
    "and WORLD_SIZE in its environment."
)


class Refused(BaseException):
    """Ends a script that does what a plan cannot; no ``except Exception`` holds it up."""


def _line_of(script: Path) -> str:
    """Return where a script is: its file's name, the line and what is written there."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__":
            path = frame.f_code.co_filename
            line = linecache.getline(path, frame.f_lineno).strip()
            return f"{Path(path).name}, line {frame.f_lineno}, {line!r}"
        frame = frame.f_back
    return script.name


def _nothing(*_args: Any, **_options: Any) -> None:
    return None


def _no_extra(*_args: Any, **_options: Any) -> dict[str, Any]:
    return {}


_INSTEAD: dict[str, Callable[..., Any]] = {
    "materialize": _nothing,
    "resume": _no_extra,
    "load": _no_extra,
    "load_safetensors": _nothing,
    "latest": _nothing,
    "save": lambda path, *_args, **_options: Saving(Path(path)),
    "export_safetensors": lambda path, *_args, **_options: Path(path),
}
"""The functions that a script is given in place of those of ``zerofx``: nothing read or written."""


class _Done:
    """Stands for the work of a collective that has been done when it returned."""

    def wait(self, *_args: Any, **_options: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future


def _with_work(
    collective: Callable[..., Any], instead: Callable[[Any, Any], None]
) -> Callable[..., _Done | None]:
    """Return what a collective is ``instead``, as a function of the first two arguments.

    It returns its work if it is called to return at once.
    """
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*args: Any, **options: Any) -> _Done | None:
        if torch.compiler.is_compiling():  # the step has a collective of its own
            return collective(*args, **options)
        given = signature.bind(*args, **options)
        given.apply_defaults()
        one, other, *_ = given.arguments.values()
        instead(one, other)
        return _Done() if given.arguments["async_op"] else None

    return call


def _collectives() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return torch's collectives, and those for a script: all ranks give what this one gives.

    A sum over ranks is the one that the fake group makes: what this rank has given.
    """

    def all_gather_object(object_list: list[Any], obj: Any, *_args: Any, **_options: Any) -> None:
        object_list[:] = [copy.deepcopy(obj) for _ in object_list]

    def gather_object(
        obj: Any, object_gather_list: list[Any] | None = None, *_args: Any, **_options: Any
    ) -> None:
        if object_gather_list is not None:
            all_gather_object(object_gather_list, obj)

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *_args: Any,
        **_options: Any,
    ) -> None:
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[0]

    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        for output in outputs:
            output.copy_(tensor)

    def gather(tensor: torch.Tensor, outputs: list[torch.Tensor] | None) -> None:
        all_gather(outputs or [], tensor)

    def scatter(output: torch.Tensor, tensors: list[torch.Tensor] | None) -> None:
        if tensors:
            output.copy_(tensors[0])

    def all_gather_single(output: torch.Tensor, tensor: torch.Tensor) -> None:
        if tensor.numel():
            output.view(-1, *tensor.shape).copy_(tensor)

    def reduce_scatter_single(output: torch.Tensor, tensor: torch.Tensor) -> None:
        if output.numel():
            output.copy_(tensor.reshape(-1, *output.shape)[0])

    new_group = dist.new_group

    def new_fake_group(
        ranks: Any = None,
        timeout: Any = None,
        _backend: Any = None,
        _pg_options: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        for name in ("backend", "pg_options"):  # its ranks are not there either
            options.pop(name, None)
        return new_group(ranks, timeout, None, None, *args, **options)

    of_tensors: dict[str, Callable[[Any, Any], None]] = {
        **dict.fromkeys(("all_reduce", "reduce", "broadcast"), _nothing),
        "all_gather": all_gather,
        "all_gather_into_tensor": all_gather_single,
        "all_gather_single": all_gather_single,  # from torch 2.13 on
        "gather": gather,
        "scatter": scatter,
        "reduce_scatter": scatter,
        "reduce_scatter_tensor": reduce_scatter_single,
        "reduce_scatter_single": reduce_scatter_single,  # from torch 2.13 on
    }
    instead = {getattr(dist, name, None): of for name, of in of_tensors.items()}
    return {
        **{one: _with_work(one, of) for one, of in instead.items() if one is not None},
        dist.broadcast_object_list: lambda *_args, **_options: None,
        dist.all_gather_object: all_gather_object,
        dist.gather_object: gather_object,
        dist.scatter_object_list: scatter_object_list,
        dist.monitored_barrier: lambda *_args, **_options: None,
        dist.new_group: new_fake_group,
    }


@contextlib.contextmanager
def _left_as_it_was(folder: Path) -> Iterator[None]:
    """Forget a script's own modules, for another run to import; restore folder and defaults."""
    before, cwd = set(sys.modules), Path.cwd()
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        yield
    finally:
        os.chdir(cwd)
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device.type == "cpu" else device)
        for name in set(sys.modules) - before:
            is_own = _is_own(getattr(sys.modules[name], "__file__", None), folder)
            if is_own and name.partition(".")[0] not in before:
                del sys.modules[name]


def _is_own(file: str | None, folder: Path) -> bool:
    """Return whether a module's file is one of the script's, which are in its folder."""
    place = Path(file or "")
    return place.is_relative_to(folder) and "site-packages" not in place.parts


def _dropping_own(folder: Path) -> Callable[..., Any]:
    """Return ``atexit.register`` that drops what the script registers: it would run unplanned.

    What libraries register, to end threads and processes of theirs, stays.
    """
    register: Callable[..., Any] = atexit.register

    @functools.wraps(register)
    def register_of_libraries(func, /, *args, **options):
        of = sys._getframe(1).f_globals
        if of.get("__name__") == "__main__" or _is_own(of.get("__file__"), folder):
            return func
        return register(func, *args, **options)

    return register_of_libraries


@contextlib.contextmanager
def _as_rank_0(ranks: int, ranks_of_node: int, on_step: Stop) -> Iterator[None]:
    """Let a script see itself as rank 0 under torchrun, and stop it at its first compiled call."""
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks_of_node),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }

    def init_process_group(*_args: Any, **_kwargs: Any) -> None:
        with mock.patch.object(dist, "init_process_group", original):
            init_fake_group(0, ranks)

    original, package = dist.init_process_group, sys.modules["zerofx"]
    zero.stop = on_step
    try:
        with contextlib.ExitStack() as patches:
            patch = patches.enter_context
            patch(mock.patch.dict(environment(), variables))
            patch(in_all_modules({original: init_process_group, **_collectives()}))
            for name, instead in _INSTEAD.items():
                patch(mock.patch.object(package, name, instead))
            yield
    finally:
        zero.stop = None
        if dist.is_initialized() and dist.get_backend() == "fake":
            dist.destroy_process_group()
