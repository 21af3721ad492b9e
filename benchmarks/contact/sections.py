"""The sections, each declared once; without torch, so that whatever it does they are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LONGEST_S = 480
"""No section takes longer, whatever it declares."""
TOGETHER_S = 1200

FRESH = "{fresh}"
"""Stands for an empty folder, made for one run of a section."""
FOLDER = "FIRST_CONTACT_FOLDER"
"""The environment variable by which a section knows that folder."""


@dataclass(frozen=True)
class Section:
    """One section: ``module`` of this package has a function of its name.

    ``rehearsed`` says what a run without a GPU shows, ``missing`` what it cannot.  ``environment``
    is the process's, from its start; ``rehearsal`` is added without a GPU.  Units: seconds.
    """

    name: str
    module: str
    shows: str
    limit_s: int
    rehearsed: str
    missing: str
    environment: Mapping[str, str] = field(default_factory=dict)
    rehearsal: Mapping[str, str] = field(default_factory=dict)


INTERPRETED = {"TRITON_INTERPRET": "1"}
EMPTY_CACHES = {
    "TRITON_CACHE_DIR": f"{FRESH}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{FRESH}/inductor",
}

SECTIONS = (
    Section(
        "kernels",
        "updates",
        "every golden kernel computes what torch.optim does in float64",
        300,
        rehearsed="all kernels, by Triton's interpreter",
        missing="the machine code, and its configurations",
        rehearsal=INTERPRETED,
    ),
    Section(
        "tuning",
        "updates",
        "first steps in bf16, clipped, on an empty cache of kernels, are the eager ones",
        120,
        rehearsed="the steps, their kernels by Triton's interpreter",
        missing="tuning, which only a GPU does, and its scratch memory (L6)",
        environment=EMPTY_CACHES,
        rehearsal=INTERPRETED,
    ),
    Section(
        "parity",
        "trainings",
        "all stages train as eager torch does, in fp32 and autocast, either lowering",
        300,
        rehearsed="all of it, on CPUs over gloo",
        missing="streams, NCCL, and a GPU's own kernels",
    ),
    Section(
        "offload",
        "trainings",
        "what leaves the device comes back bitwise, from host memory and from files",
        180,
        rehearsed="every target and tier, between memory and memory",
        missing="copies beside the compute, pinned memory",
        environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},  # the same products every time
    ),
    Section(
        "snapshot",
        "trainings",
        "an asynchronous save has the values of its call, whatever the training does meanwhile",
        60,
        rehearsed="saves beside steps, on a CPU",
        missing="copies that are queued on a stream while updates go on",
    ),
    Section(
        "sanitizer",
        "trainings",
        "TORCH_CUDA_SANITIZER finds no accesses that streams leave unordered",
        90,
        rehearsed="the steps under the sanitizer, with one stream made up for it",
        missing="all that the sanitizer is for",
        environment={"TORCH_CUDA_SANITIZER": "1"},
    ),
    Section(
        "memory",
        "memory_use",
        "a step allocates what is predicted, and what is left out of that (L10) in bytes",
        240,
        rehearsed="the prediction, against torch's CPU allocator",
        missing="rounding and segments, cuBLAS workspaces, the context, NCCL's buffers",
    ),
    Section(
        "update",
        "updates",
        "the update kernel moves memory as fast as a copy, and as AdamW(fused=True)",
        90,
        rehearsed="the systems and their results, on Inductor's CPU kernels",
        missing="Triton's kernels, and figures that mean anything",
    ),
    Section(
        "link",
        "devices",
        "figures for the option hardware: link, compute, memory and copies (L5)",
        90,
        rehearsed="every measurement, over gloo, small",
        missing="figures that mean anything",
    ),
    Section(
        "threads",
        "devices",
        "no thread of a rank touches another rank's GPU (L2)",
        90,
        rehearsed="the steps and saves with two ranks",
        missing="contexts and allocations: they take two GPUs",
    ),
    Section(
        "speed",
        "speeds",
        "a Llama of 1B parameters, against FSDP2 + compile and plain torch.compile",
        420,
        rehearsed="a tiny Llama, in fp32",
        missing="the size, and figures that mean anything",
    ),
    Section(
        "host",
        "speeds",
        "the host's time for a step and a layer, and that a default step never waits for the GPU",
        120,
        rehearsed="the steps; on a CPU their time is the compute's too",
        missing="host time apart from the device's, and waits",
    ),
    Section(
        "overlap",
        "speeds",
        "what a step with offload takes beside one without, and what its copies take alone",
        240,
        rehearsed="the same steps, tiny",
        missing="copies beside the compute",
    ),
)

NOTED = {
    "L9": "a rank that compiles slowly in mid-step holds the others inside NCCL, whose watchdog "
    "aborts them after 10 minutes: no section provokes it",
}
"""What is only noted in the report."""
