"""Why a node that the user did not write is there: its role, what it serves, pass and reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import fx

from zerofx.ir.parameters import ParameterTable


class Role(StrEnum):
    """The role of an inserted node.  Dumps show it, and name the node after it."""

    # What losses are divided by, what is returned of them, and batch norms' sums.
    LOSS_COUNT = "loss_count"
    LOSS_VALUE = "loss_value"
    STATISTICS = "statistics"
    CHUNK = "chunk"

    # Gathers of parameters, and what stands before and behind them.
    HOISTED_CAST = "hoisted_cast"
    GATHER_CAST = "gather_cast"
    PACK = "pack"
    GATHER_SHARD = "gather_shard"
    KEPT_SHARD = "kept_shard"
    GATHER = "gather"
    WHOLE = "whole"
    FREE = "free"
    QUANTIZED = "quantized"
    DEQUANTIZED = "dequantized"

    # Gradients, from backward's to what updates read.
    ACCUMULATE = "accumulate"
    REDUCE_CAST = "reduce_cast"
    FLATTEN = "flatten"
    REDUCE_GRADIENT = "reduce_gradient"
    REDUCED_GRADIENT = "reduced_gradient"
    GRADIENT_WIRE = "gradient_wire"
    ROUNDING_ERROR = "rounding_error"
    KEPT_ERROR = "kept_error"

    # Arithmetic on shards, and its reductions.
    TAKE_SHARD = "take_shard"
    MASK_PADDING = "mask_padding"
    ON_SHARD = "on_shard"
    PARTIAL = "partial"
    REDUCE_SCALAR = "reduce_scalar"
    FINISH_REDUCTION = "finish_reduction"

    # Updates, on the device and by owners.
    UPDATE = "update"
    UPDATED = "updated"
    SQUARES = "squares"
    WRITE_BACK = "write_back"
    ON_OWNERS = "on_owners"
    DIRECTION = "direction"
    RECOMPUTE = "recompute"

    # Shards, gradients and new values that travel between host and device.
    SHARD_TO_DEVICE = "shard_to_device"
    SHARD_ON_DEVICE = "shard_on_device"
    VALUE_TO_DEVICE = "value_to_device"
    VALUE_ON_DEVICE = "value_on_device"
    VALUES_TO_HOST = "values_to_host"
    VALUES_ON_HOST = "values_on_host"
    GRADIENTS_TO_HOST = "gradients_to_host"
    GRADIENTS_ON_HOST = "gradients_on_host"
    UPDATED_ON_HOST = "updated_on_host"
    VALUES_TO_DEVICE = "values_to_device"
    UPDATED_VALUE = "updated_value"
    STORE = "store"
    STORED = "stored"

    # Values that forward saves for backward.
    TO_HOST = "to_host"
    ON_HOST = "on_host"
    TO_DEVICE = "to_device"
    RELOADED = "reloaded"
    VIEW = "view"

    # What files hold.
    STATES_FROM_FILE = "states_from_file"
    STATES = "states"
    STATES_TO_FILE = "states_to_file"
    SHARDS_FROM_FILE = "shards_from_file"
    SHARDS = "shards"
    SHARDS_TO_FILE = "shards_to_file"
    TO_FILE = "to_file"
    FROM_FILE = "from_file"
    VALUE = "value"
    DROP_VALUE = "drop_value"


@dataclass(frozen=True)
class Provenance:
    """Why a node that the user did not write is there.

    ``role`` is what it does, ``parameter`` the parameter
    it does it for (-1 for several), ``inserted_by`` the pass.  ``bucket`` is the bucket whose
    parameters it serves together, -1 for none.  ``reason`` is why the pass chose to.
    """

    role: Role
    parameter: int
    inserted_by: str
    bucket: int = -1
    reason: str = ""


def provenance(node: fx.Node) -> Provenance | None:
    return node.meta.get("zerofx")


def parameter_of(node: fx.Node) -> int:
    """Index of the parameter that an inserted node is for; -1 for several, or none."""
    return getattr(provenance(node), "parameter", -1)


def bucket_of(node: fx.Node) -> int:
    """Number of the bucket that an inserted node serves; -1 for none."""
    return getattr(provenance(node), "bucket", -1)


def role(node: fx.Node) -> Role | None:
    """The role of an inserted node; None for the user's own."""
    return getattr(provenance(node), "role", None)


def served(node: fx.Node, table: ParameterTable) -> str:
    """Names of the parameters that an inserted node serves."""
    if parameter_of(node) >= 0:
        return table[parameter_of(node)].name
    members = table.bucket(bucket_of(node)) if bucket_of(node) >= 0 else ()
    return ", ".join(info.name for info in members) or "several"
