"""Forked jobs from a script, a thread and a child of multiprocessing: `fork_matrix.py CALLER OUTCOME ...`; outcome "killed" ends this program.

After each outcome the caller looks for what the job has left in it. What is left outside, the test looks for.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path

from muster.elastic import LaunchFailed, launch

LIMIT_S = 120
SHARED = os.environ.get("MATRIX_SHARED", "muster_matrix")


def start(function, **options):
    return launch(function, nproc=2, start_method="fork", log_dir="/dev/null", wait=False, **options)


def succeed(_ready):
    def work():
        block = shared_memory.SharedMemory(create=True, size=64)
        block.close()
        block.unlink()
        return os.environ["RANK"]

    with start(work) as job:
        assert dict(job.wait(LIMIT_S)) == {0: "0", 1: "1"}


def fail(_ready):
    def work():
        raise KeyError("the text")

    with start(work) as job:
        try:
            job.wait(LIMIT_S)
        except LaunchFailed as error:
            assert isinstance(error.__cause__, KeyError), error
        else:
            raise AssertionError("the job succeeded")


def crash(_ready):
    def work():
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0 and os.environ["RANK"] == "1":
            shared_memory.SharedMemory(SHARED, create=True, size=64)  # left behind: the caller's tracker removes it
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt

    with start(work, max_restarts=1) as job:
        assert dict(job.wait(LIMIT_S)) == {0: 1, 1: 1}


def interrupt(ready, *, shares=False):
    """The signal comes to the main thread; wherever the job was started, the block around it stops the job."""

    def work():
        if shares and os.environ["RANK"] == "1":
            shared_memory.SharedMemory(SHARED, create=True, size=64)  # the caller's tracker outlives both
        child = os.fork()
        if child == 0:
            os.setsid()
        else:
            os.write(ready, b"!")
        time.sleep(600)

    with contextlib.suppress(KeyboardInterrupt), start(work) as job:
        job.wait(LIMIT_S)


def be_killed(ready):
    interrupt(ready, shares=True)


OUTCOMES = {"success": succeed, "exception": fail, "crash": crash, "interrupt": interrupt, "killed": be_killed}


def signal_when_ready(fd, signum, done):
    """Signal this process when both workers are ready."""
    for _ in range(2):
        os.read(fd, 1)
    os.kill(os.getpid(), signum)
    done.set()


def list_own():
    """This process's children, descriptors and temporary files."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = set(file.read().split())
    fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_open(fd)}
    files = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("muster")}
    return children, {(fd, name) for fd, name in fds.items() if "muster" in name or "pidfd" in name}, files


def fd_is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def run(names):
    """Each outcome; the caller's own child, handler and file stay as they are."""
    own_handler = lambda *_: None  # noqa: E731
    is_main = threading.current_thread() is threading.main_thread()
    old = signal.signal(signal.SIGUSR1, own_handler) if is_main else None
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, start_new_session=True)  # ends with its input
    shared_memory.SharedMemory  # noqa: B018  # its tracker is the caller's: started by the first job, and stays
    with tempfile.TemporaryFile() as file:
        file.write(b"the caller's")
        file.flush()
        for name in names:
            check(name, file)
        assert child.poll() is None
    if is_main:
        assert signal.signal(signal.SIGUSR1, old) is own_handler
    child.stdin.close()
    assert child.wait() == 0


def check(name, file):
    read, write = os.pipe()
    before = list_own()
    done = threading.Event()
    if name in ("interrupt", "killed"):
        signum = signal.SIGKILL if name == "killed" else signal.SIGINT
        threading.Thread(target=signal_when_ready, args=(read, signum, done), daemon=True).start()
    else:
        done.set()
    OUTCOMES[name](write)
    done.wait()
    after = list_own()
    new = [sorted(now - then) for now, then in zip(after, before, strict=True)]
    new[0] = [pid for pid in new[0] if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert not any(new), f"{name} left {new}"
    assert os.pread(file.fileno(), 100, 0) == b"the caller's"
    os.close(read)
    os.close(write)
    print(f"{name} ok", flush=True)


def script(names):
    run(names)


def thread(names):
    """From a pool's thread; the main thread is where signals arrive."""
    with ThreadPoolExecutor(1) as pool:
        for name in names:
            run_in(pool, name)


def run_in(pool, name):
    if name != "interrupt":
        pool.submit(run, [name]).result()
        return
    # In a program that has no other idea of its own, an interrupt in the main thread stops the job through its handle.
    read, write = os.pipe()
    handles = []

    def work():
        os.write(write, b"!")
        time.sleep(600)

    def wait():
        handles.append(start(work))
        with contextlib.suppress(LaunchFailed):
            handles[0].wait(LIMIT_S)

    future = pool.submit(wait)
    threading.Thread(target=signal_when_ready, args=(read, signal.SIGINT, threading.Event()), daemon=True).start()
    try:
        future.result()
    except KeyboardInterrupt:
        handles[0].stop()
    future.result()
    print(f"{name} ok", flush=True)


def child(names):
    """From a child that multiprocessing forked, a daemon."""
    process = multiprocessing.get_context("fork").Process(target=run, args=(names,), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if names == ["killed"] else 0), process.exitcode


CALLERS = {"script": script, "thread": thread, "child": child}

if __name__ == "__main__":
    CALLERS[sys.argv[1]](sys.argv[2:])
