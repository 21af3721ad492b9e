"""Why Dynamo cannot trace a line of a step, in the user's words: the line, the reason, a remedy."""

from __future__ import annotations

import re
from typing import NamedTuple

WHOLE = (
    "zerofx compiles the whole step (forward, backward, clipping, update) as one program, and "
    "this line cannot be traced into it"
)


class _Cause(NamedTuple):
    """Says in a step's terms what torch's words mean, which a pattern finds."""

    pattern: str
    reason: str
    remedy: str


_LATER = "Return the value from the step, and do this with it after the call."
_BEFORE = "Do it before the call, and give the step what comes out as an argument."
_OUTSIDE = "Move it out of the step."

# The first that fits is taken.  Patterns are of torch 2.11 to 2.15; where none fits, torch's own
# words are left to speak.
_CAUSES = (
    _Cause(
        r"batchnorm\.py.*num_batches_tracked",
        "A batch norm with momentum=None divides by how many batches it has seen.",
        "Give its momentum as a number.",
    ),
    _Cause(
        r"runtime/memory/guard\.py",
        "It reads a tensor that holds no values: a gradient of an earlier call that a later one "
        "has replaced, or a state that is in files.",
        "Keep a copy of the gradient, made in the step that computes it (p.grad.clone()); read "
        "states between calls, by optimizer.state_dict().",
    ),
    _Cause(r"builtin operator `print`", "It prints while the step runs.", _LATER),
    _Cause(
        r"Tensor\.item\(\)|to_list|tolist\(\)|_local_scalar_dense",
        "It reads a tensor's value (`.item()`, `float(x)`, `.tolist()`, a format), which is known "
        "only when the program runs.",
        f"{_LATER} What the step itself computes with stays a tensor.",
    ),
    _Cause(
        r"[Dd]ata-dependent branching|generic_jump TensorVariable",
        "It decides by a tensor's value (`if`, `while`, `and`, `any()`) what to do next.",
        "Compute both ways and choose with torch.where, or decide after the call, from what the "
        "step returns.",
    ),
    _Cause(
        r"aten\._(?:cudnn_)?ctc_loss",
        "torch cannot trace a CTC loss, with any backend.",
        "Train this model without compiling its step, or with another loss.",
    ),
    _Cause(
        r"aten\.bincount",
        "How long torch.bincount's result is depends on a tensor's values, minlength or not.",
        "Write F.one_hot(x, num_classes).sum(0).",
    ),
    _Cause(
        r"output shape depends on input Tensor data|Dynamic shape operator",
        "The size of its result depends on a tensor's values (`x[mask]`, nonzero, unique).",
        "Keep all elements, and multiply by the mask or use torch.where; or do it before the call.",
    ),
    _Cause(
        r"enter a `(?:lock|RLock)`|thread\.lock",
        "It takes a lock, which is no part of a program.",
        "Do what it guards before the first call (many libraries build something once: call it "
        "once uncompiled).",
    ),
    _Cause(
        r"builtin operator `breakpoint`|pdb",
        "A debugger cannot stop inside of a compiled program.",
        'Run the step without torch.compile to debug it; ZEROFX_DUMP="folder" writes the program.',
    ),
    _Cause(r"builtin operator `(?:open|input)`", "It opens a file.", _OUTSIDE),
    _Cause(r"builtin operator `(?:eval|exec)`", "It runs text as code.", _BEFORE),
    _Cause(
        r"qualname: (?:\w*Dataset|DataLoader|\w*Sampler)\b|torch/utils/data/",
        "It makes or reads a data loader.",
        "Loop over the loader around the step, and give each batch as an argument.",
    ),
    _Cause(
        r"lr_scheduler\.py|LRScheduler",
        "It makes or steps a learning rate scheduler.",
        "Call scheduler.step() after the compiled step: rates are read when it runs.",
    ),
    _Cause(
        r"torch\.serialization|qualname: save\b|safetensors|OrderedDict.*'_metadata'"
        r"|destination\._metadata = OrderedDict",
        "It saves or loads a file.",
        "Call zerofx.save(path, model, optimizer) between two steps.",
    ),
    _Cause(
        r"RemovableHandle|register_\w*hook",
        "It adds a hook to a module or tensor in every call.",
        "Add it once, before the first call. Hooks on gradients: change p.grad between backward() "
        "and optimizer.step() instead.",
    ),
    _Cause(
        r"copy\.deepcopy",
        "It copies a model or tensor with copy.deepcopy.",
        "Make the copy before the first call; inside of the step update it with torch operations "
        "(copy_, lerp_), as an average of weights does.",
    ),
    _Cause(
        r"Python builtin `_warnings\.warn|warnings\.warn\(",
        "It warns while the step runs.",
        "Silence it with warnings.filterwarnings before the first call, or remove it.",
    ),
    _Cause(
        r"LoggingLogger|logging\.\w*Logger",
        "It gets or asks a logger, which is done once and not in a program.",
        "Get the logger when the module is imported: calls of its methods in the step are left "
        "out of the program.",
    ),
    _Cause(
        r"builtin `time\.|datetime|perf_counter|a time function",
        "It reads the clock, of which a program would keep the first answer.",
        "Measure around the call of the step.",
    ),
    _Cause(
        r"Random\.random|numpy\.random|RandomState|random\.Random",
        "It draws a random number in Python, of which a program would keep the first.",
        "Draw it with torch (torch.rand), or before the call and give it as an argument.",
    ),
    _Cause(
        r"torch\._C\.Generator|<unknown module>\.Generator\b|Opaque object",
        "It makes a random generator in every call.",
        "Draw with the default generator (torch.manual_seed once), or give drawn values to the "
        "step.",
    ),
    _Cause(
        r"tqdm|wandb|tensorboard|mlflow|SummaryWriter",
        "It reports progress while the step runs.",
        _LATER,
    ),
    _Cause(
        r"creation function with requires_grad",
        "It makes a tensor that requires a gradient.",
        "Write torch.zeros_like(x).requires_grad_() for torch.zeros_like(x, requires_grad=True).",
    ),
    _Cause(
        r"distributed[./]nn[./]functional",
        "torch compiles no collective of torch.distributed.nn.functional.",
        "To compare samples of all ranks in a loss, gather features by "
        "all_gather_tensor_autograd(features, 0, torch.distributed.group.WORLD), of "
        "torch.distributed._functional_collectives: gradients are those of one process then, "
        "for the mean over ranks of each rank's loss. All ranks need as many features.",
    ),
    _Cause(
        r"torch\.distributed|all_reduce|all_gather|ProcessGroup|barrier",
        "It communicates between ranks by itself.",
        "Gradients are averaged without it. Reduce metrics after the call, from what the step "
        "returns.",
    ),
    _Cause(
        r"LBFGS",
        "It calls an optimizer with a closure that computes gradients several times.",
        "Use an optimizer that steps once for each backward(); LBFGS is not supported.",
    ),
    _Cause(
        r"_json\.|json\.\w*coder|<unknown module>\.Encoder\b|pickle",
        "It writes or reads a format of files.",
        _OUTSIDE,
    ),
)

_ANY = _Cause(
    "",
    "",
    "Move it out of the step, or write it with torch operations: log after the call, from what "
    "the step returns.",
)

_LIBRARY = r"site-packages|/lib/python3\.|^<frozen"

_FRAME = re.compile(
    r'^\s*File "(?P<path>.+)", line (?P<line>\d+), in (?P<name>.+)\n(?P<code>.*)', re.M
)


def explained(message: str, advice: str) -> str:
    """Return a refusal of Dynamo's with the user's line, the reason and a remedy in front.

    ``advice`` follows the remedy: what else is known of the step.
    """
    if message.startswith(WHOLE):
        return message
    head, _, stack = message.partition("from user code:")
    frames = [match.groupdict() for match in _FRAME.finditer(stack)]
    # Not torch's hints, which name what may be the reason elsewhere.
    said = [line for line in head.splitlines() if not line.lstrip().startswith("Hint:")]
    places = _places(frames)
    text = "\n".join([*said, *places])
    cause = next((cause for cause in _CAUSES if re.search(cause.pattern, text)), _ANY)
    lines = "".join(f"\n  {line}" for line in places)
    because = f"{cause.reason} {cause.remedy}".lstrip()
    return f"{WHOLE}:{lines}\n{because}{advice}\n\nWhat torch says of it:\n{message}"


def _places(frames: list[dict[str, str]]) -> list[str]:
    """Return the user's last line on the way, and the line of a library that it ends in."""
    own = [frame for frame in frames if not re.search(_LIBRARY, frame["path"])]
    shown = own[-1:] + [frame for frame in frames[-1:] if frame not in own]
    return [
        f"{frame['path']}:{frame['line']}, in {frame['name']}: {frame['code'].strip()}"
        for frame in shown
    ]
