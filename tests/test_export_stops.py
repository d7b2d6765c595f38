"""A target that is complete or absent whatever stops the exporter."""

import os
import random
import resource
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
import writers
from golden import tiny
from tqdm import tqdm

from export.__main__ import catch_signals, main

# What the tests fork does nothing with the parent's threads, which are numpy's and tqdm's.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def child(arguments: list, limit: int | None = None) -> int:
    """Forks a process that exports and ends with main's code; returns once it catches signals."""
    sys.stdout.flush()
    ready = os.pipe()
    process = os.fork()
    if process:
        os.read(ready[0], 1)
        os.close(ready[0])
        os.close(ready[1])
        return process
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        # tqdm's own lock is shared with the parent, which would wait for a child killed inside it.
        tqdm.set_lock(threading.RLock())
        catch_signals()
        os.write(ready[1], b"x")
        os._exit(main([str(argument) for argument in arguments]))
    finally:
        os._exit(99)


def exit_code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture
def exported(tmp_path, out, tensors):
    """A folder and the file that it gives."""
    folder = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors)
    assert main([str(folder), "-o", str(out), "--name", "x"]) == 0
    return folder, out.read_bytes()


@pytest.mark.parametrize("old", [None, b"the old file"])
def test_a_write_that_fails(tmp_path, out, exported, old):
    """A full disk, as a limit on the file's size: nothing new, and the old file stays."""
    folder, whole = exported
    out.unlink()
    if old:
        out.write_bytes(old)
    for limit in (0, 1, 4096, len(whole) // 2, len(whole) - 1):
        assert exit_code(child([folder, "-o", out, "--name", "x"], limit)) == 2
        assert [path.name for path in out.parent.iterdir()] == ([out.name] if old else [])
        assert old is None or out.read_bytes() == old
    assert exit_code(child([folder, "-o", out, "--name", "x"], len(whole))) == 0
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("number", "codes"),
    [(signal.SIGKILL, {-9}), (signal.SIGTERM, {130}), (signal.SIGINT, {130})],
)
def test_signals_at_any_moment(tmp_path, out, exported, number, codes):
    """50 of each: the target is absent or complete. But for SIGKILL no temporary file stays."""
    folder, whole = exported
    arguments = [folder, "-o", out, "--name", "x"]
    started = time.monotonic()
    assert exit_code(child(arguments)) == 0
    duration = time.monotonic() - started
    choose, interrupted = random.Random(5), 0
    for _ in range(50):
        out.unlink(missing_ok=True)
        process = child(arguments)
        time.sleep(choose.uniform(0, 1.1 * duration))
        os.kill(process, number)
        code = exit_code(process)
        assert code in {0, *codes}
        interrupted += code != 0
        if out.exists():
            assert out.read_bytes() == whole
        else:
            assert code != 0
        left = [path for path in out.parent.iterdir() if path != out]
        assert number == signal.SIGKILL or left == []
        for path in left:
            path.unlink()
    print(f"{interrupted} of 50 interrupted")


def test_the_order_on_the_disk(tmp_path, out, tensors, monkeypatch):
    """The file's bytes are on the disk before it gets its name, the name before the end."""
    folder = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors)
    steps = []

    def fsync(descriptor):
        steps.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")

    replace = Path.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", lambda *args: (steps.append("rename"), replace(*args)))
    assert main([str(folder), "-o", str(out)]) == 0
    assert steps == ["sync file", "rename", "sync folder"]


def test_the_file_is_as_readable_as_any(exported, out):
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~umask
