"""The README's script runs as it stands, and the pages of options name what there is."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from zerofx.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_script() -> float:
    """Run the README's first script; return the loss that it prints."""
    (source, *_) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(ROOT / "README.md"), "exec"), {"__name__": "__main__"})
    return float(printed.getvalue())


@pytest.mark.slow(reason="a process of its own trains")
def test_the_script_trains(monkeypatch):
    monkeypatch.setenv("ZEROFX_LOWERING", "eager")  # compiling its regions takes longer
    assert run_script() < 0.3  # a mean of squares of numbers that are near 1 each


@pytest.mark.nightly
def test_the_script_trains_compiled():
    assert run_script() < 0.3


def options_in(page: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)


def test_the_page_of_options_names_each_once():
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert sorted(options_in(page)) == sorted(OPTIONS)


def test_the_readme_shows_ten_options():
    shown = options_in(README)
    assert len(shown) == 10
    assert set(shown) <= set(OPTIONS)


def test_no_page_links_to_a_file_that_is_not_there():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    pages += [ROOT / "examples" / "README.md", ROOT / "benchmarks" / "README.md"]
    lost = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert not lost


def test_the_map_of_the_rooms_names_files_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:zerofx|passes|codegen|tests)/[\w/]*(?:\.py)?)`", page)
    assert len(named) > 30
    assert not [path for path in named if not (ROOT / path).exists()]
