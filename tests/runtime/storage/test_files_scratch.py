"""Scratch files go with their process, however it ends, and are seen by no other."""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kit.covering import first
from tests.kit.files import BLOCK, empty, layout, read, store_of, write
from tests.kit.ranks import start
from zerofx.errors import FileTierError
from zerofx.runtime.storage.disk import FileStore

ROOT = Path(__file__).resolve().parents[3]
BUCKET = layout("b", shard=BLOCK)


SERVER = f"""
import json, os, sys
sys.path[:0] = {[str(ROOT)]}
import tests.kit.files, torch, zerofx.runtime.storage.disk
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for fd, path in enumerate(request["outputs"], 1):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
sys.argv = ["script", *request["arguments"]]
exec(request["script"], {{"__name__": "__main__"}})
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run scripts in processes of their own, forked where everything is imported: that takes long.

    Returns the exit status, and what went to stdout and to stderr.
    """
    outputs = [str(tmp_path_factory.mktemp("outputs") / name) for name in ("stdout", "stderr")]
    command = [sys.executable, "-c", SERVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as server:

        def run_one(script, *arguments):
            for path in outputs:
                Path(path).write_text("")
            request = {"script": script, "arguments": arguments, "outputs": outputs}
            server.stdin.write(json.dumps(request) + "\n")
            status = int(server.stdout.readline())
            return status, *(Path(path).read_text() for path in outputs)

        yield run_one
        server.stdin.close()


def test_two_stores_in_one_directory_do_not_see_each_other(tmp_path):
    with contextlib.closing(store_of([tmp_path], [BUCKET])) as one:
        values = torch.arange(BLOCK, dtype=torch.float32)
        write(one, "b", {(0, "shard"): values})
        with contextlib.closing(store_of([tmp_path], [BUCKET])) as two:
            write(two, "b", {(0, "shard"): -values})
        assert torch.equal(read(one, "b")[0, "shard"], values)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "end", first(1, ["pass", "raise SystemExit(3)", "raise RuntimeError('no')"])
)
def test_a_process_that_ends_leaves_nothing(run, tmp_path, end):
    script = f"""
from tests.kit.files import empty, layout, store_of
import os, sys
store = store_of([sys.argv[1]], [layout("b", shard=1000)])
store.start_write("b", empty(store, "b"))
print(len(os.listdir(sys.argv[1])))
{end}
"""
    status, stdout, stderr = run(script, str(tmp_path))
    assert stdout == "0\n", stderr
    assert status == {"pass": 0, "raise SystemExit(3)": 3}.get(end, 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.nightly
def test_killed_processes_leave_nothing(run, tmp_path):
    script = """
from tests.kit.files import empty, layout, store_of
import contextlib, os, random, signal, sys, time

directory, = sys.argv[1:]
bucket = layout("b", shard=400_000)

def work(ready):
    with contextlib.closing(store_of([directory], [bucket], depth=4, checksums=True)) as store:
        while True:
            store.start_write("b", empty(store, "b")).wait()
            os.write(ready, b".")

generator = random.Random(0)
for turn in range(8):
    ended, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(ready)
        finally:
            os._exit(1)
    os.read(ended, 1)
    time.sleep(generator.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.listdir(directory) == [], turn
"""
    status, _, stderr = run(script, str(tmp_path))
    assert status == 0, stderr


def fork_a_child(directory):
    """Be a process whose forked child ends as a script does: its exit handlers run."""
    gc.freeze()  # what was imported: to collect it at exit takes a second
    store = store_of([directory], [layout("b", shard=1000)])
    child = os.fork()
    if child == 0:
        try:
            store.start_write("b", empty(store, "b"))
        except FileTierError as error:
            ctypes.pythonapi.Py_Exit(7 if "was forked from" in str(error) else 8)
        ctypes.pythonapi.Py_Exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store.start_write("b", empty(store, "b")).wait()
    assert os.listdir(directory) == []
    ctypes.pythonapi.Py_Exit(0)


def test_a_forked_child_neither_uses_nor_removes_its_parents_files(tmp_path):
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=fork_a_child, args=(str(tmp_path),))
    start(process, 0)
    process.join()
    assert process.exitcode == 0
    assert os.listdir(tmp_path) == []


def test_a_store_that_cannot_be_opened_leaves_nothing(tmp_path):
    directory = tmp_path / "directory"
    directory.mkdir()
    with pytest.raises(FileTierError, match="does not exist"):
        FileStore([directory, tmp_path / "missing"])
    with pytest.raises(FileTierError, match="no room"):
        store_of([directory], [layout("b", shard=2**60)])
    assert os.listdir(directory) == []
