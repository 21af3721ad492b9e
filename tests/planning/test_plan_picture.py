"""``plan --picture``: what is drawn are the plan's facts; what can't be drawn is said at first."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from matplotlib import image

import zerofx.__main__ as command_line
from tests.kit.device_memory import squares
from zerofx import plan
from zerofx.cost.timeline import LANES
from zerofx.errors import CommandError
from zerofx.planning import picture
from zerofx.report.memory import KINDS
from zerofx.report.picture import MEMORY


@pytest.fixture(scope="module")
def plans():
    """The facts of plans for 2 and for 4 ranks; the second has a limit, and three stages."""
    model = torch.nn.Linear(512, 256)
    given = model, torch.optim.AdamW(model.parameters()), torch.ones(8, 512)
    options = {"hardware": "latency_s=1e-5 bytes_per_s=1e9"}
    two = plan(squares, given, ranks=2, options=options).facts
    four = plan(squares, given, ranks=4, options=options, stages=[0, 1, 3]).facts
    return [two, {**four, "memory_limit": 3 * 2**20}]


@pytest.fixture(scope="module")
def drawn(plans):
    """The axes of memory and of time."""
    return picture.figure_of(plans, ["two", "four"]).axes


def stages(plans):
    return [of for plan in plans for of in plan["stages"].values()]


def bars(axis):
    """Return the bars by label: where each one is, where it begins, and its height."""
    return {
        each.get_label(): [(bar.get_center()[0], bar.get_y(), bar.get_height()) for bar in each]
        for each in axis.containers
        if hasattr(each, "patches")
    }


def test_the_bars_of_memory_are_the_peak_by_kind_and_end_at_what_the_process_takes(plans, drawn):
    of, memory = stages(plans), bars(drawn[0])
    kinds = {kind for stage in of for kind in stage["peak"]}
    assert set(memory) - {picture.BESIDE} == kinds and "parameters" in kinds
    for kind in kinds:
        heights = [height for _, _, height in memory[kind]]
        assert heights == [stage["peak"].get(kind, 0) for stage in of]
    tops = [max(sum(each[at][1:]) for each in memory.values()) for at in range(len(of))]
    assert tops == [stage["device_bytes"] for stage in of]
    sums = [sum(each[at][2] for each in memory.values()) for at in range(len(of))]
    assert sums == tops  # no bar hides another


def test_lines_are_what_is_kept_and_the_limit(plans, drawn):
    (kept,) = drawn[0].collections
    heights = [segment[0][1] for segment in kept.get_segments()]
    assert heights == [sum(stage["keeps"].values()) for stage in stages(plans)]
    (limit,) = [line for line in drawn[0].lines if line.get_label() == "memory limit"]
    assert set(limit.get_ydata()) == {3 * 2**20}
    assert drawn[0].get_ylim()[1] > 3 * 2**20


def test_without_a_limit_there_is_no_line(plans):
    memory, _ = picture.figure_of(plans[:1], ["two"]).axes
    assert not memory.lines


def test_the_bars_of_time_are_the_lanes_and_the_mark_is_the_interval(plans, drawn):
    of, time = stages(plans), bars(drawn[1])
    assert set(time) == {"compute", "link"}
    for lane, each in time.items():
        assert [height for _, _, height in each] == [stage["lanes_s"][lane] for stage in of]
    (marks,) = [each for each in drawn[1].containers if not hasattr(each, "patches")]
    line, _, (interval,) = marks
    assert list(line.get_ydata()) == [stage["expected_s"] for stage in of]
    ends = [tuple(segment[:, 1]) for segment in interval.get_segments()]
    assert ends == [pytest.approx(stage["step_s"]) for stage in of]
    assert marks.get_label() == "a step, 80% of them within"


def test_stages_are_beside_each_other_and_plans_apart(plans, drawn):
    labels = [label.get_text() for label in drawn[1].get_xticklabels()]
    assert labels == ["0", "1", "2", "3", "0", "1", "3"]
    at = [place for place, _, _ in bars(drawn[0])["parameters"]]
    assert at == pytest.approx(list(drawn[1].get_xticks()))
    names = {text.get_text(): text.get_position()[0] for text in drawn[0].texts}
    assert names["two"] == pytest.approx((at[0] + at[3]) / 2)
    assert names["four"] == pytest.approx((at[4] + at[6]) / 2) and at[4] - at[3] > 1


def test_each_kind_and_each_lane_has_a_colour_of_its_own():
    assert set(MEMORY) == {kind for kinds in KINDS.values() for kind in kinds}
    assert set(picture.LANE_COLOURS) == set(LANES)
    for colours in (MEMORY, picture.LANE_COLOURS):
        assert len(set(colours.values())) == len(colours)


def test_a_plan_of_no_stage_is_left_out_and_only_such_are_refused(plans, tmp_path):
    none = {**plans[0], "stages": {}}
    memory, _ = picture.figure_of([none, plans[0]], ["none", "two"]).axes
    assert "none" not in [text.get_text() for text in memory.texts]
    with pytest.raises(CommandError, match="is not drawn: no stage can be planned"):
        picture.draw([none], tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())


def test_the_suffix_is_the_type(plans, tmp_path):
    for suffix in (".png", ".svg", ".PDF"):
        picture.draw(plans, tmp_path / f"plan{suffix}")
    pixels = image.imread(tmp_path / "plan.png")[..., :3]
    colour = [int(MEMORY["optimizer states"][at : at + 2], 16) / 255 for at in (1, 3, 5)]
    assert (abs(pixels - colour).max(-1) < 0.01).sum() > 500
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    assert (tmp_path / "plan.PDF").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.PDF", "plan.png", "plan.svg"]


def test_two_files_are_drawn_beside_each_other(plans, tmp_path, capsys):
    paths = [tmp_path / f"{name}.json" for name in ("one", "other")]
    for path, facts in zip(paths, plans, strict=True):
        path.write_text(json.dumps(facts))
    words = ["plan", "--picture", str(tmp_path / "both.svg"), "--compare", *map(str, paths)]
    assert command_line.main(words) == 0
    drawn = (tmp_path / "both.svg").read_text()
    assert "first: 2 rank(s)" in drawn and "second: 4 rank(s)" in drawn


@pytest.mark.parametrize(
    "name, words",
    [
        ("plan.jpg", "none of .png, .svg, .pdf: name it plan.png"),
        ("plan", "name it plan.png"),
        ("nowhere/plan.png", "no folder"),
        ("folder.png", "is a folder: name a file in it"),
    ],
)
def test_what_cannot_be_drawn_is_said_before_anything_runs(name, words, tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "train.py").write_text("raise SystemExit('has run')")
    given = ["plan", "--ranks", "2", "--picture", str(tmp_path / name), str(tmp_path / "train.py")]
    assert command_line.main(given) == 1
    error = capsys.readouterr().err
    assert words in error and "has run" not in error and error.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CommandError, match=r"pip install 'zerofx\[pictures\]'"):
        picture.check(tmp_path / "plan.png")
