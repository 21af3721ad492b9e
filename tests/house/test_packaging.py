"""A wheel and a source distribution install, and what is installed compiles a step."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}({folder!r}))"

STEP = """
import torch, zerofx
assert zerofx.__file__.startswith({folder!r}), zerofx.__file__
import zerofx.passes.pipeline, zerofx.codegen.kernels
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

compiled = torch.compile(step, backend="zero", options={{"lowering": "eager"}})
assert compiled(torch.ones(2, 4)) > compiled(torch.ones(2, 4))
"""


def python(*arguments, cwd):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ("wheel", "sdist"))
def test_what_is_installed_compiles_a_step(kind, tmp_path):
    checkout, built, installed = (tmp_path / name for name in ("checkout", "built", "installed"))
    subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    built.mkdir()
    python("-c", BUILD.format(kind=kind, folder=str(built)), cwd=checkout)
    (archive,) = built.iterdir()
    how = ("--no-deps", "--no-build-isolation", "--target", str(installed))
    python("-m", "pip", "install", "-q", *how, str(archive), cwd=tmp_path)
    files = {path.relative_to(installed) for path in installed.rglob("*.*")}
    expected = {path.relative_to(checkout) for path in checkout.glob("zerofx/**/*.py")}
    expected |= {path.relative_to(checkout) for path in checkout.glob("zerofx/**/*.json")}
    assert any(path.suffix == ".json" for path in expected)
    for folder in ("passes", "codegen"):
        linked = (checkout / folder).rglob("*.py")
        expected |= {Path("zerofx", path.relative_to(checkout)) for path in linked}
    assert expected - files == set()
    script = tmp_path / "step.py"
    path = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
    script.write_text(path + STEP.format(folder=str(installed)))
    python(str(script), cwd=tmp_path)
