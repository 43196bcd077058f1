"""Starts functions as workers: `calls.py SCENARIO,... [ARGUMENT]`. Without torch."""

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import shared_memory

from muster.agent.errors import EnvironmentFault
from muster.elastic import AgentLost, LaunchFailed, PickleFault, launch


if "CALLS_HELD" in os.environ:
    launch = functools.partial(launch, held=os.environ["CALLS_HELD"] or True)


class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right


def rank():
    return int(os.environ["RANK"])


def add(pair, *, scale=1):
    return Pair((pair.left + pair.right) * scale, rank())


def fail(text):
    if rank() == 1:
        raise ValueError(text)
    time.sleep(60)


def fail_first(path):
    with open(f"{path}.{rank()}", "a") as file:
        file.write("started\n")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and rank() == 1:
        time.sleep(0.3)  # rank 0 has returned by then
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt


def leave():
    if rank() == 0:
        sys.exit(0)
    return "stayed"


def return_lock():
    return threading.Lock()


def idle():
    os.write(1, b"idle %d\n" % rank())  # in one write: both workers and the caller share the pipe
    time.sleep(600)


def nothing():
    pass


def use_all(queue, lock, event, barrier, value, pipe, name):
    memory = shared_memory.SharedMemory(name)
    barrier.wait()
    with lock:
        memory.buf[0] += 1
        value.value += 10
    memory.close()
    event.wait()
    queue.put(rank())
    if rank() == 0:
        pipe.send("from rank 0")


def scenario_results():
    results = launch(add, (Pair(1, 2),), {"scale": 10}, nproc=2)
    print({rank: (type(pair).__name__, pair.left, pair.right) for rank, pair in results.items()}, results.attempt)
    print(dict(launch(lambda x: (x, __name__), (3,), nproc=2)))
    print(dict(launch(leave, nproc=2)))


def scenario_objects():
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue, event, value = context.Queue(), context.Event(), context.Value("i", 0)
        ours, theirs = context.Pipe()
        memory = shared_memory.SharedMemory(create=True, size=16)
        args = (queue, context.Lock(), event, context.Barrier(2), value, theirs, memory.name)
        with launch(use_all, args, nproc=2, start_method=method, wait=False) as job:
            event.set()
            found = sorted(queue.get(timeout=60) for _ in range(2))
            print(method, found, ours.recv(), dict(job.wait()), value.value, memory.buf[0])
        memory.close()
        memory.unlink()


def scenario_failure():
    try:
        launch(fail, ("the text",), nproc=2)
    except LaunchFailed as error:
        print(type(error.__cause__).__name__, error.__cause__, "in fail" in str(error.__cause__.__cause__))
        print([(failure.global_rank, failure.exit_code) for failure in error.failures if not failure.collateral])


class Deadly:
    """Kills the process that pickles it, half-way, but for that of the second attempt."""

    def __init__(self, attempt):
        self.attempt = attempt
        self.before = bytes(4 << 20)

    def __getstate__(self):
        if self.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"attempt": self.attempt}


def return_deadly():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    return [bytes(4 << 20), Deadly(attempt if rank() == 1 else 1)]


def scenario_sending():
    results = launch(return_deadly, nproc=2, max_restarts=1)
    print({rank: value[1].attempt for rank, value in results.items()}, results.attempt)
    try:
        launch(return_deadly, nproc=2)
    except LaunchFailed as error:
        print([(failure.global_rank, failure.signal) for failure in error.failures if not failure.collateral])


def scenario_restart(path):
    results = launch(fail_first, (path,), nproc=2, max_restarts=1)
    print(dict(results), results.attempt)


def scenario_unpicklable():
    for call in (lambda: launch(add, (threading.Lock(),)), lambda: launch(add, (), {"scale": threading.Lock()})):
        try:
            call()
        except PickleFault as error:
            print(error)
    try:
        launch(return_lock)
    except LaunchFailed as error:
        print(error.__cause__)


def scenario_where():
    """A thread, a multiprocessing child, and a caller with children and handlers of its own."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    child = os.fork()
    if child == 0:
        time.sleep(600)
    found = []
    thread = threading.Thread(target=lambda: found.append(dict(launch(rank, nproc=2))))
    thread.start()
    thread.join()
    print("thread", found)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("child", pool.apply(launch_in_child))
    job = []
    starter = threading.Thread(target=lambda: job.append(launch(short, nproc=2, wait=False)))
    starter.start()
    starter.join()
    print("thread that ends", dict(job[0].wait()))
    print(handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)])
    with launch(idle, nproc=2, wait=False) as running:
        os.kill(child, signal.SIGKILL)
        print("own child only", os.waitpid(-1, 0)[0] == child, os.waitpid(-1, os.WNOHANG))
        running.kill()
    print("no other", os.waitpid(-1, os.WNOHANG))  # only the resource tracker of multiprocessing


def launch_in_child():
    return dict(launch(rank, nproc=2))


def short():
    time.sleep(0.5)
    return rank()


def scenario_idle():
    job = launch(idle, nproc=2, wait=False, on_event=print_pids)
    try:
        job.wait()
    except (AgentLost, LaunchFailed) as error:
        print(type(error).__name__, error)


def print_pids(event):
    if event.what == "agent_started":
        print(f"agent {event.detail['pid']}\n", end="", flush=True)
    if event.what == "worker_released":
        print(f"worker {event.detail['pid']}\n", end="", flush=True)


def scenario_stop():
    job = launch(idle, nproc=2, wait=False)
    while job.state.phase != "running":
        time.sleep(0.02)
    print(job.state.phase, job.state.ranks, len(job.state.pids), job.state.attempt)
    try:
        job.wait(0.1)
    except TimeoutError as error:
        print(error)
    job.stop()
    try:
        job.wait()
    except LaunchFailed as error:
        print(error, error.failures)
    print(job.state.phase)


def scenario_large(mebibytes):
    pids, peaks = [], []

    def read_peak(event):
        if event.what == "agent_started":
            pids.append(event.detail["pid"])
        if pids:
            with suppress(OSError, StopIteration), open(f"/proc/{pids[0]}/status") as file:  # it may have ended
                peaks.append(next(int(line.split()[1]) for line in file if line.startswith("VmHWM")))

    results = launch(make_large, (int(mebibytes),), on_event=read_peak)
    print(len(results[0]) >> 20, "MiB; the agent took less than 35 MB:", peaks[-1] < 35_000)


def make_large(mebibytes):
    return bytes(mebibytes << 20)


def scenario_many_descriptors():
    """More than `select` takes, and after a job that cannot be started as many as before."""
    import io
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    for method in ("spawn", "fork"):
        print(dict(launch(rank, start_method=method)))
    before, own = len(os.listdir("/proc/self/fd")), (sys.stdout, sys.executable)
    for _ in range(3):
        sys.stdout = io.StringIO()  # the job's output goes through a pipe
        multiprocessing.set_executable("/does/not/exist")
        try:
            launch(rank)
        except EnvironmentFault as error:
            line = str(error)
        finally:
            sys.stdout = own[0]
            multiprocessing.set_executable(own[1])
    print(len(os.listdir("/proc/self/fd")) - before, line, len(kept))


def scenario_loop(count):
    launch(nothing)  # starts the resource tracker
    before = census()
    for _ in range(int(count)):
        launch(nothing)
    after = census()
    names = {*after[-1]} - {*before[-1]}
    for _ in range(300):  # other programs of this machine have shared memory, too, but only for a while
        if not names:
            break
        time.sleep(0.2)
        names &= {*census()[-1]}
    print(f"left: {before}, {after}, {names}" if after[:-1] != before[:-1] or names else "nothing left")


def census():
    import tempfile

    own = os.getpid()
    children = sum(os.path.exists(f"/proc/{p}/stat") and f" {own} " in open(f"/proc/{p}/stat").read() for p in os.listdir("/proc") if p.isdigit() and p != str(own))
    names = sorted(os.listdir(tempfile.gettempdir())) + sorted(os.listdir("/dev/shm"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), children, names


if __name__ == "__main__":
    for scenario in sys.argv[1].split(","):
        call = globals()[f"scenario_{scenario}"]
        call(*sys.argv[2 : 2 + call.__code__.co_argcount])
