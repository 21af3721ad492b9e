"""Tiers, shards, resumed runs, and the limit on a default test's processor time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit import tiers

pytest_plugins = ["pytester"]

# Three of one tier each, and many of a product.
SUITE = """
import pytest

def test_default(): pass

@pytest.mark.nightly
def test_nightly(): pass

@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(40))
def test_exhaustive(number): pass
"""

# Their calls take a file's number of times so many seconds of this process or of a child.
BUSY = """
import subprocess, sys, time, pytest

def busy(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds: pass
"""


@pytest.fixture(autouse=True)
def is_watched(monkeypatch):
    monkeypatch.delenv("COVERAGE_RUN", raising=False)
    monkeypatch.setattr(tiers, "_is_watched", lambda: False)
    monkeypatch.setattr(tiers, "slowness", lambda: 1.0)


@pytest.fixture
def run(pytester):
    """``run(source, *arguments)``: a run of pytest with nothing but these tests and tiers."""

    def of(source, *arguments):
        pytester.makepyfile(test_it=source)
        return pytester.inline_run(
            "-p", "tests.kit.tiers", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", *arguments
        )

    return of


def names(result):
    return {report.nodeid.partition("::")[2] for report in result.getreports() if is_call(report)}


def is_call(report):
    return getattr(report, "when", None) == "call"


def test_a_tier_is_what_its_mark_says(run):
    assert names(run(SUITE, "-m", "not nightly and not exhaustive")) == {"test_default"}
    assert len(names(run(SUITE, "-m", "exhaustive"))) == 40


def test_nightly_takes_a_part_of_the_exhaustive_tests_that_its_seed_draws(run):
    one, again, other = (
        names(run(SUITE, "-m", "nightly", "--seed", seed)) for seed in ("1", "1", "2")
    )
    assert "test_nightly" in one and "test_default" not in one
    assert 1 < len(one) < 20
    assert one == again != other


MANY = """
import pytest
@pytest.mark.parametrize("case", range(3))
def test_default(case): pass
@pytest.mark.nightly
@pytest.mark.parametrize("case", range(20))
def test_one(case): pass
@pytest.mark.parametrize("case", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))])
def test_other(case): pass
"""


def test_nightly_takes_no_more_cases_of_one_test_than_asked_for(run):
    def drawn(*arguments):
        return names(run(MANY, "-m", "nightly", *arguments))

    one, other = (drawn("--cases", "4", "--seed", seed) for seed in ("1", "2"))
    assert len(one) == len(other) == 6 and one != other
    assert {"test_other[1]", "test_other[2]"} < one & other
    assert one == drawn("--cases=4", "--seed=1")
    shards = [drawn("--cases=4", "--seed=1", f"--shard={number}/2") for number in (1, 2)]
    assert set.union(*shards) == one and not set.intersection(*shards)
    assert len(drawn("--cases=0")) == 22 and len(drawn()) == tiers.CASES + 2
    assert len(names(run(MANY, "--cases=4", "-m", "nightly or exhaustive"))) == 22
    assert len(names(run(MANY, "--cases=4", "-m", "not nightly"))) == 4


def test_shards_are_disjoint_and_together_the_whole(run):
    shards = [names(run(SUITE, "--shard", f"{number}/3")) for number in (1, 2, 3)]
    assert all(shards) and sum(map(len, shards)) == 42
    assert set.union(*shards) == names(run(SUITE))


@pytest.mark.parametrize("shard", ("0/3", "4/3", "1", "a/b", "1/0"))
def test_a_shard_that_is_none_is_refused(run, shard, capsys):
    assert run(SUITE, "--shard", shard).ret == pytest.ExitCode.USAGE_ERROR
    assert "argument --shard: invalid" in capsys.readouterr().err


def test_a_resumed_run_does_what_has_not_passed(run, tmp_path):
    fails = "def test_one(): pass\ndef test_two(): assert {}\ndef test_three(): pass\n"
    arguments = (f"--resume={tmp_path}/passed",)
    assert names(run(fails.format(0), *arguments)) == {"test_one", "test_two", "test_three"}
    assert names(run(fails.format("not 0"), *arguments)) == {"test_two"}
    assert names(run(fails.format(0), *arguments)) == set()


def test_a_test_whose_teardown_fails_has_not_passed(run, tmp_path):
    source = "import pytest\n@pytest.fixture\ndef broken():\n    yield\n    assert {}\n"
    source += "def test_one(broken): pass\n"
    arguments = (f"--resume={tmp_path}/passed",)
    run(source.format(False), *arguments)
    assert names(run(source.format(True), *arguments)) == {"test_one"}
    assert names(run(source.format(True), *arguments)) == set()


@pytest.mark.slow(reason="starts two processes of pytest")
def test_processes_of_one_run_resume_alike(pytester, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    pytester.makepyfile(test_it=SUITE)
    passed = [f"test_it.py::test_exhaustive[{number}]" for number in range(1, 40)]
    (tmp_path / "passed").write_text("\n".join(passed) + "\n")
    pytester.plugins = ["tests.kit.tiers"]
    ended = pytester.runpytest_subprocess("-n", "2", "-q", f"--resume={tmp_path}/passed")
    ended.assert_outcomes(passed=3)
    lines = (tmp_path / "passed").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 42


CALLS = """
calls = []
def test_calls():
    calls.append(None)
    busy({} if len(calls) == 1 else {})
"""


def test_too_much_time_of_two_calls_fails_and_of_one_does_not(run):
    arguments = ("--cpu-limit", "0.1")
    failed = run(BUSY + CALLS.format(0.2, 0.2), *arguments)
    failed.assertoutcome(failed=1)
    (report,) = failed.getfailures()
    assert "s of the processors" in str(report.longrepr) and "slow(reason=" in str(report.longrepr)
    run(BUSY + CALLS.format(0.2, 0.0), *arguments).assertoutcome(passed=1)
    run(BUSY + CALLS.format(0.2, 0.2), "--cpu-limit", "0").assertoutcome(passed=1)


def test_time_of_child_processes_counts_and_sleep_does_not(run, tmp_path):
    child = (
        "def test_child():\n    subprocess.run([sys.executable, '-c', 'sum(range(2 * 10**7))'])\n"
    )
    child += "def test_sleeps():\n    time.sleep(0.2)\n"
    result = run(BUSY + child, "--cpu-limit", "0.1", f"--cpu={tmp_path}/cpu")
    result.assertoutcome(passed=1, failed=1)
    assert result.getfailures()[0].nodeid.endswith("test_child")
    found = [json.loads(line) for line in (tmp_path / "cpu").read_text().splitlines()]
    assert found[0]["cpu_s"] > 0.1 > found[1]["cpu_s"]


@pytest.mark.parametrize("mark", ("slow(reason='it counts')", "nightly", "exhaustive"))
def test_what_is_marked_may_take_longer(run, mark):
    source = f"@pytest.mark.{mark}\ndef test_busy(): busy(0.2)\n"
    run(BUSY + source, "--cpu-limit", "0.1").assertoutcome(passed=1)


def test_on_a_machine_that_is_slow_now_a_test_may_take_as_much_longer(run, monkeypatch):
    monkeypatch.setattr(tiers, "slowness", lambda: 3.0)
    source = CALLS.format(0.2, 0.2) + "    assert len(calls) == 1\n"
    run(BUSY + source, "--cpu-limit", "0.1").assertoutcome(passed=1)
    run(BUSY + CALLS.format(0.4, 0.4), "--cpu-limit", "0.1").assertoutcome(failed=1)


def test_what_fails_is_not_run_again(run):
    source = CALLS.format(0.2, 0.0) + "    assert len(calls) > 1\n"
    run(BUSY + source, "--cpu-limit", "0.1").assertoutcome(failed=1)


def test_fixtures_are_made_anew_and_their_time_is_their_own(run):
    source = "made = []\n@pytest.fixture\ndef fresh():\n    busy(0.2)\n    made.append(None)\n"
    source += "    return made\n"
    quick = "def test_quick(fresh):\n    assert len(made) == 1\n"
    run(BUSY + source + quick, "--cpu-limit", "0.1").assertoutcome(passed=1)
    slow = "def test_slow(fresh):\n    busy(0.2 if len(made) == 1 else 0)\n"
    slow += "def test_made_again(): assert len(made) == 2\n"
    run(BUSY + source + slow, "--cpu-limit", "0.1").assertoutcome(passed=2)


def test_slow_without_a_reason_is_refused(run, capsys):
    run("import pytest\n@pytest.mark.slow\ndef test_it(): pass\n")
    assert "the mark slow takes reason='...'" in capsys.readouterr().err


def test_a_process_that_is_gone_and_its_grandchildren_are_counted():
    source = "import subprocess, sys, time; x = sum(range(2 * 10**7)); time.sleep({})"
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
    before = tiers.cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", parent.format(source.format(0))], check=True)
    waited_for = tiers.cpu_s(os.getpid()) - before
    assert waited_for > 0.2
    going = subprocess.Popen([sys.executable, "-c", parent.format(source.format(60))])
    try:
        deadline = time.monotonic() + 60
        while tiers.cpu_s(os.getpid()) - before < 1.5 * waited_for:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        going.kill()
        going.wait()
