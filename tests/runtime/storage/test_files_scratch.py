"""Scratch folders go with their run, however it ends, and a living run's are never touched."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.kit.covering import first
from tests.kit.files import BLOCK, layout
from zerofx.errors import FileTierError
from zerofx.runtime.storage.disk import FileStore
from zerofx.runtime.storage.disk.scratch import Owner, RunFolder, remove_stale
from zerofx.runtime.storage.disk.system import SystemCalls

ROOT = Path(__file__).resolve().parents[3]
BUCKET = layout("b", shard=BLOCK)


def make_folder(directory, **changes):
    """A run's folder as another owner would have made it, with a file in it."""
    owner = Owner.this_process()
    owner = Owner(**{**vars(owner), **changes})
    folder = directory / owner.folder_name("abcd1234")
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    (folder / "bucket-0").write_bytes(b"x" * 100)
    return folder


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


GONE = {
    "of a process that ended": {"pid": 2**22 + 1},
    "of a process whose number another one has": {"start": 1},
    "of before the machine was started": {"boot": "0f0e0d0c-0000-0000-0000-000000000000"},
}


@pytest.mark.parametrize("changes", GONE.values(), ids=GONE)
def test_a_folder_is_removed(tmp_path, changes):
    stale = make_folder(tmp_path, **changes)
    assert remove_stale(tmp_path) == [str(stale)]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("changes", GONE.values(), ids=GONE)
def test_a_folder_whose_lock_somebody_holds_is_left_alone(tmp_path, changes):
    folder = make_folder(tmp_path, **changes)
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_stale(tmp_path) == []
        assert (folder / "bucket-0").exists()
    assert remove_stale(tmp_path) == [str(folder)]


def test_a_folder_of_a_living_process_is_left_alone_even_unlocked(tmp_path):
    folder = make_folder(tmp_path)
    assert remove_stale(tmp_path) == []
    assert (folder / "bucket-0").exists()


def test_a_folder_of_another_host_is_left_alone(tmp_path):
    folder = make_folder(tmp_path, host="another", pid=2**22 + 1, boot="00-00")
    assert remove_stale(tmp_path) == []
    assert (folder / "bucket-0").exists()


def test_what_is_no_runs_folder_is_left_alone(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stale = make_folder(elsewhere, pid=2**22 + 1)
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / "zerofx-files.run-model").mkdir()
    (directory / "checkpoint.pt").touch()
    (directory / stale.name).symlink_to(stale)  # nobody's folder: a link to one
    assert remove_stale(directory) == []
    assert len(os.listdir(directory)) == 3 and (stale / "bucket-0").exists()


def test_a_folder_that_was_being_made_or_removed_is_removed(tmp_path):
    making = make_folder(tmp_path, pid=2**22 + 1)
    making.rename(f"{making}.making")
    without_lock = make_folder(tmp_path, pid=2**22 + 2)
    (without_lock / "lock").unlink()
    assert len(remove_stale(tmp_path)) == 2
    assert os.listdir(tmp_path) == []


def test_a_folder_removed_while_it_is_made_is_made_again(tmp_path):
    class Hasty(SystemCalls):
        """Somebody takes this process for dead, once, before it has its lock."""

        made = []

        def make_folder(self, path):
            super().make_folder(path)
            self.made.append(path)
            if len(self.made) == 1:
                os.rmdir(path)

    system = Hasty()
    folder = RunFolder(str(tmp_path), system)
    assert len(system.made) == 2 and os.listdir(tmp_path) == [os.path.basename(folder.path)]
    folder.remove()
    assert os.listdir(tmp_path) == []


def test_the_name_says_whose_it_is(tmp_path):
    with FileStore([tmp_path]) as store:
        name = os.path.basename(store.folders[0])
        assert Owner.of(name) == Owner.this_process()
        assert f".pid-{os.getpid()}." in name
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            assert f".boot-{boot_id.read().strip()}." in name
    assert Owner.of("zerofx-files.run-1.host-a.boot-b") is None


def test_two_stores_in_one_directory_do_not_see_each_other(tmp_path):
    with FileStore([tmp_path], [BUCKET]) as one:
        values = torch.arange(BLOCK, dtype=torch.float32)
        one.wait(one.start_write("b", {"shard": values}))
        with FileStore([tmp_path], [BUCKET]) as two:
            assert one.folders != two.folders
            two.wait(two.start_write("b", {"shard": -values}))
        found = torch.empty(BLOCK)
        one.wait(one.start_read("b", {"shard": found}))
        assert torch.equal(found, values)


@pytest.mark.slow(reason="processes of its own start")
@pytest.mark.parametrize(
    "end", first(1, ["pass", "raise SystemExit(3)", "raise RuntimeError('no')"])
)
def test_a_process_that_ends_leaves_nothing(run, tmp_path, end):
    script = f"""
from tests.kit.files import layout
from zerofx.runtime.storage.disk import FileStore
import os, sys
store = FileStore([sys.argv[1]], [layout("b", shard=1000)])
store.start_write("b", store.empty("b"))
print(len(os.listdir(sys.argv[1])))
{end}
"""
    status, stdout, stderr = run(script, str(tmp_path))
    assert stdout == "1\n", stderr
    assert status == {"pass": 0, "raise SystemExit(3)": 3}.get(end, 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.nightly
def test_killed_processes_leave_what_the_next_run_removes_and_no_more(run, tmp_path):
    script = """
from tests.kit.files import layout
from zerofx.runtime.storage.disk import FileStore
import os, random, signal, sys, time
import torch

directory, = sys.argv[1:]
bucket = layout("b", shard=400_000)
torch.set_num_threads(1)

def work(ready=None):
    with FileStore([directory], [bucket], depth=4, checksums=True) as store:
        turn = 0
        while True:
            memory = store.empty("b").fill_(turn % 100)
            store.start_write("b", memory)
            found = store.empty("b")
            store.wait(store.start_read("b", found))
            assert torch.equal(memory, found)
            turn += 1
            if ready is not None and turn % 10 == 0:
                os.write(ready, b".")

def fork(*arguments):
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
        finally:
            os._exit(1)
    return child

ended, ready = os.pipe()
neighbour = fork(ready)
os.read(ended, 1)
(folder,) = os.listdir(directory)
generator = random.Random(0)
left_behind = 0
for turn in range(16):
    child = fork()
    time.sleep(generator.uniform(0, 0.03 if turn % 2 else 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left_behind += len(os.listdir(directory)) - 1
    with FileStore([directory], [bucket], depth=1) as store:
        found = set(os.listdir(directory))
        assert found == {folder, os.path.basename(store.folders[0])}, found
os.set_blocking(ended, False)
while os.read(ended, 2**16) == b"." * 2**16:
    pass
os.set_blocking(ended, True)
os.read(ended, 1)  # the neighbour still reads what it wrote
os.kill(neighbour, signal.SIGKILL)
print(left_behind)
"""
    status, stdout, stderr = run(script, str(tmp_path))
    assert status == 0, stderr
    assert int(stdout) >= 4, "hardly any child lived long enough to leave something behind"
    assert len(remove_stale(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.slow(reason="processes of its own start")
def test_a_forked_child_neither_uses_nor_removes_its_parents_files(run, tmp_path):
    script = """
from tests.kit.files import layout
from zerofx.errors import FileTierError
from zerofx.runtime.storage.disk import FileStore
import os, sys
store = FileStore([sys.argv[1]], [layout("b", shard=1000)])
child = os.fork()
if child == 0:
    try:
        store.start_write("b", store.empty("b"))
    except FileTierError as error:
        assert "was forked from" in str(error)
        sys.exit(7)  # and its exit handlers run
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
store.wait(store.start_write("b", store.empty("b")))
print(len(os.listdir(sys.argv[1])))
"""
    status, stdout, stderr = run(script, str(tmp_path))
    assert (status, stdout) == (0, "1\n"), stderr
    assert os.listdir(tmp_path) == []


def test_a_child_that_outlives_its_killed_parent_keeps_the_folder_until_it_ends(run, tmp_path):
    script = """
from tests.kit.files import layout
from zerofx.runtime.storage.disk import FileStore
import os, signal, sys, time
store = FileStore([sys.argv[1]], [layout("b", shard=1000)])
child = os.fork()
if child == 0:
    os.close(1), os.close(2)
    time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    _, stdout, _ = run(script, str(tmp_path))
    child = int(stdout)
    try:
        assert remove_stale(tmp_path) == [] and len(os.listdir(tmp_path)) == 1
    finally:
        os.kill(child, 9)
    deadline = time.monotonic() + 20
    while not remove_stale(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.listdir(tmp_path) == []


def test_a_store_that_cannot_be_opened_leaves_nothing(tmp_path):
    directory = tmp_path / "directory"
    directory.mkdir()
    with pytest.raises(FileTierError, match="does not exist"):
        FileStore([directory, tmp_path / "missing"])
    with pytest.raises(FileTierError, match="no room"):
        FileStore([directory], [layout("b", shard=2**60)])
    assert os.listdir(directory) == []
