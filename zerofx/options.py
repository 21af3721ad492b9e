"""The options of one compiled step, each declared once; the only reader of ``os.environ``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from zerofx import hardware
from zerofx.errors import StepError
from zerofx.hardware import Hardware

ENVIRONMENT_PREFIX = "ZEROFX_"

STOPS = (
    "data_parallel",
    "hoist_casts",
    "bucket",
    "shard_optimizer",
    "shard_gradients",
    "quantize_reductions",
    "update_in_backward",
    "shard_parameters",
    "quantize_gathers",
    "place_offload",
    "offload_activations",
    "prefetch",
)
"""Passes behind which a program runs without the later ones, as ``stop_after`` has it."""

RENAMED = {"link": "hardware"}
"""Old names of options, and their names of today."""

ABSENT = {
    "prefetch_across_steps": "gone: no gain could be measured",
    "clip": "planned but not in this version",
}
"""Names of what is no option any more, or not yet, and why."""


@dataclass(frozen=True)
class _Kind:
    """The values that an option accepts.

    They are of ``types`` and of none that it ``refuses``; ``expected`` says so in words.  ``parse``
    makes such a value of the text of an environment variable, and ``read`` the option's of either.
    Errors are TypeError and ValueError; their words go behind the option's name.
    """

    types: tuple[type, ...]
    expected: str
    read: Callable[[Any], object] = lambda value: value
    parse: Callable[[str], object] = str
    refuses: tuple[type, ...] = (bool,)  # isinstance(True, int) holds, and stage=True is a mistake

    def check(self, value: Any) -> Any:
        """Return the option's value for an object from ``options=``."""
        if isinstance(value, self.refuses) or not isinstance(value, self.types):
            raise TypeError(f"must be {self.expected}, not {_kind_of(value)}")
        return self.read(value)

    def check_text(self, text: str) -> Any:
        """Return the option's value for the text of an environment variable."""
        try:
            value = self.parse(text)
        except (ValueError, OverflowError):
            raise ValueError(f"must be {self.expected}, not {text!r}") from None
        return self.read(value)


def _one_of(values: Mapping[str, object], name: str, given: object) -> Any:
    if name not in values:
        raise ValueError(f"must be one of {', '.join(values)}, not {given!r}")
    return values[name]


def _choice(*choices: object) -> _Kind:
    """One of a few values of one type."""
    kind, values = type(choices[0]), {str(choice): choice for choice in choices}
    expected = f"one of {', '.join(values)} ({kind.__name__})"
    return _Kind((kind,), expected, lambda value: _one_of(values, str(value), value))


def _dtype(*allowed: torch.dtype) -> _Kind:
    """One of a few dtypes, or its name."""
    values = {str(dtype).removeprefix("torch."): dtype for dtype in allowed}

    def read(value: Any) -> Any:
        return _one_of(values, str(value).removeprefix("torch."), value)

    return _Kind((torch.dtype, str), "a torch.dtype or its name", read)


def _codes(*allowed: str, **others: str) -> _Kind:
    """The name of a code that values travel in; ``others`` are those that do not fit, and why."""
    values = {name: name for name in allowed}

    def read(value: Any) -> Any:
        name = str(value).removeprefix("torch.")
        if name in others:
            raise ValueError(f"must be {' or '.join(allowed)}, not {name}: {others[name]}")
        return _one_of(values, name, value)

    expected = f"{' or '.join(map(repr, allowed))}"
    return _Kind((str, torch.dtype), expected, read)


def _several(*choices: str) -> _Kind:
    """Some of a few words, separated by commas or in a list; in the order of the choices."""
    one = _choice(*choices)

    def read(value: Any) -> tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else value
        chosen = {one.check(word.strip() if isinstance(word, str) else word) for word in words}
        return tuple(choice for choice in choices if choice in chosen)

    expected = f"words like {', '.join(map(repr, choices))}, or a list of them"
    return _Kind((str, list, tuple, set, frozenset), expected, read)


def _start(value: str) -> str:
    way, colon, path = value.partition(":")
    if way not in ("compiled", "at_once") or (colon and (way == "compiled" or not path)):
        raise ValueError(f"must be compiled, at_once or at_once:FILE, not {value!r}")
    return value


def _axes_in(text: Any) -> Any:
    """Return the words that a text such as ``node:0, gpu:3`` gives axes; anything else as it is."""
    if not (isinstance(text, str) and ":" in text):
        return text
    pairs = [pair.partition(":") for pair in text.split(",")]
    return {axis.strip(): word.strip() for axis, _, word in pairs}


def _stages(value: Any) -> Any:
    """Return a stage, or those of the axes of a mesh by their names."""
    if isinstance(value, str) and ":" in value:
        found = _axes_in(value)
        value = {axis: int(stage) if stage.isdecimal() else stage for axis, stage in found.items()}
    if not isinstance(value, Mapping):
        return _one_of(_STAGES, str(value), value)
    for axis, stage in value.items():
        if isinstance(stage, bool) or not isinstance(axis, str):
            raise TypeError(f"must give axes of a mesh, by name, their stages, not {value!r}")
        try:
            _one_of(_STAGES, str(stage), stage)
        except ValueError as error:
            raise ValueError(f"of axis {axis!r} {error}") from None
    return dict(value)


_STAGES = {str(stage): stage for stage in range(4)}

_WIRES = {name: name for name in ("bfloat16", "int8", "int4")}


def _wires(value: Any) -> Any:
    """Return what gradients travel in, or that for axes of a mesh by their names."""
    value = _axes_in(value)
    if not isinstance(value, Mapping):
        return _one_of(_WIRES, str(value).removeprefix("torch."), value)
    for axis, wire in value.items():
        if not isinstance(axis, str):
            raise TypeError(f"must give axes of a mesh, by name, their wires, not {value!r}")
        try:
            _one_of(_WIRES, str(wire).removeprefix("torch."), wire)
        except ValueError as error:
            raise ValueError(f"of axis {axis!r} {error}") from None
    return {axis: str(wire).removeprefix("torch.") for axis, wire in value.items()}


def _switches(value: Any) -> Any:
    """Return whether, or whether for each of these axes of a mesh by their names."""
    value = _axes_in(value)
    if not isinstance(value, Mapping):
        return _one_of(_SWITCHED, str(value).lower(), value)
    if not all(isinstance(axis, str) for axis in value):
        raise TypeError(f"must give axes of a mesh, by name, 0 or 1, not {value!r}")
    found = {}
    for axis, on in value.items():
        try:
            found[axis] = _one_of(_SWITCHED, str(on).lower(), on)
        except ValueError as error:
            raise ValueError(f"of axis {axis!r} {error}") from None
    return found


def _positive(nbytes: int) -> int:
    if nbytes <= 0:
        raise ValueError(f"must be a positive number of bytes, not {nbytes}")
    return nbytes


def _not_negative(number: int) -> int:
    if number < 0:
        raise ValueError(f"must be 0, 1 or a number of chunks, not {number}")
    return number


def _figures(value: Any) -> Hardware:
    if isinstance(value, Hardware):
        return value
    try:
        return hardware.of(os.fspath(value) if isinstance(value, os.PathLike) else value)
    except ValueError as error:
        raise ValueError(f"must be figures like '{_EXAMPLE}', not {value!r}: {error}") from None


def _path(value: Any) -> str:
    if not os.fspath(value):
        raise ValueError("must be a folder's path, not an empty string")
    return os.fsdecode(value)


def _paths(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(os.pathsep)
    paths = tuple(map(_FOLDER.check, value if isinstance(value, list | tuple) else [value]))
    if not paths:
        raise ValueError("must be paths of folders, not an empty list")
    real = [os.path.realpath(path) for path in paths]
    if len(set(real)) != len(real):
        raise ValueError(
            f"names one folder twice, of {', '.join(real)}: striping is over different disks. Name"
            " each once"
        )
    return paths


_SWITCHED = dict(zip("0 1 false true off on no yes".split(), (False, True) * 4, strict=True))
_SWITCH = _Kind(
    (bool, int, str),
    "True or False",
    lambda value: _one_of(_SWITCHED, str(value).lower(), value),
    refuses=(),
)
_STAGE = _Kind(
    (int, Mapping),
    "one of 0, 1, 2, 3 (int), or a dict with one for each axis of a mesh",
    _stages,
)
_WIRE = _Kind(
    (str, torch.dtype, Mapping),
    "'bfloat16', 'int8' or 'int4', or a dict with one of these for axes of a mesh",
    _wires,
)
_FEEDBACK = _Kind(
    (int, str, Mapping),
    "0 or 1, or a dict with one of these for axes of a mesh",
    _switches,
    refuses=(),
)
_INTEGER = _Kind((int,), "an integer", parse=int)
_BYTES = _Kind((int,), "a whole number of bytes", _positive, lambda text: int(float(text)))  # 25e6
_CHUNKS = _Kind((int,), "0, 1 or a number of chunks", _not_negative, int)
_EXAMPLE = "latency_s=3e-4 bytes_per_s=1e9"
_HARDWARE = _Kind(
    (Hardware, str, os.PathLike, Mapping),
    f"text like '{_EXAMPLE}', a dict, or the path of a .json file",
    _figures,
)
_AXIS = _Kind((str,), "the name of a mesh's inner axis")
_FOLDER = _Kind((str, os.PathLike), "a folder's path", _path)
_START = _Kind((str,), "compiled, at_once or at_once:FILE", _start)
_FOLDERS = _Kind((str, os.PathLike, list, tuple), "a folder's path or a list of them", _paths)
_GROUP = _Kind(  # the runtime checks its ranks
    (object,),
    "a process group or a device mesh (torch.distributed.new_group makes one, on the ranks that "
    "take part)",
    # What is passed by mistake: new_group gives the ranks it leaves out a number.
    refuses=(bool, int, float, str, bytes, list, tuple, set, dict, range),
)


def _option(default: Any, kind: _Kind) -> Any:
    return field(default=default, metadata={"kind": kind})


def _pass(default: bool) -> Any:
    """Declare the switch of an optional pass, which has the pass's name."""
    return field(default=default, metadata={"kind": _SWITCH, "is_pass": True})


@dataclass(frozen=True)
class Options:
    """The choices for one compiled step, each checked by ``resolve``; docs/options.md says more."""

    stage: int = _option(3, _STAGE)
    """ZeRO's stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters.

    Of a mesh that of its inner axis, ``outer_stage`` being the other's."""
    lowering: str = _option("inductor", _choice("eager", "inductor"))
    """``eager`` runs the program op by op, ``inductor`` compiles its compute."""
    process_group: object = _option(None, _GROUP)
    """The data-parallel ranks: a process group, or a device mesh of one or two axes.  None is the
    world."""
    secondary_shard: str | None = _option(None, _AXIS)
    """The inner axis of a mesh: a rank keeps a second shard, of a copy that its node has."""
    accumulate: str | None = _option(None, _choice("local", "sharded"))
    """``local`` or ``sharded``; None chooses by where the accumulation happens."""
    loss: str = _option("rank", _choice("rank", "global"))
    """``rank`` is the mean of the ranks' losses, ``global`` one over all their samples: what losses
    are divided by becomes the mean over ranks and micro-batches."""
    batch_norm: str = _option("local", _choice("local", "rank0", "global"))
    """Whose batch norms' statistics are: the rank's own, rank 0's at the next call, as DDP has it,
    or of all ranks' batches, as SyncBatchNorm has it."""
    uneven: bool = _option(False, _SWITCH)
    """Ranks may run out of batches: they call ``zerofx.no_data(step)`` instead. ``loss=global``
    implies it."""
    chunk_loss: int | None = _option(None, _CHUNKS)
    """Compute the head and the loss in chunks of tokens: 0 is off, 1 on, more says how many; None
    is on where 128 tokens make more than a bucket."""
    reduce_dtype: torch.dtype | None = _option(
        None, _dtype(torch.float16, torch.bfloat16, torch.float32, torch.float64)
    )
    """The dtype gradients are reduced in; None is the captured gradient's."""
    gather_dtype: str | None = _option(
        None,
        _codes(
            "int8",
            int4="a weight with seven levels to each side is another model's. Gather in int8",
        ),
    )
    """The code that parameters are gathered in at stage 3; None is the dtype that uses them.
    Changes numerics."""
    reduce_wire: str | None = _option(None, _WIRE)
    """The code that gradients are reduced in: they travel in it, and are summed in float32.

    Of a mesh that of its inner axis, ``outer_wire`` being the other's.  None is ``reduce_dtype``.
    Changes numerics."""
    error_feedback: bool | None = _option(None, _FEEDBACK)
    """What rounding has taken from a rank's gradients is added to its next ones.

    Of a mesh over its inner axis, ``outer_feedback`` being for the other.  None is on over an outer
    axis with a wire of whole numbers."""
    bucket_bytes: int | None = _option(None, _BYTES)
    """The most that travels together, in bytes; None chooses by the link's figures."""
    memory_budget: int | None = _option(None, _BYTES)
    """Bytes that a step may allocate beyond what a rank keeps; None keeps nothing gathered."""
    plan: str | None = _option(None, _choice("auto"))
    """``auto`` chooses what is not given of ``stage``, ``bucket_bytes``, ``memory_budget``,
    ``offload`` and ``recompute``: what is predicted to be fastest within ``memory_limit``."""
    memory_limit: int | None = _option(None, _BYTES)
    """All bytes of a rank's process on its device, for ``plan``; None is what is free."""
    hardware: Hardware | None = _option(None, _HARDWARE)
    """The figures that plans are made with; None measures the group's own at its first call."""
    offload: tuple[str, ...] = _option((), _several("optimizer", "params", "activations", "auto"))
    """The targets that leave the device; ``auto`` is the smallest set that fits the budget."""
    offload_tier: str = _option("cpu", _choice("cpu", "nvme"))
    """Their place: host memory, or files (``nvme``)."""
    offload_dir: tuple[str, ...] = _option((), _FOLDERS)
    """The folders for these files, on different disks: buckets are striped over them."""
    offload_cache_bytes: int | None = _option(None, _BYTES)
    """Host memory for what is in files, per rank; None is a share of half of what is free."""
    offload_checksums: bool = _option(False, _SWITCH)
    """Compare what is read from files with a checksum of what was written."""
    delayed_update: bool = _option(False, _SWITCH)
    """A call computes without the last updates on the host, which go on meanwhile; at stage 3."""
    start: str = _option("compiled", _START)
    """``compiled`` compiles before the first call runs; ``at_once`` runs operator by operator until
    what is compiled meanwhile is ready; ``at_once:FILE`` records which step took what, or repeats
    it."""
    program_cache: bool = _option(True, _SWITCH)
    """Keep captured and compiled programs beside what Inductor keeps, and take them from there."""
    dump: str | None = _option(None, _FOLDER)
    """The folder that receives the program after every pass; None writes nothing."""
    validate: bool = _option(False, _SWITCH)
    """Run each pass's program on random inputs, and compare it with the one before; slow."""
    check_order: bool = _option(False, _SWITCH)
    """Watch what a running step reads and writes, and raise where nothing orders it; slow."""
    stop_after: str | None = _option(None, _choice(*STOPS))
    """The last pass to run: what later ones shard or offload stays as it is."""
    recompute: bool = _pass(True)
    hoist_casts: bool = _pass(True)
    bucket: bool = _pass(True)
    update_in_backward: bool = _pass(True)
    prefetch: bool = _pass(True)
    fuse_optimizer: bool = _pass(True)
    """Updates of neighbouring shards, or of a whole parameter, are one compiled kernel; with
    ``inductor`` only."""
    peer_memory: bool = _option(True, _SWITCH)
    """Ranks of one machine may read each other's memory; off, all goes through sockets."""
    master_weights: bool = _option(False, _SWITCH)
    """bfloat16 and float16 parameters are trained in float32, kept as a state; changes numerics."""
    stochastic_rounding: bool = _option(False, _SWITCH)
    """What an update stores in bfloat16 is rounded at random, unbiased; changes numerics."""
    moment_dtype: torch.dtype | None = _option(None, _dtype(torch.bfloat16, torch.int8))
    """The dtype that moments are kept in; None is the optimizer's.  Changes numerics."""
    rounding_seed: int = _option(0, _INTEGER)
    """The seed of the random numbers that updates round with."""
    outer_stage: int | None = None
    """The stage along the outer axis of a mesh; None where there is one stage.  Part of ``stage``
    as it is given."""
    outer_wire: str | None = None
    """The code of gradients along the outer axis of a mesh.  Part of ``reduce_wire`` as it is
    given."""
    outer_feedback: bool | None = None
    """The same of ``error_feedback``."""

    @property
    def may_lack_data(self) -> bool:
        """Whether a rank may go through a call without a batch of its own."""
        return self.uneven or self.loss == "global"

    @property
    def quantizes_reductions(self) -> bool:
        """Return whether gradients travel in a code over any axis."""
        return bool(self.reduce_wire or self.outer_wire)

    @property
    def feeds_back(self) -> tuple[bool, bool]:
        """Return whether errors are kept and added, over the inner axis and over the outer one."""
        outside = self.outer_feedback
        if outside is None:
            outside = self.outer_wire in ("int8", "int4")
        return bool(self.error_feedback), bool(outside)

    @property
    def stage_outside(self) -> int | None:
        """Return the stage along a mesh's outer axis; None if nothing is cut."""
        if not self.stage:
            return None
        return self.stage if self.outer_stage is None else self.outer_stage

    def enabled(self, pass_name: str) -> bool:
        """Return whether these options leave the pass on; only an optional pass can be off."""
        return getattr(self, pass_name) if pass_name in OPTIONAL_PASSES else True


_FIELDS = {each.name: each for each in fields(Options) if "kind" in each.metadata}

OPTIONS = tuple(_FIELDS)
"""The names of all options."""

OPTIONAL_PASSES = tuple(name for name, each in _FIELDS.items() if "is_pass" in each.metadata)
"""Passes that a boolean option of their own name turns off."""


def resolve(
    options: Mapping[str, object] | None,
    environ: Mapping[str, str] | None = None,
) -> Options:
    """Check what the user passed and what the environment says, which wins.

    Every option has the twin ``ZEROFX_<NAME>``, except ``process_group``: an environment
    variable cannot hold a group.  An empty variable means the default where that is None, so
    ``ZEROFX_DUMP=`` turns off a dump that the code asks for.  A value that the environment
    overrides is checked all the same.

    ``environ`` is ``os.environ`` unless a test gives another.  Each option is checked by itself;
    ``compiler.choices`` checks them together.

    Raises: ValueError for an unknown, renamed or planned name and for a value outside what is
    allowed, TypeError for a value of the wrong type.
    """
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict of names to values, not {_kind_of(options)}")

    values: dict[str, Any] = {}
    for name, value in options.items():
        if not isinstance(name, str):
            raise TypeError(f"the names of options are strings, not {_kind_of(name)}")
        if name not in _FIELDS:
            raise _bad_name("option", name, str)
        values[name] = _value(name, name, value, value is None)
    twins = {_twin(name): name for name in _FIELDS}
    for variable, text in sorted((os.environ if environ is None else environ).items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if variable not in twins:
            raise _bad_name("environment variable", variable, _twin)
        if variable == _twin("process_group"):
            raise ValueError(
                f"{variable} cannot be set: a process group is an object, which no environment"
                " variable can hold. Unset it and pass options={'process_group': group}"
            )
        name = twins[variable]
        values[name] = _value(name, variable, text, not text)
    mesh, figures = values.get("process_group"), values.get("hardware")
    if isinstance(values.get("stage"), dict):
        values |= _stages_on(mesh, values["stage"])
    if figures is not None and figures.links:
        _check_axes(mesh, figures.links, f"hardware='{figures}'", "figures")
    if values.get("reduce_wire"):
        values |= _wires_on(mesh, values["reduce_wire"])
    if values.get("error_feedback") is not None:
        values |= _feedback_on(mesh, values)
    return Options(**values)


def named(
    options: Mapping[str, object] | None, environ: Mapping[str, str] | None = None
) -> frozenset[str]:
    """Return the names of the options that somebody has given, here or in the environment.

    None, or an empty variable, leaves a choice as it is.
    """
    environ = os.environ if environ is None else environ
    given = {name for name, value in (options or {}).items() if value is not None}
    return frozenset({*given, *(name for name in _FIELDS if environ.get(_twin(name)))})


def _check_axes(mesh: Any, named: Collection[str], given: str, what: str) -> Sequence[str]:
    """Return the axes of a mesh, all of which are ``named``.  Raises: ValueError otherwise."""
    axes = getattr(mesh, "mesh_dim_names", None)
    if not axes:
        raise ValueError(
            f"{given} goes by the axes of a device mesh, and process_group is "
            f"{'none' if mesh is None else 'not one with names'}: pass "
            "init_device_mesh(device, (nodes, ranks of a node), mesh_dim_names=('node', 'gpu'))"
        )
    unknown = [axis for axis in named if axis not in axes]
    missing = [axis for axis in axes if axis not in named]
    if unknown or missing:
        raise ValueError(
            f"{given} {'names' if unknown else 'leaves out'} "
            f"{', '.join(map(str, unknown or missing))}, and "
            f"the mesh in process_group has the axes {', '.join(axes)}: give each its {what}"
        )
    return axes


def _stages_on(mesh: Any, stages: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields for stages by axes.  Raises: ValueError if the mesh has others."""
    given = f"stage={dict(stages)}"
    axes = _check_axes(mesh, stages, given, "stage")
    *outer, inner = (stages[axis] for axis in axes)
    if not outer:
        return {"stage": inner}
    if outer[0] > inner:
        raise ValueError(
            f"{given}: what is sharded over the outer axis ({axes[0]}) is sharded over the inner "
            f"one ({axes[-1]}) too. With stage {inner} there, {axes[0]} may have "
            f"{' or '.join(map(str, range(inner + 1)))}"
        )
    return {"stage": inner, "outer_stage": outer[0]}


def _wires_on(mesh: Any, wires: str | Mapping[str, str]) -> dict[str, str | None]:
    """Return the fields for wires by axes.  Raises: ValueError if the mesh has others."""
    if isinstance(wires, str):
        return {"reduce_wire": wires, "outer_wire": wires}
    *outer, inner = map(wires.get, _axes_of(mesh, "reduce_wire", wires))
    return {"reduce_wire": inner, "outer_wire": outer[0] if outer else None}


def _feedback_on(mesh: Any, values: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return the fields for feedback by axes.  Raises: ValueError if the mesh has others.

    One value for all axes is for those that have wires.
    """
    given = values["error_feedback"]
    if isinstance(given, bool):
        outside = given if values.get("outer_wire") else None
        alone = not values.get("reduce_wire") and outside is not None
        return {"error_feedback": None if alone else given, "outer_feedback": outside}
    *outer, inner = map(given.get, _axes_of(mesh, "error_feedback", given))
    return {"error_feedback": inner, "outer_feedback": outer[0] if outer else None}


def _axes_of(mesh: Any, name: str, values: Mapping[str, object]) -> Iterable[str]:
    """Return the axes of a mesh, of which an option names some.

    Raises: ValueError if it names others, or if there are none with names.
    """
    axes = getattr(mesh, "mesh_dim_names", None)
    given = f"{name}={dict(values)}"
    if not axes:
        raise ValueError(
            f"{given} goes by the axes of a device mesh, and process_group is "
            f"{'none' if mesh is None else 'not one with names'}: give one value for all ranks, or "
            "pass a mesh with mesh_dim_names"
        )
    unknown = [axis for axis in values if axis not in axes]
    if unknown:
        raise ValueError(
            f"{given} names {', '.join(unknown)}, and the mesh in process_group has the axes "
            f"{', '.join(axes)}: name one of these, or give one value for all of them"
        )
    return axes


def _value(name: str, spelled: str, given: Any, is_nothing: bool) -> object:
    """Return an option's value for what the user has ``spelled`` as an option or a variable.

    Where nothing is the default, it may be given.  Raises: TypeError or ValueError.
    """
    default, kind = _FIELDS[name].default, _FIELDS[name].metadata["kind"]
    if is_nothing and default in (None, ()):
        return default
    try:
        return kind.check(given) if spelled == name else kind.check_text(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{spelled} {error}") from None


def environment() -> Mapping[str, str]:
    """The process's environment, for what is not an option: torchrun's variables."""
    return os.environ


def ranks_of_machine(world_size: int) -> int:
    """Return how many ranks share this machine's memory: as torchrun says, or else all.

    Raises: StepError if the environment says no number.
    """
    ranks = environment().get("LOCAL_WORLD_SIZE") or str(world_size)
    if not ranks.isdecimal() or int(ranks) < 1:
        raise StepError(
            f"LOCAL_WORLD_SIZE is {ranks!r}, and it says how many ranks share this machine's "
            "memory: a number from 1 on. torchrun sets it; set it so, or unset it."
        )
    return int(ranks)


def turned_off(names: Iterable[str], stop_after: str | None = None) -> dict[str, str]:
    """The environment variables that turn these passes or switches off, and all behind one."""
    off = {_twin(name): "0" for name in names}
    return off if stop_after is None else {**off, _twin("stop_after"): stop_after}


def refuse_mode(mode: object) -> None:
    """Raise ValueError if ``torch.compile`` was given a ``mode``."""
    if mode is None:
        return
    raise ValueError(
        f"mode={mode!r} has no meaning for backend='zero': modes are presets of Inductor's"
        " settings. Drop mode= and choose by name, for example"
        " options={'lowering': 'inductor'}"
    )


def _twin(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _bad_name(what: str, name: str, spelled: Callable[[str], str]) -> ValueError:
    """Return the error for a name that no option has; ``spelled`` writes an option's name."""
    # process_group has no twin: to offer one would lead to the next error.
    known = [spelled(each) for each in _FIELDS if spelled is str or each != "process_group"]
    listed = f"Known: {', '.join(known)}"
    renamed = {spelled(old): spelled(new) for old, new in RENAMED.items()}
    if name in renamed:
        return ValueError(f"{what} {name!r} is now called {renamed[name]!r}; rename it. {listed}")
    absent = {spelled(each): why for each, why in ABSENT.items()}
    if name in absent:
        return ValueError(f"{what} {name!r} is {absent[name]}; drop it. {listed}")
    # A cutoff of 0 names the nearest however far it is.
    (nearest,) = difflib.get_close_matches(name, [*known, *absent], n=1, cutoff=0.0)
    aside = f", which is {absent[nearest]}" if nearest in absent else ""
    return ValueError(f"{what} {name!r} is unknown; did you mean {nearest!r}{aside}? {listed}")


def _kind_of(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"
