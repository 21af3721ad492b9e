"""Records made by hand, for tests of what is drawn and said of them; no program is needed."""

from __future__ import annotations

import random

from zerofx.report.timeline.record import DEVICE, Busy, Memory, Node, StepRecord

MIB = 2**20


def node(name: str, issued_s: float, phase: str = "forward", **values) -> Node:
    given = {
        "operator": "aten.mm",
        "value": "f32[8, 8]",
        "bucket": -1,
        "parameters": (),
        "role": "",
        "why": "",
        "source": "",
        "waits_for": -1,
        **values,
    }
    return Node(name=name, phase=phase, issued_s=issued_s, **given)


def small(name: str = "w", **values) -> StepRecord:
    """Three milliseconds: a gather that is waited for, forward, and backward at the peak.

    ``name`` is the parameter's, and is in a node's name and line too.
    """
    gather = {"operator": "zerofx.all_gather_start", "parameters": (0,), "bucket": 0}
    nodes = (
        node(f"gather_{name}", 0.0, why=f"shard_parameters: {name} is sharded", **gather),
        node("wait", 0.0, operator="zerofx.wait", parameters=(0,), bucket=0, waits_for=0),
        node("mm", 1e-3, source=f"/home/me/train.py:7 loss = model({name})"),
        node("mm_backward", 2e-3, "backward", source="/home/me/train.py:8 loss.backward()"),
        node("output", 3e-3, "update", operator="output"),
    )
    spans = (
        Busy(0, "link", 0.0, 1e-3, 4 * MIB),
        Busy(1, "waiting", 0.0, 1e-3, 0),
        Busy(2, "compute", 1e-3, 2e-3, 0),
        Busy(3, "compute", 2e-3, 3e-3, 0),
    )
    memory = (
        Memory(0, "device", "parameters", 0, 4, 2 * MIB, "f32[524288]"),
        Memory(0, "device", "gathered parameters", 0, 2, 4 * MIB, "f32[1048576]"),
        Memory(2, "device", "activations", 2, 3, 8 * MIB, "f32[2097152]"),
        Memory(3, "device", "temporaries", 3, 3, 6 * MIB, ""),
    )
    given = {"title": "step0_0", "program": "03_prefetch", "rank": 1, "world_size": 2,
             "figures": "latency_s=1 (given)", "compute_s": 2e-3, "exposed_s": 1e-3,
             "bound_s": 2.5e-3, "parameters": (name,), "nodes": nodes, "spans": spans,
             "memory": memory, **values}  # fmt: skip
    return StepRecord(**given)


def empty() -> StepRecord:
    """A program that returns nothing and does nothing."""
    nodes = (node("output", 0.0, operator="output"),)
    return StepRecord("step0_0", "00_captured", 0, 1, nodes=nodes)


def nothing() -> StepRecord:
    """Not even that."""
    return StepRecord("step0_0", "00_captured", 0, 1)


def large(count: int = 100_000) -> StepRecord:
    """As many nodes, half of them short computations and a fifth transfers; the same every time."""
    draw = random.Random(0)
    nodes, spans, memory = [], [], []
    now_s = link_s = 0.0
    for position in range(count):
        phase = "forward" if position < count // 3 else "backward"
        parameter = position * 1000 // count
        values = {"parameters": (parameter,), "source": f"model.py:{position % 97} y = f(x)"}
        if position % 5 == 0:
            values |= {"operator": "zerofx.all_gather_start", "bucket": parameter}
        nodes.append(node(f"node_{position}", now_s, phase, **values))
        if position % 5 == 0:
            begin_s = max(link_s, now_s)
            link_s = begin_s + draw.uniform(1e-6, 9e-6)
            spans.append(Busy(position, "link", begin_s, link_s, draw.randrange(MIB)))
        elif position % 2:
            took_s = draw.uniform(1e-6, 5e-6)
            spans.append(Busy(position, "compute", now_s, now_s + took_s, 0))
            now_s += took_s
            end = min(position + draw.randrange(1, count // 2), count - 1)
            kind = draw.choice(DEVICE)
            memory.append(
                Memory(position, "device", kind, position, end, draw.randrange(MIB), "f32[9]")
            )
    names = tuple(f"layers.{number}.weight" for number in range(1000))
    return StepRecord("step0_0", "09_prefetch", 0, 8, "given", now_s, 0.0, now_s, names,
                      tuple(nodes), tuple(spans), tuple(memory))  # fmt: skip
