"""Why a node that the user did not write is there: its role, what it serves, pass and reason."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zerofx.ir.parameters import ParameterTable


@dataclass(frozen=True)
class Provenance:
    """Why a node that the user did not write is there.

    ``role`` is what it does (``gather``, ``reduce_gradient``, ...), ``parameter`` the parameter
    it does it for (-1 for several), ``inserted_by`` the pass.  ``bucket`` is the bucket whose
    parameters it serves together, -1 for none.  ``reason`` is why the pass chose to.
    """

    role: str
    parameter: int
    inserted_by: str
    bucket: int = -1
    reason: str = ""


def provenance(node: fx.Node) -> Provenance | None:
    return node.meta.get("zerofx")


def parameter_of(node: fx.Node) -> int:
    """Index of the parameter that an inserted node is for; -1 for several, or none."""
    origin = provenance(node)
    return origin.parameter if origin else -1


def bucket_of(node: fx.Node) -> int:
    """Number of the bucket that an inserted node serves; -1 for none."""
    origin = provenance(node)
    return origin.bucket if origin else -1


def role(node: fx.Node) -> str | None:
    """The role of an inserted node; None for the user's own."""
    origin = provenance(node)
    return origin.role if origin else None


def served(node: fx.Node, table: ParameterTable) -> str:
    """Names of the parameters that an inserted node serves."""
    if parameter_of(node) >= 0:
        return table[parameter_of(node)].name
    members = table.bucket(bucket_of(node)) if bucket_of(node) >= 0 else ()
    return ", ".join(info.name for info in members) or "several"
