"""What ``zerofx.explain(step)`` and ``python -m zerofx explain`` say of a step."""

import re

import pytest
import torch
from torch import fx, nn

import zerofx
import zerofx.__main__ as command_line
from tests.kit.covering import first, nightly
from tests.kit.programs import clone, mlp_step, run_passes
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.cost.timeline import LANES, Timeline
from zerofx.ir import ops
from zerofx.ir.effects import why_uncaptured
from zerofx.ir.rules import _RULES, FILES, TO_HOST, UPDATES
from zerofx.passes.manager import TURNED_OFF
from zerofx.report.explain import limit_text
from zerofx.report.write import EXPLANATION

NUMEL = 8 * 8 + 8


def train(optimizer=torch.optim.AdamW, dtype=torch.float32, **options):
    """Compile and run a step of one layer; return what explains it."""
    torch._dynamo.reset()
    model = nn.Linear(8, 8, dtype=dtype)
    chosen = optimizer(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).pow(2).sum()
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        return loss

    step.__code__ = step.__code__.replace()  # what is explained is known by its code
    options = {"lowering": "eager", **options}
    compiled = torch.compile(step, backend="zero", options=options)
    compiled(torch.ones(2, 8, dtype=dtype))
    return zerofx.explain(compiled)


def memory(text):
    """The table of what a rank keeps: by what, each stage and this program."""
    rows = re.findall(r"^(parameters|gradients|optimizer states|together)  +(.*)$", text, re.M)[1:]
    return {what: re.split(r" {2,}", values.strip()) for what, values in rows}


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("stage", first(1, (3, 0)))
def test_memory_stands_beside_the_formulas_of_every_stage(stage, ranks):  # noqa: F811
    table = memory(ranks(2).run(train_at, stage)[0])
    assert table["parameters"] == ["288 B", "288 B", "288 B", "144 B"] + [
        "288 B" if stage == 0 else "144 B"
    ]
    assert table["gradients"][:4] == ["288 B", "288 B", "144 B", "144 B"]
    states = "576 B" if stage == 0 else "288 B"
    assert table["optimizer states"] == ["576 B", "288 B", "288 B", "288 B", states]
    assert table["together"][:4] == ["1.12 KiB", "864 B", "720 B", "576 B"]


def train_at(stage):
    return train(stage=stage)


@pytest.mark.parametrize(
    ("kept", "arguments"),
    (
        nightly(0, {"optimizer": torch.optim.SGD}),
        nightly(8, {}),
        nightly(4, {"dtype": torch.bfloat16}),
        (12, {"dtype": torch.bfloat16, "master_weights": True}),
    ),
)
def test_states_count_by_the_models_and_the_optimizers_dtypes(kept, arguments):
    text = train(**arguments)
    width = arguments.get("dtype", torch.float32).itemsize
    per_element = f"parameters {width}, gradients {width}, optimizer states {kept};"
    assert f"Bytes per element: {per_element} {NUMEL} elements, 1 rank(s)." in text
    nbytes = f"{kept * NUMEL} B"
    assert memory(text)["optimizer states"] == [nbytes] * 5


def test_what_is_off_says_why_and_how_to_turn_it_on():
    text = train(stage=2, prefetch=False)
    assert re.search(r"prefetch +off +turned off; ZEROFX_PREFETCH=1 turns it on", text)
    assert re.search(r"shard_parameters +off +stage 2 \(needs 3\)", text)
    assert re.search(r"merge_updates +off +lowering eager \(needs inductor\)", text)
    assert re.search(r"bucket +on +buckets: 1", text)


FUSING = {"until": "merge_updates", "lowering": "inductor"}


@pytest.mark.nightly
def test_updates_are_fused_where_nothing_is_in_the_way():
    skipped = {
        name: run_passes(clone(mlp_step()), **FUSING | options)["merge_updates"].skipped
        for name, options in (
            ("fused", {}),
            ("stage 0", {"stage": 0}),
            ("eager", {"lowering": "eager"}),
            ("off", {"fuse_optimizer": False}),
        )
    }
    needs = "lowering eager (needs inductor)"
    assert skipped == {"fused": "", "stage 0": "", "eager": needs, "off": TURNED_OFF}
    text = train(stage=2, fuse_optimizer=False)
    assert text.count("turned off; ZEROFX_FUSE_OPTIMIZER=1 turns it on") == 3


# What no CUDA graph can hold


def uncaptured(text):
    """The rows of the table: by operator and number of nodes, why."""
    rows = text.split("no CUDA graph can hold", 1)[1].split("\n\n")[0].splitlines()[2:]
    cells = [re.split(r" {2,}", row) for row in rows]
    return {what: why for what, _, why in cells}


def test_a_plain_step_has_nothing_but_updates_against_a_graph():
    why = "the host computes the update's numbers at every call"
    assert uncaptured(train()) == {"update (2)": why}


def test_nothing_speaks_against_a_graph_of_an_evaluation():
    model = nn.Linear(8, 8)
    compiled = torch.compile(
        lambda x: model(x).sum(), backend="zero", options={"lowering": "eager"}
    )
    with torch.no_grad():
        compiled(torch.ones(2, 8))
    text = zerofx.explain(compiled)
    assert "A CUDA graph could hold all of this program, if its inputs stayed" in text


@pytest.mark.nightly
def test_gradients_between_calls_and_sizes_that_change_stand_against_a_graph():
    model = nn.Linear(8, 8)
    chosen = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).pow(2).sum()
        loss.backward()
        chosen.step()
        return loss

    compiled = torch.compile(step, backend="zero", options={"lowering": "eager"}, dynamic=True)
    for rows in (2, 3):
        compiled(torch.ones(rows, 8))
    text = zerofx.explain(compiled)
    last = uncaptured(text[text.rindex("program 1") :])
    assert last["placeholder (2)"].startswith("a gradient that is kept between calls lies")
    assert last["output (1)"] == "it hands on gradients, which the next call's must not overwrite"
    assert last["sizes (2)"].startswith("they change from call to call")


def test_every_operator_of_the_hosts_has_a_reason():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for reason, target, arguments in (
        ("the host reads found_inf", ops.update, (x, x, 0, 0, x)),
        ("the host reads found_inf", ops.update_together, ([x], [x], 0, [0], x)),
        ("the host computes the update's", ops.on_owners, ([x], [x], 0, [0], [0], 1)),
        ("the host looks for room", ops.copy_start, ([x], [0], ops.HOST)),
        ("the host waits until shards", ops.copy_start_shards, ([x], [0], [x])),
        ("the host's threads update", ops.update_start, (x, x, 0, [0])),
        ("the host's threads update", ops.update_start_shards, ([x], x, 0, [0])),
        ("the host's threads read", ops.fetch_start, (x, "value")),
        ("the host's threads write", ops.evict, (x, "value")),
        ("the host reads a value", torch.ops.aten._local_scalar_dense.default, (x,)),
        ("the size of its result", torch.ops.aten.nonzero.default, (x,)),
        ("the host runs programs", torch.ops.higher_order.cond, (x, x, x, [])),
        ("", ops.all_gather_start, (x, 2)),
        ("", ops.reduce_scatter_start, (x, "mean", 2)),
        ("", torch.ops.aten.mm.default, (x, x)),
    ):
        node = graph.call_function(target, arguments)
        why = why_uncaptured(node)
        assert why.startswith(reason) and bool(why) is bool(reason), target
        waits = {ops.update_start: "its threads have updated", ops.fetch_start: "for files"}
        wait = graph.call_function(ops.wait, (node,))
        assert why_uncaptured(wait).endswith(waits.get(target, ""))
    for rules in _RULES.values():  # a new operator is one of these
        of_host = rules.updates is not None or rules.lane in (TO_HOST, UPDATES, FILES)
        assert rules.uncaptured or not of_host or rules is _RULES[ops.optimizer_step]


@pytest.mark.parametrize("lane", LANES)
def test_the_busiest_lane_limits_the_step(lane):
    lanes = {**dict.fromkeys(LANES, 0.001), lane: 0.006}
    text = limit_text(Timeline(compute_s=0.007, exposed_s=0.001, transfers={}, lanes=lanes))
    assert text.startswith(f"{lane}, for 75% of a step of 8 ms; 1 ms of it a rank only waits. ")


def test_an_empty_step_is_limited_by_nothing_it_can_name():
    assert limit_text(Timeline(0.0, 0.0, {}, dict.fromkeys(LANES, 0.0))).startswith(
        "compute, for 0%"
    )


# The command


def explain(*arguments):
    return command_line.main(["explain", *map(str, arguments)])


def without_seconds(text):
    """The text with neither times nor what only columns of times make wide."""
    text = re.sub(r"^first call .*\n", "", text, flags=re.MULTILINE)
    return [re.sub(r" +\d+\.\d{3}$|seconds$|-+", "", line).split() for line in text.splitlines()]


def test_the_first_call_is_explained_by_parts():
    (line,) = re.findall(r"^first call +(.*)$", train(), flags=re.MULTILINE)
    total, parts = line.split(" s: ")
    pairs = (part.rpartition(" ") for part in parts.split(", "))
    seconds = {part: float(taken) for part, _, taken in pairs}
    assert seconds.keys() >= {"Dynamo", "AOTAutograd", "passes", "taking charge", "running"}
    assert sum(seconds.values()) == pytest.approx(float(total), abs=0.1)


def test_a_dump_is_explained_as_the_step_was(tmp_path, capsys):
    text = train(dump=str(tmp_path))
    assert explain(tmp_path) == 0
    printed = capsys.readouterr().out
    assert without_seconds(printed) == without_seconds(text)
    assert "seconds" in text and "seconds" not in printed
    (folder,) = (tmp_path / "rank0").iterdir()
    for where in (tmp_path / "rank0", folder):
        assert explain(where) == 0 and capsys.readouterr().out == printed
    assert explain(tmp_path, "--function", folder.name) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.nightly
def test_the_same_step_is_explained_in_the_same_bytes(tmp_path):
    texts = []
    for run in ("first", "second"):
        train(dump=str(tmp_path / run))
        (path,) = (tmp_path / run).glob(f"rank0/*/{EXPLANATION}")
        texts.append(re.sub(r"^step\d+", "step", path.read_text()))
    assert texts[0] == texts[1]


def write(folder, text=None):
    folder.mkdir(parents=True)
    (folder / "00_captured.py").write_text("")
    if text is not None:
        (folder / EXPLANATION).write_text(text)


def test_functions_come_in_the_order_in_which_they_were_compiled(tmp_path, capsys):
    for name in ("step10_0", "step2_1", "step2_0"):
        write(tmp_path / "rank1" / name, f"{name}\n")
    write(tmp_path / "rank1" / "evaluate11_0")
    assert explain(tmp_path, "--rank", 1) == 0
    first, second, third, last = capsys.readouterr().out.split("\n\n")
    assert (first, second, third) == ("step2_0", "step2_1", "step10_0")
    assert last == "evaluate11_0 has no explain.txt: it was compiled, and has not run once.\n"


def test_what_there_is_not_is_said(tmp_path, capsys):
    write(tmp_path / "rank1" / "step0_0", "text")
    for arguments, told in (
        ((tmp_path / "none",), "does not exist"),
        ((__file__,), "is no folder"),
        ((tmp_path,), "holds no dump of rank 0; it holds rank1. Run the training"),
        ((tmp_path, "--rank", 1, "--function", "other"), "no function 'other'; there is step0_0"),
    ):
        assert explain(*arguments) == 1
        assert told in capsys.readouterr().err
