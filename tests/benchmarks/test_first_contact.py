"""First contact with a GPU: sections survive each other, and a machine without one rehearses."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerofx import hardware

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# A section of a few words, which are run as Python behind this.
FINDS = "from pathlib import Path; from contact.findings import Findings; import sys, time; "
FINDS += "found = Findings(Path(sys.argv[1])); "
PASSES = FINDS + "found.check('it holds', True); found.figure('speed', 3.0, 'GB/s'); found.end()"
FAILS = FINDS + "found.check('it holds', False, 'no: 1 is not 2'); found.end()"
DIES = FINDS + "found.check('the first', True); sys.exit('out of words')"
HANGS = FINDS + "found.check('the first', True); time.sleep(60)"


@pytest.fixture
def contact(monkeypatch):
    """Import a module of the package ``contact`` as the command would, for one test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield lambda name: importlib.import_module(f"contact.{name}")
    for name in [n for n in sys.modules if n.partition(".")[0] == "contact"]:
        del sys.modules[name]


LIMITS_S = {"hangs": 6}  # on a busy machine it takes seconds to begin
HEADER = {"rehearsal": True, "gpus": 0, "gpu": "no GPU", "versions": {"torch": "2.13.0"}}


@pytest.fixture
def drive(contact, tmp_path):
    """``drive({name: program})``: the records."""
    make = contact("sections").Section

    def run(programs, header=HEADER, **how):
        sections = [
            make(
                name,
                "",
                f"that {name} is shown",
                LIMITS_S.get(name, 60),
                f"a bit of {name}",
                f"more of {name}",
            )
            for name in programs
        ]

        def command_of(section):
            code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); {programs[section.name]}"
            return [sys.executable, "-S", "-c", code, str(tmp_path / f"{section.name}.json")]

        how = {"together_s": 300.0, "say": said.append, **how}
        records = contact("driver").drive(sections, tmp_path, command_of, header=header, **how)
        return records, contact("report").report(sections, records, header)

    said = run.said = []
    return run


def statuses(records):
    return {name: record["status"] for name, record in records.items()}


def test_a_section_that_fails_dies_or_hangs_leaves_others_alone_and_the_report_says_which(drive):
    records, report = drive({"fails": FAILS, "hangs": HANGS, "dies": DIES, "passes": PASSES})
    assert statuses(records) == {
        "fails": "failed",
        "hangs": "timed out",
        "dies": "crashed",
        "passes": "passed",
    }
    assert "| fails | **failed** |" in report and "it holds: no: 1 is not 2" in report
    assert "Killed after 6 s." in report
    assert "Ended with exit code 1." in report and "out of words" in report
    assert "| passes | passed |" in report and "| speed | 3 | GB/s |" in report
    for name in ("hangs", "dies"):  # what was found before is kept
        assert [check["name"] for check in records[name]["checks"]] == ["the first"]


def test_resume_leaves_out_what_has_passed_on_the_same_machine(drive):
    drive({"one": PASSES, "other": FAILS})
    records, _ = drive({"one": DIES, "other": PASSES}, resume=True)
    assert statuses(records) == {"one": "passed", "other": "passed"}
    assert "one: passed before" in drive.said
    header = {**HEADER, "versions": {"torch": "2.14.0"}}
    records, _ = drive({"one": FAILS}, header, resume=True)
    assert statuses(records) == {"one": "failed"}


def test_what_no_time_is_left_for_is_not_run(drive):
    records, report = drive({"one": PASSES}, together_s=0.5)
    assert statuses(records) == {"one": "not run"}
    assert "No time was left." in report


def test_a_report_without_a_gpu_says_first_what_was_rehearsed(contact, drive):
    _, report = drive({"one": PASSES})
    title, _, opening, *_ = report.splitlines()
    assert title == "# First contact" and "there is no GPU here" in opening
    assert "| one | a bit of one | more of one |" in report
    header = {**HEADER, "rehearsal": False, "gpus": 1, "gpu": "NVIDIA H100"}
    opening = contact("report").opening([], header)
    assert opening == "1 x NVIDIA H100; torch 2.13.0"


def test_no_section_takes_more_than_eight_minutes_and_each_is_a_function(contact):
    sections = contact("sections")
    assert sections.LONGEST_S == 480 and sections.TOGETHER_S == 1200
    for section in sections.SECTIONS:
        assert section.limit_s <= sections.LONGEST_S
        source = (BENCHMARKS / "contact" / f"{section.module}.py").read_text(encoding="utf-8")
        names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        assert section.name in names


@pytest.mark.nightly
def test_all_sections_are_rehearsed_without_a_gpu(tmp_path, contact):
    command = [sys.executable, BENCHMARKS / "first_contact.py", tmp_path, "--patience", "10"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=7200)
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert ran.returncode == 0, report + ran.stderr
    sections = contact("sections").SECTIONS
    for text in (ran.stdout, report):
        assert "This is a rehearsal: there is no GPU here" in text
        assert all(f"| {each.name} | {each.rehearsed} |" in text for each in sections)
    for section in sections:
        assert f"| {section.name} | passed |" in report
    assert f"{len(sections)} of {len(sections)} sections passed" in ran.stdout
    assert not (tmp_path / "hardware.json").exists()
    figures = hardware.of(json.loads((tmp_path / "hardware.rehearsed.json").read_text()))
    assert figures.bytes_per_s > 0 and figures.copy_bytes_per_s > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # nothing is left behind
