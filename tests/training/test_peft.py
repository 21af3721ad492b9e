"""Adapters of ``peft`` on a frozen model of Hugging Face: trained, saved, loaded and merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.checkpoints import assert_same
from tests.kit.covering import each_value, exhaustive
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.parameters.guarded import ShardedParameter

STAGES = (0, 1, 2, 3)
NUM_ADAPTERS = 4  # two matrices beside each of q_proj and v_proj
ROWS = 2  # of one rank's batch

Pair = tuple[torch.nn.Module, torch.optim.Optimizer]


def frozen_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,  # with 1, torch's own aot_eager adds up in another order
        max_position_embeddings=9,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def with_adapters(base: LlamaForCausalLM, seed: int = 1) -> PeftModel:
    torch.manual_seed(seed)
    config = LoraConfig(
        r=3,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,  # random, where peft would begin with a zero
    )
    return get_peft_model(base, config)


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), lr=1e-2)


def step(model, optimizer, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def compiled(fn, stage: int = 3):
    return torch.compile(fn, backend="zero", options={"stage": stage, "lowering": "eager"})


def batch(number: int, rank: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 31, (ROWS, 9), generator=torch.Generator().manual_seed(10 * number + rank)
    )


def losses(run, pair: Pair, numbers) -> list[float]:
    return [run(*pair, batch(number, dist.get_rank())).item() for number in numbers]


def trained_by_torch(world_size: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Each rank's losses and the model in the end: one process computes all ranks' gradients."""
    model = with_adapters(frozen_base())
    optimizer = optimizer_of(model)
    found: list[list[float]] = [[] for _ in range(world_size)]
    for number in range(3):
        gradients = []
        for rank in range(world_size):
            loss = model(input_ids=batch(number, rank), labels=batch(number, rank)).loss
            found[rank].append(loss.item())
            gradients.append(torch.autograd.grad(loss, trainable(model)))
        for parameter, *each in zip(trainable(model), *gradients, strict=True):
            parameter.grad = sum(each[1:], each[0]) / world_size
        optimizer.step()
    return [(found[rank], model.state_dict()) for rank in range(world_size)]


def trained_by_zerofx(stage: int):
    torch._dynamo.reset()
    communicator = Communicator.of(None)  # kept: only a living one is the step's own
    traffic = traffic_of(communicator)
    model = with_adapters(frozen_base())
    pair, run = (model, optimizer_of(model)), compiled(step, stage)
    found = losses(run, pair, range(2))
    traffic.reset()
    found += losses(run, pair, range(2, 3))
    sharded = {name for name, one in model.named_parameters() if type(one) is ShardedParameter}
    names = {name for name, _ in model.named_parameters()}
    assert sharded == (names if stage == 3 else set())
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)
    assert {id(one) for one in pair[1].state} == {id(one) for one in trainable(model)}
    return found, model.state_dict(), traffic.snapshot()["sent_bytes"]


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "world_size"), each_value(STAGES, (1, 2)))
def test_adapters_train_as_in_torch_and_frozen_weights_have_no_gradients(stage, world_size, ranks):  # noqa: F811
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: more may add in another order
    try:
        expected = trained_by_torch(world_size)
    finally:
        torch.set_num_threads(threads)
    model = with_adapters(frozen_base())
    adapters = sum(one.nbytes for one in trainable(model))
    frozen = sum(one.nbytes for one in model.parameters()) - adapters
    for (found, state, sent), (right, right_state) in zip(
        ranks(world_size).run(trained_by_zerofx, stage), expected, strict=True
    ):
        assert found == right
        assert_same(dict(state), dict(right_state))
        # Padding is at most 16 bytes a parameter, and a rank.
        share, padding = (world_size - 1) / world_size, 16 * (world_size + 1) * NUM_ADAPTERS
        assert sent["reduce"] <= (2 if stage == 0 else 1) * (adapters * share + padding)
        if world_size > 1:
            assert sent["reduce"] >= adapters * share
            assert (sent["gather"] > frozen * share) == (stage == 3)


def saved(root: str):
    """Train and save adapters in every way, and go on."""
    torch._dynamo.reset()
    model = with_adapters(frozen_base())
    pair, run, see = (model, optimizer_of(model)), compiled(step), compiled(logits)
    losses(run, pair, range(2))
    seen = see(model, batch(9))
    zerofx.save(f"{root}/adapters", *pair, trainable_only=True)
    with zerofx.full_params(model):
        within = {key: one.clone() for key, one in get_peft_model_state_dict(model).items()}
        if dist.get_rank() == 0:
            model.save_pretrained(f"{root}/peft")
    state = model.state_dict()
    if dist.get_rank() == 0:
        model.save_pretrained(f"{root}/peft-of-state", state_dict=state)
    assert_same(get_peft_model_state_dict(model, state_dict=state), within)
    return seen, within, losses(run, pair, range(2, 4))


def loaded(root: str, how: str):
    """Load into a fresh base and adapters, see, go on, and merge."""
    torch._dynamo.reset()
    if how == "plain":
        model = with_adapters(frozen_base(), seed=2)
    elif how == "deferred":
        with zerofx.deferred_init(exact=True):
            model = with_adapters(frozen_base(), seed=2)
    else:
        with zerofx.deferred_init(exact=True):
            base = frozen_base()
        model = with_adapters(base, seed=2)
    pair, run, see = (model, optimizer_of(model)), compiled(step), compiled(logits)
    zerofx.load(f"{root}/adapters", *pair)
    seen = see(model, batch(9))
    after = losses(run, pair, range(2, 4))
    zerofx.unshard(*pair)
    apart = logits(model, batch(9))
    merged = model.merge_and_unload()
    assert type(merged) is LlamaForCausalLM
    torch.testing.assert_close(logits(merged, batch(9)), apart)
    return seen, after


@pytest.mark.nightly
def test_dora_trains_as_in_torch():
    """It asks in which module the class of a weight is defined, which torch cannot trace."""

    def built() -> Pair:
        torch.manual_seed(1)
        settings = {"r": 3, "target_modules": ["q_proj", "v_proj"], "use_dora": True}
        model = get_peft_model(frozen_base(), LoraConfig(**settings, init_lora_weights=False))
        return model, optimizer_of(model)

    mine, others, run = built(), built(), compiled(step)
    for number in range(3):
        assert torch.equal(run(*mine, batch(number)), step(*others, batch(number)))


@pytest.fixture(scope="module", name="saved_by_two")
def saved_by_two_fixture(ranks, tmp_path_factory):  # noqa: F811
    root = tmp_path_factory.mktemp("saved")
    return root, ranks(2).run(saved, str(root))


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["plain", exhaustive("deferred"), "deferred base"])
def test_saved_adapters_load_beside_a_fresh_base(how, saved_by_two, ranks):  # noqa: F811
    root, before = saved_by_two
    for (seen, _, after), (seen_again, after_again) in zip(
        before, ranks(2).run(loaded, str(root), how), strict=True
    ):
        assert torch.equal(seen_again, seen)
        assert after_again == after


@pytest.mark.nightly
def test_a_checkpoint_of_adapters_has_their_bytes_and_no_others(saved_by_two):
    root, _ = saved_by_two
    entries = dcp.FileSystemReader(root / "adapters").read_metadata().state_dict_metadata
    nbytes = {
        name: entry.size.numel() * entry.properties.dtype.itemsize
        for name, entry in entries.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    model = with_adapters(frozen_base())
    adapters = {
        f"model.{name}": one.nbytes for name, one in model.named_parameters() if one.requires_grad
    }
    assert len(adapters) == NUM_ADAPTERS
    assert {name: size for name, size in nbytes.items() if name.startswith("model.")} == adapters
    states = sum(size for name, size in nbytes.items() if name.startswith("optimizer."))
    assert states == 2 * sum(adapters.values()) + 4 * NUM_ADAPTERS  # two moments, a step count


@pytest.mark.nightly
@pytest.mark.parametrize("folder", ["peft", "peft-of-state"])
def test_what_peft_saves_is_what_peft_loads(folder, saved_by_two):
    root, [(seen, adapters, _), _] = saved_by_two
    model = PeftModel.from_pretrained(frozen_base(), Path(root) / folder)
    assert_same(dict(get_peft_model_state_dict(model)), adapters)
    torch.testing.assert_close(logits(model, batch(9)), seen)
