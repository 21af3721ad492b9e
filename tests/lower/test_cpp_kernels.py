"""Inductor's C++ kernels in one file: what they compute, where they lie, and what stays alone."""

from __future__ import annotations

import os

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.cpp_builder import CppBuilder
from torch.fx.experimental.proxy_tensor import make_fx

from zerofx import compat
from zerofx.compat import cpp_kernels
from zerofx.compat.cpp_kernels import kernels_together
from zerofx.lower import regions
from zerofx.lower.regions import CompiledRegion

pytestmark = pytest.mark.slow(reason="kernels are compiled")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing known from before."""
    torch._inductor.codecache.CppPythonBindingsCodeCache.cache_clear()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def built(monkeypatch):
    """The names of the files that a C++ compiler is run for."""
    found = []
    original = CppBuilder.build

    def build(self):
        found.append(os.path.basename(self.get_target_file_path()))
        original(self)

    monkeypatch.setattr(CppBuilder, "build", build)
    return found


def graphs(numbers, shape=(33, 40)):
    def graph(number):
        return lambda x, y: ((torch.sin(x) * y * number).sum(1), torch.cos(x + number).softmax(0))

    x, y = torch.randn(shape), torch.randn(shape)
    return [make_fx(graph(number))(x, y) for number in numbers], [x, y]


def libraries(folder):
    return {path.stat().st_ino for path in folder.glob("??/*.main.so")}


@torch.no_grad()
def test_kernels_in_one_file_compute_what_they_do_alone(cache, built, tmp_path, monkeypatch):
    torch.manual_seed(0)
    gms, inputs = graphs((1.5, 2.5, 3.5))
    with kernels_together():
        together = [compile_fx(gm, inputs) for gm in gms]
    kernels = list(cache.glob("??/*.main.so"))
    assert built.count("kernels.so") == 1 and len(kernels) >= 3 and len(libraries(cache)) == 1
    assert not [name for name in built if name.endswith(".main.so")]
    assert not list(cache.glob("tmp*")), "what it was made in is gone"
    values = [run(*inputs) for run in together]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "alone"))
    torch._inductor.codecache.CppPythonBindingsCodeCache.cache_clear()
    for run, its in zip([compile_fx(gm, inputs) for gm in gms], values, strict=True):
        assert all(map(torch.equal, run(*inputs), its))
    assert built.count("kernels.so") == 1, "outside of the context nothing is done"
    assert len([name for name in built if name.endswith(".main.so")]) == len(kernels)


@torch.no_grad()
def test_what_others_compiled_together_is_found_by_inductor(cache, built):
    gms, inputs = graphs((1.5, 2.5))
    with kernels_together():
        expected = [compile_fx(gm, inputs)(*inputs) for gm in gms]  # called: compiled alone, before
    built.clear()
    torch._inductor.codecache.CppPythonBindingsCodeCache.cache_clear()
    found = [compile_fx(gm, inputs)(*inputs) for gm in gms]
    assert not [name for name in built if name.endswith(".so")]
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))


@torch.no_grad()
def test_they_are_compiled_in_as_many_files_as_asked_for_and_at_the_end_of_the_outer_context(
    cache, built
):
    gms, inputs = graphs((1.5, 2.5, 3.5))
    with kernels_together() as kernels:
        kernels.at_once = 2
        for gm in gms:
            with kernels_together():
                compile_fx(gm, inputs)
        assert not [name for name in built if name.endswith(".so")]
    assert built.count("kernels.so") == len(libraries(cache)) == 2


@torch.no_grad()
def test_what_fails_together_is_compiled_by_itself(cache, built, monkeypatch):
    gms, inputs = graphs((1.5, 2.5))
    monkeypatch.setattr(cpp_kernels, "_text", lambda sources: "no C++")
    with kernels_together():
        run = [compile_fx(gm, inputs) for gm in gms][-1]
    torch.testing.assert_close(run(*inputs), gms[-1](*inputs), rtol=1e-4, atol=1e-4)
    assert len([name for name in built if name.endswith(".main.so")]) == len(libraries(cache)) >= 2


SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0, const float ks1)
{
    for (int64_t i = 0; i < ks0; ++i) out_ptr0[i] = in_ptr0[i] * ks1;
}
"""
ARGUMENTS = ("const float*", "float*", "const int64_t", "const float")


def kernels_of(*sources):
    scope = {}
    with kernels_together():
        inductor = torch._inductor.async_compile.AsyncCompile()
        for source in sources:
            scope[f"kernel_{len(scope)}"] = inductor.cpp_pybinding(ARGUMENTS, source)
        inductor.wait(scope)
    return list(scope.values())


def test_kernels_take_tensors_and_numbers_and_refuse_others(cache):
    twice, thrice = kernels_of(SOURCE, SOURCE.replace("* ks1", "* ks1 * 1.5f"))
    x, y = torch.arange(5.0), torch.zeros(5)
    twice(x, y, 4, 2.0)
    assert y.tolist() == [0.0, 2.0, 4.0, 6.0, 0.0]
    thrice(x, y, 5, 2.0)
    assert y.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    with pytest.raises(RuntimeError, match="another number of arguments"):
        twice(x, y, 4)
    with pytest.raises(TypeError):
        twice(x, y, "four", 2.0)
    assert len(libraries(cache)) == 1
    without_lock = compat.inductor._WithoutLock(thrice, thrice.__self__.__file__)
    y.zero_()
    without_lock(x, y, 5, 2.0)  # a float, of a width that only its C++ says
    assert y.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]


@pytest.mark.parametrize(
    "more",
    (
        pytest.param("#define TWO 2", id="a macro"),
        pytest.param("static int kernel;", id="its name"),
        pytest.param('extern "C" int other() { return 1; }', id="another function"),
    ),
)
@pytest.mark.parametrize("is_behind", (False, True))
def test_a_kernel_with_more_in_it_is_compiled_alone(more, is_behind, cache, built):
    before = SOURCE.replace('extern "C"', f'{more}\nextern "C"', 1)
    source = f"{SOURCE}\n{more}\n" if is_behind else before
    if "int kernel" in more:
        source = source.replace("static int kernel;", "// kernel")
    kernels = kernels_of(source, SOURCE, SOURCE.replace("* ks1", "+ ks1"))
    assert len(libraries(cache)) == 2 and built.count("kernels.so") == 1
    x, y = torch.ones(2), torch.zeros(2)
    for kernel, expected in zip(kernels, (3.0, 3.0, 4.0), strict=True):
        kernel(x, y, 2, 3.0)
        assert y.tolist() == [expected] * 2


@torch.no_grad()
def test_a_region_whose_kernel_fails_does_not_take_others_with_it(cache, monkeypatch, caplog):
    """Compile each by itself where something fails behind all of them."""
    made = []
    monkeypatch.setattr(CompiledRegion, "_known", {})
    for number, gm in enumerate(graphs((1.5, 2.5))[0]):
        region = CompiledRegion(in_a_list(gm), ())
        made.append(region)
        assert region.is_to_compile, number
    root = torch.nn.Sequential(*made)
    failing = []
    original = cpp_kernels.Kernels.compile

    def compile(self):
        if not failing:
            failing.append(self)
            raise RuntimeError("of one of them")
        original(self)

    monkeypatch.setattr(cpp_kernels.Kernels, "compile", compile)
    assert set(regions.compile_regions(root)) == set(made)
    assert failing and all(len(one.compiled) == 1 and not one.is_to_compile for one in made)
    assert not [record for record in caplog.records if "cannot compile" in record.getMessage()]


@torch.no_grad()
@pytest.mark.parametrize("interrupted_by", (KeyboardInterrupt, GeneratorExit))
def test_nothing_is_left_of_what_is_interrupted(interrupted_by, cache, monkeypatch):
    """Else a region would run kernels of which nobody has compiled the C++."""
    monkeypatch.setattr(CompiledRegion, "_known", {})
    made = [CompiledRegion(in_a_list(gm), ()) for gm in graphs((1.5, 2.5))[0]]
    compiling = regions.compile_regions(torch.nn.Sequential(*made))
    next(compiling)
    if interrupted_by is GeneratorExit:  # whoever counts them has failed
        compiling.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            compiling.throw(KeyboardInterrupt)
    assert cpp_kernels._TOGETHER.get() is None
    assert all(one.is_to_compile and not one.compiled for one in made)
    assert len(list(regions.compile_regions(torch.nn.Sequential(*made)))) == 2


def in_a_list(gm):
    """The same as a region has it: its inputs are in a list."""
    return make_fx(lambda values: gm(*values))([torch.randn(33, 40), torch.randn(33, 40)])
