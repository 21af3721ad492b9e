"""Checkpoints that a script saves while it is being planned: none is written."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from zerofx.deferred.block import is_block_open
from zerofx.planning.loading import in_all_modules, path_of


@contextlib.contextmanager
def nothing_written() -> Iterator[None]:
    """Have a script write no checkpoint: its parameters have no values, and those of files stay.

    What ``torch.save`` is given while the script is being recorded ``torch.load`` returns.  What
    safetensors and ``torch.distributed.checkpoint`` are given is dropped.
    """
    saved: dict[str, Any] = {}
    save, load = torch.save, torch.load

    def place_of(file: Any) -> str | None:
        path = path_of(file)
        return None if path is None else os.path.realpath(path)

    @functools.wraps(save)
    def keep(obj, f, *args, **options):
        place = place_of(f)
        if not is_block_open():  # the script has been stopped, and ends
            return
        if place is None:
            save(obj, f, *args, **options)
        else:
            saved[place] = copy.deepcopy(obj)

    @functools.wraps(load)
    def load_kept(f, *args, **options):
        place = place_of(f)
        return copy.deepcopy(saved[place]) if place in saved else load(f, *args, **options)

    def moving(move: Callable) -> Callable:
        @functools.wraps(move)
        def move_kept(source, target, **options):
            place = place_of(source)
            if place not in saved:
                return move(source, target, **options)
            saved[os.path.realpath(target)] = saved.pop(place)

        return move_kept

    instead = {
        save: keep,
        dcp.save: _dropping(dcp.save, lambda: None),
        dcp.async_save: _dropping(dcp.async_save, _done),
    }
    if importlib.util.find_spec("safetensors") is not None:
        from safetensors.torch import save_file, save_model

        instead |= {write: _dropping(write, lambda: None) for write in (save_file, save_model)}
    with contextlib.ExitStack() as patches:
        patch = patches.enter_context
        patch(in_all_modules(instead))
        patch(mock.patch.object(torch, "load", load_kept))
        for move in (os.replace, os.rename):
            patch(mock.patch.object(os, move.__name__, moving(move)))
        yield


def _dropping(save: Callable, answer: Callable[[], Any]) -> Callable:
    """Return what takes the arguments of ``save``, writes nothing, and returns an answer."""

    @functools.wraps(save)
    def dropping(*_args, **_options):
        return answer()

    return dropping


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
