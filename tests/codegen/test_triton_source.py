"""Golden kernels: what is emitted for each optimizer, reviewed as text.

After a change of the emitter (or of torch.optim, whose lines are quoted), write them anew with

    python -m tests.codegen.test_triton_source

and review the difference.  They are of torch 2.13; other versions' optimizers may name things
otherwise, so there the tests of what kernels compute have to do.
"""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.codegen import work
from tests.codegen.updates import OPTIMIZERS, Shards, program
from tests.codegen.variants import VARIANTS
from tests.kit.covering import first
from zerofx.codegen.pointwise import pointwise_program
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.triton.source import kernel_name, triton_source

GOLDEN = Path(__file__).parent / "golden"
# What is not the optimizer's own.
NOTES = (
    "resume_master: ",
    "random_bits: ",
    "round_stochastically: ",
    "round_to: ",
    "decode_blocks: ",
    "scale_of: ",
    "encode_blocks: ",
    "sum_of_squares: ",
)


def emitted(name):
    return triton_source(program(**VARIANTS[name]))


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="golden kernels quote torch 2.13's optimizers"
)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_kernel_is_the_golden_one(name):
    assert emitted(name) == (GOLDEN / f"{name}.py").read_text(encoding="utf-8")


def test_the_kernel_in_the_documentation_is_a_golden_one():
    page = (Path(__file__).parents[2] / "docs" / "codegen.md").read_text(encoding="utf-8")
    shown = page.partition("```python\n")[2].partition("```")[0]
    golden = (GOLDEN / "adamw_bf16_gradient.py").read_text(encoding="utf-8")
    (function,) = ast.parse(shown).body
    assert ast.unparse(function) in ast.unparse(ast.parse(golden))
    comments = [line for line in shown.splitlines() if "#" in line]
    assert len(comments) == 5 and all(line in golden for line in comments)


def test_every_golden_kernel_has_its_variant():
    assert {path.stem for path in GOLDEN.glob("*.py")} == set(VARIANTS)


@pytest.mark.parametrize("name", first(4, VARIANTS))
def test_what_is_emitted_is_python_and_says_where_each_statement_is_from(name):
    source = emitted(name)
    module = ast.parse(source)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    kernel = kernel_name(program(**VARIANTS[name]))
    assert kernel in functions
    lines = source.splitlines()
    block = functions[f"{kernel}_block"]
    for node in block.body:
        if isinstance(node, ast.Assign) and "tl.load" not in (text := lines[node.lineno - 1]):
            above = next(
                line for line in reversed(lines[: node.lineno - 1]) if "#" in line or not line
            )
            is_said = above.strip("# ").startswith(NOTES)
            assert ".py:" in above or is_said, text


@pytest.mark.nightly
def test_adamw_moves_as_many_bytes_as_it_must():
    of_variant = {
        "adamw_bf16_gradient": 26,
        "adamw": 28,
        "adamw_bf16_parameters": 14,
        "adamw_masters": 30,  # the parameter is read too: somebody may have written to it
        "adamw_rounded": 14,
        "adamw_bf16_moments": 20,
        "adamw_rounded_int8_moments": 10 + 16 / 256,
        "adamw_masters_int8_moments": 18 + 16 / 256,
        "adamw_squares": 28 + 4 / 1024,
    }
    for name, expected in of_variant.items():
        assert program(**VARIANTS[name]).bytes_per_element == expected, name


def test_a_state_that_is_not_read_is_not_loaded():
    streams = {stream.name: stream for stream in program(OPTIMIZERS["asgd"]).streams}
    assert streams["ax"].load is None and streams["ax"].store is not None
    assert program(OPTIMIZERS["asgd"]).bytes_per_element == 4 + 4 + 4 + 4


def test_numbers_bear_the_optimizers_names_and_say_what_they_are():
    numbers = {n.name: n.formula for n in program(OPTIMIZERS["adamw"]).numbers}
    assert numbers["step_size"] == "lr/(1 - beta1**(step + 1))"
    assert numbers["bias_correction2_sqrt"] == "(1 - beta2**(step + 1))**0.5"
    assert numbers["one_minus_lr_weight_decay"] == "1 - lr*weight_decay"


def test_numbers_of_one_name_in_group_and_state_stay_apart():
    class Twice(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"scale": 0.5})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("scale", 0.25)
                    p.mul_(group["scale"]).mul_(self.state[p]["scale"]).add_(p.grad)

    made = program(Twice)
    assert [number.name for number in made.numbers] == ["scale", "scale_1"]
    assert made.host((0, 0, 2.0, 3.0))[1] == (2.0, 3.0) or list(made.host((0, 0, 2.0, 3.0))[1]) == [
        2.0,
        3.0,
    ]


def test_a_state_called_coefficient_has_a_pointer_beside_the_clip_factors():
    class Averaged(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state.setdefault("coefficient", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                p.add_(state["coefficient"], alpha=-0.1)

    clipped = work.traced(work.clip, torch.float32, torch.float32)
    source = triton_source(program(Averaged, work=clipped))
    assert "tl.load(coefficient_ptr)" in source  # an argument
    assert "coefficient_ptr = stream(" not in source and "_ptr_1 = stream(" in source


def test_a_number_that_is_no_one_minus_something_is_named_too():
    def update(p, g, s, lr):
        p.mul_(lr * (2 - lr) - 1).add_(g, alpha=(lr + 0.5) * lr)  # in words, 2 - lr never ends

    assert "one_minus" not in triton_source(update_of(update))


def update_of(update, **variant):
    """The program of an optimizer that applies ``update(p, p.grad, state)``."""

    class Custom(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    update(p, p.grad, self.state[p], group["lr"])

    shards = Shards(Custom([nn.Parameter(torch.ones(7))]), pointwise_program, variant)
    return shards.trace()[1]


@pytest.mark.parametrize(
    ("update", "named"),
    [
        (lambda p, g, s, lr: p.sub_(torch.tanh(g)), "aten.tanh.default"),
        (lambda p, g, s, lr: p.sub_(g.pow(1.7)), "aten.pow.Tensor_Scalar"),
        (lambda p, g, s, lr: p.sub_(g.div(3, rounding_mode="floor")), "aten.div.Tensor_mode"),
        (lambda p, g, s, lr: p.copy_(torch.empty_like(p)), "aten.copy_.default"),
    ],
)
def test_an_operation_without_a_rule_is_refused_by_name_and_line(update, named):
    with pytest.raises(UpdateError) as refusal:
        update_of(update)
    line = update.__code__.co_firstlineno
    assert named in str(refusal.value) and f"{Path(__file__).name}:{line}" in str(refusal.value)


def test_an_input_of_unknown_dtype_is_refused():
    shards = Shards(OPTIMIZERS["adamw"]([nn.Parameter(torch.ones(7))]), lambda update: update)
    update = shards.trace()[0]
    next(iter(update.graph_module.graph.nodes)).meta.clear()
    with pytest.raises(UpdateError, match="dtype"):
        pointwise_program(update)


def test_operators_on_lists_are_written_one_tensor_at_a_time():
    def update(p, g, s, lr):
        torch._foreach_add_([p], [g], alpha=-lr)
        torch._foreach_maximum_([p], -5.0)
        torch._foreach_mul_([p], torch._foreach_sqrt([g]))

    source = triton_source(update_of(update))
    assert "param = param - lr * grad" in source and "maximum(param, -5.0)" in source
    assert "param * tl.sqrt_rn(grad)" in source


def test_casts_bits_and_integers_are_written_as_such():
    def update(p, g, s, lr):
        bits = p.sub(g, alpha=lr).view(torch.int32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        p.copy_(rounded.view(torch.float32).to(torch.bfloat16))

    source = triton_source(update_of(update))
    assert ".to(tl.int32, bitcast=True)" in source and "(bits >> 16) & 1" in source
    assert ".to(tl.float32, bitcast=True).to(tl.bfloat16)" in source


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for path in GOLDEN.glob("*.py"):
        path.unlink()
    for variant in VARIANTS:
        (GOLDEN / f"{variant}.py").write_text(emitted(variant), encoding="utf-8")
    print(f"{len(VARIANTS)} kernels written to {GOLDEN}")
