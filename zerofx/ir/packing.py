"""Programs as bytes: graphs with their nodes' names and metadata, for another process."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat

_PLAIN = ("placeholder", "call_function", "output")


def packed(graphs: Sequence[fx.Graph], meta: Collection[str], beside: Any = None) -> bytes | None:
    """Return graphs as bytes, with these metadata of their nodes, and with a value ``beside`` them.

    None if there is a constant or a symbolic size in them, or anything else that is no operator and
    does not pickle.
    """
    nodes = [list(graph.nodes) for graph in graphs]
    if any(node.op not in _PLAIN for each in nodes for node in each):
        return None
    stream = io.BytesIO()
    position = {node: at for at, node in enumerate(node for each in nodes for node in each)}
    pickler = _Pickler(stream, position)
    try:
        pickler.dump((beside, [len(each) for each in nodes]))
        for node in position:
            noted = {key: node.meta[key] for key in meta if key in node.meta}
            pickler.dump((node.op, node.name, node.target, node.args, node.kwargs, noted))
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return stream.getvalue()


def unpacked(data: bytes) -> tuple[list[fx.GraphModule], Any]:
    """Return the graphs that ``packed`` has made bytes of, and what was beside them."""
    unpickler = _Unpickler(io.BytesIO(data))
    beside, lengths = unpickler.load()
    found = []
    for length in lengths:
        graph = fx.Graph()
        for _ in range(length):
            op, name, target, args, kwargs, noted = unpickler.load()
            node = graph.create_node(op, target, args, kwargs, name)
            node.meta.update(noted)
            unpickler.nodes.append(node)
        found.append(compat.aot.graph_module(nn.Module(), graph))
    return found, beside


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, position: dict[fx.Node, int]):
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.position = position
        self.fakes: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind is fx.Node:
            return self.position[value]
        if kind is torch._ops.OpOverload:
            namespace, name = value._schema.name.split("::")
            return "operator", namespace, name, value._overloadname
        if kind is torch.memory_format or kind is torch.layout:
            return "of torch", str(value).removeprefix("torch.")
        if isinstance(value, torch.Tensor):
            return self._fake(value)
        return None

    def _fake(self, value: torch.Tensor) -> Any:
        if not compat.tensors.is_fake(value):
            raise pickle.PicklingError("a constant")
        known = self.fakes.get(id(value))
        if known is not None:
            return "fake", known
        self.fakes[id(value)] = len(self.fakes)
        sizes = *value.shape, *value.stride(), value.storage_offset()
        if not all(isinstance(size, int) for size in sizes) or value.layout != torch.strided:
            raise pickle.PicklingError("a symbolic size")
        layout = tuple(value.shape), value.stride(), value.storage_offset()
        return "new", layout, value.dtype, str(value.device)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO):
        super().__init__(stream)
        self.nodes: list[fx.Node] = []
        self.fakes: list[torch.Tensor] = []
        self.mode: Any = None

    def persistent_load(self, found: Any) -> Any:
        if type(found) is int:
            return self.nodes[found]
        kind, *rest = found
        if kind == "new":
            if self.mode is None:
                self.mode = compat.tensors.fake_tensors()
            layout, dtype, device = rest
            fake = compat.tensors.make_fake(self.mode, layout, dtype, torch.device(device))
            self.fakes.append(fake)
            return fake
        if kind == "fake":
            return self.fakes[rest[0]]
        if kind == "of torch":
            return getattr(torch, rest[0])
        namespace, name, overload = rest
        packet = getattr(getattr(torch.ops, namespace), name)
        return getattr(packet, overload or "default")
