"""One compiled program: passes -> agree -> lower -> what a call of the step runs."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import fx

from zerofx import compat
from zerofx.capture import substitutes
from zerofx.capture.step import CapturedStep
from zerofx.compiler.choices import attempts, first_that_fits
from zerofx.compiler.facts import context_of
from zerofx.compiler.rewrite import described_optimizers, rewrite
from zerofx.hardware import Hardware
from zerofx.ir import ops
from zerofx.ir.collectives import changing_numbers
from zerofx.ir.interface import recorded
from zerofx.ir.parameters import ParameterTable
from zerofx.lower.at_once import AtOnce
from zerofx.lower.lowering import lower
from zerofx.lower.regions import KernelAhead, errors_of
from zerofx.options import Options, ranks_of_machine
from zerofx.order.check import CHECK
from zerofx.passes.base import PassContext
from zerofx.passes.manager import PassReport
from zerofx.report.explain import explanation, first_words
from zerofx.report.write import EXPLANATION, ProgramDump
from zerofx.runtime.comm.agreement import AgreementError, where_they_part
from zerofx.runtime.comm.peer_memory import AnotherProgramError
from zerofx.runtime.memory.pages import return_freed_memory
from zerofx.runtime.optimizer.setup import ProgramSetup, Trained
from zerofx.runtime.optimizer.state_dict import refuse_step_hooks
from zerofx.runtime.parameters.first_values import digest_of
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.step import StepRuntime
from zerofx.runtime.storage.tier import FileOptions, FileTier

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
        for optimizer in map(substitutes.optimizer_of, step.optimizers):
            refuse_step_hooks(optimizer)
        self.function = function
        self.first_call = function.first_call
        self.number = function.num_programs
        self._parameters = [weakref.ref(tensor) for tensor in step.tensors]
        self.optimizers = step.optimizers
        self._compiled: Callable[[], Any] = lambda: None
        # Until it is ready; in a list, for torch wraps programs and copies their attributes.
        self.captured = [step]
        ctx = self._context(step)
        self.dump = self._new_dump(ctx)
        self.rewritten, self.lowered = rewrite(step, ctx, self.dump)
        residency = recorded(self.gm.graph).decisions.residency
        if ctx.world_size > 1 and residency and function.agree_on_kept(residency.kept_gathered):
            self.dump = self._new_dump(ctx)  # once more, without what another rank cannot keep
            self.rewritten, self.lowered = rewrite(step, ctx, self.dump)
        self.runtime: StepRuntime | None = None
        self.at_once: AtOnce | None = None

    @property
    def gm(self) -> fx.GraphModule:
        return self.rewritten.gm

    @property
    def options(self) -> Options:
        return self.rewritten.ctx.options

    @property
    def table(self) -> ParameterTable:
        return self.rewritten.ctx.table

    @property
    def figures(self) -> Hardware:
        return self.rewritten.ctx.figures

    @property
    def reports(self) -> tuple[PassReport, ...]:
        return (*self.rewritten.reports, *self.lowered.reports)

    def given(self, code: CodeType, compiled: Callable) -> None:
        """Note the function that it is for, and what torch keeps for as long as it has it."""
        self.code = code
        self._compiled = weakref.ref(compiled)

    @property
    def parameters(self) -> set[int]:
        """Return the ids of its living parameters: new tensors may get those of dead ones."""
        return {id(tensor) for of in self._parameters if (tensor := of()) is not None}

    @property
    def is_in_use(self) -> bool:
        """Return whether torch has it still: until its model or its optimizer is gone."""
        return self._compiled() is not None

    def _context(self, step: CapturedStep) -> PassContext:
        """Collect what the passes are given.

        With ``offload="auto"`` the first program of a function finds the least that fits all ranks.
        """
        function = self.function
        options, communicator = function.options, function.communicator
        assert options is not None, "the environment is read before anything compiles"

        def context(options: Options) -> PassContext:
            figures, kept = function.figures, function.kept_gathered
            known = REGISTRY.places(step.tensors)
            return context_of(step, options, communicator.mesh, figures, kept, known)

        if "auto" not in options.offload:
            return context(options)
        tried = attempts(options, step.table, communicator.mesh)
        if function.attempt is None:
            mine = first_that_fits(step, [context(attempt) for attempt in tried])
            lines = (f"offload auto within {options.memory_budget} bytes",)
            timeout_s = function.agreement_timeout_s
            found = function.agreement.exchange(lines, str(mine).encode(), timeout_s)
            function.attempt = max(map(int, found))
        return context(tried[function.attempt])

    def _new_dump(self, ctx: PassContext) -> ProgramDump | None:
        """Return the writer of programs: to a folder, torch's structured trace, or both."""
        folder = self.function.backend.dump_folder(ctx.options.dump)
        if folder is None and not compat.aot.is_traced():
            return None
        (step,) = self.captured
        function = f"{self.function.name}_{self.number}"
        return ProgramDump(folder, function, ctx, described_optimizers(step))

    def _make_ready(self) -> StepRuntime:
        """Agree with the other ranks, take charge of the parameters, lower.

        What can be refused is refused before the first of these: nothing has changed then.
        """
        options, communicator = self.options, self.function.communicator
        (step,) = self.captured
        nodes = self.lowered.gm.graph.nodes
        try:
            self.function.check_start()
            optimizers = {handle: substitutes.optimizer_of(handle) for handle in self.optimizers}
            runtime = StepRuntime(
                communicator,
                self.gm.graph,
                Trained(self.table, step.tensors, step.buffers, optimizers, step.replaced),
                ProgramSetup(
                    options,
                    self.function.copies,
                    self.function.backend.turns,
                    in_place=[node.args[2] for node in nodes if node.target is ops.write_back],
                    joins_updates=self.lowered.has_run("merge_updates"),
                    open_files=self._open_files,
                    delayed=self.function.delayed if options.delayed_update else None,
                ),
                keep_source=self.dump.write_file if self.dump else None,
            )
        except Exception as error:
            self.function.fail(error)
            raise
        sources = runtime.sources()
        is_same_for_all = self.function.agreement.check(
            (*self.rewritten.schedule, f"start: {options.start}"),
            self.function.agreement_timeout_s,
            digest_of(sources),
            beside=changing_numbers(self.rewritten.gm.graph),
        )
        runtime.bind(sources if is_same_for_all else {})
        runtime.program = lower(self.lowered.gm, runtime.kernels())
        self.at_once = self.function.at_once(self.rewritten, runtime.communicates)
        if self.at_once is None or self.at_once.step:  # another program has begun
            if self.at_once is not None:
                self.at_once.join(runtime.program)
            graph = self.lowered.gm.graph
            kernels = KernelAhead.all_of(lambda: runtime.steps.ask_for_kernels(graph))
            self.first_call.compile_regions(runtime.program, kernels)
        else:
            compat.inductor.import_inductor()  # beside the next steps it would slow them down
            self.at_once.add(runtime.program)
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
            return next(bound.file.place for bound in bounds if bound.file is not None)
        ranks = ranks_of_machine(self.function.communicator.world_size)
        options = self.options
        given = options.offload_dir, options.offload_cache_bytes, options.offload_checksums
        return REGISTRY.files.open(FileOptions(*given, ranks))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        active = self.function.backend.active  # it may be a call of a function like its own
        active.has_run = True
        if self.runtime is not None:
            results = self._run(self.runtime, inputs)
            active.function.called(self.options)
            return results
        # Updates are traced as they will be in later calls.
        with compat.tensors.without_dispatch_modes(), self.first_call.part("taking charge"):
            self.runtime = self._make_ready()
        return_freed_memory()
        with self.first_call.part("running"):
            results = self._run(self.runtime, inputs)
        active.function.called(self.options)
        return_freed_memory()
        if self.dump and self.dump.folder is not None:
            self.dump.write_file(EXPLANATION, explanation(self, with_seconds=False) + "\n")
            for name, error in errors_of(self.runtime.program).items():
                self.dump.write_file(f"{name}_error.txt", error)
        return results

    def _run(self, runtime: StepRuntime, inputs: list[Any]) -> list[Any]:
        """Run the program, and say it if another rank runs or has compiled another one."""
        try:
            with (
                self.at_once.running() if self.at_once else contextlib.nullcontext(),
                self.function.communicator.running(self.rewritten.digest),
            ):
                if self.options.check_order:
                    with CHECK.watching(runtime, self.lowered.gm.graph):
                        return runtime(inputs)
                return runtime(inputs)
        except AnotherProgramError as error:
            known = [one for f in self.function.backend.functions for one in f.programs]
            programs = {one.rewritten.digest: one.rewritten.schedule for one in known}
            its = programs.get(error.program)
            if its is None:
                raise
            ranks = self.function.communicator.rank, error.peer
            raise AgreementError(
                f"{error} {where_they_part(*ranks, self.rewritten.schedule, its)}"
            ) from error
        except Exception as error:
            news = ""
            with contextlib.suppress(Exception):  # a store that is gone says nothing
                news = self.function.agreement.news(self.rewritten.schedule)
            if not news:
                raise
            raise AgreementError(news) from error
