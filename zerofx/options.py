"""The options of one compiled step, each declared once; the only reader of ``os.environ``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from zerofx import hardware
from zerofx.hardware import Hardware

ENVIRONMENT_PREFIX = "ZEROFX_"

STOPS = (
    "data_parallel",
    "hoist_casts",
    "bucket",
    "shard_optimizer",
    "shard_gradients",
    "update_in_backward",
    "shard_parameters",
    "place_offload",
    "offload_activations",
    "prefetch",
)
"""Passes behind which a program runs without the later ones, as ``stop_after`` has it."""

RENAMED = {"link": "hardware"}
"""Old names of options, and their names of today."""

REMOVED = {"prefetch_across_steps": "no gain could be measured"}
"""Options that are gone, and why."""

# Promised by the contract, not built yet.  Naming them here turns "unknown" into "not yet".
PLANNED = ("clip",)


class _Kind:
    """The values that an option accepts.

    ``check`` takes an object from ``options=``, ``parse`` the text of an environment variable;
    both return the option's value.  Raises: TypeError or ValueError that begins with ``name``.
    """

    def check(self, name: str, value: Any) -> object:
        raise NotImplementedError

    def parse(self, name: str, text: str) -> object:
        return self.check(name, text)


class _Choice(_Kind):
    """One of a few values of one type."""

    def __init__(self, *choices: object) -> None:
        self.choices = choices
        self.listed = ", ".join(map(str, choices))

    def check(self, name: str, value: Any) -> object:
        expected = type(self.choices[0])
        # isinstance(True, int) holds, and stage=True is a mistake.
        if not isinstance(value, expected) or isinstance(value, bool):
            raise TypeError(
                f"{name} must be one of {self.listed} ({expected.__name__}), not {_kind_of(value)}"
            )
        if value not in self.choices:
            raise ValueError(f"{name} must be one of {self.listed}, not {value!r}")
        return value

    def parse(self, name: str, text: str) -> object:
        for choice in self.choices:
            if text == str(choice):
                return choice
        raise ValueError(f"{name} must be one of {self.listed}, not {text!r}")


class _Several(_Kind):
    """Some of a few words, separated by commas or in a list."""

    def __init__(self, *choices: str) -> None:
        self.one = _Choice(*choices)

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else value
        if not isinstance(words, list | tuple | set | frozenset):
            raise TypeError(
                f"{name} must be words like {', '.join(map(repr, self.one.choices))}, or a list of"
                f" them, not {_kind_of(value)}"
            )
        chosen = {
            self.one.check(name, word.strip() if isinstance(word, str) else word) for word in words
        }
        return tuple(word for word in map(str, self.one.choices) if word in chosen)


class _Switch(_Kind):
    """On or off."""

    WORDS = dict(zip("0 1 false true off on no yes".split(), (False, True) * 4, strict=True))

    def check(self, name: str, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if not isinstance(value, int | str):
            raise TypeError(f"{name} must be True or False, not {_kind_of(value)}")
        if str(value).lower() not in self.WORDS:
            raise ValueError(f"{name} must be one of {', '.join(self.WORDS)}, not {value!r}")
        return self.WORDS[str(value).lower()]


class _Dtype(_Kind):
    """One of a few dtypes, or its name."""

    def __init__(self, *allowed: torch.dtype) -> None:
        self.allowed = {str(dtype).removeprefix("torch."): dtype for dtype in allowed}

    def check(self, name: str, value: Any) -> torch.dtype:
        if not isinstance(value, torch.dtype | str):
            raise TypeError(f"{name} must be a torch.dtype or its name, not {_kind_of(value)}")
        dtype = self.allowed.get(str(value).removeprefix("torch."))
        if dtype is None:
            raise ValueError(f"{name} must be one of {', '.join(self.allowed)}, not {str(value)!r}")
        return dtype


class _Integer(_Kind):
    """Any integer."""

    def check(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, not {_kind_of(value)}")
        return value

    def parse(self, name: str, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name} must be an integer, not {text!r}") from None


class _Bytes(_Kind):
    """A positive number of bytes."""

    def check(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number of bytes (int), not {_kind_of(value)}")
        if value <= 0:
            raise ValueError(f"{name} must be a positive number of bytes, not {value}")
        return value

    def parse(self, name: str, text: str) -> int:
        try:
            value = int(float(text))  # 25e6 too
        except (ValueError, OverflowError):
            raise ValueError(f"{name} must be a number of bytes, not {text!r}") from None
        return self.check(name, value)


class _Hardware(_Kind):
    """Figures of the link and of compute: text, or a dict of names to numbers."""

    EXAMPLE = "latency_s=3e-4 bytes_per_s=1e9"

    def check(self, name: str, value: Any) -> Hardware:
        if isinstance(value, Hardware):
            return value
        if not isinstance(value, str | Mapping):
            raise TypeError(
                f"{name} must be text like '{self.EXAMPLE}' or a dict, not {_kind_of(value)}"
            )
        try:
            return hardware.parse(value) if isinstance(value, str) else hardware.of(value)
        except ValueError as error:
            raise ValueError(
                f"{name} must be figures like '{self.EXAMPLE}', not {value!r}: {error}"
            ) from None


class _Folder(_Kind):
    """A path."""

    def check(self, name: str, value: Any) -> str:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str):
            raise TypeError(f"{name} must be a folder's path, not {_kind_of(value)}")
        if not path:
            raise ValueError(f"{name} must be a folder's path, not an empty string")
        return path


class _Folders(_Kind):
    """One path or several: a list of them, or text with the system's separator of paths."""

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = value.split(os.pathsep)
        paths = value if isinstance(value, list | tuple) else [value]
        for path in paths:
            if not isinstance(path, str | os.PathLike):
                raise TypeError(
                    f"{name} must be a folder's path or a list of them, not {_kind_of(value)}"
                )
        paths = [os.fspath(path) for path in paths]
        if not paths or not all(paths):
            raise ValueError(f"{name} must be paths of folders, not an empty string or list")
        real = [os.path.realpath(path) for path in paths]
        if len(set(real)) != len(real):
            raise ValueError(
                f"{name} names one folder twice, of {', '.join(real)}: striping is over different"
                " disks. Name each once"
            )
        return tuple(paths)


class _Group(_Kind):
    """A process group or a device mesh; the runtime checks its ranks."""

    # Values that are passed by mistake.  new_group gives the ranks it leaves out a number.
    NEVER_A_GROUP = (bool, int, float, str, bytes, list, tuple, set, dict, range)

    def check(self, name: str, value: Any) -> object:
        if isinstance(value, self.NEVER_A_GROUP):
            raise TypeError(
                f"{name} must be a process group or a device mesh, not {_kind_of(value)};"
                " make one with torch.distributed.new_group on the ranks that take part"
            )
        return value

    def parse(self, name: str, text: str) -> object:
        raise ValueError(
            f"{name} cannot be set: a process group is an object, which no environment variable"
            " can hold. Unset it and pass options={'process_group': group}"
        )


def _option(default: Any, kind: _Kind) -> Any:
    return field(default=default, metadata={"kind": kind})


def _switch(default: bool) -> Any:
    return _option(default, _Switch())


def _pass(default: bool) -> Any:
    """Declare the switch of an optional pass, which has the pass's name."""
    return field(default=default, metadata={"kind": _Switch(), "is_pass": True})


@dataclass(frozen=True, eq=False)
class Options:
    """The choices for one compiled step, each checked by ``resolve``.

    Two of them are equal if every field is, the process group by identity: a device mesh
    compares by value, and two meshes over the same ranks may hold different communicators.
    """

    stage: int = _option(3, _Choice(0, 1, 2, 3))
    """ZeRO's stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    lowering: str = _option("inductor", _Choice("eager", "inductor"))
    """``eager`` runs the program op by op, ``inductor`` compiles its compute."""
    process_group: object = _option(None, _Group())
    """The data-parallel ranks: a process group or device mesh.  None is the world."""
    accumulate: str | None = _option(None, _Choice("local", "sharded"))
    """``local`` or ``sharded``; None chooses by where the accumulation happens."""
    reduce_dtype: torch.dtype | None = _option(
        None, _Dtype(torch.float16, torch.bfloat16, torch.float32, torch.float64)
    )
    """The dtype gradients are reduced in; None is the captured gradient's."""
    bucket_bytes: int | None = _option(None, _Bytes())
    """The most that travels together, in bytes; None chooses by the link's figures."""
    memory_budget: int | None = _option(None, _Bytes())
    """Bytes that a step may allocate beyond what a rank keeps; None keeps nothing gathered."""
    hardware: Hardware | None = _option(None, _Hardware())
    """The figures that plans are made with; None measures the group's own at its first call."""
    offload: tuple[str, ...] = _option((), _Several("optimizer", "params", "activations", "auto"))
    """The targets that leave the device.  ``optimizer``: states, and updates run on the host;
    ``params``: at stage 3, this rank's shards of parameters; ``activations``: what forward saves
    for backward, until backward reads it; ``auto``: the smallest set that fits
    ``memory_budget``."""
    offload_tier: str = _option("cpu", _Choice("cpu", "nvme"))
    """Their place: host memory, or files (``nvme``)."""
    offload_dir: tuple[str, ...] = _option((), _Folders())
    """The folders for these files, on different disks: buckets are striped over them."""
    offload_cache_bytes: int | None = _option(None, _Bytes())
    """Host memory that may hold what is in files, per rank; None takes half of what the machine
    has available, divided by its ranks."""
    offload_checksums: bool = _switch(False)
    """Compare what is read from files with a checksum of what was written."""
    delayed_update: bool = _switch(False)
    """Updates on the host go on while the next call computes, which stores their results: a call
    computes with values that lack the last update.  Changes numerics; at stage 3."""
    dump: str | None = _option(None, _Folder())
    """The folder that receives the program after every pass; None writes nothing."""
    validate: bool = _switch(False)
    """Run each pass's program on random inputs, and compare it with the one before; slow."""
    stop_after: str | None = _option(None, _Choice(*STOPS))
    """The last pass to run: what later ones shard or offload stays as it is."""
    recompute: bool = _pass(True)
    hoist_casts: bool = _pass(True)
    bucket: bool = _pass(True)
    update_in_backward: bool = _pass(True)
    prefetch: bool = _pass(True)
    fuse_optimizer: bool = _pass(True)
    """Updates of neighbouring shards run as one compiled kernel; with ``inductor`` only."""
    peer_memory: bool = _switch(True)
    """Ranks of one machine may read each other's memory; off, all goes through sockets."""
    master_weights: bool = _switch(False)
    """bfloat16 and float16 parameters are trained in float32, kept as a state; changes numerics."""
    stochastic_rounding: bool = _switch(False)
    """Values that an update stores in bfloat16 are rounded at random, unbiased; changes
    numerics."""
    moment_dtype: torch.dtype | None = _option(None, _Dtype(torch.bfloat16, torch.int8))
    """The dtype that moments are kept in, bfloat16 or int8 by blocks; None is the optimizer's.
    Changes numerics."""
    rounding_seed: int = _option(0, _Integer())
    """The seed of the random numbers that updates round with."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Options):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        return tuple(
            id(self.process_group) if name == "process_group" else getattr(self, name)
            for name in _FIELDS
        )

    def enabled(self, pass_name: str) -> bool:
        """Return whether these options leave the pass on; only an optional pass can be off."""
        return getattr(self, pass_name) if pass_name in OPTIONAL_PASSES else True


_FIELDS = {each.name: each for each in fields(Options)}

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
    if environ is None:
        environ = os.environ

    values: dict[str, Any] = {}
    for name, value in options.items():
        _check_option_name(name)
        default, kind = _FIELDS[name].default, _FIELDS[name].metadata["kind"]
        is_unset = value is None and default in (None, ())
        values[name] = default if is_unset else kind.check(name, value)
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = _option_of(variable)
        default, kind = _FIELDS[name].default, _FIELDS[name].metadata["kind"]
        is_unset = not text and default in (None, ()) and name != "process_group"
        values[name] = default if is_unset else kind.parse(variable, text)
    return Options(**values)


def environment() -> Mapping[str, str]:
    """The process's environment, for what is not an option: torchrun's variables."""
    return os.environ


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


def _check_option_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the names of options are strings, not {_kind_of(name)}")
    if name not in _FIELDS:
        raise _bad_name("option", name, str)


def _option_of(variable: str) -> str:
    """Return the name of the option that an environment variable is the twin of."""
    for name in _FIELDS:
        if variable == _twin(name):
            return name
    raise _bad_name("environment variable", variable, _twin)


def _twin(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _bad_name(what: str, name: str, spelled: Callable[[str], str]) -> ValueError:
    """Return the error for a name that no option has; ``spelled`` writes an option's name."""
    # process_group has no twin: to offer one would lead to the next error.
    known = [spelled(each) for each in _FIELDS if spelled is str or each != "process_group"]
    planned = [spelled(each) for each in PLANNED]
    renamed = {spelled(old): spelled(new) for old, new in RENAMED.items()}
    listed = f"Known: {', '.join(known)}"
    if name in renamed:
        return ValueError(f"{what} {name!r} is now called {renamed[name]!r}; rename it. {listed}")
    removed = {spelled(old): why for old, why in REMOVED.items()}
    if name in removed:
        return ValueError(f"{what} {name!r} is gone: {removed[name]}; drop it. {listed}")
    if name in planned:
        return ValueError(f"{what} {name!r} is planned but not in this version; drop it. {listed}")
    # A cutoff of 0 names the nearest however far it is.
    (nearest,) = difflib.get_close_matches(name, known + planned, n=1, cutoff=0.0)
    if nearest in planned:
        nearest = f"{nearest!r}, which is planned but not in this version"
    else:
        nearest = repr(nearest)
    return ValueError(f"{what} {name!r} is unknown; did you mean {nearest}? {listed}")


def _kind_of(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"
