"""The compiler on one screen: capture -> passes -> agree -> lower -> a callable step."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zerofx import compat, traced
from zerofx.auto_offload import attempts, first_that_fits
from zerofx.capture import CapturedStep, StepCapture
from zerofx.codegen.storage import Precision
from zerofx.codegen.whole_tensors import whole_update_flops
from zerofx.dump import ProgramDump
from zerofx.dump_folder import DumpFolder, claim, run_of_this_process
from zerofx.errors import GraphError, StepError
from zerofx.explanation import explanation, first_words, peak_bytes
from zerofx.figures import NOMINAL, Figures
from zerofx.graph import copied, kept_gathered, updates
from zerofx.in_place import buckets_updated_in_place
from zerofx.lower import lower
from zerofx.optimizer_facts import describe
from zerofx.options import Options, environment, refuse_mode, resolve
from zerofx.passes.base import PassContext
from zerofx.passes.manager import PassReport, run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.passes.stop_after import stopped
from zerofx.picture.files import TimelineDump
from zerofx.plan import KeptGathered
from zerofx.progress import progress
from zerofx.runtime.agreement import Agreement, AgreementError, where_they_part
from zerofx.runtime.communication import Communicator, default_group
from zerofx.runtime.delayed import DelayedUpdates
from zerofx.runtime.file_tier import FileTier
from zerofx.runtime.link import measured
from zerofx.runtime.moves import Mover
from zerofx.runtime.pages import return_freed_memory
from zerofx.runtime.parameters import REGISTRY
from zerofx.runtime.peer_memory import AnotherProgramError, PeerMemory
from zerofx.runtime.state_bytes import bytes_of_states
from zerofx.runtime.step import StepRuntime
from zerofx.runtime.step_setup import DeviceSetup, HostSetup, Trained
from zerofx.runtime.whole import has_step_hooks
from zerofx.schedule import schedule
from zerofx.state_reads import refuse_reads_of_states
from zerofx.timeline import predict
from zerofx.validate import Validator

logger = logging.getLogger("zerofx")

AGREEMENT_TIMEOUT_S = 300.0
"""How long a rank waits for the others to have compiled the same schedule."""

GRAPH_BREAK = (
    "zerofx compiles the whole step (forward, backward, clipping, update) as one program, and the "
    "line above cannot be traced into it. Move it out of the step, or write it with torch "
    "operations: log after the call, from what the step returns."
)

RAN_EAGERLY = (
    "torch has compiled nothing of this function and run it eagerly: it is marked with "
    "torch.compiler.disable, or does nothing with tensors. Gradients were not averaged over the "
    "ranks, and what it has updated is this rank's own. Remove the mark, and start again."
)

RECOMPILE_LIMIT = (
    "A zerofx program is for one model and the shapes that torch takes for static, and torch "
    "compiles one function's code torch._dynamo.config.recompile_limit times at most, for all its "
    "models and torch.compile calls together. Raise that, or define the step once per model."
)

OUTGROWN = (
    "The ranks compare what fits memory_budget: at the first call, and whenever a batch has become "
    "so large that on this rank it no longer does. Then all ranks must call with batches as large: "
    "begin with the largest, or give a larger memory_budget, or none."
)

_function_numbers = itertools.count()


class CompiledFunction:
    """One ``torch.compile(step, backend="zero")``: its options, its ranks, its programs."""

    def __init__(self, backend: ZeroBackend, arguments: Mapping[str, Any]):
        refuse_mode(arguments.get("mode"))
        self.backend = backend
        # Ranks call torch.compile alike, even if one of them then fails to compile.
        self.number = next(_function_numbers)
        self.user_options = arguments.get("options")
        # What the user wrote is checked where it is written.
        resolve(self.user_options, {}, is_complete=False)
        self.options: Options | None = None
        self.code: types.CodeType | None = None
        self.programs: list[Program] = []
        self.kept_gathered: dict[tuple[str, ...], KeptGathered] = {}
        self.attempt: int | None = None  # which one offload="auto" has come to
        self.mover = Mover(REGISTRY.host)
        self.delayed = DelayedUpdates(REGISTRY.host, REGISTRY.delayed)
        backend.functions.add(self)

    @contextlib.contextmanager
    def call_context(self) -> Iterator[None]:
        """Surround one call: parameters are plain, and Dynamo traces whole steps."""
        reason = compat.why_not_compiled()
        if reason is not None:
            raise StepError(
                f"{reason}, so torch would run this function eagerly, on shards and without "
                "averaging gradients. Call it outside of that; zerofx.explain(step) counts what "
                "a step does."
            )
        previous, self.backend.active.function = self.backend.function, self
        handled = sys.exc_info()[1]  # by who calls, if it does so
        self.backend.active.has_run = False
        REGISTRY.enter_call()
        try:
            with compat.whole_step_tracing(self.backend, traced.SUBSTITUTES):
                yield
            # Dynamo leaves a context as if nothing had been raised, whatever has.
            if not self.backend.active.has_run and sys.exc_info()[1] is handled:
                raise StepError(RAN_EAGERLY)
        finally:
            REGISTRY.exit_call()
            self.backend.active.function = previous
            compat.explain_refusal(GRAPH_BREAK, RECOMPILE_LIMIT)

    def compile(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable:
        """Compile one graph that Dynamo has traced from this function."""
        self._first_compilation()
        try:
            communicator = self.communicator
            self.figures = self._figures(inputs)
            assert self.options is not None, "read at the first compilation"
            refuse_reads_of_states(gm, inputs, self.options.stage)
            capture = StepCapture(
                gm, inputs, communicator.rank, communicator.world_size, _owner_of_gradient
            )
            return capture.lower(self._run_passes)
        except AgreementError:
            raise  # which all ranks have seen
        except Exception as error:
            self.agreement.fail(f"{type(error).__name__}: {error}")
            raise

    def _figures(self, inputs: list[Any]) -> Figures:
        """What to plan with: as the user says, or as the ranks measure, all at their first call."""
        assert self.options is not None
        if self.options.link is not None:
            return self.options.link
        devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
        device = max(devices, key=lambda device: device.type != "cpu", default=torch.device("cpu"))
        name = f"the first call of compiled function {self.number}"  # as all ranks count them
        try:
            return measured(self.communicator, device, name, AGREEMENT_TIMEOUT_S) or NOMINAL
        except AgreementError as error:
            self.agreement.fail(str(error))  # to ranks that were given figures: they wait there
            raise

    def _run_passes(self, step: CapturedStep) -> Callable:
        program = Program(self, step)
        self.programs.append(program)
        return program

    def agree_on_kept(self, mine: KeptGathered | None) -> bool:
        """Find what all ranks can keep gathered; return whether this one could keep more.

        How much a budget leaves depends on the batch.  Ranks whose batches have other shapes later
        need no meeting for as long as what was agreed on fits.

        Raises: AgreementError if they gather different things, or one does not come.
        """
        if mine is None or self.kept_gathered.get(mine.gathers) == mine:
            return False
        lines = ("within memory_budget", *mine.gathers)
        try:
            with self.ending_divided_steps():
                values = self.agreement.exchange(lines, mine.packed(), AGREEMENT_TIMEOUT_S)
        except AgreementError as error:
            error.add_note(OUTGROWN)
            raise
        kept = functools.reduce(KeptGathered.also_fitting, map(mine.unpacked, values))
        self.kept_gathered[mine.gathers] = kept
        return kept != mine

    @contextlib.contextmanager
    def ending_divided_steps(self) -> Iterator[None]:
        """If only some ranks have come to agree, end the step that the others wait in.

        Where they cannot read this one's memory they wait for the process group's timeout.
        """
        try:
            yield
        except AgreementError as error:
            if error.divided:
                REGISTRY.carried.step_failed(self.communicator, ())
                self.communicator.abandon()
            raise

    def _first_compilation(self) -> None:
        """Read the environment and find the ranks, once per function."""
        if self.options is not None:
            return
        self.options = stopped(resolve(self.user_options))
        is_used = self.options.stage == 3 or self.options.offload
        if self.options.memory_budget is not None and not is_used:
            logger.warning(
                "memory_budget decides what stays gathered at stage 3; stage %d ignores it.",
                self.options.stage,
            )
        group = self.options.process_group
        if group is None:
            group = default_group(environment())
        self.communicator = Communicator.of(group)
        self.code = compat.code_being_compiled()
        self.name = f"{self.code.co_name}{self.number}"
        group = self.communicator.group
        if group is not None and not self.options.peer_memory:
            PeerMemory.decline(group)
        self.agreement = Agreement(
            compat.agreement_store(group) if group is not None else None,
            self.communicator.rank,
            self.communicator.world_size,
            f"function {self.number}",
            traffic=self.communicator.traffic,
        )


class Program:
    """One compiled graph: the passes' result, their reports, and what runs it.

    The passes run while Dynamo compiles; the rest waits for the first call, when no compilation
    is under way that optimizers would notice (``torch.compiler.is_compiling()``).
    """

    _boxed_call = True  # AOTAutograd then hands over its inputs in a list that may be emptied

    def __init__(self, function: CompiledFunction, step: CapturedStep):
        assert function.options is not None, "the environment is read before anything compiles"
        options, communicator = function.options, function.communicator
        self.function = function
        self.options = options
        self.figures = function.figures
        # Until it is ready; in a list, for torch wraps programs and copies their attributes.
        self.captured = [step]
        self.gm, self.table = step.gm, step.table
        self.optimizers = step.optimizers
        for optimizer in map(traced.optimizer_of, self.optimizers):
            if has_step_hooks(optimizer):
                raise StepError(
                    f"{type(optimizer).__name__} has step hooks (its own or global), which would "
                    "not run inside the compiled step. Remove them, and do their work in the step "
                    "or after the call."
                )
        known = REGISTRY.places(step.tensors)
        step.table.assign({index: place for index, place in known.items() if place is not None})
        ctx = PassContext(
            options,
            step.table,
            communicator.rank,
            communicator.world_size,
            step.num_backwards,
            frozenset(known),
            function.kept_gathered,
            self.figures,
            whole_updates(step),
            state_bytes(step, options),
            _kept_on_host(options, step),
            _kept_in_files(options, step),
        )
        self.bucket_bytes = ctx.bucket_bytes
        self.dump: ProgramDump | None = None
        self.captured_peak: int | None = None  # known if somebody logs it
        if "auto" in options.offload:
            ctx = self._automatic(ctx, step)
            options = self.options = ctx.options
        agrees = options.memory_budget is not None and communicator.world_size > 1
        captured = copied(self.gm.graph) if agrees else None
        self.reports = self._rewritten(ctx)
        if captured is not None and function.agree_on_kept(kept_gathered(self.gm.graph)):
            self.gm.graph = captured  # what another rank cannot keep: once more, without it
            self.reports = self._rewritten(ctx)
        self.schedule = (
            *schedule(self.gm, step.table, options.stage),
            *Precision.of(options).description,
            *([f"offload {', '.join(options.offload)}"] if options.offload else []),
            *([f"offload_tier {options.offload_tier}"] if options.offload else []),
            *(["delayed_update"] if options.delayed_update else []),
        )
        digest = hashlib.sha256("\n".join(self.schedule).encode()).digest()
        self.digest = int.from_bytes(digest[:7], "big")
        self.runtime: StepRuntime | None = None

    def _automatic(self, ctx: PassContext, step: CapturedStep) -> PassContext:
        """Find the least that has to leave the device, on any rank; the first program decides."""
        captured, function = copied(self.gm.graph), self.function
        tried = attempts(ctx.options, step.table)

        def context(options: Options) -> PassContext:
            return replace(
                ctx,
                options=options,
                state_bytes=state_bytes(step, options),
                host_parameters=_kept_on_host(options, step),
                filed_parameters=_kept_in_files(options, step),
            )

        def try_passes(options: Options) -> None:
            self.gm.graph = copied(captured)
            run_pipeline(self.gm, context(options), PIPELINE)

        if function.attempt is None:
            mine = first_that_fits(tried, try_passes)
            lines = (f"offload auto within {ctx.options.memory_budget} bytes",)
            found = function.agreement.exchange(lines, str(mine).encode(), AGREEMENT_TIMEOUT_S)
            function.attempt = max(map(int, found))
        self.gm.graph = captured
        return context(tried[function.attempt])

    def _rewritten(self, ctx: PassContext) -> list[PassReport]:
        """Run the passes, and dump what they make."""
        self.dump = dump = self._new_dump(ctx)
        timelines = None
        if dump and dump.folder is not None:
            (step,) = self.captured
            timelines = TimelineDump(dump.folder, dump.name, ctx, bytes_kept(step, ctx.options))

        validator = None
        if ctx.options.validate:
            write_minimal = dump.write_minimal if dump else None
            described = self._described_optimizers()
            validator = Validator(self.gm, ctx, PIPELINE, described, write_minimal)

        def on_program(name: str, gm: fx.GraphModule, report: PassReport | None) -> None:
            if report is None and logger.isEnabledFor(logging.INFO):
                self.captured_peak = peak_bytes(self)
            path = dump.write(name, gm, report) if dump else None
            if timelines:
                timelines.write(name, gm)
            if validator:  # which may reject what has been written
                validator(name, gm, report, path)

        def on_rejected(name: str, gm: fx.GraphModule, error: Exception) -> None:
            path = None
            with contextlib.suppress(Exception):  # the first error is the one to hear of
                path = dump.write_rejected(name, gm, error) if dump else None
            if path:
                error.add_note(f"what it has left is in {path}")

        reports = run_pipeline(self.gm, ctx, PIPELINE, on_program, on_rejected)
        if dump:
            timeline = predict(self.gm.graph, ctx.figures, ctx.table, ctx.world_size)
            dump.write_summary(reports, str(timeline))
        if timelines:
            timelines.finish()
        return reports

    def _new_dump(self, ctx: PassContext) -> ProgramDump | None:
        """What writes the programs: to the user's folder, to torch's structured trace, or both."""
        folder = self.function.backend.dump_folder(ctx.options.dump)
        if folder is None and not compat.is_traced():
            return None
        return ProgramDump(
            folder,
            ctx.rank,
            f"{self.function.name}_{len(self.function.programs)}",
            ctx.table,
            world_size=ctx.world_size,
            stage=ctx.options.stage,
            optimizers=self._described_optimizers(),
            figures=f"link: {ctx.figures} ({ctx.figures.source})",
        )

    def _described_optimizers(self) -> dict[int, dict[str, Any]]:
        (step,) = self.captured
        names = {id(t): info.name for t, info in zip(step.tensors, step.table, strict=True)}
        return {h: describe(traced.optimizer_of(h), names) for h in self.optimizers}

    def _make_ready(self) -> StepRuntime:
        """Agree with the other ranks, take charge of the parameters, lower.

        What can be refused is refused before the first of these: nothing has changed then.
        """
        options, communicator = self.options, self.function.communicator
        (step,) = self.captured
        in_place = buckets_updated_in_place(self.gm.graph, self.table) if options.bucket else []
        fuses = options.fuse_optimizer and options.lowering == "inductor" and options.stage > 0
        try:
            runtime = StepRuntime(
                communicator,
                self.gm.graph,
                Trained(
                    self.table,
                    step.tensors,
                    step.buffers,
                    {handle: traced.optimizer_of(handle) for handle in self.optimizers},
                ),
                DeviceSetup(
                    options.stage,
                    Precision.of(options),
                    moves_whole=options.bucket,
                    in_place=[bucket.parameters for bucket in in_place],
                    reuses_buffers=options.memory_budget is None,
                ),
                HostSetup(
                    self.function.mover,
                    keeps_states="optimizer" in options.offload,
                    joins_updates=fuses,
                    open_files=self._open_files,
                    delayed=self.function.delayed if options.delayed_update else None,
                ),
                keep_source=self.dump.write_kernel if self.dump else None,
            )
        except Exception as error:
            self.function.agreement.fail(f"{type(error).__name__}: {error}")
            raise
        with self.function.ending_divided_steps():
            self.function.agreement.check(self.schedule, AGREEMENT_TIMEOUT_S)
        runtime.bind()
        runtime.program = lower(
            self.gm,
            runtime.kernels(),
            options.lowering,
            runtime.device_updates.update_together if fuses else None,
            # A budget counts a bucket's buffer, and its gradients as gone once they are in it.
            runtime.buckets.reduce_bucket_start if options.memory_budget is None else None,
            runtime.buckets.write_back,
            in_place,
        )
        level = logging.INFO if self is self.function.programs[0] else logging.DEBUG
        if logger.isEnabledFor(level):
            logger.log(level, "%s", first_words(self))
        self.captured.clear()  # which holds the model
        return runtime

    def _open_files(self) -> FileTier:
        """The tier of the directories that the options name; without any, where shards are."""
        if self.options.offload_tier != "nvme":
            (step,) = self.captured
            bounds = filter(None, map(REGISTRY.lookup, step.tensors))
            return next(bound.file.tier for bound in bounds if bound.file is not None)
        ranks = environment().get("LOCAL_WORLD_SIZE") or str(self.function.communicator.world_size)
        if not ranks.isdecimal() or int(ranks) < 1:
            raise StepError(
                f"LOCAL_WORLD_SIZE is {ranks!r}, and it says how many ranks share this machine's "
                "memory: a number from 1 on. torchrun sets it; set it so, or unset it."
            )
        return REGISTRY.files.open(
            self.options.offload_dir,
            self.options.offload_cache_bytes,
            self.options.offload_checksums,
            int(ranks),
        )

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.function.backend.active.has_run = True  # it may be a call of a function like its own
        if self.runtime is not None:
            return self._run(self.runtime, inputs)
        with compat.outside_of_modes():  # updates are traced as they will be in later calls
            self.runtime = self._make_ready()
        return_freed_memory()
        with progress(self.runtime.program, self.function.name, self.function.communicator.rank):
            results = self._run(self.runtime, inputs)
        return_freed_memory()
        if self.dump and self.dump.folder is not None:
            number = self.function.programs.index(self)
            self.dump.write_explanation(explanation(self, number, with_seconds=False))
        return results

    def _run(self, runtime: StepRuntime, inputs: list[Any]) -> list[Any]:
        """Run the program, and say it if another rank runs or has compiled another one."""
        try:
            with self.function.communicator.running(self.digest):
                return runtime(inputs)
        except AnotherProgramError as error:
            known = [one for f in self.function.backend.functions for one in f.programs]
            its = next((one.schedule for one in known if one.digest == error.program), None)
            if its is None:
                raise
            ranks = self.function.communicator.rank, error.peer
            raise AgreementError(
                f"{error} {where_they_part(*ranks, self.schedule, its)}"
            ) from error
        except Exception as error:
            news = self._news_of_others()
            if not news:
                raise
            raise AgreementError(news) from error

    def _news_of_others(self) -> str:
        with contextlib.suppress(Exception):  # a store that is gone says nothing
            return self.function.agreement.news(self.schedule)
        return ""


def whole_updates(step: CapturedStep) -> dict[tuple[int, int], int]:
    """The updates that may need whole tensors, (optimizer, parameter) -> what each computes."""
    flops = {handle: whole_update_flops(traced.optimizer_of(handle)) for handle in step.optimizers}
    return {
        (handle, parameter): flops[handle][id(step.tensors[parameter])]
        for handle, parameter in updates(step.gm.graph)
        if id(step.tensors[parameter]) in flops.get(handle, ())
    }


def state_bytes(step: CapturedStep, options: Options) -> dict[tuple[int, int], float]:
    """What each update, as (optimizer, parameter), keeps per element, if a plan is made with it."""
    if "optimizer" not in options.offload or options.memory_budget is None:
        return {}
    return bytes_kept(step, options)


def bytes_kept(step: CapturedStep, options: Options) -> dict[tuple[int, int], float]:
    """What each update, as (optimizer, parameter), keeps per element, where that is known."""
    infos = {id(t): info for t, info in zip(step.tensors, step.table, strict=True)}
    kept = {
        handle: bytes_of_states(traced.optimizer_of(handle), infos, Precision.of(options))
        for handle in step.optimizers
    }
    return {
        (handle, parameter): kept[handle][id(step.tensors[parameter])]
        for handle, parameter in updates(step.gm.graph)
        if id(step.tensors[parameter]) in kept[handle]
    }


def _kept_on_host(options: Options, step: CapturedStep) -> frozenset[int]:
    """The parameters whose shards the program is to find in host memory, by index.

    What updates nothing, an evaluation, takes shards from where they are: they need not move for
    it, nor fit the device.
    """
    if "params" in options.offload:
        return frozenset(info.index for info in step.table)
    if options.stage < 3 or updates(step.gm.graph):
        return frozenset()
    bounds = map(REGISTRY.lookup, step.tensors)
    return frozenset(i for i, bound in enumerate(bounds) if bound and bound.host is not None)


def _kept_in_files(options: Options, step: CapturedStep) -> frozenset[int]:
    """Those of them, by index, that are in files while nothing is done with them there."""
    on_host = _kept_on_host(options, step)
    if "params" in options.offload:
        return on_host if options.offload_tier == "nvme" else frozenset()
    bounds = {index: REGISTRY.lookup(step.tensors[index]) for index in on_host}
    return frozenset(i for i, bound in bounds.items() if bound and bound.file is not None)


def _owner_of_gradient(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """The parameter whose stored gradient a tensor stands for."""
    bound = REGISTRY.keeper(tensor)
    return bound.parameter if bound is not None else None


class ZeroBackend:
    """What ``backend="zero"`` names."""

    __name__ = "zero"

    def __init__(self) -> None:
        compat.forward_call_context()
        self.active = threading.local()
        self.functions: weakref.WeakSet[CompiledFunction] = weakref.WeakSet()
        self.dump_folders: dict[str, DumpFolder] = {}  # by what options call them

    def dump_folder(self, path: str | None) -> DumpFolder | None:
        """The folder that this process dumps to, for an option's path; the run's own."""
        if path is None:
            return None
        path = os.path.abspath(path)
        if path not in self.dump_folders:
            self.dump_folders[path] = claim(path, run_of_this_process())
        return self.dump_folders[path]

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
            raise compat.pass_through_dynamo(error) from error.__cause__


zero = ZeroBackend()
