"""Captured steps for the passes of offload, and what the verifier says of a broken program."""

import functools

import pytest
import torch
from torch import nn

from tests.kit.programs import Captured, capture, mlp_step, smallest_step
from zerofx import GraphError
from zerofx.ir import ops
from zerofx.ir.offload import (
    changes_files,
    copies_activation,
    copies_to_device,
    is_fetch,
    is_staged,
)
from zerofx.verify.verifier import verify

FACTS = frozenset({"averaged_gradients", "sharded_updates"})

OFFLOADED = {"offload": "optimizer", "update_in_backward": True, "bucket": True}


@functools.cache
def tied_step():
    """A weight used twice, a frozen one, two groups, and a parameter read after its update."""
    torch.manual_seed(0)
    tied, other, frozen = (nn.Parameter(torch.randn(5, 5)) for _ in range(3))
    bias = nn.Parameter(torch.zeros(5))
    frozen.requires_grad_(False)
    groups = [{"params": [tied, other]}, {"params": [bias], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)

    def step(x):
        y = ((x @ tied).relu() @ other @ frozen + bias) @ tied
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return tied.detach().sum()

    return capture(step, torch.randn(3, 5), world_size=2)


@functools.cache
def twice_step():
    """One parameter is updated twice in a step."""
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return capture(step, torch.randn(3, 5), world_size=2)


STEPS = {
    "smallest": smallest_step,
    "layers": mlp_step,
    "clipped": lambda: mlp_step(clip=True),
    "tied": tied_step,
    "twice": twice_step,
}


def refused(program: Captured, match: str, facts: frozenset[str] = FACTS) -> None:
    """The graph is well formed, and the verifier refuses the program with these words."""
    program.gm.graph.lint()
    with pytest.raises(GraphError, match=match):
        verify(program.gm, program.table, facts)


# Calls of the operators that offload shares, as ``nodes_of`` takes them.


def bucket_to_host(node):
    return is_staged(node) and not copies_activation(node)


def bucket_to_device(node):
    return copies_to_device(node) and not copies_activation(node)


def value_to_host(node):
    return is_staged(node) and copies_activation(node)


def value_to_device(node):
    return copies_to_device(node) and copies_activation(node)


MOVES = (bucket_to_host, bucket_to_device, ops.copy_start_shards)
ACTIVATION_MOVES = (value_to_host, value_to_device)


def wait_of_copy(node):
    return ops.waits_on(node) in ("to host", "to device") and node.target is ops.wait


def wait_of_update(node):
    return ops.waits_on(node) == "updates" and node.target is ops.wait


def wait_of_fetch(node):
    return ops.waits_on(node) == "files"


def fetch_states(node):
    return is_fetch(node, "states")


def fetch_shards(node):
    return is_fetch(node, "shards")


def fetch_value(node):
    return is_fetch(node, "value")


def evict_states(node):
    return node.target is ops.evict and node.args[1] == "states"


def evict_shards(node):
    return node.target is ops.evict and node.args[1] == "shards"


def drop_value(node):
    return node.target is ops.evict and node.args[1] == "value" and not changes_files(node)
