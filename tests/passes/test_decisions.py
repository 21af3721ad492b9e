"""A program's ``Decisions`` are all that there is to decide: passes apply what they are given."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.kit.covering import only
from tests.kit.planted.steps import FILES, SLOW
from tests.kit.programs import Captured, clone, context_of, mlp_step
from tests.replay.test_dumped_programs import language_step
from zerofx.capture import substitutes
from zerofx.ir.interface import recorded
from zerofx.ir.parameters import Decisions
from zerofx.ir.roles import provenance
from zerofx.passes.manager import run_pipeline
from zerofx.passes.memory.saved_values import SavedValues
from zerofx.passes.offload import offload_activations, place_offload
from zerofx.passes.pipeline import PIPELINE, rewrites
from zerofx.passes.schedule import prefetch
from zerofx.passes.zero import bucket, gathers
from zerofx.replay.validate import Validator
from zerofx.report.optimizers import describe

ALL_ON = {"lowering": "inductor", "bucket": True, "bucket_bytes": 2000, "update_in_backward": True}
ROOM = {"memory_budget": 12_000, "hardware": SLOW}

Forms = dict[str, tuple[Callable[[], Captured], dict[str, Any]]]
FORMS: Forms = {
    "layers": (lambda: mlp_step(6, 17, clip=True), {}),
    "layers, a budget": (lambda: mlp_step(6, 17), ROOM),
    "layers, a budget, no overlap": (
        lambda: mlp_step(6, 17),
        {**ROOM, "hardware": f"{SLOW} overlaps=0"},
    ),
    "states leave": (lambda: mlp_step(6, 17), {**ROOM, "offload": "optimizer"}),
    "states leave, stage 2": (
        lambda: mlp_step(6, 17),
        {**ROOM, "memory_budget": 20_000, "offload": "optimizer", "stage": 2},
    ),
    "all in files": (
        lambda: mlp_step(6, 17),
        {**FILES, "offload": "optimizer,params,activations", "recompute": False, "hardware": SLOW},
    ),
    "language": (lambda: language_step(layers=1), {"bucket_bytes": 20_000}),
}
RULES = (
    (bucket, "_by_layer"),
    (SavedValues, "choose"),
    (gathers, "decide"),
    (place_offload, "decide"),
    (offload_activations, "_planned"),
    (prefetch, "_starts"),
)


@pytest.fixture(autouse=True)
def small_activations_leave(monkeypatch):
    monkeypatch.setattr(offload_activations, "SMALLEST_BYTES", 1)


def made(form: str, decided: Decisions | None = None, on_program: Any = None) -> Captured:
    """The program of a form, by what is decided or by the passes' own rules."""
    step, options = FORMS[form]
    program = clone(step())
    ctx = context_of(program, **{**ALL_ON, **options})
    ctx = dataclasses.replace(ctx, decided=decided or Decisions())
    observer = on_program(program, ctx) if on_program else None
    run_pipeline(program.gm, ctx, rewrites(PIPELINE), observer)
    return program


def decisions_of(program: Captured) -> Decisions:
    return recorded(program.graph).decisions


def text_of(program: Captured) -> list[str]:
    nodes = program.graph.nodes
    return [f"{node.format_node()} {provenance(node)}" for node in nodes]


@pytest.mark.parametrize("form", only(("layers, a budget", "all in files"), FORMS))
def test_given_all_decisions_no_rule_is_asked_and_the_program_is_the_same(form):
    first = made(form)
    decided = decisions_of(first)
    with contextlib.ExitStack() as without_rules:
        for owner, name in RULES:
            without_rules.enter_context(mock.patch.object(owner, name, None))
        again = made(form, decided)
    assert text_of(again) == text_of(first)
    assert decisions_of(again) == decided


@pytest.mark.nightly
def test_every_field_is_decided_by_some_form():
    found = [dataclasses.asdict(decisions_of(made(form))) for form in FORMS]
    assert all(any(each[field] for each in found) for field in found[0]), found


OTHERS = {
    "layout": {},
    "saved": ((frozenset(), {}),),
    "residency": None,
    "away": {},
    "starts": {},
}
FORM_OF = {"saved": "language", "residency": "layers, a budget", "away": "all in files"}


@pytest.mark.nightly
@pytest.mark.parametrize("field", OTHERS)
def test_other_decisions_give_another_program_that_computes_the_same(field):
    """Validated pass by pass: what is decided changes when and where, never what."""
    form = FORM_OF.get(field, "layers")
    own = decisions_of(made(form))
    other = OTHERS[field]
    if field == "residency":
        kept = own.residency.kept_gathered
        all_cuts = tuple(frozenset(range(int(words.split()[-2]))) for words in kept.choices)
        other = dataclasses.replace(
            own.residency, kept_gathered=dataclasses.replace(kept, cuts=all_cuts)
        )
    changed = Decisions(**{field: other})

    def validator(program: Captured, ctx: Any) -> Validator:
        names = {id(t): info.name for t, info in zip(program.tensors, program.table, strict=True)}
        described = {h: describe(substitutes.optimizer_of(h), names) for h in program.optimizers}
        return Validator(program.gm, ctx, PIPELINE, described)

    program = made(form, changed, validator)
    assert getattr(decisions_of(program), field) == other
    assert text_of(program) != text_of(made(form))
