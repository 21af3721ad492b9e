"""A trace made by hand, for tests of what is drawn and measured of it; no program is needed."""

from __future__ import annotations

from typing import Any

from zerofx.report.timeline import PREDICTED, VERSION, process_events, span_event

MIB = 2**20


def small(program: str = "03_prefetch", name: str = "w") -> dict[str, Any]:
    """Three milliseconds: a gather that is waited for, forward, and backward at the peak.

    ``name`` is the parameter's, and is in a node's name too.
    """
    spans = (
        ("link", f"gather_{name}", "gather", 0.0, 1e-3, {"bytes": 4 * MIB, "parameters": name}),
        ("waiting", "wait", "waiting", 0.0, 1e-3, {}),
        ("compute", "mm", "forward", 1e-3, 2e-3, {"source": f"/home/me/train.py:7 model({name})"}),
        ("compute", "mm_backward", "backward", 2e-3, 3e-3, {}),
    )
    memory = ((0.0, 2, 4, 0, 0), (1000.0, 2, 4, 8, 0), (2000.0, 2, 0, 8, 6), (3000.0, 2, 0, 0, 0))
    kinds = ("parameters", "gathered parameters", "activations", "temporaries")
    title = f"step0_0: {program}, rank 1 of 2"
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            *process_events(PREDICTED, f"predicted: {title}", {span[0] for span in spans}),
            *(span_event(PREDICTED, *span, **args) for *span, args in spans),
            *(
                {
                    "ph": "C",
                    "pid": PREDICTED,
                    "tid": 0,
                    "ts": at_us,
                    "name": "device memory by kind",
                    "args": {kind: MIB * n for kind, n in zip(kinds, numbers, strict=True)},
                }
                for at_us, *numbers in memory
            ),
        ],
        "zerofx": {
            "version": VERSION,
            "title": title,
            "step_s": 3e-3,
            "hardware": "latency_s=1 (given)",
            "words": ["A step is predicted to take 3 ms.", "The peak is 16.00 MiB."],
            "nodes": [f"gather_{name}", "wait", "mm", "mm_backward", "output"],
            "waits_for": {"wait": f"gather_{name}"},
        },
    }


def empty(program: str = "00_captured") -> dict[str, Any]:
    """A program that returns nothing and does nothing."""
    trace = small(program)
    ours = {**trace["zerofx"], "step_s": 0.0, "nodes": ["output"], "waits_for": {}}
    return {**trace, "traceEvents": [], "zerofx": ours}
