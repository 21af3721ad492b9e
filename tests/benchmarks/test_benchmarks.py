"""The benchmarks run, compare equal work, and count what they say they count."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SYSTEMS = ("zerofx 3 eager", "FSDP2", "DDP")


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark's module as its command would, for one test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


@pytest.mark.nightly
def test_speed_has_a_row_for_every_system_and_their_losses_agree():
    sizes = "--width 64 --layers 1 --rows 1 --length 8 --rounds 1 --steps 1".split()
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "speed.py", *sizes]
        + ["--memory-parameters", "0", "--systems", *SYSTEMS],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr  # 1 if the losses differ
    rows = ran.stdout.split("---\n")[-1].splitlines()
    assert [row.split("  ")[0] for row in rows] == list(SYSTEMS)
    sent_mb = [float(row.split("x")[1].split()[0]) for row in rows]
    assert all(sent_mb), ran.stdout


@pytest.mark.nightly
def test_a_model_too_large_for_a_process_trains_sharded_and_fails_in_one():
    rows = limited("sharded, deferred", "resumed", "one process, plain")
    assert "trains" in rows[0] and "trains" in rows[1] and "training" in rows[2]


@pytest.mark.nightly
def test_a_model_of_four_times_the_limit_trains_in_files_and_cannot_be_constructed_plainly():
    # Beside the cache a step needs 0.3 GiB for what is under way, and its compilation 0.2.
    sizes = "--gib 0.75 --cached 0.25".split()
    rows = limited("files, deferred", "files, resumed", "files, plain", sizes=sizes)
    assert "trains" in rows[0] and "trains" in rows[1] and "construction" in rows[2]


@pytest.mark.nightly
def test_debugging_has_a_row_for_dumps_off_and_for_what_asks_taken_out():
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "debugging.py"] + "--layers 1 --rounds 1 --steps 2".split(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    rows = [row.split() for row in ran.stdout.split("--\n")[-1].splitlines()]
    assert [row[:2] for row in rows] == [["1", "off"], ["1", "bypassed"]]
    assert all(0 < float(row[-1].rstrip("%")) < 100 for row in rows), ran.stdout


def test_a_wrong_order_is_one_of_steps_that_differ(load):
    two_links = load("two_links")
    of_forms = {  # predicted, and measured in rounds of which the last one was disturbed
        "a": (1.0, (10.0, 10.0, 10.0, 14.0)),
        "b": (0.9, (10.3, 10.4, 10.3, 14.2)),
        "c": (0.5, (12.0, 12.1, 11.9, 16.9)),
        "d": (2.0, (20.0, 21.0, 20.0, 28.0)),
    }
    found = [two_links.Result(name, *times, 0) for name, times in of_forms.items()]
    wrong = [(fast.form, slow.form) for fast, slow in two_links.misplaced(found)]
    assert wrong == [("a", "c"), ("b", "c")], "a and b take as long"


def test_two_links_are_compared_for_every_pair_of_stages_that_there_is(load):
    known = load("two_links").forms()
    assert {"0", "3 two hops", "gpu 3, node 0", "gpu 2, node 0", "1 two hops"} <= set(known)
    assert "gpu 1, node 3" not in known and "gpu 2, node 2" not in known


@pytest.mark.nightly
def test_a_slow_outer_link_favours_what_is_predicted():
    sizes = "--width 64 --layers 1 --rounds 3 --ratios 10 --bytes-per-s 4e6".split()
    # It gives each form the figures that it has measured, and the tests' own would win.
    environ = {name: text for name, text in os.environ.items() if name != "ZEROFX_HARDWARE"}
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "two_links.py", *sizes, "--forms", "0", "gpu 3, node 0"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    rows = ran.stdout.split("---\n")[1].splitlines()[:2]
    assert [row.split("  ")[0] for row in rows] == ["gpu 3, node 0", "0"]
    sent = [float(row.split("MB")[0].split()[-1]) for row in rows]
    assert sent[1] == pytest.approx(2 * sent[0], rel=0.02), "half of it, twice"


def limited(*names, sizes=("--gib", "0.5")):
    """The rows of benchmarks/limited.py, which fails by itself if one is not as it must be."""
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "limited.py", *sizes, "--width", "768", "--only", *names],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    rows = ran.stdout.split("---\n")[-1].splitlines()
    assert len(rows) == len(names)
    return rows


@pytest.mark.nightly
def test_overlap_has_a_row_for_every_regime():
    sizes = "--layers 4 --seconds 0.5 --rounds 1 --regimes updates even".split()
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "overlap.py", *sizes],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode in (0, 1), ran.stderr  # 1 for a missed aim: a busy machine misses them
    rows = ran.stdout.split("---\n")[-1].splitlines()
    assert [row.split()[0] for row in rows] == ["updates", "even"]


@pytest.mark.nightly
def test_checkpoints_has_a_row_for_every_system(tmp_path):
    sizes = "--width 64 --layers 1 --rows 1 --length 8 --rounds 1 --steps 1".split()
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "checkpoints.py", *sizes, "--directory", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode in (0, 1), ran.stderr  # 1 for a step that a snapshot makes too slow
    rows = [row.split("  ") for row in ran.stdout.split("---\n")[-1].splitlines()]
    assert [row[0] for row in rows] == ["zerofx 3", "FSDP2 + DCP"]
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_files_compares_updates_with_what_no_schedule_can_beat(tmp_path):
    sizes = ["--directories", tmp_path, "--gib", "0.01", "--bucket-mib", "2", "--rounds", "1"]
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "files.py", *sizes, "--updates"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    for words in ("a step from files", "1M elements in 5 buckets, 2 in memory", "can beat"):
        assert words in ran.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_files_has_a_row_for_every_system_and_says_whether_it_met_its_aim(tmp_path):
    sizes = "--gib 0.01 --bucket-mib 3 --block-kib 512 --rounds 1 --checksums --fio".split()
    for aim, status in (("0", 0), ("1e9", 1)):
        ran = subprocess.run(
            [sys.executable, BENCHMARKS / "files.py", *sizes, ""]
            + ["--directories", tmp_path, "--at-least", aim],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == status, ran.stderr
        rows = ran.stdout.split("---\n")[-1].splitlines()
        assert [" ".join(row.split()[:2]) for row in rows] == [
            f"{kind} {system}"
            for kind in ("read", "write")
            for system in ("store", "threads", "store,")
        ]
    assert not list(tmp_path.iterdir())


def event(name, at_s, phase):
    payload = json.dumps({"name": name, "ts": at_s * 1e6, "ph": phase}, indent=0)
    lines = [f"\t{line}\n" for line in payload.splitlines()]
    return ['V1120 20:49:40.266000 1 file.py:1] {"chromium_event": {}}\n', *lines]


@pytest.mark.nightly
def test_a_moment_of_compilation_is_counted_once(load):
    compile_time = load("compile_time")
    lines = [
        *event("dynamo", 0, "B"),
        *event("inductor_compile", 2, "B"),
        *event("fx_graph_cache_miss", 2, "i"),
        *event("fx_graph_cache_hit", 3, "i"),
        *event("inductor_compile", 3, "B"),  # in another thread
        *event("inductor_compile", 5, "E"),
        *event("inductor_compile", 6, "E"),
        'V1120 20:49:41 1 file.py:1] {"artifact": {"name": "fx_graph_cache_hit"}}\n',
        'V1120 20:49:41 1 file.py:1] {"artifact": {"name": "fx_graph_cache_miss"}}\n',
        *event("dynamo", 10, "E"),
        *event("create_aot_dispatcher_function", 20, "B"),
        *event("create_aot_dispatcher_function", 21, "E"),
    ]
    found = compile_time.with_trace(compile_time.Compilation(30.0, passes_s=1.5), lines)
    assert (found.capture_s, found.inductor_s) == (10 - 4 + 1 - 1.5, 4)
    assert (found.compiled, found.cached) == (1, 1)


@pytest.mark.parametrize("last, differ", [(1.00005, False), (1.001, True), (float("nan"), True)])
def test_losses_that_differ_are_found(load, last, differ):
    assert load("systems").losses_differ({"one": 1.0, "other": last}) is differ


def test_a_widened_model_has_the_parameters_asked_for_and_the_same_depth(load):
    models = load("models")
    wide = models.Sizes(layers=2).widened(20e6)
    assert wide.layers == 2
    assert 20e6 <= sum(parameter.numel() for parameter in wide.build().parameters()) < 25e6


@pytest.mark.nightly
def test_the_optimizers_benchmark_has_a_row_for_every_system_and_their_results_agree():
    systems = ["zerofx", "AdamW(fused=True)", "AdamW(foreach=True)"]
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "optimizer.py", "--elements", "1e4"]
        + ["--rounds", "1", "--systems", *systems],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr  # 1 if the results differ
    rows = ran.stdout.split("---\n")[-1].splitlines()
    assert [row.split("  ")[0] for row in rows] == [*systems, "copy", "triad"]


@pytest.mark.nightly
def test_a_checkout_against_itself_has_a_round_of_each():
    root = BENCHMARKS.parent
    sizes = ["--width", "64", "--layers", "1", "--rows", "1", "--length", "16", "--rounds", "3"]
    command = [sys.executable, BENCHMARKS / "versus.py", root, root, *sizes]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode in (0, 1), result.stderr  # a busy machine's ratio may be anything
    assert result.stdout.count("round ") == 3 and "ratio" in result.stdout


def test_the_interval_of_a_median_holds_it_and_leaves_out_stray_rounds(load):
    versus = load("versus")
    low, high = versus.interval([1.0, 1.01, 0.99] * 5 + [3.0])
    assert 0.99 <= low <= 1.0 <= high <= 1.01


def test_orders_agree_as_far_as_pairs_do(load):
    kendall = load("foresight").kendall
    assert kendall([1, 2, 3], [10, 20, 30]) == 1 and kendall([1, 2, 3], [3, 2, 1]) == -1
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert kendall([1, 1, 2], [5, 5, 7]) == 1, "what is equal in both has no order"
