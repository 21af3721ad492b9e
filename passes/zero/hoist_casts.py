"""Cast parameters before they are gathered, so that the narrower dtype travels."""

from __future__ import annotations

import torch
from torch import fx

from zerofx.ir.interface import input_role, placeholders
from zerofx.ir.roles import Provenance, Role
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.zero.elementwise import CASTS


def hoist_casts(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Merge a parameter's casts to one dtype into one that ``shard_parameters`` gathers through.

    Before (autocast)::

        a = _to_copy(p, dtype=bf16);  y = mm(x, a);  ...;  b = _to_copy(p, dtype=bf16)

    After::

        a = _to_copy(p, dtype=bf16)  # hoisted_cast;  y = mm(x, a);  ...

    Casting each element commutes with gathering: results are bitwise the same.  Casts to a
    wider dtype stay, as the narrower parameter is cheaper to gather.
    """
    hoisted = merged = 0
    for parameter in placeholders(gm.graph, "parameter"):
        width = parameter.meta["val"].dtype.itemsize
        first: dict[torch.dtype, fx.Node] = {}
        for node in [user for user in parameter.users if user.target in CASTS]:
            value = node.meta["val"]
            if value.dtype.itemsize > width or value.device != parameter.meta["val"].device:
                continue
            if value.stride() != parameter.meta["val"].stride():
                continue
            if value.dtype in first:
                node.replace_all_uses_with(first[value.dtype])
                gm.graph.erase_node(node)
                merged += 1
                continue
            first[value.dtype] = node
            of = input_role(parameter).parameter
            node.meta["zerofx"] = Provenance(Role.HOISTED_CAST, of, "hoist_casts")
            hoisted += 1
    return {"hoisted": hoisted, "merged": merged}
