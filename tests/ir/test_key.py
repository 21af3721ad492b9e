"""Keys: what differs has other text, and what text cannot stand for has none."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zerofx.ir.key import NoKeyError, described, described_code, described_tensor, key_of
from zerofx.ir.mesh import Mesh
from zerofx.passes.memory.recompute import recompute
from zerofx.passes.schedule.prefetch import prefetch

VALUES = (
    None,
    True,
    1,
    1.0,
    -0.0,
    0.0,
    float("inf"),
    1e-5,
    1.0000000001e-5,
    1j,
    "1",
    b"1",
    "a, b",
    ("a", "b"),
    ["a", "b"],
    ("a, b",),
    (("a",), "b"),
    {"a": 1},
    {"a": "1"},
    {1, 2},
    (1, 2),
    slice(1, 2),
    range(1, 2),
    ...,
    torch.float32,
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("meta"),
    "cpu",
    torch.strided,
    torch.contiguous_format,
    Mesh.flat(2),
    Mesh.flat(2, 1),
    torch.add,
    operator.add,
    F.gelu,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add.Scalar,
    torch.ops.aten.add,
)


def test_values_that_differ_have_texts_that_differ():
    texts = [described(value) for value in VALUES]
    assert len(set(texts)) == len(texts)


def test_texts_do_not_depend_on_the_order_of_sets():
    assert described(frozenset("abcdef")) == described(frozenset("fedcba"))


def test_keys_do_not_run_parts_together():
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("abc", "")}) == 4


class OfTheUser:
    pass


def of_the_user(x):
    return x


@torch.library.custom_op("test_key::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize(
    "value",
    [
        OfTheUser(),
        of_the_user,
        functools.partial(torch.add, 1),
        lambda x: x,
        torch.ones(2),
        nn.Linear(2, 2),
        torch.ops.test_key.doubled.default,
        torch.ops.test_key.doubled,
        torch.ops.higher_order.triton_kernel_wrapper_functional,
        [1, {"a": OfTheUser()}],
        torch.Generator(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_text_cannot_stand_for_has_none(value):
    with pytest.raises(NoKeyError):
        described(value)


def test_a_function_in_the_place_of_torchs_is_not_torchs(monkeypatch):
    described(F.gelu), described(torch.softmax)

    @functools.wraps(F.layer_norm)
    def mine(*args, **kwargs):
        return 2 * F.rms_norm(*args, **kwargs)

    monkeypatch.setattr(F, "layer_norm", mine)
    assert F.layer_norm.__module__ == "torch.nn.functional"
    with pytest.raises(NoKeyError):
        described(F.layer_norm)


class Subclass(torch.Tensor):
    pass


def test_tensors_are_told_by_all_but_their_elements():
    base = torch.zeros(4, 4)
    same = torch.ones(4, 4)
    others = [
        base.t(),
        base[1:],
        base[:, 1:],
        base.double(),
        base.to("meta"),
        base.view(16),
        torch.zeros(4, 4, requires_grad=True),
        nn.Parameter(base),
        torch.zeros(4, 4, dtype=torch.complex64),
        torch.zeros(4, 4, dtype=torch.complex64).conj(),
    ]
    texts = [described_tensor(each) for each in (base, *others)]
    assert len(set(texts)) == len(texts) and described_tensor(same) == texts[0]
    with pytest.raises(NoKeyError):
        described_tensor(base.as_subclass(Subclass))


MODULE = sys.modules["zerofx.passes.schedule.prefetch"]


def patched(monkeypatch, name, value):
    monkeypatch.setattr(MODULE, name, value, raising=False)
    return described_code([MODULE])


def foreign(*args):
    return None


@functools.wraps(prefetch)
def wrapping(*args):
    return None


@contextlib.contextmanager
def context():
    yield


class Foreign:
    def run(self, *args):
        return None

    __call__ = run


def test_what_modules_hold_is_told(monkeypatch):
    plain = described_code([MODULE])
    assert plain == described_code([MODULE])
    others = [
        patched(monkeypatch, "a_number", 1),
        patched(monkeypatch, "a_number", 2),
        patched(monkeypatch, "prefetch", recompute),
        patched(monkeypatch, "prefetch", torch.relu),
        patched(monkeypatch, "prefetch", torch.sigmoid),
        patched(monkeypatch, "prefetch", torch.Tensor.sigmoid),
        patched(monkeypatch, "prefetch", torch.Tensor.tanh),
        patched(monkeypatch, "prefetch", functools.partial(prefetch, 1)),
        patched(monkeypatch, "prefetch", functools.partial(prefetch, 2)),
    ]
    assert len({plain, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "value",
    [
        foreign,
        wrapping,
        context,
        functools.partial(foreign, 1),
        functools.cache(foreign),
        Foreign().run,
        Foreign(),
        Foreign,
        mock.MagicMock(),
        lambda gm, ctx: {},
    ],
)
def test_a_function_from_elsewhere_has_no_text(monkeypatch, value):
    with pytest.raises(NoKeyError, match="in the place of .*prefetch"):
        patched(monkeypatch, "prefetch", value)


def test_a_class_of_a_notebook_has_no_text(monkeypatch):
    of_notebook = type("Foreign", (), {"__module__": "a_module_without_a_file"})
    with pytest.raises(NoKeyError, match="a class of a_module_without_a_file"):
        patched(monkeypatch, "prefetch", of_notebook)


def test_a_method_from_elsewhere_has_no_text(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "sum", foreign)
    with pytest.raises(NoKeyError, match="torch.Tensor.sum"):
        described_code([torch])


def test_a_function_around_torch_compile_changes_no_key():
    """As Lightning puts one there when it is imported."""
    plain = described_code([torch])
    with mock.patch.object(torch, "compile", lambda *arguments: None):
        assert described_code([torch]) == plain
