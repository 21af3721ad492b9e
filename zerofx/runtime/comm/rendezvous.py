"""Tell torchrun's starts apart: each has keys of its own in the store."""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

LONGEST_POLL_S = 0.01


def store_of_this_start(
    store: dist.Store, rank: int, world_size: int, timeout_s: float
) -> dist.Store:
    """Return ``store`` under a prefix that the ranks of this start have agreed on, and no others.

    torchrun keeps its store when it starts its workers again.  gloo would look for new ranks at the
    addresses that those have left which are gone, and hang, not always (torch 2.11 to 2.14).
    ``TORCHELASTIC_RESTART_COUNT`` does not tell starts apart: each agent counts its own, and not
    those that a node which joined has caused.

    So rank 0 chooses a name.  Nobody can tell a name of this start from one that an earlier
    rank 0 has left, but for the answer to a question that is new itself: the others ask.

    Raises: RuntimeError on rank 0 if the others have not come within ``timeout_s`` seconds;
    torch's DistStoreError on them if it does not answer.
    """
    store = dist.PrefixStore("zerofx", store)
    name = _choose(store, world_size, timeout_s) if rank == 0 else _ask(store, rank)
    return dist.PrefixStore(f"start/{name}", store)


def _ask(store: dist.Store, rank: int) -> str:
    question = secrets.token_hex(8)
    store.set(f"question/{rank}", question)
    name = store.get(f"answer/{question}").decode()  # waits, for as long as the store does
    store.set(f"heard/{name}/{rank}", "")
    return name


def _choose(store: dist.Store, world_size: int, timeout_s: float) -> str:
    """Answer all questions, those of earlier starts too, until every rank has heard."""
    deadline = time.monotonic() + timeout_s
    name = secrets.token_hex(8)
    silent = list(range(1, world_size))
    pause = 1e-4
    while silent:
        for rank in silent:
            if store.check([f"question/{rank}"]):
                store.set(f"answer/{store.get(f'question/{rank}').decode()}", name)
        silent = [rank for rank in silent if not store.check([f"heard/{name}/{rank}"])]
        if silent and time.monotonic() > deadline:
            raise RuntimeError(
                f"rank(s) {silent} of {world_size} have not come to make the process group with "
                f"rank 0 within {timeout_s:g} s: look at their logs"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_POLL_S)
    return name
