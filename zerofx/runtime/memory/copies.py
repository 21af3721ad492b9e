"""Watches tensors of state dicts, which are copies here, and warns of writes that are lost."""

from __future__ import annotations

import warnings

import torch


class GivenCopies:
    """Watches copies for writes that would have reached the model or optimizer in plain torch."""

    def __init__(self) -> None:
        self._given: list[tuple[str, torch.Tensor, int]] = []

    def give(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, a copy of what goes by ``name``, and watch it until ``check``."""
        if not value.is_inference():
            alias = value.detach()
            alias.data = value.new_empty(0)  # it shares the count of writes, and no memory
            self._given.append((name, alias, alias._version))
        return value

    def forget(self) -> None:
        """Watch none of them further: they are loaded, as what has read a file into them does."""
        self._given.clear()

    def check(self) -> None:
        """Warn if some have been written to, and watch them no further."""
        given, self._given = self._given, []
        written = [name for name, alias, version in given if alias._version != version]
        if written:
            warnings.warn(
                f"{len(written)} tensor(s) of a state_dict() have been written to, the first "
                f"{written[0]!r}, which changes nothing: they are copies, for ranks keep shards. "
                "Write to the parameters in zerofx.full_params(model), or give the state dict to "
                "load_state_dict().",
                stacklevel=2,
            )


GIVEN_COPIES = GivenCopies()
