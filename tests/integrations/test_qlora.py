"""QLoRA: the packed weights of bitsandbytes are sharded and gathered packed, adapters trained."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import zerofx
from tests.kit.programs import capture, nodes_of, rewritten
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from tests.kit.trainers import CLASSES, LENGTH, built, check, train_alone, train_on_rank
from zerofx.ir import ops
from zerofx.ir.graph import is_backward
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.parameters.guarded import ShardedParameter

WIDTH = 64  # of a block that has a scale of its own


def quantized(folder, double=True, storage=torch.uint8):
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_quant_storage=storage,
    )
    on = {"quantization_config": settings, "device_map": {"": "cpu"}, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder, **on)


def adapted(folder, checkpointing=False, reference=False, **given):
    model = quantized(folder, **given)
    for part in model.modules() if reference else ():
        # Or on some CPUs an evaluation packs the weights for good, and nothing trains after it.
        if isinstance(part, Linear4bit):
            part.support_avx512bf16_for_cpu = False
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    torch.manual_seed(1)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    return get_peft_model(model, config)


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    built(hidden_size=WIDTH, intermediate_size=2 * WIDTH).save_pretrained(folder)
    return str(folder)


def batch(number, rank=0):
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randint(CLASSES, (2, LENGTH), generator=generator)


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train_by_hand(folder, stage, double):
    """Return losses and adapters of a rank, the bytes it keeps packed, and what it gathers."""
    torch._dynamo.reset()
    communicator = Communicator.of(None)  # kept: only a living one is the step's own
    traffic = traffic_of(communicator)
    model = adapted(folder, double=double).train()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)

    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = torch.compile(step, backend="zero", options={"stage": stage, "lowering": "eager"})
    losses = [run(batch(number, dist.get_rank())) for number in range(2)]
    traffic.reset()
    losses.append(run(batch(2, dist.get_rank())))
    packed = [p for p in model.parameters() if isinstance(p, Params4bit)]
    assert len(packed) == 2 * 7
    assert all(isinstance(p, ShardedParameter) == (stage == 3) for p in packed)
    sent = traffic.snapshot()["sent_bytes"]["gather"]
    with zerofx.full_params(model):
        adapters = [parameter.detach().clone() for parameter in trainable(model)]
    return losses, adapters, sent


def train_in_one_process(folder, double, num_ranks):
    """As the ranks do: their gradients are averaged."""
    model = adapted(folder, double=double).train()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    losses = [[] for _ in range(num_ranks)]
    for number in range(3):
        gradients = []
        for rank, found in enumerate(losses):
            ids = batch(number, rank)
            loss = model(input_ids=ids, labels=ids).loss
            found.append(loss.detach())
            gradients.append(torch.autograd.grad(loss, trainable(model)))
        for parameter, *each in zip(trainable(model), *gradients, strict=True):
            parameter.grad = sum(each[1:], each[0]) / num_ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.detach() for parameter in trainable(model)], model


def test_packed_weights_are_gathered_packed_and_checkpointed_products_repeated():
    """These are most of what a checkpoint is to drop, and draw nothing."""
    packed = Linear4bit(WIDTH, WIDTH, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    packed.to("cpu")
    adapter = torch.nn.Parameter(torch.ones(WIDTH))
    optimizer = torch.optim.SGD([adapter], lr=0.1)

    def block(x):
        return packed(x * adapter).tanh() * adapter

    def step(x):
        checkpoint(block, x, use_reentrant=False).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(3, WIDTH), world_size=2)
    program = rewritten(captured, until="recompute", stage=0)
    product = torch.ops.bitsandbytes.gemm_4bit.default
    assert [is_backward(node) for node in nodes_of(program, product)] == [False, True]
    gathers = nodes_of(rewritten(captured, stage=3), ops.all_gather_start)
    assert torch.uint8 in {node.meta["val"].dtype for node in gathers}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "double", "num_ranks"),
    [(3, True, 2), (3, False, 3), (2, True, 2), (1, False, 2)],
)
def test_adapters_train_as_in_torch_beside_weights_gathered_packed(
    stage,
    double,
    num_ranks,
    folder,
    ranks,  # noqa: F811
):
    expected, adapters, model = train_in_one_process(folder, double, num_ranks)
    packed = sum(one.nbytes for one in model.parameters() if isinstance(one, Params4bit))
    whole = sum(m.in_features * m.out_features for m in model.modules() if type(m) is Linear4bit)
    others = [one for one in model.parameters() if not isinstance(one, Params4bit)]
    found = ranks(num_ranks).run(train_by_hand, folder, stage, double, timeout_s=300)
    for (losses, trained, sent), right in zip(found, expected, strict=True):
        torch.testing.assert_close(losses, right, rtol=1e-6, atol=0)
        torch.testing.assert_close(trained, adapters, rtol=1e-6, atol=1e-6)
        # Forward and backward gather all, but the head that both use at once; shards are padded.
        share, padding = (num_ranks - 1) / num_ranks, 16 * num_ranks * len(list(model.parameters()))
        rest = sum(one.nbytes for one in others)
        if stage == 3:
            assert sent <= 2 * share * (packed + rest + padding)
            assert sent >= 2 * share * packed + share * rest
    assert packed <= 0.27 * 2 * whole, "of bfloat16"


CASES = {
    "double": {},
    "not double": {"double": False},
    "checkpointed": {"checkpointing": True},
    "stored as bfloat16": {"storage": torch.bfloat16},
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_trainer_trains_evaluates_and_resumes(case, folder, ranks, tmp_path):  # noqa: F811
    build = partial(adapted, folder, **CASES[case])
    given = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
    given |= {"eval_strategy": "epoch", "optim": "sgd", "learning_rate": 1.0}
    given |= {"activation_checkpointing": bool(CASES[case].get("checkpointing"))}
    two = {**given, "per_device_train_batch_size": 6}
    found = ranks(2).run(
        train_on_rank, str(tmp_path / "two"), two, None, None, 8, build, timeout_s=300
    )
    one = {**given, "per_device_train_batch_size": 12}
    alone = partial(build, reference=True)
    expected, evaluated, model = train_alone(tmp_path / "one", one, 8, alone)
    for losses, evaluations in found:
        check(losses, expected)
        check(evaluations, evaluated)
    saved = PeftModel.from_pretrained(quantized(folder), tmp_path / "two").state_dict()
    adapters = {name: one for name, one in model.state_dict().items() if "lora_" in name}
    assert len(adapters) == 8
    for name, value in adapters.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6)
    for others in (1, 3):
        apart = {**given, "per_device_train_batch_size": 12 // others}
        checkpoint = str(tmp_path / "two" / "checkpoint-2")
        settings = str(tmp_path / f"on-{others}"), apart, None, checkpoint, 8, build
        again, _ = ranks(others).run(train_on_rank, *settings, timeout_s=300)[0]
        check(again, expected)
