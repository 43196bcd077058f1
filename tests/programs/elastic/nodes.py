"""One job of two nodes, started from two programs: `nodes.py SCENARIO PORT` starts `nodes.py SCENARIO PORT NODE` twice.

Prints what each wrote: node 0's lines, then node 1's.
"""

import os
import signal
import subprocess
import sys
import time

from muster.elastic import LaunchFailed, launch

SCENARIO, PORT, *REST = sys.argv[1:]
NODE = int(REST[0]) if REST else None


def place():
    return tuple(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"))


def large():
    return bytes(int(os.environ["RANK"])) * (8 << 20)


def crash_once():
    if place()[0] == 3 and place()[3] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return place()


def fail():
    if place()[0] == 3:
        raise ValueError("the text")
    time.sleep(600)


def wait_for_file(path):
    os.write(1, b"running %d\n" % place()[0])  # in one write: both workers share the pipe
    while not os.path.exists(path):
        time.sleep(0.05)
    return place()


def start(function, args=(), **settings):
    named = {"endpoint": f"127.0.0.1:{PORT}", "node_rank": NODE, "run_id": "job", **settings}
    return launch(function, args, nproc=2, nodes=named.pop("nodes", 2), **named)


def node_results():
    print(dict(start(place)))
    print(dict(start(place, all_results=True)))
    print({rank: len(value) >> 20 for rank, value in start(large, all_results=True).items()})


def node_forks():
    """Closures: each program is the template of its own node's workers, also after a restart of all."""
    rows = [NODE] * 3

    def work():
        rows.append(place()[0])
        crash_once()
        return rows

    results = start(work, start_method="fork", max_restarts=1, all_results=True)
    print(dict(results), results.attempt, rows == [NODE] * 3)


def node_fail():
    try:
        start(fail)
    except LaunchFailed as error:
        print(type(error.__cause__).__name__, [(each.global_rank, each.exit_code) for each in error.failures if not each.collateral])


def node_lost():
    """Node 1's program is killed. The job goes on with node 0."""
    print(dict(start(wait_for_file, ("go",), nodes="1:2", flags=["--rdzv-conf=last_call_timeout=60"])))


def node_alone():
    """The others never come; no process listens at the endpoint."""
    for rank in (0, 1):
        try:
            start(place, node_rank=rank, flags=["--rdzv-conf=join_timeout=2"])
        except LaunchFailed as error:
            print(error)


def config(**settings):
    from muster.elastic import DefaultLogsSpecs, LaunchConfig

    named = {"max_restarts": 1, "rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{PORT}", "run_id": "job", **settings}
    return LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=2, logs_specs=DefaultLogsSpecs(), **named)


def node_elastic_launch():
    from muster.elastic import ChildFailedError, elastic_launch

    print(elastic_launch(config(), crash_once)())
    try:
        elastic_launch(config(max_restarts=0), fail)()
    except ChildFailedError as error:
        print(error.get_first_failure()[0], type(error.__cause__).__name__)
    from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

    if NODE == 1:
        try:
            elastic_launch(config(rdzv_configs={"join_timeout": 2, "is_host": "false"}, rdzv_endpoint="127.0.0.1:1"), place)()
        except RendezvousTimeoutError as error:
            print(error)


def run_both():
    """Start both programs; in some scenarios do something to node 1's when all workers run."""
    def open_node(node):
        return subprocess.Popen([sys.executable, __file__, SCENARIO, PORT, str(node)], stdout=subprocess.PIPE, text=True)

    nodes = [open_node(0), open_node(1)]
    if SCENARIO == "lost":
        for node in nodes:
            print(sorted(node.stdout.readline() for _ in range(2)))
        nodes[1].kill()
        nodes[1].wait()
        print(sorted(nodes[0].stdout.readline() for _ in range(2)))
        open("go", "w").close()
    for node in nodes:
        print(node.communicate()[0], end="")


if __name__ == "__main__":
    run_both() if NODE is None else globals()[f"node_{SCENARIO}"]()
