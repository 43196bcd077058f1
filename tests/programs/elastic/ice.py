"""ice-learn's calls, with only the import changed: `ice.py SCENARIO`."""

import os
import socket
import sys
import tempfile
import threading
import time

try:
    import multiprocess as mp  # ice-learn's: dill's copy of multiprocessing
except ImportError:
    import multiprocessing as mp

import muster.elastic
from muster.elastic import launcher

if __name__ == "__main__":  # workers need none of it: torch's own classes import torch, which takes them a second
    # as written: from ice.llutil.launcher.elastic_multiprocessing import start_processes, SignalException, Std
    # and from ice.llutil.launcher.local_elastic_agent import LocalElasticAgent
    from muster.elastic import LocalElasticAgent, SignalException, Std, WorkerSpec, start_processes

    launcher._PRELOADED = ()


class Events:
    """As ice.llutil.launcher.events.Events."""

    def __init__(self, start_method):
        context = mp.get_context(start_method)
        self.debugger_start, self.debugger_end = context.Event(), context.Event()
        self.pause, self.paused, self.resume = context.Event(), context.Event(), context.Event()
        self.stop_all_tasks = context.Event()
        self.trigger_save_checkpoint, self.finished_save_checkpoint = context.Event(), context.Event()
        self.progress_bar_iter, self.progress_bar_total = context.Value("i", -1), context.Value("i", -1)


def trainer(bar):
    for step in range(1, 6):
        sys.stderr.write(f"\r{step * 20:3}%|{'#' * step}")
        sys.stderr.flush()
        sys.stdout.write(f"step {step} of {bar}\n")
        sys.stdout.flush()
        time.sleep(0.15)
    sys.stderr.write("\n")
    return bar


def train(events, steps):
    """The loop of ice-learn's tasks: `_Task._iterate` and `_process_events` of ice.core.hypergraph."""
    rank = int(os.environ["LOCAL_RANK"])
    if rank == 0:
        events.progress_bar_total.value = steps
    for step in range(1, steps + 1):
        if rank == 0:
            events.progress_bar_iter.value = step
        if step % 5 == 0:
            sys.stdout.write(f"step {step} of {rank}\n")
            sys.stdout.flush()
        if events.pause.is_set():
            events.paused.set()
            events.resume.wait()
            events.paused.clear()
        if events.trigger_save_checkpoint.is_set():
            sys.stdout.write(f"saved by {rank} at step {step}\n")
            sys.stdout.flush()
            time.sleep(0.3)
            if rank == 0:
                events.finished_save_checkpoint.set()
            else:
                events.finished_save_checkpoint.wait()
        if events.stop_all_tasks.is_set():
            return "stopped"
        time.sleep(0.1)
    return "done"


def scenario_bars():
    """Two workers with bars on stderr and lines on stdout."""
    context = start_processes("trainer", trainer, {0: ("a",), 1: ("b",)}, {0: {}, 1: {}}, tempfile.mkdtemp(), "spawn", Std.NONE, Std.ALL)
    values = context.wait().return_values
    print(values)


def scenario_progbar_events():
    """The caller draws a bar of its own, as ice-learn's agent does."""
    progbar_events = {"trigger_clear": threading.Event(), "cleared": threading.Event()}
    context = start_processes(
        "trainer", trainer, {0: ("a",), 1: ("b",)}, {0: {}, 1: {}}, tempfile.mkdtemp(), "spawn", Std.ERR, Std.OUT, progbar_events
    )
    turns, cleared = 0, 0
    while (result := context.wait(0.01)) is None:
        progbar_events["cleared"].clear()
        if progbar_events["trigger_clear"].is_set():
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()
            cleared += 1
            progbar_events["cleared"].set()
            while progbar_events["trigger_clear"].is_set():
                time.sleep(0.001)
        turns += 1
        sys.stdout.write(f"\rturn {turns}")
        sys.stdout.flush()
        progbar_events["cleared"].clear()
    print("\r\x1b[K", cleared > 0, result.return_values, sep="")


def scenario_agent(steps, whose="ice-learn", node="0", nodes="1", port="0"):
    """As ice-learn's launch_agent, with a handler of torch's registry."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    if port == "0":
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    parameters = RendezvousParameters("static", f"127.0.0.1:{port}", "none", int(nodes), int(nodes), rank=int(node), timeout=900)
    events = Events("spawn") if whose == "ice-learn" else muster.elastic.Events("spawn")
    spec = WorkerSpec(
        role="trainer", local_world_size=2, entrypoint=train, args=(events, int(steps)),
        rdzv_handler=registry.get_rendezvous_handler(parameters), max_restarts=0, monitor_interval=1,
        redirects=Std.NONE, tee=Std.ALL, master_addr="127.0.0.1", master_port=int(port),
    )
    try:
        print(LocalElasticAgent(spec=spec, start_method="spawn", log_dir=tempfile.mkdtemp(), events=events).run().return_values)
    except SignalException as error:
        print("signal", error.sigval.name)
    finally:
        spec.rdzv_handler.shutdown()


if __name__ == "__main__":
    globals()[f"scenario_{sys.argv[1]}"](*sys.argv[2:])
