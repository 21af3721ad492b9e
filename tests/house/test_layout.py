"""The house keeps its shape: who imports whom, who touches torch's insides, what is tested."""

import ast
import functools
import logging.config
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from importlinter.cli import lint_imports
from setuptools import find_packages

from zerofx.options import OPTIONAL_PASSES
from zerofx.passes.pipeline import PIPELINE

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("passes", "codegen")

# What passes and kernels may know.  None of it may know more than that itself, or the runtime
# would come in by the back door.
SEEN_BY_PASSES = (
    "ir",
    "cost",
    "hardware",
    "calibration",
    "worker",
    "accelerator",
    "options",
    "errors",
    "compat",
)

# The runner alone verifies; it is given what dumps.
RUNNER = ROOT / "passes" / "manager.py"
SEEN_BY_RUNNER = (*SEEN_BY_PASSES, "verify")


def sources(*folders):
    """Return the Python files below these folders of the repository, links not followed."""
    found = []
    for folder in folders:
        for parent, _, names in os.walk(ROOT / folder):
            found += [Path(parent, name) for name in names if name.endswith(".py")]
    return sorted(found)


PRODUCT = sources("zerofx", *LINKED)
PROGRAMS = sources("examples", "benchmarks")
EVERYTHING = PRODUCT + PROGRAMS + sources("tests")


def shown(path):
    return path.relative_to(ROOT).as_posix()


def package_of(path):
    """Return the package that relative imports in this file start from."""
    folder = path.relative_to(ROOT).parent.parts
    return ".".join(("zerofx", *folder) if folder[0] in LINKED else folder)


def module_of(path):
    """Return the dotted name by which this file is imported; a package's for its ``__init__``."""
    stem = () if path.stem == "__init__" else (path.stem,)
    return ".".join((package_of(path), *stem))


class Names(ast.NodeVisitor):
    """Collects the absolute dotted names that a file imports and those that it uses.

    Local names are followed to what they were imported as, so ``dist._x`` after ``import
    torch.distributed as dist`` is ``torch.distributed._x``.  A constant argument of
    ``import_module`` or ``__import__`` counts as an import.
    """

    def __init__(self, source, package):
        self.package = package
        self.imported = []
        self.used = []
        self.local = {}
        tree = ast.parse(source)
        # Imports first: a function may use what the file imports further down.
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.add_import(node)
            elif isinstance(node, ast.ImportFrom):
                self.add_import_from(node)
        self.visit(tree)

    def add_import(self, node):
        for alias in node.names:
            self.imported.append((node.lineno, alias.name))
            if alias.asname:
                self.local[alias.asname] = alias.name
            else:
                top = alias.name.split(".")[0]
                self.local[top] = top

    def add_import_from(self, node):
        base = node.module or ""
        if node.level:
            parts = self.package.split(".")
            parts = parts[: len(parts) - (node.level - 1)]
            base = ".".join((*parts, base) if base else parts)
        for alias in node.names:
            name = f"{base}.{alias.name}"
            self.imported.append((node.lineno, name))
            self.local[alias.asname or alias.name] = name

    def visit_Attribute(self, node):
        name = self.resolve(node)
        if name is None:
            self.generic_visit(node)
        else:
            self.used.append((node.lineno, name))

    def visit_Call(self, node):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                self.imported.append((node.lineno, argument.value))
        self.generic_visit(node)

    def resolve(self, node):
        """Return the dotted name of a chain of attributes that starts at an import."""
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value)
            return base and f"{base}.{node.attr}"
        return self.local.get(node.id) if isinstance(node, ast.Name) else None

    @property
    def all(self):
        return self.imported + self.used


def is_inside(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


names_in = functools.cache(Names)
"""The names in a source, which are the same for every test that asks."""


def house_imports_beyond(source, package, *allowed):
    """Return the lines and names of zerofx that a file touches outside of ``allowed``."""
    names = names_in(source, package)
    touched = names.imported + [(line, name) for line, name in names.used if name != "zerofx"]
    return [
        (line, name)
        for line, name in touched
        if is_inside(name, "zerofx") and not is_inside(name, *(f"zerofx.{a}" for a in allowed))
    ]


def is_private_torch(name):
    """Whether a dotted name goes through a private module or function of torch.

    ``torch.ops``, ``torch._foreach_*`` and ``torch._ops.OpOverload`` are how anybody writes
    about operators.  Below a class, a private name is no module's.
    """
    top, *rest = name.split(".")
    if top != "torch" or not rest or rest[0] == "ops":
        return False
    if rest[0].startswith("_foreach_") or rest[:2] == ["_ops", "OpOverload"]:
        return False
    for part in rest:
        if part.startswith("_") and not part.endswith("__"):
            return True
        if part[0].isupper():
            return False
    return False


def private_torch(source, package):
    names = names_in(source, package).all
    return sorted({(line, name) for line, name in names if is_private_torch(name)})


def environment_reads(source, package):
    readers = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
    return [(line, n) for line, n in names_in(source, package).all if is_inside(n, *readers)]


def top_level_links(source, package):
    return [(line, n) for line, n in names_in(source, package).imported if is_inside(n, *LINKED)]


def violations(check, paths, *arguments):
    """Return ``file:line name`` for everything that ``check`` finds in these files."""
    return [
        f"{shown(path)}:{line} {name}"
        for path in paths
        for line, name in check(path.read_text(encoding="utf-8"), package_of(path), *arguments)
    ]


def test_there_is_something_to_scan():
    assert {"zerofx/options.py", "passes/__init__.py"} <= set(map(shown, PRODUCT))
    assert shown(Path(__file__)) in map(shown, EVERYTHING)


def test_passes_and_kernels_never_reach_the_runtime():
    paths = [path for path in sources(*LINKED) if path != RUNNER]
    assert not violations(house_imports_beyond, paths, *SEEN_BY_PASSES, *LINKED)


def test_the_runner_never_reaches_the_runtime():
    paths = [path for path in PRODUCT if path == RUNNER]
    assert not violations(house_imports_beyond, paths, *SEEN_BY_RUNNER, *LINKED)


@pytest.mark.parametrize("names", [SEEN_BY_PASSES, SEEN_BY_RUNNER], ids=["passes", "runner"])
def test_what_they_see_knows_no_more_than_they_do(names):
    seen = [path for path in PRODUCT if is_inside(module_of(path), *(f"zerofx.{n}" for n in names))]
    assert seen
    assert not violations(house_imports_beyond, seen, *names)


@pytest.mark.parametrize(
    "source, touched",
    [
        ("import zerofx.runtime", ["zerofx.runtime"]),
        ("import zerofx", ["zerofx"]),
        ("from zerofx import runtime", ["zerofx.runtime"]),
        ("from zerofx import *", ["zerofx.*"]),
        ("from zerofx.runtime.step import run", ["zerofx.runtime.step.run"]),
        ("from zerofx.backend import zero", ["zerofx.backend.zero"]),
        ("from .. import capture", ["zerofx.capture"]),
        ("from ..runtime import step", ["zerofx.runtime.step"]),
        ("def f():\n    import zerofx.capture.step as c", ["zerofx.capture.step"]),
        ("import importlib\nimportlib.import_module('zerofx.backend')", ["zerofx.backend"]),
        ("import zerofx.ir.ops\nzerofx.runtime.step.run()", ["zerofx.runtime.step.run"]),
        ("from zerofx.options_of_another import x", ["zerofx.options_of_another.x"]),
    ],
)
def test_a_way_to_the_runtime_is_found(source, touched):
    found = house_imports_beyond(source, "zerofx.passes", *SEEN_BY_PASSES, *LINKED)
    assert [name for _, name in found] == touched


@pytest.mark.parametrize(
    "source",
    [
        "import zerofx.ir.ops\nzerofx.ir.ops.wait",
        "from zerofx.ir import ops, parameters",
        "from zerofx.ir.graph import alias_roots",
        "from zerofx.codegen import trace",
        "from . import base",
        "from .base import Pass",
        "from .. import errors",
        "from ..ir.parameters import ParameterTable",
        "import torch, zerofx_of_another",
    ],
)
def test_what_a_pass_may_import_is_let_through(source):
    assert not house_imports_beyond(source, "zerofx.passes", *SEEN_BY_PASSES, *LINKED)


def test_rooms_open_downward(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(logging.config, "dictConfig", lambda _: None)  # it would disable our logger
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0


def test_every_room_has_its_place_in_the_order():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [each["layers"] for each in contract["contracts"]]
    placed = {name for layer in layers for name in layer.split(" | ")}
    modules = [module_of(path) for path in PRODUCT if path.name != "__init__.py"]
    assert not [module for module in modules if not is_inside(module, *placed)]


def test_the_runtime_knows_nothing_of_passes():
    above = ("zerofx.passes", "zerofx.backend", "zerofx.capture", "zerofx.compiler")
    assert not [
        f"{shown(path)}:{line} {name}"
        for path in sources("zerofx/runtime")
        for line, name in names_in(path.read_text(encoding="utf-8"), package_of(path)).all
        if is_inside(name, *above)
    ]


def test_only_compat_touches_private_torch():
    # Tests are left out: they look at torch's insides to show that these are untouched.
    compat = ROOT / "zerofx" / "compat"
    paths = [path for path in PRODUCT + PROGRAMS if path.parent != compat]
    assert not violations(private_torch, paths)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch._functorch.aot_autograd import aot_module",
        "from torch import _guards",
        "from torch._subclasses import FakeTensorMode",
        "import torch\ntorch._dynamo.reset()",
        "import torch\n@torch._dynamo.disable\ndef f(): pass",
        "import torch\ntorch._logging.set_logs()",
        "import torch\ntorch._C._get_graph()",
        "from torch.distributed.distributed_c10d import _get_default_group",
        "import torch.distributed.distributed_c10d as c10d\nc10d._get_default_group()",
        "import torch.distributed as dist\ndist._functional_collectives",
        "import torch.utils._pytree as pytree",
        "from torch import distributed\ndef f():\n    return distributed._tensor.x().y",
        "import importlib\nimportlib.import_module('torch._dynamo')",
        "import torch._ops",
        "from torch._ops import OpOverloadPacket",
        "import torch\ntorch._ops.HigherOrderOperator",
    ],
)
def test_a_use_of_private_torch_is_found(source):
    assert private_torch(source, "zerofx")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch._foreach_add_",
        "import torch\nisinstance(x, torch._ops.OpOverload)",
        "from torch._ops import OpOverload",
        "import torch\ntorch.ops._c10d_functional.wait_tensor.default",
        "import torch\ntorch.Tensor._make_subclass",
        "import torch\ntorch.fx.Node.meta",
        "from torch.distributed.distributed_c10d import ProcessGroup",
        "import torch\ngm._x = module._dynamo",
        "from zerofx.compat import _dynamo",
    ],
)
def test_public_torch_is_let_through(source):
    assert not private_torch(source, "zerofx")


def test_only_options_reads_the_environment():
    paths = [path for path in PRODUCT if shown(path) != "zerofx/options.py"]
    assert not violations(environment_reads, paths)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['RANK']",
        "import os\nos.environ.get('RANK')",
        "import os\nos.getenv('RANK')",
        "from os import environ",
        "import os as system\nsystem.environ",
    ],
)
def test_a_read_of_the_environment_is_found(source):
    assert environment_reads(source, "zerofx")


@pytest.mark.slow(reason="every source is parsed")
def test_no_file_imports_the_links_targets_as_top_level():
    assert not violations(top_level_links, EVERYTHING)


@pytest.mark.parametrize(
    "source", ["import passes", "from passes import base", "from codegen.trace import x"]
)
def test_a_top_level_import_is_found(source):
    assert top_level_links(source, "zerofx")


@pytest.mark.parametrize("folder", [f for f in LINKED if sources(f)])
def test_a_top_level_import_is_refused_with_the_remedy(folder):
    # In a process of its own: this one may have put a folder of tests under that name.
    ran = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode != 0
    message = ran.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: ")
    assert f"import zerofx.{folder}" in message


@pytest.mark.parametrize("folder", LINKED)
def test_the_links_are_relative(folder):
    link = ROOT / "zerofx" / folder
    if not link.is_symlink():
        pytest.skip("an unpacked source distribution holds files where the checkout has links")
    assert os.readlink(link) == f"../{folder}"


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = find_packages(str(ROOT), **project["tool"]["setuptools"]["packages"]["find"])
    assert {package_of(path) for path in PRODUCT} == set(found)


def holds_a_pass(path):
    """Whether a file of passes/ holds a pass: a function of the file's own name."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.FunctionDef) and node.name == path.stem for node in body)


def passes():
    return {path.stem for path in (ROOT / "passes").rglob("*.py") if holds_a_pass(path)}


def pipeline():
    """Return the name of every pass in passes/pipeline.py, and the option that turns it off."""
    return {step.name: step.option if step.optional else "" for step in PIPELINE}


def test_every_pass_has_a_test_of_its_own():
    tested = {path.stem for path in (ROOT / "tests" / "passes").glob("test_*.py")}
    assert not sorted(name for name in passes() if f"test_{name}" not in tested)


def test_every_pass_is_in_the_pipeline_by_its_files_name():
    assert passes() == set(pipeline())


def test_the_optional_passes_are_the_ones_with_an_option():
    assert set(pipeline().values()) - {""} == set(OPTIONAL_PASSES)


def written_files():
    """Return the files that are committed or about to be: what git does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        ran = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return EVERYTHING
    paths = [ROOT / name for name in ran.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def unfinished_lines(text):
    # Spelled in halves: this file is scanned too.
    marks = "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3))
    return [i for i, line in enumerate(text.splitlines(), 1) if re.search(rf"\b({marks})\b", line)]


def test_no_file_is_left_unfinished():
    found = []
    for path in written_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{shown(path)}:{line}" for line in unfinished_lines(text)]
    assert not found


def test_a_mark_of_unfinished_work_is_found():
    assert unfinished_lines("a = 1\n# TO" + "DO: b\n") == [2]
    assert unfinished_lines("FIX" + "ME") == [1]
    assert unfinished_lines("# X" + "XX") == [1]
    assert not unfinished_lines("TO" + "DOS, X" + "XX" + "X, fixme")
