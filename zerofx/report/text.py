"""A program as the text of a Python file, which ``write.py`` writes and ``read.py`` reads.

The file holds the program and, as literals, the facts that are needed to run it again.  Every node
is one line of a function, under comments that say where it comes from.
"""

from __future__ import annotations

import json
import operator
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.interface import gradient_of, input_role, placeholders, recorded, why_kept
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.roles import bucket_of, parameter_of, provenance
from zerofx.ir.source import source_of
from zerofx.report.python_text import (
    EXACT,
    AsItIs,
    comment,
    literal_text,
    one_line,
    quoted_name,
    target_text,
    value_text,
    without_addresses,
)

FORMAT = 2
"""The format of dumped files.  It grows when an older reader would misread one."""

CONSTANTS_FILE = "constants.pt"

_IMPORTS = """\
import operator
from math import inf, nan
from pathlib import Path

import torch

aten, prims, zerofx = torch.ops.aten, torch.ops.prims, torch.ops.zerofx"""

_RUN = """\
if __name__ == "__main__":
    import sys

    from zerofx.__main__ import main

    sys.exit(main(["run", __file__, *sys.argv[1:]]))"""

_FEW = 3
"""A bucket with at most so many parameters is named in full by each node that serves it."""

_IN_TEXT = 64
"""A constant with at most so many elements is written into the program."""

_LARGEST_CONSTANT = 64 * 2**20
"""A constant of at most so many bytes is written to a file next to the program."""


@dataclass
class ProgramText:
    """A program as Python.

    ``optimizers`` are described by handle: programs count them from 0, in order of first use, for
    handles are numbers of a process.  ``in_file`` gets the constants that the text does not hold,
    by name.
    """

    gm: fx.GraphModule
    table: ParameterTable
    optimizers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    in_file: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.handles: dict[int, int] = {}
        self.reads_file = False
        self.constants: dict[str, AsItIs] = {}
        self.obstacles: list[str] = []  # to running it again: none, for most programs

    def file(self) -> str:
        """Return the program's file, without a header."""
        program = self._program()  # first: it notes optimizers, constants and obstacles
        optimizers = [self.optimizers.get(handle, {}) for handle in self.handles]
        facts = {**self.facts(), "OPTIMIZERS": optimizers, "OBSTACLES": self.obstacles}
        literals = [literal_text(name, value) for name, value in facts.items()]
        constants = literal_text("CONSTANTS", self.constants)
        if self.reads_file:
            path = f"Path(__file__).with_name({CONSTANTS_FILE!r})"
            constants += f"\nCONSTANTS |= torch.load({path}, weights_only=True)"
        return "\n\n".join([*literals, _IMPORTS, constants, f"\n{program}\n", f"{_RUN}\n"])

    def facts(self) -> dict[str, Any]:
        """Return the parameters, inputs and results of the program, as its file names them."""
        graph = self.gm.graph
        gradients = recorded(graph).gradients.items()
        return {
            "PARAMETERS": {info.name: _described(info) for info in self.table},
            "INPUTS": {node.name: self._input(node) for node in placeholders(graph)},
            "GRADIENTS": {position: self.table[index].name for position, index in gradients},
            "SHARDED_RESULTS": sorted(recorded(graph).sharded),
        }

    def _input(self, node: fx.Node) -> dict[str, Any]:
        role, value = input_role(node), node.meta.get("val")
        described: dict[str, Any] = {"kind": role.kind}
        if role.parameter >= 0:
            described["parameter"] = self.table[role.parameter].name
        flags = ("sharded", "unreduced", "on_host")
        described |= {flag: given for flag in flags if (given := getattr(role, flag))}
        if isinstance(value, torch.Tensor):
            described["shape"] = tuple(map(compat.aot.size_hint, value.shape))
            described["stride"] = tuple(map(compat.aot.size_hint, value.stride()))
            described["dtype"] = str(value.dtype).removeprefix("torch.")
            described["device"] = str(value.device)
            return described
        value = compat.aot.scalar_hint(value)
        if value is not None and not isinstance(value, int | float | str):
            self.obstacles.append(f"its input {node.name} is a {type(value).__name__}")
            value = None
        return {**described, "value": value}

    def _program(self) -> str:
        graph = self.gm.graph
        inputs = (f"    {node.name}: {_annotation(node)}," for node in placeholders(graph))
        lines, place = ["def program(", *inputs, "):"], ""
        statements = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        last_read: dict[fx.Node, list[str]] = defaultdict(list)
        for node in statements:
            last_read[max(node.users, default=node)].append(node.name)
        for node in statements:
            source = _source(node)
            if source and source != place:
                lines += ["", f"    # from {source}"]  # code is not wrapped
                place = source
            for note in self._notes(node):
                lines += comment(note)
            end = f";  del {', '.join(last_read[node])}" if last_read[node] else ""
            lines.append(f"    {node.name}: {_annotation(node)} = {self._call(node)}{end}")
        lines += ["", f"    return {self._argument(graph.output_node().args[0])}"]
        return "\n".join(lines)

    def _notes(self, node: fx.Node) -> list[str]:
        """List the comments about a node: what passes have noted on it."""
        found = []
        origin = provenance(node)
        if origin is not None:
            what = " ".join([origin.role, self._served(node)]).rstrip()
            bucket = f" (bucket {origin.bucket})" if origin.bucket >= 0 else ""
            why = f"; {one_line(origin.reason)}" if origin.reason else ""
            found.append(f"{origin.inserted_by}: {what}{bucket}{why}")
        if gradient_of(node):
            names = (quoted_name(self.table[index].name) for index in sorted(gradient_of(node)))
            found.append(f"this rank's gradient of {', '.join(names)}")
        if kept := why_kept(node):
            found.append(f"kept from forward to backward: {one_line(kept)}")
        return found

    def _served(self, node: fx.Node) -> str:
        """Return the names of the parameters that an inserted node is for.

        Those of a large bucket are named where something starts: a collective, a move, an update.
        """
        if parameter_of(node) >= 0:
            return quoted_name(self.table[parameter_of(node)].name)
        members = [quoted_name(info.name) for info in self.table.bucket(bucket_of(node))]
        starts = ops.starts(node) or node.target is ops.on_owners
        return ", ".join(members) if starts or len(members) <= _FEW else ""

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._constant(node)
        if node.target is operator.getitem:
            container, key = map(self._argument, node.args)
            return f"{container}[{key}]"
        target = target_text(node.target) if node.op == "call_function" else None
        if target is None:
            return self._unknown(node, f"nothing can import {node.target}")
        arguments = self._arguments(node)
        arguments += [f"{name}={self._argument(value)}" for name, value in node.kwargs.items()]
        return f"{target}({', '.join(arguments)})"

    def _arguments(self, node: fx.Node) -> list[str]:
        """Write positional arguments; ours by name, from the first that is no tensor on."""
        if not ops.is_ours(node.target):
            return list(map(self._argument, node.args))
        shown: list[str] = []
        by_name = False
        for value, argument in zip(node.args, node.target._schema.arguments, strict=False):
            by_name = by_name or "Tensor" not in str(argument.type)
            if argument.name == "optimizer" and value is not None:
                value = self.handles.setdefault(value, len(self.handles))
            text = self._argument(value)
            shown.append(f"{argument.name}={text}" if by_name else text)
        return shown

    def _constant(self, node: fx.Node) -> str:
        name = str(node.target)
        value = operator.attrgetter(name)(self.gm)
        if not isinstance(value, torch.Tensor) or compat.tensors.is_fake(value):
            return self._unknown(node, f"{name} is a {type(value).__name__}")
        with compat.tensors.real_tensors():
            if value.numel() <= _IN_TEXT and value.dtype in EXACT and value.is_contiguous():
                text = f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
                if value.device.type != "cpu":
                    text += f".to({str(value.device)!r})"
                self.constants[name] = AsItIs(text)
            elif value.nbytes <= _LARGEST_CONSTANT:
                self.in_file[name] = value.detach()
                self.reads_file = True
            else:
                return self._unknown(node, f"{name} takes {value.nbytes} bytes: it was not written")
        return f"CONSTANTS[{name!r}]"

    def _argument(self, value: Any) -> str:
        """Write an argument as Python reads it."""
        return repr(fx.node.map_aggregate(value, self._leaf))

    def _leaf(self, value: Any) -> AsItIs:
        """Write what an argument's lists, tuples, dicts and slices hold."""
        if isinstance(value, fx.Node):
            return AsItIs(value.name)
        value = compat.aot.scalar_hint(value)
        if value is None or type(value) in (bool, int, float, complex, str):
            return AsItIs(repr(value))
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return AsItIs(value)
        if isinstance(value, torch.device):
            return AsItIs(f"torch.device({str(value)!r})")
        if value is Ellipsis:
            return AsItIs("...")
        text = target_text(value)
        if text is None:
            self.obstacles.append(f"one of its arguments is of type {type(value).__name__}")
            text = repr(one_line(without_addresses(repr(value))))
        return AsItIs(text)

    def _unknown(self, node: fx.Node, why: str) -> str:
        """Write a node that cannot be run again, to be read; note it as an obstacle."""
        self.obstacles.append(f"{node.name}: {one_line(without_addresses(why))}")
        reads = ", ".join(read.name for read in node.all_input_nodes)
        return f"({without_addresses(str(node.target))!r}, [{reads}])"


def _described(info: ParameterInfo) -> dict[str, Any]:
    described: dict[str, Any] = {
        "shape": info.shape,
        "stride": info.stride,
        "dtype": str(info.dtype).removeprefix("torch."),
        "device": str(info.device),
        "requires_grad": info.requires_grad,
    }
    if info.assigned is not None:
        described["place"] = astuple(info.assigned)
    return described


def _source(node: fx.Node) -> str:
    """``train.py:12 (model.head): loss = model(x)``: the user's line, and the module it is in."""
    place, text = source_of(node)
    if not place:
        return ""
    if modules := list((node.meta.get("nn_module_stack") or {}).values()):
        path = one_line(modules[-1][0])  # G['model'].head
        place += " (" + re.sub(r"""^[LG]\[['"](.*?)['"]\]""", r"\1", path) + ")"
    return f"{place}: {one_line(text)}"


def _annotation(node: fx.Node) -> str:
    return json.dumps(value_text(node.meta.get("val")), ensure_ascii=False)
