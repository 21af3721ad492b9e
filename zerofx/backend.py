"""The backend ``zero``: compiled functions, their options and ranks, and calls of them.

From a step to what runs: ``capture`` -> ``program`` (passes -> agree -> lower) -> a callable.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import logging
import os
import sys
import threading
import time
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import fx

from zerofx import compat
from zerofx.accelerator import free_bytes, is_accelerator
from zerofx.capture import substitutes
from zerofx.capture.checks import refuse_reads_of_states
from zerofx.capture.refusals import explained
from zerofx.capture.step import CapturedStep, StepCapture
from zerofx.compiler.best import Choice, Search, agreed, first_found, searches
from zerofx.compiler.choices import choose, stopped
from zerofx.compiler.forecast import Ranks
from zerofx.compiler.program import Program
from zerofx.compiler.progress import FirstCall
from zerofx.compiler.rewrite import Rewritten
from zerofx.deferred.block import leave_block
from zerofx.errors import BudgetError, GraphError, StepError
from zerofx.garbage import without_collections
from zerofx.hardware import NOMINAL, Hardware
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import KeptGathered
from zerofx.lower.at_once import AtOnce, Record, changes_replicas
from zerofx.lower.compile_process import CompileProcess
from zerofx.lower.regions import num_cores
from zerofx.options import Options, environment, named, ranks_of_machine, refuse_mode
from zerofx.report.folder import DumpFolder, claim, run_of_this_process
from zerofx.runtime.comm.agreement import Agreement, AgreementError
from zerofx.runtime.comm.communication import Communicator, default_group
from zerofx.runtime.comm.measure import measured
from zerofx.runtime.comm.peer_memory import PeerMemory
from zerofx.runtime.optimizer.delayed import DelayedUpdates
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.copies import Copies
from zerofx.runtime.turns import NoDataAnywhere, Turns
from zerofx.wrappers import WrappersMet

logger = logging.getLogger("zerofx")

AGREEMENT_TIMEOUT_S = 300.0
"""The time that a rank waits for the others to have compiled the same schedule."""

AT_ONCE_TIMEOUT_S = 1800.0
"""The time that a rank waits for the others to begin a step, as long as gloo waits in one."""

PAUSE = 2.0
"""How long a step that runs operator by operator waits, times the fastest one, where ranks have no
second core each: what compiles needs the same one, and a step is to take no more than three."""

RAN_EAGERLY = (
    "torch has compiled nothing of this function and run it eagerly: it is marked with "
    "torch.compiler.disable, or does nothing with tensors. Gradients were not averaged over the "
    "ranks, and what it has updated is this rank's own. Remove the mark, and start again."
)

SAVES_THROUGH_HOOKS = (
    "saved_tensors_hooks are in force (save_on_cpu is one), and forward and backward are one "
    "program here, which saves nothing through them. Call the step outside of them; to keep less "
    "on the device, use torch.utils.checkpoint in the model, or options={'offload': 'activations'}."
)

RECOMPILES = (
    "Torch compiles a program for each value of what it takes for constant: a string, a flag, an "
    "object that the step refers to, such as an optimizer. Pass a number that changes as a tensor, "
    "keep other values out of the step, and make objects once, before the loop. "
    'TORCH_LOGS="recompiles" says what has changed. If it has few values, raise '
    "torch._dynamo.config.recompile_limit."
)

RECOMPILE_LIMIT = (
    "The recompile_limit given to torch.compile is for the programs of all models. Leave it out: "
    f"then each model has torch._dynamo.config.recompile_limit of its own. {RECOMPILES}"
)

NO_CALL = (
    "a rank without data goes through the step's program with zero weight, and has none before its "
    "first call: call the step once before, or give any batch of the right form, "
    "zerofx.no_data(step, batch)."
)

OUTGROWN = (
    "The ranks compare what fits memory_budget: at the first call, and whenever a batch has become "
    "so large that on this rank it no longer does. Then all ranks must call with batches as large: "
    "begin with the largest, or give a larger memory_budget, or none."
)


class CompiledFunction:
    """One ``torch.compile(step, backend="zero")``: its options, its ranks, its programs."""

    def __init__(self, backend: ZeroBackend, arguments: Mapping[str, Any]):
        refuse_mode(arguments.get("mode"))
        self.backend = backend
        # Ranks call torch.compile alike, even if one of them then fails to compile.
        self.number = next(backend.numbers)
        self.user_options = arguments.get("options")
        # What the user wrote is checked where it is written.
        choose(self.user_options, {}, is_complete=False)
        self.options: Options | None = None
        self._compiles_for_cpu = False  # with the options, regions before they run
        self.compiles_beside: CompileProcess | None = None  # asked ahead of the first to need it
        self.communicator: Communicator  # found with the options
        self.agreement: Agreement
        self.code: types.CodeType | None = None
        self.programs: list[Program] = []  # those in use, and what was dropped since the last
        self.num_programs = 0
        self.kept_gathered: dict[tuple[str, ...], KeptGathered] = {}
        self.why_not_sharded = ""  # of a step whose stage nobody has chosen yet
        self.attempt: int | None = None  # which one offload="auto" has come to
        self.choice: Choice | None = None  # what plan="auto" has come to
        self.chosen_from: tuple[Options, int]  # then what was given, and the limit
        self.chose_for_updates = False
        # By the program's digest, and whether all ranks call it; with where they meet meanwhile.
        self.starting: dict[tuple[int, bool], tuple[AtOnce, Agreement]] = {}
        self.record: Record | None = None  # of these
        self.first_call = FirstCall(0.0)  # or the last call that has compiled
        self.copies = Copies(REGISTRY.host)
        self.delayed = DelayedUpdates()
        self.called_with: tuple[tuple[Any, ...], dict[str, Any]] | None = (
            None  # if it may lack data
        )
        backend.functions.add(self)

    @property
    def agreement_timeout_s(self) -> float:
        return AGREEMENT_TIMEOUT_S

    @contextlib.contextmanager
    def call_context(self) -> Iterator[None]:
        """Surround one call: parameters are plain, and Dynamo traces whole steps."""
        if getattr(self.backend.active, "is_asking", False):
            raise AskedError(self)
        if self.backend.stop is not None:
            leave_block()
        reason = compat.dynamo.why_not_compiled()
        if reason is not None:
            raise StepError(
                f"{reason}, so torch would run this function eagerly, on shards and without "
                "averaging gradients. Call it outside of that; zerofx.explain(step) counts what "
                "a step does."
            )
        if compat.dynamo.saves_through_hooks():
            raise StepError(SAVES_THROUGH_HOOKS)
        self._refuse_late_group()
        called_s = time.perf_counter()

        def begins() -> None:
            self.first_call.end()  # its step, as it runs, calls what is compiled too
            self.first_call = FirstCall(called_s)
            self.first_call.show()
            call.enter_context(without_collections())  # until what is dropped is gone

        if self.options is None or self.options.may_lack_data:
            arguments = compat.dynamo.arguments_of_call()
            self.calling_with = arguments and copied_containers(arguments)
        wrappers = WrappersMet()
        previous = self.backend.function
        if previous is None:
            self.backend.active.recompile_limit = compat.dynamo.recompile_limit()
        handled = sys.exc_info()[1]  # by who calls, if it does so
        self.backend.active.has_run = False
        if self.backend.dropped:
            REGISTRY.while_idle(self.backend.forget_dropped)
        REGISTRY.enter_call()
        call = contextlib.ExitStack()
        try:
            self.backend.active.function = self
            with compat.tracing.whole_step_tracing(
                self.backend, substitutes.SUBSTITUTES, wrappers, begins
            ):
                yield
            # Dynamo leaves a context as if nothing had been raised, whatever has.
            if not self.backend.active.has_run and sys.exc_info()[1] is handled:
                raise StepError(RAN_EAGERLY)
        finally:
            call.close()
            self.first_call.end()
            REGISTRY.exit_call()
            self.backend.active.function = previous
            compat.dynamo.explain_refusal(
                lambda message: explained(message, wrappers.words()), RECOMPILE_LIMIT
            )

    def _refuse_late_group(self) -> None:
        """Refuse to train alone, as at the first call, beside ranks that have met since."""
        of = self.options
        if of is None or of.process_group is not None or self.communicator.group is not None:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise StepError(
                f"{self.name} was first called before init_process_group, so it trains alone, and "
                f"now there are {dist.get_world_size()} ranks. Call init_process_group before the "
                "first compiled call; or here zerofx.unshard(model, optimizer), and torch.compile "
                "the function again."
            )

    def called(self, options: Options) -> None:
        """Note that a call has gone through: a rank without data may do so again."""
        if options.may_lack_data:
            self.called_with = self.calling_with
        self.calling_with = None

    def without_data(self, step: Callable, given: Arguments | None) -> int:
        """Go through a call and add nothing; return how many ranks have data.

        It is called with what is ``given``, or with what it was called with before.

        Raises: StepError if it was not, or data is never lacking by what the options say.
        """
        options = self.options or choose(self.user_options)
        if not options.may_lack_data:
            raise StepError(
                "a rank without data is not expected: give the compiled step the option "
                'uneven=True (ZEROFX_UNEVEN=1), or loss="global", on all ranks.'
            )
        if given is None and self.called_with is not None:
            arguments, by_name = self.called_with
            is_method = inspect.ismethod(step)  # then it was called with its object
            given = arguments[1:] if is_method else arguments, by_name
        if given is None:
            raise StepError(NO_CALL)
        arguments, by_name = copied_containers(given)
        turns = self.backend.turns
        try:
            with turns.without_data():
                step(*arguments, **by_name)
        except NoDataAnywhere:
            return 0
        return turns.ranks_with_data

    def compile(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable:
        """Compile one graph that Dynamo has traced from this function."""
        if self.backend.stop is not None:
            return self._capture_alone(gm, inputs, self.backend.stop)
        devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
        device = max(devices, key=is_accelerator, default=torch.device("cpu"))
        self._first_compilation(device)
        self.first_call.name = self.name
        try:
            communicator = self.communicator
            assert self.options is not None, "read at the first compilation"
            if self.is_to_choose:
                self._check_reads(gm, inputs)
            else:
                refuse_reads_of_states(gm, inputs, self.options.stage)
            if self.choice is None:
                with self.first_call.part("measuring"):
                    self.figures = self._figures(device)
            capture = StepCapture(gm, inputs, communicator.mesh, self.options)
            code = compat.dynamo.code_being_compiled()
            self._refuse_runaway(code, {id(tensor) for tensor in capture.tensors})
            with self.first_call.part("AOTAutograd"):
                compiled = capture.lower(self._run_passes, self._is_kept(), self._warm_up)
            self.programs[-1].given(code, compiled)
            weakref.finalize(compiled, self.backend.dropped.add, code).atexit = False
            return compiled
        except AgreementError:
            raise  # which all ranks have seen
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this one could not compile, wherever they wait for it.

        With ``start="at_once"`` they may do so where a step begins.
        """
        starting = [meeting for start, meeting in self.starting.values() if not start.is_over]
        for meeting in (self.agreement, *starting):
            meeting.fail(f"{type(error).__name__}: {error}")

    def _warm_up(self) -> None:
        """Do, while another rank traces, what regions need to be compiled or taken over."""
        if self._compiles_for_cpu:
            compat.rehearsal.warm_up()
        elif self.compiles_beside is not None:
            compat.inductor.import_inductor()

    def _is_kept(self) -> bool:
        """Return whether programs of earlier starts are taken, and this one's kept for later ones.

        Not while somebody looks at how they come about.
        """
        of = self.options
        assert of is not None
        is_on = of.program_cache and compat.compile_cache.is_kept()
        return is_on and not (of.dump or of.validate or compat.aot.is_traced())

    def _capture_alone(self, gm: fx.GraphModule, inputs: list[Any], stop: Stop) -> Callable:
        """Capture a step without other ranks, for ``stop``, which ends the call."""
        options = choose(self.user_options)
        self.name = compat.dynamo.code_being_compiled().co_name
        self._check_reads(gm, inputs)
        capture = StepCapture(gm, inputs, Mesh(), options)
        return capture.lower(partial(stop, self))

    def _check_reads(self, gm: fx.GraphModule, inputs: list[Any]) -> None:
        """Note why a step cannot be sharded; refuse what no stage allows."""
        refuse_reads_of_states(gm, inputs, stage=0)
        try:
            refuse_reads_of_states(gm, inputs, stage=1)
        except StepError as error:
            self.why_not_sharded = str(error)

    def _figures(self, device: torch.device) -> Hardware:
        """Return the figures to plan with: the user's, or those that the ranks measure."""
        assert self.options is not None
        given = self.options.hardware
        if given is not None:
            return self._ranks(given).figures_for(self.options)
        name = f"the first call of compiled function {self.number}"  # as all ranks count them
        try:
            found = measured(self.communicator, device, name, AGREEMENT_TIMEOUT_S, self._is_kept())
        except AgreementError as error:
            self.agreement.fail(str(error))  # to ranks that were given figures: they wait there
            raise
        return found or NOMINAL

    @property
    def is_to_choose(self) -> bool:
        """Return whether the first program's options are still to be chosen, by ``plan``."""
        return self.options is not None and self.options.plan is not None and self.choice is None

    def _is_to_choose_again(self, step: CapturedStep) -> bool:
        """Return whether what was chosen was for steps that update nothing, and this one does."""
        return bool(self.choice and step.updates) and not self.chose_for_updates

    def _choose(self, step: CapturedStep) -> CapturedStep:
        """Choose the options that are not given, with all ranks; return the step for them.

        What another function over the same parameters has chosen, or was given, is taken over:
        they have their layout.  So is what this one has chosen for a step without updates: that
        leaves open what leaves the device.
        """
        assert self.options is not None
        if self.choice is None:
            limit = self.options.memory_limit
            self.chosen_from = self.options, self._free_bytes(step) if limit is None else limit
        given, limit = self.chosen_from
        by_user = fixed = named(self.user_options)
        bound = {id(tensor) for tensor in step.tensors if REGISTRY.lookup(tensor) is not None}
        before, trains = self.backend.function_of(bound)
        if before is not None and before.options is not None:
            names = {"stage", "bucket_bytes", *(["offload"] if trains else [])}
            fixed |= names
            taken = {
                name: getattr(before.options, name)
                for name in (*names, "outer_stage")
                if name.removeprefix("outer_") not in by_user
            }
            given = replace(given, **taken)
        ranks = self._ranks(self.figures)
        exchange = partial(self.agreement.exchange, timeout_s=AGREEMENT_TIMEOUT_S)
        kept: int | None = None
        if before is not None and before.choice is not None and before.chose_for_updates:
            mine = before.choice.form.states
            kept = max(map(int, exchange(("plan auto beside states",), str(mine).encode())))
        search = partial(
            Search,
            step,
            ranks=ranks,
            limit=limit,
            why_whole=self.why_not_sharded,
            known=REGISTRY.places(step.tensors),
        )
        looked = searches(search, step, given, fixed, ranks, kept)
        try:
            self.choice = first_found(looked, partial(agreed, exchange=exchange))
        except BudgetError as error:
            if before is not None and before is not self and "stage" not in by_user:
                error.add_note(
                    f"Its stage is that of {before.name}, which was called with the same "
                    "parameters before: another may take less. Call the training step first, or "
                    "give the option stage to both."
                )
            raise
        logger.info("%s: plan auto has chosen %s", self.name, self.choice.reasons[0])
        self.options, self.chose_for_updates = self.choice.options, bool(step.updates)
        self.figures = ranks.figures_for(self.options)
        with compat.tensors.real_tensors():  # in which a mesh has its ranks
            self.communicator = Communicator.of(self._group, self.options.stage_outside)
        return step.on(self.communicator.mesh)

    def _ranks(self, figures: Hardware) -> Ranks:
        """Return the function's ranks by all axes that they have, whichever of these count."""
        assert self.options is not None
        mesh: Any = self.options.process_group
        names = getattr(mesh, "mesh_dim_names", None) or ()
        axes = tuple((name, mesh.size(at)) for at, name in enumerate(names))
        return Ranks(axes or Mesh.flat(self.communicator.world_size).axes, figures)

    def _free_bytes(self, step: CapturedStep) -> int:
        """Return what a rank's process may take of its device: the least of what is free on any."""
        devices = {tensor.device for tensor in step.tensors}
        device = max(devices, key=is_accelerator, default=torch.device("cpu"))
        if is_accelerator(device):
            free = free_bytes(device)
        else:
            ranks = ranks_of_machine(self.communicator.world_size)
            free = (REGISTRY.host.available_bytes() or 2**62) // ranks
        lines = ("plan auto within what is free",)
        found = self.agreement.exchange(lines, str(free).encode(), AGREEMENT_TIMEOUT_S)
        return min(map(int, found))

    def _run_passes(self, step: CapturedStep) -> Callable:
        if self.is_to_choose or self._is_to_choose_again(step):
            with self.first_call.part("choosing"):
                step = self._choose(step)
        with self.first_call.part("passes"):
            program = Program(self, step)
        self.num_programs += 1
        self.programs = [*(known for known in self.programs if known.is_in_use), program]
        return program

    def _refuse_runaway(self, code: types.CodeType, parameters: set[int]) -> None:
        """Refuse one more program for parameters that have as many as torch compiles of a function.

        Torch's own count takes all models for one, and what it has dropped for what is in use.

        Raises: StepError.
        """
        limit = self.backend.active.recompile_limit
        if self.backend.programs_of(code, parameters) < limit:
            return
        gc.collect()  # what was dropped may lie in cycles
        if self.backend.programs_of(code, parameters) >= limit:
            raise StepError(
                f"{code.co_name} has {limit} program(s) for the same parameters, and "
                f"torch._dynamo.config.recompile_limit allows no more. {RECOMPILES}"
            )

    def agree_on_kept(self, mine: KeptGathered | None) -> bool:
        """Find what all ranks can keep on the device; return whether this one could keep more.

        How much a budget leaves depends on the batch.  Ranks whose batches have other shapes later
        need no meeting for as long as what was agreed on fits.

        Raises: AgreementError if they choose among different things, or one does not come.
        """
        if mine is None or self.kept_gathered.get(mine.choices) == mine:
            return False
        lines = ("within memory_budget", *mine.choices)
        try:
            values = self.agreement.exchange(lines, mine.packed(), AGREEMENT_TIMEOUT_S)
        except AgreementError as error:
            error.add_note(OUTGROWN)
            raise
        kept = functools.reduce(KeptGathered.also_fitting, map(mine.unpacked, values))
        self.kept_gathered[mine.choices] = kept
        return kept != mine

    def check_start(self) -> None:
        """Find out whether programs can start at once, if they are to.

        Raises: StepError if Inductor has no cache, or for a file that cannot be used.
        """
        assert self.options is not None
        way, _, path = self.options.start.partition(":")
        if way != "compiled" and not compat.compile_cache.is_kept():
            raise StepError(
                f"start={way} takes what another process compiles from Inductor's cache, and "
                "torch._inductor.config turns that off. Turn it on (TORCHINDUCTOR_FX_GRAPH_CACHE=1,"
                " TORCHINDUCTOR_FORCE_DISABLE_CACHES unset), or use start=compiled."
            )
        path = os.path.abspath(path) if path else ""
        if path and path not in self.backend.records:
            self.backend.records[path] = Record(path, is_writer=self.communicator.rank == 0)
        self.record = self.backend.records.get(path)

    def at_once(self, made: Rewritten, communicates: bool) -> AtOnce | None:
        """Return what takes over regions once they are compiled, with all ranks; None as compiled.

        Programs that communicate alike share it, for some ranks may run another of them than the
        others do.
        """
        assert self.options is not None
        if self.options.start == "compiled":
            return None
        # What changes nothing that ranks have in common, they may call alone.
        is_common = communicates or changes_replicas(made.gm.graph)
        key = made.digest, is_common
        if key not in self.starting:
            rank, scope = self.communicator.rank, f"{self.agreement.scope}/{key}"
            agreement = Agreement(self.agreement.store, rank, self.communicator.world_size, scope)

            def exchange(value: bytes) -> list[bytes]:
                if not is_common:
                    return [value]
                try:
                    return agreement.exchange((scope,), value, AT_ONCE_TIMEOUT_S)
                except AgreementError as error:
                    error.add_note(
                        "With start=at_once the ranks meet where a step begins, until all is "
                        "compiled: one has not begun it."
                    )
                    raise

            # In a record, where a number is to be the same on all ranks and in each training.
            number = sum(common for _, common in self.starting)
            name = f"{self.name}_{number}" if is_common else self.name
            ranks = ranks_of_machine(self.communicator.world_size)
            cores = num_cores() // ranks
            pause = 0.0 if cores >= 2 else PAUSE
            record = self.record if is_common else None
            threads = max(1, cores - 1)
            process, self.compiles_beside = self.compiles_beside, None
            start = AtOnce(name, exchange, record, pause, threads, self._compile_process, process)
            self.starting[key] = start, agreement
        return self.starting[key][0]

    def _compile_process(self) -> CompileProcess:
        """Ask for the process that compiles for the ranks of this machine."""
        ranks = ranks_of_machine(self.communicator.world_size)
        return CompileProcess(self.agreement.store, ranks)

    def _first_compilation(self, device: torch.device) -> None:
        """Read the environment and find the ranks, once per function."""
        if self.options is not None:
            return
        options = stopped(choose(self.user_options))
        if not options.may_lack_data:
            self.calling_with = None
        how = options.lowering, options.start, device.type
        self._compiles_for_cpu = how == ("inductor", "compiled", "cpu")
        is_used = options.stage == 3 or options.offload
        if options.memory_budget is not None and not is_used:
            logger.warning(
                "memory_budget decides what stays gathered at stage 3; stage %d ignores it.",
                options.stage,
            )
        group = options.process_group
        if group is None:
            group = default_group(environment(), device)
        self._group = group
        self.communicator = Communicator.of(group, options.stage_outside)
        if self._compiles_for_cpu and self.communicator.world_size == 1:
            compat.inductor.import_inductor()
            compat.inductor.prepare_beside()
        self.code = compat.dynamo.code_being_compiled()
        self.name = f"{self.code.co_name}{self.number}"
        group = self.communicator.group
        for part in self.communicator.parts():
            if part.group is not None and not options.peer_memory:
                PeerMemory.decline(part.group)
        self.agreement = Agreement(
            compat.tensors.agreement_store(group) if group is not None else None,
            self.communicator.rank,
            self.communicator.world_size,
            f"function {self.number}",
            # Ranks that cannot read this one's memory wait for the process group's timeout.
            end_step=lambda: self.communicator.abandon(),
        )
        is_beside = options.lowering == "inductor" and options.start != "compiled"
        if is_beside and compat.compile_cache.is_kept():
            self.compiles_beside = self._compile_process()  # it imports torch while this one traces
            weakref.finalize(self, self.compiles_beside.close)
        self.options = options  # last: a call after one that fails here begins anew


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a function is called with, by position and by name."""


def copied_containers(value: Any) -> Any:
    """Lists, tuples and dicts anew, of the same values: the step may take them apart."""
    if isinstance(value, (dict, UserDict)):
        new = copy.copy(value)
        try:
            for key, one in value.items():
                new[key] = copied_containers(one)
        except (TypeError, AttributeError, NotImplementedError):
            return value  # one that takes no items, and cannot be taken apart
        return new
    if type(value) in (list, tuple):
        return type(value)(map(copied_containers, value))
    return value


class AskedError(BaseException):
    """No error: ends a call that was made to find which function it would run."""

    def __init__(self, function: CompiledFunction) -> None:
        super().__init__()
        self.function = function


Stop = Callable[[CompiledFunction, CapturedStep], NoReturn]
"""Ends the call of a function, whose step has been captured, by an exception."""


class ZeroBackend:
    """The object that ``backend="zero"`` names; with a ``stop``, one that captures alone."""

    __name__ = "zero"

    def __init__(self, stop: Stop | None = None) -> None:
        self.stop = stop
        self.numbers = itertools.count()
        self.turns = Turns()  # torch may have a function run the program of another one like it
        compat.tracing.forward_call_context()
        self.active = threading.local()
        self.functions: weakref.WeakSet[CompiledFunction] = weakref.WeakSet()
        self.dump_folders: dict[str, DumpFolder] = {}  # by what options call them
        self.records: dict[str, Record] = {}  # by their files' absolute paths
        self.dropped: set[types.CodeType] = set()  # functions of which torch has dropped a program

    def dump_folder(self, path: str | None) -> DumpFolder | None:
        """The folder that this process dumps to, for an option's path; the run's own."""
        if path is None:
            return None
        path = os.path.abspath(path)
        if path not in self.dump_folders:
            self.dump_folders[path] = claim(path, run_of_this_process())
        return self.dump_folders[path]

    def function_called_by(self, step: Callable) -> CompiledFunction | None:
        """Return the compiled function that a callable is; None if it is none of ours."""
        compiled = compat.dynamo.compiled_callable(step)
        if compiled is None:
            return None
        self.active.is_asking = True
        try:
            compiled()
        except AskedError as asked:
            return asked.function
        except TypeError:  # of something around it, which looks at its arguments
            return None
        finally:
            self.active.is_asking = False
        return None

    def programs_of(self, code: types.CodeType, parameters: set[int]) -> int:
        """Count a function's programs in use that have some of these parameters, given by id."""
        return sum(
            program.is_in_use
            and program.code is code
            and (program.parameters == parameters or bool(program.parameters & parameters))
            for function in self.functions
            for program in function.programs
        )

    def function_of(self, parameters: set[int]) -> tuple[CompiledFunction | None, bool]:
        """Return the last function that has a program of some of these parameters, by id.

        One that updates comes before others; the second value says whether it does.
        """
        known = [
            (bool(program.optimizers), function.number, function)
            for function in self.functions
            for program in function.programs
            if program.is_in_use and program.parameters & parameters
        ]
        trains, _, function = max(known, key=lambda each: each[:2], default=(False, 0, None))
        return function, trains

    def forget_dropped(self) -> None:
        """Have torch forget functions if it has dropped all their programs.

        It would keep an entry of each program, which it would look at in vain.
        """
        while self.dropped:
            compat.dynamo.forget_unless_in_use(self.dropped.pop())

    @property
    def function(self) -> CompiledFunction | None:
        """The function whose call is under way in this thread."""
        return getattr(self.active, "function", None)

    def call_context(self, arguments: Mapping[str, Any]) -> Callable:
        """The context that Dynamo puts around every call of one compiled function."""
        return CompiledFunction(self, arguments).call_context

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **arguments: Any) -> Callable:
        if self.function is None:
            raise GraphError(
                "the zero backend was called outside a function compiled with "
                'torch.compile(step, backend="zero"); use it that way.'
            )
        try:
            return self.function.compile(gm, list(inputs))
        except Exception as error:
            raise compat.dynamo.pass_through_dynamo(error) from error.__cause__


zero = ZeroBackend()
