"""Each optional pass can be turned off, alone and with any other: the step computes the same.

On two ranks, against the run with every pass on.  That bitwise is asked for wherever the pass
claims it makes one exception: where gradients are clipped, a pass that cuts shards elsewhere adds
up their norm in another order.  Every program goes through the verifier, after every pass.

``python -m tests.training.test_toggles`` prints the table of docs/toggles.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tabulate import tabulate
from torch.nn.utils import clip_grad_norm_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.covering import first
from tests.kit.models import Gpt, language_loss
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from zerofx import backend
from zerofx.options import OPTIONAL_PASSES
from zerofx.passes.pipeline import PIPELINE, rewrites

STAGES = (0, 1, 2, 3)
STEPS = 4
CLIPPED = 0.5  # under the norm of every step's gradients
PROMISED = 1e-6
TIMEOUT_S = 600.0

PASSES = {step.name: step for step in rewrites(PIPELINE) if step.optional}
NAMES = tuple(PASSES)
CUTS_SHARDS = {"bucket"}
"""Passes that decide which elements a rank's shards hold, so how a norm is added up."""

ALONE = tuple((name,) for name in NAMES)
PAIRS = tuple(itertools.combinations(NAMES, 2))


@dataclass(frozen=True)
class Form:
    """What the step looks like."""

    autocast: bool = False
    checkpoint: bool = False
    clipped: bool = False
    lowering: str = "eager"

    def __str__(self) -> str:
        words = ["bf16" if self.autocast else "fp32"]
        words += ["checkpointed"] if self.checkpoint else []
        words += ["clipped"] if self.clipped else []
        return " ".join(words + ([] if self.lowering == "eager" else [self.lowering]))


EVERYTHING = Form(autocast=True, checkpoint=True)
"""Every pass has something to do in it."""
KINDS = (Form(), Form(autocast=True), Form(checkpoint=True))
FORMS = [Form(k.autocast, k.checkpoint, clipped) for k in KINDS for clipped in (False, True)]
COMPILED = [Form(True, True, clipped, "inductor") for clipped in (False, True)]


@dataclass
class Trained:
    """What one rank saw, and what each pass did: its counts, or why it did not run."""

    losses: torch.Tensor
    norms: torch.Tensor
    parameters: dict[str, torch.Tensor]
    did: dict[str, int]
    skipped: dict[str, str]


def train(form: Form, stage: int, off: tuple[str, ...]) -> Trained:
    """A few steps of a small GPT with a tied head; runs on a rank."""

    def step(model, optimizer, inputs, targets):
        with torch.autocast("cpu", torch.bfloat16, enabled=form.autocast):
            loss = language_loss(model, inputs, targets)
        loss.backward()
        norm = torch.zeros(())
        if form.clipped:
            norm = clip_grad_norm_(model.parameters(), CLIPPED)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gpt(layers=2, width=33, checkpoint=form.checkpoint)
    # Adam makes full steps of rounding errors where a gradient is zero, unless epsilon is larger.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    passes = {name: name not in off for name in NAMES}
    options = {"stage": stage, "lowering": form.lowering, **passes}
    known = set(backend.zero.functions)
    compiled = torch.compile(step, backend="zero", options=options)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    results = []
    for number in range(STEPS):
        batch = [part.chunk(world_size)[rank] for part in models.tokens(number, 2 * world_size)]
        results.append([value.detach().double() for value in compiled(model, optimizer, *batch)])
    losses, norms = torch.tensor(results, dtype=torch.float64).T
    (function,) = [function for function in backend.zero.functions if function not in known]
    (program,) = function.programs
    return Trained(
        losses,
        norms,
        {name: value.detach().clone() for name, value in model.state_dict().items()},
        {report.name: sum(report.counts.values()) for report in program.reports},
        {report.name: report.skipped for report in program.reports if report.skipped},
    )


def distance(mine: list[Trained], others: list[Trained]) -> float:
    """The largest relative difference of a loss or of a whole parameter; 0 if bitwise equal."""
    largest = 0.0
    for one, other in zip(mine, others, strict=True):
        assert one.parameters.keys() == other.parameters.keys()
        largest = max(largest, ((one.losses - other.losses) / other.losses).abs().max().item())
        for name, value in other.parameters.items():
            if not torch.equal(one.parameters[name], value):
                apart = (one.parameters[name].double() - value.double()).norm()
                largest = max(largest, (apart / value.double().norm()).item())
    return largest


@pytest.fixture(name="trained", scope="module")
def trained_fixture(ranks):
    """``trained(form, stage, off)``: both ranks' results, each computed once."""
    return functools.cache(lambda *arguments: ranks(2).run(train, *arguments, timeout_s=TIMEOUT_S))


def applies(off: tuple[str, ...], stage: int) -> bool:
    return all(PASSES[name].smallest_stage <= stage for name in off)


def is_bitwise(off: tuple[str, ...], form: Form) -> bool:
    """Whether the passes claim that nothing changes without them."""
    claimed = all(PASSES[name].preserves_numerics for name in off)
    return claimed and not (form.clipped and CUTS_SHARDS & set(off))


def check(trained: Callable, form: Form, stage: int, off: tuple[str, ...]) -> None:
    mine, others = trained(form, stage, off), trained(form, stage, ())
    turned_off = {name for name, why in mine[0].skipped.items() if why == "turned off"}
    assert turned_off == set(off)
    assert "turned off" not in others[0].skipped.values()
    assert others[0].losses[-1] != others[0].losses[0]
    if form.clipped:
        assert (others[0].norms > CLIPPED).all(), "nothing was clipped"
    found = distance(mine, others)
    if form.lowering == "eager" and is_bitwise(off, form):
        assert found == 0, f"{found:.1e} from the run with {', '.join(off)} on"
    assert found <= PROMISED


def test_the_options_are_the_pipelines_optional_passes():
    assert set(OPTIONAL_PASSES) == {*PASSES, "fuse_optimizer"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", first(1, first(2, NAMES)))
def test_without_one_pass_the_step_computes_the_same(trained, name):
    check(trained, EVERYTHING, 3, (name,))


@pytest.mark.nightly
@pytest.mark.parametrize("name", first(1, first(2, NAMES)))
def test_every_pass_has_something_to_do_in_that_step(trained, name):
    """Otherwise turning it off says nothing."""
    assert trained(EVERYTHING, 3, ())[0].did[name] > 0


@pytest.mark.nightly
def test_without_any_pass_the_step_computes_the_same(trained):
    check(trained, EVERYTHING, 3, NAMES)


# The rest of the matrix.


def cells(forms: Iterable[Form], stages: Iterable[int]) -> list:
    """(form, stage, what is off) of every table cell in which all of it would run."""
    return [
        pytest.param(form, stage, off, id=f"{form}, stage {stage}, no {' '.join(off)}")
        for form, stage, off in itertools.product(forms, stages, ALONE + PAIRS)
        if applies(off, stage)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form, stage, off", cells(FORMS, STAGES))
def test_without_any_one_or_two_passes_the_step_computes_the_same(trained, form, stage, off):
    check(trained, form, stage, off)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form, stage, off", cells(COMPILED, (1, 3)))
def test_compiled_without_one_or_two_passes_the_step_computes_the_same(trained, form, stage, off):
    check(trained, form, stage, off)


# The table.

DOCUMENT = Path(__file__).parents[2] / "docs" / "toggles.md"


def row_of(off: tuple[str, ...]) -> str:
    return " + ".join(off)


def table(measure: Callable, forms: list[Form], stages: Iterable[int]) -> str:
    """The largest distance over the forms, by what is off and by stage."""

    def cell(off: tuple[str, ...], stage: int) -> str:
        if not applies(off, stage):
            return "-"
        found = max(distance(measure(form, stage, off), measure(form, stage, ())) for form in forms)
        return f"{found:.0e}" if found else "bitwise"

    rows = [[row_of(off), *(cell(off, stage) for stage in stages)] for off in ALONE + PAIRS]
    headers = ["turned off", *(f"stage {stage}" for stage in stages)]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


@pytest.mark.nightly
def test_the_document_has_a_row_for_every_pass_and_every_pair():
    rows = re.findall(r"^\| (\w+(?: \+ \w+)?) +\|", DOCUMENT.read_text(), re.MULTILINE)
    for off in ALONE + PAIRS:
        assert row_of(off) in rows, (
            f"run python -m tests.training.test_toggles: {off} is not in {DOCUMENT}"
        )


def main() -> None:
    unclipped = [form for form in FORMS if not form.clipped]
    with contextlib.closing(Ranks(2)) as both:

        @functools.cache
        def measure(*arguments) -> list[Trained]:
            return both.run(train, *arguments, timeout_s=TIMEOUT_S)

        for title, forms, stages in (
            ("Not clipped", unclipped, STAGES),
            ("Clipped, fp32", [f for f in FORMS if f.clipped and not f.autocast], STAGES),
            ("Clipped, bf16", [f for f in FORMS if f.clipped and f.autocast], STAGES),
            ("Compiled, not clipped", COMPILED[:1], (1, 3)),
            ("Compiled, clipped", COMPILED[1:], (1, 3)),
        ):
            print(f"## {title}\n\n{', '.join(map(str, forms))}:\n")
            print(table(measure, forms, stages), "\n", flush=True)


if __name__ == "__main__":
    main()
