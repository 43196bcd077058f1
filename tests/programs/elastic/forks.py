"""Starts functions as forks of this program: `forks.py SCENARIO`. Without torch."""

import atexit
import multiprocessing
import os
import signal
import socket
import sqlite3
import stat
import sys
import tempfile
import threading
import warnings


from muster import worker
from muster.agent.errors import SpawnError
from muster.agent.workers import stall_watch
from muster.elastic import LaunchFailed, launch

PID = os.getpid()


def rank():
    return int(os.environ["RANK"])


def attempt():
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def fork(function, *args, **options):
    return launch(function, args, nproc=2, start_method="fork", **options)


def closures():
    lock, queue = threading.Lock(), multiprocessing.get_context("fork").SimpleQueue()
    large = bytearray(1 << 20)
    with tempfile.TemporaryFile() as file, lock:
        file.write(b"the caller's file")
        file.flush()

        def work(word):
            queue.put((rank(), word))
            return rank(), len(large), lock.locked(), os.pread(file.fileno(), 100, 0).decode()

        print(dict(fork(work, "sent")))
        print(sorted([queue.get(), queue.get()]))
    print(dict(fork(lambda: rank())), dict(launch(lambda *, a: a, (), {"a": 1}, start_method="fork")))


def restart():
    before = [1, 2]

    def work():
        before.append(rank())
        if attempt() == 0 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return before, attempt()

    print(dict(fork(work, max_restarts=1)), before)


def ends():
    """What the program has registered runs in the program, and what a worker has registered runs there."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(lambda: print(f"the program's exit handler {os.getpid() == PID}"))
    sys.stdout.write("written before, ")

    def work(how):
        atexit.register(lambda: os.write(1, b"a worker's exit handler\n"))
        own = tempfile.TemporaryDirectory()
        work.own = own
        threading.Thread(target=lambda: open(f"{own.name}/file", "w").close()).start()
        if how == "raises":
            raise ValueError("the text")
        if how == "exits":
            sys.exit("the reason")
        return own.name

    try:
        for name in fork(work, "returns").values():
            print("own folder is there:", os.path.exists(name))
        for how in ("raises", "exits"):
            try:
                fork(work, how)
            except LaunchFailed as error:
                print(type(error.__cause__).__name__, error.__cause__, "in work" in str(error.__cause__.__cause__))
    finally:
        print("finally", os.getpid() == PID, os.path.exists(folder.name))


def callers_own():
    """Handlers, children and threads of the program stay as they were, and are not the workers'."""
    signal.signal(signal.SIGTERM, lambda *_: print("the program's handler"))
    child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    child.start()

    def work():
        handler = signal.getsignal(signal.SIGTERM)
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        return multiprocessing.active_children(), handler == signal.SIG_DFL, process.exitcode, len(threading.enumerate())

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        print(fork(work)[0])
    stop.set()
    thread.join()
    print(child.is_alive(), os.waitpid(-1, os.WNOHANG), callable(signal.getsignal(signal.SIGTERM)))
    child.kill()
    child.join()


def steps():
    """The program is no worker; its forks are."""
    worker.step(1)

    def work():
        worker.step(1, total=2)
        return worker.is_managed(), worker._state.slot is not None

    print(worker.is_managed(), dict(fork(work)))


def usual():
    """A tracer, threads' sockets, a database and files are no hazard: workers have them, and so has the program."""
    seen = []
    calls = lambda frame, *_: seen.append(frame.f_code.co_name)  # noqa: E731
    listener = socket.create_server(("127.0.0.1", 0))  # such as a debugger's
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/file", "w+b") as file:
        database = sqlite3.connect(f"{folder}/database")
        database.execute("create table t (x)")
        database.execute("insert into t values (7)")
        database.commit()
        file.write(b"the text")
        file.flush()

        def work():
            fds = [one.fileno() for one in (listener, client, server)]
            are_sockets = all(stat.S_ISSOCK(os.fstat(fd).st_mode) for fd in fds)
            return are_sockets, os.pread(file.fileno(), 9, 0), database.execute("select x from t").fetchall()

        if hasattr(sys, "monitoring"):
            sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "a tracer")
            sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.PY_START, lambda *_: None)
            sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.PY_START)
        sys.settrace(calls)
        sys.setprofile(calls)
        found = dict(fork(work))
        kept = sys.gettrace() is calls and sys.getprofile() is calls
        sys.settrace(None)
        sys.setprofile(None)
        print(found, "work" in seen, kept)
        client.sendall(b"still the program's")
        print(server.recv(100).decode(), database.execute("select x from t").fetchall(), file.tell())
        database.close()
    for one in (listener, client, server):
        one.close()


def debugged():
    """A debugger listens, and has replaced what starts processes: workers connect to it, guard and agent must not."""
    import debugpy

    debugpy.listen(("127.0.0.1", 0))
    print(dict(fork(lambda: (rank(), sys.gettrace() is not None))))
    print(dict(fork(attempt)))
    print(len(set(launch(os.getpid, nproc=2).values())), "processes")


def blocked_handler():
    """A fork of a fork waits for ever: nothing releases the lock in the child."""
    stall_watch.LOOK_S, stall_watch.ANSWER_LIMIT_S = 0.1, 1.0
    lock = threading.Lock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release)
    try:
        fork(rank)
    except SpawnError as error:
        print(error)


def image_lost():
    """Its end is the end of what can be started, and says so."""

    def work():
        if rank() == 0:
            os.kill(os.getsid(os.getppid()) if os.getppid() != 1 else 1, 0)
            children = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
            image = next(pid for pid in children if b"muster-image" in open(f"/proc/{pid}/cmdline", "rb").read())
            os.kill(int(image), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    try:
        fork(work, max_restarts=1)
    except LaunchFailed as error:
        print(error)


if __name__ == "__main__":
    for scenario in sys.argv[1].split(","):
        globals()[scenario]()
