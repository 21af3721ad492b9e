"""Parameters made later: what is recorded of how they are made gives the values of making them."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy
import pytest
import torch
from torch import nn

import zerofx
from tests.kit.models import ConvNet, Gpt, Mlp, Recurrent
from zerofx.deferred.guards import DeferredParameter, DeferredTensor
from zerofx.deferred.ledger import LEDGER

PUT_OFF = "zerofx.deferred_init has put off"


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    assert len(LEDGER) == 0


def deferred(make, exact=True, seed=3):
    torch.manual_seed(seed)
    with zerofx.deferred_init(exact=exact):
        made = make()
    return made


def check_exact(make, seed=3):
    """Deferred construction gives the bits of plain construction, and its generator's state."""
    torch.manual_seed(seed)
    plain = make()
    state = torch.get_rng_state()
    late = deferred(make, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(type(one) is DeferredParameter for one in late.parameters() if one.numel())
    assert all(one.untyped_storage().nbytes() == 0 for one in late.parameters())
    zerofx.materialize(late)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(LEDGER) == 0
    assert [*dict(plain.named_parameters())] == [*dict(late.named_parameters())]
    pairs = zip(plain.parameters(), late.parameters(), strict=True)
    for one, other in (*pairs, *zip(plain.buffers(), late.buffers(), strict=True)):
        assert type(one) is type(other)
        assert (one.dtype, one.stride(), one.requires_grad) == (
            (other.dtype, other.stride(), other.requires_grad)
        )
        assert torch.equal(one, other)
    return late


class Exotic(nn.Module):
    """Initialised in ways that a table of known layers would miss."""

    def __init__(self):
        super().__init__()
        self.flat = [torch.empty(7, 5), torch.Tensor(5, 3)]
        self.legacy = nn.Parameter(self.flat[1])
        nn.init.orthogonal_(self.legacy)
        self.scaled = nn.Parameter(torch.randn(6, 4) * 0.1 + torch.eye(6, 4))
        self.log = nn.Parameter(torch.log(torch.arange(1, 17, dtype=torch.float32).repeat(3, 1)))
        self.ones, self.full = nn.Parameter(torch.ones(9)), nn.Parameter(torch.full((4,), 2.5))
        self.embedding = nn.Embedding(11, 5, padding_idx=3)
        with torch.no_grad():
            self.embedding.weight[2:4, 1:].mul_(3.0)
            self.embedding.weight[:, 0] = torch.linspace(0, 1, 11)
            self.embedding.weight[self.embedding.weight > 0.5] = 0.25
        self.linear = nn.Linear(5, 4)
        self.linear.weight.data.normal_(0, 0.02).clamp_(-0.01, 0.01)
        self.linear.bias.data.copy_(torch.from_numpy(numpy.arange(4.0, dtype=numpy.float32)))
        self.linear.reset_parameters()
        self.clone = copy.deepcopy(self.linear)
        self.tied = nn.Linear(5, 4)
        self.tied.weight = self.linear.weight
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.last = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.whole = nn.Parameter(torch.randint(0, 9, (8,)).float(), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(8).to(torch.float64))
        if self.scaled.std().item() > 0.5:  # a value that has to be known at once
            nn.init.zeros_(self.scaled)
        self.register_buffer("norm", self.linear.weight.norm(dim=1))
        self.register_buffer("frequencies", 1.0 / 10 ** (torch.arange(0, 8, 2).float() / 8), False)
        self.rates = torch.linspace(0, 0.5, 3).tolist()
        self.table = self.linear.weight.detach().sum(1).numpy().copy()


def test_odd_ways_to_initialize_give_the_same_bits():
    late = check_exact(Exotic)
    torch.manual_seed(3)
    plain = Exotic()
    assert late.rates == plain.rates
    assert (late.table == plain.table).all()
    assert torch.equal(late.flat[1], plain.flat[1])  # it is the memory of a parameter
    assert late.tied.weight is late.linear.weight


@pytest.mark.parametrize(
    "make",
    [
        Gpt,
        Mlp,
        ConvNet,
        lambda: Recurrent(nn.GRU),
        lambda: Gpt().half(),
        lambda: Gpt().to(torch.bfloat16),
        lambda: Gpt().double().apply(_reset),
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 5)),
        lambda: nn.utils.weight_norm(nn.Linear(4, 5)),
        lambda: nn.Linear(4, 5).requires_grad_(False),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_models_give_the_same_bits(make):
    check_exact(make)


def _reset(module):
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.constant_(module.bias, 0.5) if module.bias is not None else None


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_models_give_the_same_bits(name, dtype):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=40)
    config = getattr(transformers, f"{name}Config")(
        **sizes, intermediate_size=32, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True
    )
    kind = transformers.AutoModelForMaskedLM if name == "Bert" else None
    kind = kind or transformers.AutoModelForCausalLM
    late = check_exact(lambda: kind.from_config(config, dtype=dtype))
    assert late.get_output_embeddings().weight is late.get_input_embeddings().weight


# By default


def test_by_default_values_follow_the_seed_and_nothing_else():
    first, again, other = (
        deferred(Exotic, False),
        deferred(Exotic, False),
        deferred(Exotic, False, 4),
    )
    for name in reversed([*dict(again.named_parameters())]):  # in another order
        zerofx.materialize(again.get_submodule(name.rpartition(".")[0]))
    for model in (first, other):
        zerofx.materialize(model)
    for one, same in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, same)
    assert not torch.equal(first.scaled, other.scaled)


def test_by_default_a_seed_set_again_gives_the_same_numbers_again():
    def make():
        first, second, third = nn.Linear(8, 8), None, None
        torch.manual_seed(5)
        second = nn.Linear(8, 8)
        torch.manual_seed(5)
        third = nn.Linear(8, 8)
        return nn.ModuleList([first, second, third])

    first, second, third = deferred(make, exact=False)
    zerofx.materialize(nn.ModuleList([third, second, first]))
    assert torch.equal(second.weight, third.weight)
    assert not torch.equal(first.weight, second.weight)


def test_by_default_values_have_the_distribution_asked_for():
    late = deferred(lambda: nn.Linear(300, 200), exact=False)
    nearly = deferred(lambda: nn.Parameter(torch.randn(60_000)), exact=False)
    zerofx.materialize(late)
    zerofx.materialize(nn.ParameterList([nearly]))
    bound = 300**-0.5
    assert late.weight.abs().max() <= bound
    assert late.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert nearly.std().item() == pytest.approx(1.0, rel=0.02)
    assert abs(nearly.mean().item()) < 0.02


def test_an_explicit_generator_is_drawn_from_and_left_as_plain_construction_leaves_it():
    def make():
        own = torch.Generator().manual_seed(9)
        return nn.ParameterList(
            [torch.empty(5, 5).normal_(generator=own), torch.rand(4, generator=own)]
        ), own

    plain, own = make()
    late, late_own = deferred(make)
    assert torch.equal(own.get_state(), late_own.get_state())
    late_own.manual_seed(1)  # what is recorded does not look at it any more
    zerofx.materialize(late)
    assert all(torch.equal(one, other) for one, other in zip(plain, late, strict=True))


def test_defaults_of_the_block_hold_when_values_are_made():
    def make():
        torch.set_default_dtype(torch.float64)
        try:
            return nn.ParameterList([torch.arange(5) / 3, torch.zeros(3), torch.randn(4)])
        finally:
            torch.set_default_dtype(torch.float32)

    plain, late = (torch.manual_seed(3), make())[1], deferred(make)
    with torch.autocast("cpu", torch.bfloat16):
        zerofx.materialize(late)
    for one, other in zip(plain, late, strict=True):
        assert one.dtype == other.dtype == torch.float64
        assert torch.equal(one, other)


# What is read, and what is there


def test_a_tensor_that_was_there_is_read_as_it_was_then():
    small, large = torch.ones(4), torch.ones(600, 600)

    def make():
        model = nn.ParameterList([torch.empty(4), torch.empty(600, 600)])
        with torch.no_grad():
            for parameter, source in zip(model, (small, large), strict=True):
                parameter.copy_(source)
                source.fill_(7.0)
        return model

    late = deferred(make)
    small.fill_(8.0)
    large.fill_(8.0)
    zerofx.materialize(late)
    assert all((parameter == 1).all() for parameter in late)


def test_a_large_tensor_that_is_written_to_after_the_block_is_an_error():
    source = torch.ones(600, 600)

    def make():
        model = nn.ParameterList([torch.empty(600, 600)])
        model[0].data.copy_(source)
        return model

    late = deferred(make)
    source.zero_()
    with pytest.raises(zerofx.StepError, match="has been written to since it was recorded"):
        zerofx.materialize(late)
    assert late[0].untyped_storage().nbytes() == 0


def test_what_was_there_is_written_to_at_once():
    there = torch.zeros(5)

    def make():
        parameter = nn.Parameter(torch.full((5,), 3.0))
        there.copy_(parameter.detach())
        return nn.ParameterList([parameter])

    late = deferred(make)
    assert (there == 3).all()
    zerofx.materialize(late)


@pytest.mark.parametrize("write", ["copy_", "bernoulli_"])
def test_what_is_written_to_may_be_read_by_the_same_call(write):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(64))
            with torch.no_grad():
                getattr(self.weight, write)(self.weight)

    assert check_exact(Tied).weight.any()


def test_a_deferred_model_loads_its_own_parameters():
    late = deferred(lambda: nn.Linear(4, 4))
    late.load_state_dict(dict(late.named_parameters()))
    zerofx.materialize(late)
    torch.manual_seed(3)
    assert torch.equal(late.weight, nn.Linear(4, 4).weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.RReLU(), nn.Linear(4, 2)),
    ],
)
def test_what_a_call_in_the_block_writes_beside_its_results(make):
    """Running statistics, which the schema of a batch norm does not name."""

    def called():
        model = make()
        with torch.no_grad():
            model.register_buffer("out", model(torch.randn(8, 4)))
            model.eval().register_buffer("last", model(torch.randn(8, 4)))
        return model

    state = check_exact(called).state_dict()
    (mean,) = (value for name, value in state.items() if name.endswith("running_mean"))
    assert mean.any()


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.arange(8.0).view(4, 2)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] + torch.ones(2), self.rows


def test_workers_of_a_loader_compute_what_they_send():
    with zerofx.deferred_init():
        dataset = Rows()
        batches = list(torch.utils.data.DataLoader(dataset, 2, num_workers=1))
    expected = torch.arange(8.0).view(4, 2)
    assert torch.equal(torch.cat([rows for rows, _ in batches]), expected + 1)
    assert all(torch.equal(whole, expected.expand(2, 4, 2)) for _, whole in batches)


def test_parameters_in_one_memory_are_made_together():
    def make():
        flat = torch.randn(20)
        return nn.ParameterList([flat[:8].view(2, 4), flat[8:].view(3, 4)]), flat

    late, flat = deferred(make)
    assert type(flat) is DeferredTensor
    zerofx.materialize(nn.ParameterList([late[1]]))
    assert type(flat) is torch.Tensor
    assert flat.data_ptr() == late[0].data_ptr()
    assert torch.equal(torch.cat([late[0].flatten(), late[1].flatten()]), flat)


def test_what_is_on_the_meta_device_stays_there():
    def make():
        with torch.device("meta"):
            away = nn.Linear(3, 3)
        return nn.ModuleList([away, nn.Linear(3, 3)])

    late = deferred(make)
    assert late[0].weight.is_meta
    assert type(late[1].weight) is DeferredParameter
    zerofx.materialize(late[1])


def test_nothing_but_parameters_is_left_to_be_made():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.register_buffer("mask", torch.ones(4, 4).tril())
            self.mine = [torch.arange(3.0)]

    late = deferred(Model)
    assert torch.equal(late.mask, torch.ones(4, 4).tril())
    assert torch.equal(late.mine[0], torch.arange(3.0))
    zerofx.materialize(late)


def test_a_second_block_goes_on_with_what_the_first_has_left():
    late = deferred(lambda: nn.Linear(4, 4))
    with zerofx.deferred_init(exact=True):
        assert type(late.weight) is nn.Parameter
        nn.init.ones_(late.weight)
        late.double()
    assert type(late.weight) is DeferredParameter
    assert late.weight.dtype is torch.float64
    zerofx.materialize(late)
    assert (late.weight == 1).all()


def test_a_second_block_makes_nothing_that_the_first_has_left(monkeypatch):
    """Though Python does not tell of its parameters: after ``gc.freeze()``, or if one is gone."""
    late, other = deferred(lambda: nn.Linear(4, 4)), deferred(lambda: nn.Linear(4, 4))
    held = other.weight.untyped_storage()
    del other
    gc.collect()
    monkeypatch.setattr(gc, "get_objects", lambda: [])
    with zerofx.deferred_init():
        pass
    assert late.weight.untyped_storage().nbytes() == held.nbytes() == 0
    assert type(late.weight) is DeferredParameter
    zerofx.materialize(late)


def test_a_second_block_makes_what_is_no_parameter_any_longer():
    late = deferred(lambda: nn.Linear(4, 4))
    with zerofx.deferred_init(exact=True):
        weight = late.weight
        del late.weight
        late.register_buffer("weight", weight.detach())
        del weight
    assert type(late.weight) is torch.Tensor and late.weight.isfinite().all()
    zerofx.materialize(late)


def test_a_block_in_a_block_is_the_same_block():
    with zerofx.deferred_init():
        with zerofx.deferred_init():
            inner = nn.Linear(3, 3)
        assert type(inner.weight) is nn.Parameter
        outer = nn.Linear(3, 3)
    assert inner.weight.untyped_storage().nbytes() == 0
    assert outer.weight.untyped_storage().nbytes() == 0
    zerofx.materialize(nn.ModuleList([inner, outer]))


def test_blocks_that_disagree_are_refused():
    with zerofx.deferred_init():
        with pytest.raises(ValueError, match="one model's parameters are made one way"):
            with zerofx.deferred_init(exact=True):
                pass


def test_an_exception_leaves_nothing_that_can_be_misread():
    kept = []
    with pytest.raises(KeyError):
        with zerofx.deferred_init():
            kept += [nn.Linear(3, 3), torch.ones(3)]
            raise KeyError("stop")
    assert torch.ones(2).sum() == 2
    with pytest.raises(RuntimeError, match=PUT_OFF):
        kept[1] + 1
    zerofx.materialize(kept[0])
    kept.clear()


# Before it is made


def test_metadata_can_be_read_and_values_cannot():
    late = deferred(lambda: nn.Linear(4, 3))
    assert "Linear(in_features=4, out_features=3" in str(late)
    assert "shape=(3, 4)" in repr(late.weight)
    assert late.weight.shape == (3, 4) and late.weight.numel() == 12
    assert isinstance(late.weight, nn.Parameter)
    torch.optim.AdamW(late.parameters(), fused=True).zero_grad()
    torch.optim.Adagrad(late.parameters())
    for use in (
        lambda: late(torch.ones(4)),
        lambda: late.weight + 1,
        lambda: late.weight.sum().item(),
        lambda: copy.deepcopy(late),
        lambda: pickle.dumps(late),
        lambda: late.weight.numpy(),
        lambda: late.weight.data,
        lambda: late.half(),
    ):
        with pytest.raises(RuntimeError, match=PUT_OFF):
            use()
    zerofx.materialize(late)
    assert late(torch.ones(4)).shape == (3,)


def test_state_dict_has_the_values_and_leaves_the_model_as_it_is():
    late = deferred(Gpt)
    saved = late.state_dict()
    assert all(type(one) is DeferredParameter for one in late.parameters())
    zerofx.materialize(late)
    for name, value in late.state_dict().items():
        assert torch.equal(value, saved[name])


def test_a_loaded_state_dict_is_what_is_made():
    source = Gpt()
    late = deferred(Gpt)
    late.load_state_dict(source.state_dict())
    assert all(type(one) is DeferredParameter for one in late.parameters())
    zerofx.materialize(late)
    for one, other in zip(source.parameters(), late.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "use, words",
    [
        (lambda t: t.data_ptr(), "needs the memory of a tensor"),
        (lambda t: t.share_memory_(), "needs the memory of a tensor"),
        (lambda t: pickle.dumps(t), "needs the memory of a tensor"),
        (lambda t: t.resize_(3), "gives a tensor other memory"),
        (lambda t: t.set_(THERE.untyped_storage()), "gives a tensor other memory"),
        (
            lambda t: torch._foreach_add_([t, THERE], 1),
            "made inside of deferred_init and to others",
        ),
        (lambda t: torch.complex(t, t).conj().mul_(2), "lazily conjugated"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_words(use, words):
    with zerofx.deferred_init():
        tensor = torch.ones(2, 2)
        with pytest.raises(zerofx.StepError, match=words):
            use(tensor)


THERE = torch.ones(2, 2)


def test_a_new_tensor_takes_a_storage_that_is_there():
    with zerofx.deferred_init():
        legacy = torch.ByteTensor(torch.ByteStorage._from_buffer(bytearray(b"abc")))
        new = torch.empty(0, dtype=torch.float32).set_(THERE.untyped_storage(), 1, (2,))
        more = new + 1
    assert legacy.tolist() == [97, 98, 99] and more.tolist() == [2, 2]
    assert new.data_ptr() == THERE[0, 1:].data_ptr()


def test_wrong_operations_fail_where_they_are_written():
    with zerofx.deferred_init():
        tensor = torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="expand|size"):
            tensor.copy_(torch.ones(4, 5))
        with pytest.raises(RuntimeError, match="leaf"):
            nn.Parameter(tensor).normal_()


def test_an_array_of_what_is_not_there_cannot_be_written_to():
    with zerofx.deferred_init():
        array = torch.ones(3).numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2


def test_a_dropped_model_leaves_nothing():
    late = deferred(Gpt)
    assert len(LEDGER)
    del late
    gc.collect()
    assert len(LEDGER) == 0
