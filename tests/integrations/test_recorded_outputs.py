"""Models of transformers record states, attentions and routers in a compiled step."""

from __future__ import annotations

import pytest
import torch

from tests.kit.covering import nightly
from tests.kit.trainers import CLASSES, built, of_experts


def train(build, asked, configured, compiles):
    torch._dynamo.reset()
    model = build(attn_implementation="eager", **configured)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens):
        outputs = model(input_ids=tokens, labels=tokens, **asked)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return outputs

    step = compiles(step)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(CLASSES, (2, 8), generator=generator) for _ in range(2)]
    return [step(batch) for batch in batches]


@pytest.mark.slow(reason="a model of transformers is compiled")
@pytest.mark.parametrize(
    "build, asked, configured, kind",
    (
        (built, {"output_attentions": True}, {"num_hidden_layers": 1}, "attentions"),
        nightly(built, {}, {"output_hidden_states": True}, "hidden_states"),
        nightly(of_experts, {"output_router_logits": True}, {}, "router_logits"),
    ),
)
def test_what_is_recorded_is_what_is_without_compiling(build, asked, configured, kind):
    options = {"lowering": "eager", "stage": 0}
    found = train(
        build, asked, configured, lambda s: torch.compile(s, backend="zero", options=options)
    )
    expected = train(build, asked, configured, lambda s: s)
    for its, other in zip(found, expected, strict=True):
        assert len(its[kind]) == len(other[kind]) > 0
        for value, wanted in zip(its[kind], other[kind], strict=True):
            torch.testing.assert_close(value, wanted.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(its.loss, other.loss.detach(), rtol=1e-6, atol=1e-6)
