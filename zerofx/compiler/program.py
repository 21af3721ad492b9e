"""One compiled program: passes -> agree -> lower -> what a call of the step runs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import fx

from zerofx import compat
from zerofx.capture import substitutes
from zerofx.capture.step import CapturedStep
from zerofx.codegen.rewrite.storage import Precision
from zerofx.codegen.rewrite.whole_tensors import whole_update_flops
from zerofx.compiler.auto_offload import attempts, first_that_fits
from zerofx.compiler.progress import progress
from zerofx.cost.timeline import predict
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.collectives import schedule
from zerofx.ir.graph import copied, updates
from zerofx.ir.interface import kept_gathered
from zerofx.lower.lowering import lower
from zerofx.options import Options, environment
from zerofx.passes.base import PassContext
from zerofx.passes.manager import Established, PassReport, run_pipeline
from zerofx.passes.pipeline import PIPELINE, lowerings, rewrites
from zerofx.replay.validate import Validator
from zerofx.report.explain import explanation, first_words, peak_bytes
from zerofx.report.optimizers import describe
from zerofx.report.timeline import TimelineDump
from zerofx.report.write import ProgramDump
from zerofx.runtime.comm.agreement import AgreementError, where_they_part
from zerofx.runtime.comm.peer_memory import AnotherProgramError
from zerofx.runtime.memory.pages import return_freed_memory
from zerofx.runtime.optimizer.setup import DeviceSetup, HostSetup, Trained
from zerofx.runtime.optimizer.state_dict import has_step_hooks
from zerofx.runtime.optimizer.states import bytes_of_states
from zerofx.runtime.parameters.first_values import digest_of
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.step import StepRuntime
from zerofx.runtime.storage.bucket import Location
from zerofx.runtime.storage.tier import FileTier

if TYPE_CHECKING:
    from zerofx.backend import CompiledFunction

logger = logging.getLogger("zerofx")


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
        self.number = function.num_programs
        self.parameters = {id(tensor) for tensor in step.tensors}
        self._compiled: Callable[[], Any] = lambda: None
        self.options = options
        self.figures = function.figures
        # Until it is ready; in a list, for torch wraps programs and copies their attributes.
        self.captured = [step]
        self.gm, self.table = step.gm, step.table
        self.optimizers = step.optimizers
        for optimizer in map(substitutes.optimizer_of, self.optimizers):
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
        self.ctx = ctx
        self.bucket_bytes = ctx.bucket_bytes
        self.dump: ProgramDump | None = None
        self.captured_peak: int | None = None  # known if somebody logs it
        if "auto" in options.offload:
            self.ctx = ctx = self._automatic(ctx, step)
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

    def given(self, code: CodeType, compiled: Callable) -> None:
        """Note the function that it is for, and what torch keeps for as long as it has it."""
        self.code = code
        self._compiled = weakref.ref(compiled)

    @property
    def is_in_use(self) -> bool:
        """Return whether torch has it still: until its model or its optimizer is gone."""
        return self._compiled() is not None

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
            run_pipeline(self.gm, context(options), rewrites(PIPELINE))

        if function.attempt is None:
            mine = first_that_fits(tried, try_passes)
            lines = (f"offload auto within {ctx.options.memory_budget} bytes",)
            found = function.agreement.exchange(
                lines, str(mine).encode(), function.agreement_timeout_s
            )
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

        lowers = False
        validator = None
        if ctx.options.validate:
            write_minimal = dump.write_minimal if dump else None
            described = self._described_optimizers()
            validator = Validator(self.gm, ctx, PIPELINE, described, write_minimal)

        def on_program(name: str, gm: fx.GraphModule, report: PassReport | None) -> None:
            if report is None and logger.isEnabledFor(logging.INFO):
                self.captured_peak = peak_bytes(self)
            path = dump.write(name, gm, report) if dump else None
            if timelines and not lowers:
                timelines.write(name, gm)
            if validator:  # which may reject what has been written
                validator(name, gm, report, path)

        def on_rejected(name: str, gm: fx.GraphModule, error: Exception) -> None:
            path = None
            with contextlib.suppress(Exception):  # the first error is the one to hear of
                path = dump.write_rejected(name, gm, error) if dump else None
            if path:
                error.add_note(f"what it has left is in {path}")

        hooks, established = (on_program, on_rejected), Established()
        reports = run_pipeline(self.gm, ctx, rewrites(PIPELINE), *hooks, established)
        self.lowered = fx.GraphModule(self.gm, self.gm.graph)
        self.gm.graph = copied(self.gm.graph)
        lowers = True
        reports += run_pipeline(self.lowered, ctx, lowerings(PIPELINE), *hooks, established)
        if dump:
            timeline = predict(self.gm.graph, ctx.figures, ctx.table, ctx.world_size)
            dump.write_summary(reports, str(timeline))
        return reports

    def _new_dump(self, ctx: PassContext) -> ProgramDump | None:
        """Return the writer of programs: to a folder, torch's structured trace, or both."""
        folder = self.function.backend.dump_folder(ctx.options.dump)
        if folder is None and not compat.is_traced():
            return None
        return ProgramDump(
            folder,
            ctx.rank,
            f"{self.function.name}_{self.number}",
            ctx.table,
            world_size=ctx.world_size,
            stage=ctx.options.stage,
            optimizers=self._described_optimizers(),
            figures=f"hardware: {ctx.figures} ({ctx.figures.source})",
        )

    def _described_optimizers(self) -> dict[int, dict[str, Any]]:
        (step,) = self.captured
        names = {id(t): info.name for t, info in zip(step.tensors, step.table, strict=True)}
        return {h: describe(substitutes.optimizer_of(h), names) for h in self.optimizers}

    def _make_ready(self) -> StepRuntime:
        """Agree with the other ranks, take charge of the parameters, lower.

        What can be refused is refused before the first of these: nothing has changed then.
        """
        options, communicator = self.options, self.function.communicator
        (step,) = self.captured
        nodes = self.lowered.graph.nodes
        try:
            runtime = StepRuntime(
                communicator,
                self.gm.graph,
                Trained(
                    self.table,
                    step.tensors,
                    step.buffers,
                    {handle: substitutes.optimizer_of(handle) for handle in self.optimizers},
                ),
                DeviceSetup(
                    options.stage,
                    Precision.of(options),
                    moves_whole=options.bucket,
                    in_place=[node.args[2] for node in nodes if node.target is ops.write_back],
                    reuses_buffers=options.memory_budget is None,
                ),
                HostSetup(
                    self.function.copies,
                    keeps_states="optimizer" in options.offload,
                    joins_updates=any(node.target is ops.update_together for node in nodes),
                    open_files=self._open_files,
                    delayed=self.function.delayed if options.delayed_update else None,
                ),
                keep_source=self.dump.write_kernel if self.dump else None,
            )
        except Exception as error:
            self.function.agreement.fail(f"{type(error).__name__}: {error}")
            raise
        sources = runtime.sources()
        with self.function.ending_divided_steps():
            is_same_for_all = self.function.agreement.check(
                self.schedule, self.function.agreement_timeout_s, digest_of(sources)
            )
        runtime.bind(sources if is_same_for_all else {})
        runtime.program = lower(self.lowered, runtime.kernels())
        level = logging.INFO if self.number == 0 else logging.DEBUG
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
            self.dump.write_explanation(explanation(self, with_seconds=False))
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
    flops = {
        handle: whole_update_flops(substitutes.optimizer_of(handle)) for handle in step.optimizers
    }
    return {
        (handle, parameter): flops[handle][id(step.tensors[parameter])]
        for handle, parameter in updates(step.gm.graph)
        if id(step.tensors[parameter]) in flops.get(handle, ())
    }


def state_bytes(step: CapturedStep, options: Options) -> dict[tuple[int, int], float]:
    """Return each update's bytes per element, as (optimizer, parameter), if a plan needs them."""
    if "optimizer" not in options.offload or options.memory_budget is None:
        return {}
    return bytes_kept(step, options)


def bytes_kept(step: CapturedStep, options: Options) -> dict[tuple[int, int], float]:
    """Return each update's bytes per element, as (optimizer, parameter), where they are known."""
    infos = {id(t): info for t, info in zip(step.tensors, step.table, strict=True)}
    kept = {
        handle: bytes_of_states(substitutes.optimizer_of(handle), infos, Precision.of(options))
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
    return frozenset(
        i for i, bound in enumerate(bounds) if bound and bound.location is not Location.DEVICE
    )


def _kept_in_files(options: Options, step: CapturedStep) -> frozenset[int]:
    """Those of them, by index, that are in files while nothing is done with them there."""
    on_host = _kept_on_host(options, step)
    if "params" in options.offload:
        return on_host if options.offload_tier == "nvme" else frozenset()
    bounds = {index: REGISTRY.lookup(step.tensors[index]) for index in on_host}
    return frozenset(i for i, bound in bounds.items() if bound and bound.file is not None)
