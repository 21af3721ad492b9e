"""A function may return objects that it builds: dataclasses, outputs of a library, nested ones."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import zerofx
from tests.kit import models
from tests.kit.covering import each_pair, exhaustive, first, nightly
from tests.kit.models import Mlp, squared_loss
from zerofx.errors import StepError

BATCH = models.features(0, 4)


@dataclass
class Output:
    loss: Any
    logits: Any = None
    count: int = 0


class Plain:
    def __init__(self, **fields: Any):
        self.__dict__.update(fields)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def zero(function, stage: int = 3):
    return torch.compile(function, backend="zero", options={"stage": stage, "lowering": "eager"})


def flat(value: Any) -> list[Any]:
    """The kinds of what a result is made of, and its leaves, in order."""
    if isinstance(value, (Output, Plain)):
        value = vars(value)
    if isinstance(value, dict):
        fields = [leaf for name, item in value.items() for leaf in (name, *flat(item))]
        return [type(value), *fields]
    if isinstance(value, (list, tuple)):
        return [type(value), *(leaf for item in value for leaf in flat(item))]
    return [value]


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    found, wanted = flat(actual), flat(expected)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        same = torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
        assert same, (one, other)


def evaluate(model, x, y):
    with torch.no_grad():
        logits = model(x)
        return Output((logits - y).square().mean(), logits, len(x))


def evaluate_nested(model, x, y):
    with torch.no_grad():
        logits = model(x)
        inner = Output(logits.sum(), [logits + 1, {"twice": 2 * logits}])
        return Plain(inner=inner, both=(inner.loss, Plain(logits=logits)), none=None)


@pytest.mark.parametrize("stage", (exhaustive(0), 3))
@pytest.mark.parametrize("function", (evaluate, evaluate_nested))
def test_an_evaluation_returns_the_object_it_builds(function, stage):
    model = Mlp()
    expected = function(model, *BATCH)
    compiled = zero(function, stage)
    for _ in range(2):
        assert_same(compiled(model, *BATCH), expected)


def train(model, optimizer, x, y):
    logits = model(x)
    loss = (logits - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return Output(loss, Plain(parts=[logits, Output(loss + 1)]), len(x))


@pytest.mark.parametrize("stage", (nightly(0), exhaustive(1), exhaustive(2), 3))
def test_a_step_returns_the_object_it_builds(stage):
    model = Mlp()
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    step = zero(train, stage)
    for number in range(3):
        batch = models.features(number, 4)
        actual = step(model, optimizers[0], *batch)
        assert_same(actual, train(reference, optimizers[1], *batch))
        assert not actual.loss.requires_grad


def test_a_parameter_in_an_object_is_the_parameter_itself():
    def step(model, x, y):
        with torch.no_grad():
            return Output(squared_loss(model, x, y), Plain(weight=model.head.weight))

    model, compiled = Mlp(), zero(step)
    for _ in range(2):
        assert compiled(model, *BATCH).logits.weight is model.head.weight


def test_an_object_left_on_the_model_has_the_steps_values():
    def step(model, x, y):
        with torch.no_grad():
            model.last = Output(squared_loss(model, x, y))
            return 2 * model.last.loss

    model, compiled = Mlp(), zero(step)
    expected = squared_loss(model, *BATCH)
    assert compiled(model, *BATCH).item() == 2 * expected.item()
    assert model.last.loss.item() == expected.item()


def wrapped(value):
    return Output(None, Plain(inner=[value]))


@pytest.mark.parametrize("stage", (0, 3))
def test_a_view_of_a_parameter_in_an_object_is_refused(stage):
    def step(model, x, y):
        squared_loss(model, x, y).backward()
        return wrapped(model.head.weight[0])

    with pytest.raises(StepError, match="a view of parameter 'head.weight'.*clone"):
        zero(step, stage)(Mlp(), *BATCH)


def row(gradient):
    return gradient[0]


def detached(gradient):
    return gradient.detach()


@pytest.mark.parametrize("look, stage", each_pair((row, detached), (0, 2, 3), default=[(row, 3)]))
def test_a_view_of_a_gradient_that_came_in_is_returned_as_a_copy(look, stage):
    def update(model, optimizer):
        looked = look(model.head.weight.grad)
        optimizer.step()
        return looked

    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    squared_loss(other := copy.deepcopy(model), *BATCH).backward()
    zero(lambda model, x, y: squared_loss(model, x, y).backward(), stage)(model, *BATCH)
    found = zero(update, stage)(model, optimizer)
    torch.testing.assert_close(found, look(other.head.weight.grad))


@pytest.mark.nightly
def test_a_step_that_clears_gradients_first_may_return_those_that_came_in():
    def step(model, optimizer, *batch):
        before = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        squared_loss(model, *batch).backward()
        optimizer.step()
        return before

    def returned(function) -> list[Any]:
        torch.manual_seed(0)
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [function(model, optimizer, *BATCH) for _ in range(3)]

    assert_same(returned(zero(step, stage=0)), returned(step))


@pytest.mark.parametrize("stage", first(1, [3, 2]))
def test_a_gradient_that_outlives_a_later_call_holds_nothing_and_says_so(stage):
    def backward(model, optimizer, *batch):
        optimizer.zero_grad()
        squared_loss(model, *batch).backward()

    def product(ones, others):
        return sum((one * other).sum() for one, other in zip(ones, others, strict=True))

    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled, multiplied = zero(backward, stage), zero(product, stage)
    compiled(model, optimizer, *BATCH)
    first = [p.grad for p in model.parameters()]
    compiled(model, optimizer, *models.features(1, 4))
    second = [p.grad for p in model.parameters()]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a later one has replaced"):
        multiplied(first, second)
    with pytest.raises(RuntimeError, match=r"has been replaced since.*p\.grad\.clone\(\)"):
        first[0].norm()
    squares = multiplied(second, second)
    zerofx.unshard(model, optimizer)
    backward(model, optimizer, *models.features(1, 4))
    gradients = [p.grad for p in model.parameters()]
    torch.testing.assert_close(squares, product(gradients, gradients))


@pytest.mark.parametrize("at_first", first(1, ["nothing", "zeros"]))
def test_a_step_may_keep_its_gradients_for_the_next_call(at_first):
    def step(model, optimizer, kept, *batch):
        optimizer.zero_grad()
        squared_loss(model, *batch).backward()
        gradients = [p.grad for p in model.parameters()]
        before = kept.get("before") or gradients
        kept["before"] = gradients
        optimizer.step()
        return sum((one * other).sum() for one, other in zip(gradients, before, strict=True))

    def trained(function) -> list[Any]:
        torch.manual_seed(0)
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zeros = [torch.zeros_like(p) for p in model.parameters()]
        kept = {"before": zeros} if at_first == "zeros" else {}
        return [function(model, optimizer, kept, *models.features(n, 4)) for n in range(3)]

    compiled = zero(step, stage=3)
    if at_first == "zeros":
        with pytest.raises(StepError, match=r"as an earlier call has left it.*p\.grad\.clone\(\)"):
            trained(compiled)
    else:
        torch.testing.assert_close(trained(compiled), trained(step))


@pytest.mark.nightly
def test_a_gradient_that_a_later_step_reads_is_not_that_steps_own():
    def step(model, optimizer, before, *batch):
        optimizer.zero_grad()
        squared_loss(model, *batch).backward()
        own = [p.grad for p in model.parameters()]
        product = sum((one * other).sum() for one, other in zip(own, before or own, strict=True))
        optimizer.step()
        return product

    def trained(function) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(0)
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generations, products = [None], []
        for number in range(3):
            batch = models.features(number, 4)
            products.append(function(model, optimizer, generations[-1], *batch))
            generations.append([p.grad for p in model.parameters()])
        return products, generations[1:]

    products, generations = trained(zero(step, stage=3))
    torch.testing.assert_close(products, trained(step)[0])
    assert len({id(gradient) for each in generations for gradient in each}) == 3 * 4
    with pytest.raises(RuntimeError, match="has been replaced since"):
        generations[0][0].norm()


@pytest.mark.parametrize("stage", first(1, [0, 1]))
def test_gradients_of_one_rank_that_are_one_tensor_are_kept_apart(stage):
    a, b = (torch.nn.Parameter(torch.randn(2, 3)) for _ in range(2))
    compiled = zero(lambda x: ((a + b) * x).sum().backward(), stage)
    x = torch.randn(4, 3)[:2]
    given = x.clone()
    compiled(x)
    a.grad.zero_()
    assert torch.equal(b.grad, given) and torch.equal(x, given)
    compiled(x)
    assert torch.equal(b.grad, 2 * given) and torch.equal(a.grad, given)


def test_what_returns_nothing_returns_none_whatever_was_compiled_before():
    """Dynamo has one None for all, which may say that it is a gradient of another function's."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        squared_loss(model, x, y).backward()
        optimizer.step()

    assert zero(step)(model, optimizer, *BATCH) is None
    weight = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert zero(lambda x: (weight * x).sum().backward())(torch.ones(3)) is None


def test_an_object_with_a_value_to_differentiate_is_refused():
    with pytest.raises(StepError, match="a value to differentiate, and has no backward"):
        zero(lambda model, x, y: wrapped(squared_loss(model, x, y)))(Mlp(), *BATCH)


def test_a_hyperparameter_set_beside_an_object_is_still_refused():
    def step(model, optimizer, x, y):
        optimizer.param_groups[0]["lr"] = 0.5
        return train(model, optimizer, x, y)

    model = Mlp()
    with pytest.raises(StepError, match="sets a hyperparameter"):
        zero(step)(model, torch.optim.AdamW(model.parameters()), *BATCH)


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=9,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


TOKENS = torch.arange(8).view(2, 4)


def assert_same_output(actual, expected) -> None:
    """Compare what a causal language model of Hugging Face's returns, its cache included."""
    assert type(actual) is type(expected)
    assert list(actual) == list(expected) == ["loss", "logits", "past_key_values"]
    assert torch.equal(actual.loss, expected["loss"]) and actual["loss"] is actual.loss
    assert torch.equal(actual.logits, expected.logits)
    assert type(actual.past_key_values) is type(expected.past_key_values)
    layers = zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True)
    for one, other in layers:
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@pytest.mark.exhaustive
def test_an_evaluation_returns_the_output_of_a_hugging_face_model(llama):
    def evaluate(model):
        with torch.no_grad():
            return model(input_ids=TOKENS, labels=TOKENS)

    compiled, model = zero(evaluate), copy.deepcopy(llama)
    for _ in range(2):
        assert_same_output(compiled(model), evaluate(llama))


@pytest.mark.exhaustive
def test_a_step_returns_the_output_of_a_hugging_face_model(llama):
    def step(model, optimizer):
        output = model(input_ids=TOKENS, labels=TOKENS)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return output

    both = [copy.deepcopy(llama), copy.deepcopy(llama)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in both]
    compiled = zero(step)
    for _ in range(3):
        actual = compiled(both[0], optimizers[0])
        assert_same_output(actual, step(both[1], optimizers[1]))


@pytest.mark.nightly
def test_a_hugging_face_model_by_itself_is_told_to_call_backward_inside(llama):
    with pytest.raises(StepError, match="a value to differentiate, and has no backward"):
        zero(copy.deepcopy(llama))(input_ids=TOKENS, labels=TOKENS)
