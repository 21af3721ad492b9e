"""Ranks of a machine have one process compile for them, which lives until all have closed."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import socket
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tests.conftest  # noqa: F401
from tests.lower.test_at_once import body
from zerofx import compat
from zerofx.compat.inductor import Like
from zerofx.ir.packing import packed
from zerofx.lower import compile_process, compile_server
from zerofx.lower.compile_process import CompileProcess, Work
from zerofx.lower.compile_server import _Server
from zerofx.lower.regions import REGION_META, CompiledRegion


def work(text, size=1, **more):
    return Work(text, b" " * size, **more)


@pytest.fixture
def server():
    """One that forks nothing, and notes what it would have had compiled."""
    with socket.create_server(("localhost", 0)) as listener:
        server = _Server(listener, 2, {})
        server.forked = []

        def fork(settings, share):
            server.forked.append((settings, [each.text for each in share]))
            server.children.append(None)

        with mock.patch.object(server, "_fork", fork):
            yield server


def client_of(server, settings):
    """A rank's end of a connection, and the server's."""
    ends = socket.socketpair()
    mine, its = (compile_server.Connection(end.detach()) for end in ends)
    server.clients[its] = b""
    mine.send_bytes(settings)
    server._receive(its)
    return mine, its


def give(server, client, works):
    mine, its = client
    mine.send_bytes(pickle.dumps(works))
    server._receive(its)


def test_what_comes_together_is_divided_among_as_many_processes_as_ranks(server):
    rank = client_of(server, b"settings")
    give(server, rank, [work("small"), work("large", 9), work("middle", 5)])
    server._start()
    assert server.forked == [(b"settings", ["large", "small"]), (b"settings", ["middle"])]


def test_what_several_ranks_ask_for_is_compiled_once(server):
    for _ in range(2):
        rank = client_of(server, b"settings")
        give(server, rank, [work("one"), work("other")])
        server._start()
    assert server.forked == [(b"settings", ["one"]), (b"settings", ["other"])]


def test_ranks_with_other_settings_have_processes_of_their_own(server):
    for name in (b"one", b"other"):
        give(server, client_of(server, name), [work(f"for {name}")])
    server._start()
    server._start()
    assert [settings for settings, _ in server.forked] == [b"one", b"other"]


def test_what_waits_is_begun_when_a_process_has_ended(server):
    rank = client_of(server, b"settings")
    give(server, rank, [work("a"), work("b")])
    server._start()
    give(server, rank, [work("c")])
    server._start()
    assert len(server.forked) == 2
    server.children.pop()
    server._start()
    assert server.forked[2:] == [(b"settings", ["c"])]


def test_a_rank_that_asks_for_what_is_done_is_told_so_at_once(server):
    rank = client_of(server, b"settings")
    server.asked.add("early")
    server.done.add("early")
    give(server, rank, [work("early"), work("late")])
    assert pickle.loads(rank[0].recv_bytes()) == ["early"]
    server._start()
    assert server.forked == [(b"settings", ["late"])]


def test_a_rank_that_has_ended_is_no_client_any_more(server):
    mine, its = client_of(server, b"settings")
    mine.close()
    server._receive(its)
    assert not server.clients


def test_where_nobody_asks_for_long_it_ends(server, monkeypatch):
    monkeypatch.setattr(compile_server, "IDLE_S", 0.01)
    client = client_of(server, b"settings")
    server.run()
    assert server.clients and client


def test_where_it_cannot_be_started_all_counts_as_done(monkeypatch, caplog):
    monkeypatch.setattr(compile_process, "_connected", mock.Mock(side_effect=OSError("no socket")))
    with caplog.at_level(logging.WARNING, "zerofx"):
        process = CompileProcess()
    process.compile([work("one")])
    process.wait("one")
    process.wait("what an earlier one was asked for")
    assert process.is_done("one") and process.has_ended
    assert "the ranks compile what is missing" in caplog.text and "no socket" in caplog.text
    process.close()


def test_of_what_cannot_be_started_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compile_process, "_started", mock.Mock(side_effect=OSError("no process")))
    with pytest.raises(OSError, match="no process"):
        compile_process._connected(dist.HashStore(), 1)
    assert not os.listdir(tmp_path)


@pytest.fixture
def far_away(monkeypatch, tmp_path):
    """A folder for temporary files whose path is longer than a socket's may be."""
    folder = tmp_path / ("far" * 40)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.mark.usefixtures("far_away")
def test_it_starts_wherever_temporary_files_are(monkeypatch):
    monkeypatch.setattr(compile_process, "_started", mock.Mock())
    connection, address, _ = compile_process._connected(None, 1)
    assert len(address) < 104
    connection.close()
    shutil.rmtree(os.path.dirname(address))


def test_ranks_with_a_cache_of_their_own_have_a_process_of_their_own(monkeypatch, tmp_path):
    listening = []

    def start(listener, *_):
        listening.append(listener.dup())
        return mock.Mock()

    monkeypatch.setattr(compile_process, "_started", start)
    store, addresses = dist.HashStore(), []
    for name in ("one", "other", "other"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        connection, address, _ = compile_process._connected(store, 2)
        connection.close()
        addresses.append(address)
    one, other, again = addresses
    assert one != other == again and len(listening) == 2
    for address, listener in zip((one, other), listening, strict=True):
        listener.close()
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)


def test_a_process_that_is_forked_off_waits_for_nothing(monkeypatch):
    monkeypatch.setattr(compile_process, "_connected", mock.Mock(side_effect=OSError))
    process = CompileProcess()
    process.compile([work("one")])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert process.has_ended and process.is_done("one")


@pytest.fixture
def region(monkeypatch, tmp_path):
    """A region to compile, where nothing is compiled yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CompiledRegion, "_known", {})
    return CompiledRegion(body(), ())


def work_of(region):
    beside = list(map(Like.of, region.sample)), region.like, region.donated
    return Work(region.text, packed([region.gm.graph], REGION_META, beside))


@pytest.mark.nightly
def test_ranks_of_a_machine_share_one_that_outlives_the_rank_that_has_started_it(region):
    store = dist.HashStore()
    first, second = CompileProcess(store, 2), CompileProcess(store, 2)
    assert first.process is not None and second.process is None
    first.close()
    second.compile([work_of(region)])
    second.wait(region.text)
    torch._dynamo.utils.counters.clear()
    region.compile_ahead()
    assert not region.compiled[0].error
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == 1
    folder = os.path.dirname(second._address)
    assert os.path.isdir(folder)
    third = CompileProcess(store, 2)  # finds it there, and what it has done
    third.compile([work_of(region)])
    third.wait(region.text)
    second.close()
    third.close()
    assert first.process.wait(timeout=60) == 0 and not os.path.exists(folder)


@pytest.mark.nightly
def test_where_it_has_ended_the_next_to_ask_starts_another(region):
    store = dist.HashStore()
    first = CompileProcess(store)
    folder = os.path.dirname(first._address)
    first.process.kill()
    first.process.wait()
    second = CompileProcess(store)
    assert second.process is not None
    second.compile([work_of(region)])
    second.wait(region.text)
    second.close()
    assert second.process.wait(timeout=60) == 0
    assert not os.path.exists(folder), "of one that is killed the rank removes it"


@pytest.mark.nightly
def test_one_that_compiles_still_ends_with_the_last_rank(region):
    process = CompileProcess()
    process.compile([work_of(region)])
    process.close()
    assert process.process.wait(timeout=60) == 0


def test_keys_that_another_process_has_found_are_those_that_this_one_would_find():
    compat.inductor.import_inductor()
    found = compat.inductor.keys()
    assert "torch_key" in found and all(found.values())
    compat.inductor.prepare_beside(found).wait(60)
    assert compat.inductor.keys() == found
