"""The same calls of torch's API and of muster's: `beside_torch.py torch|muster PORT` prints what comes of them."""

import json
import logging
import os
import sys
import time

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

if sys.argv[1] == "torch" or __name__ != "__main__":
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import start_processes
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
else:
    from muster.elastic import LaunchConfig, LocalElasticAgent, WorkerSpec, elastic_launch, start_processes

PORT = int(sys.argv[2]) if __name__ == "__main__" else 0
NOT_ALWAYS = ("_monitor_workers", "_assign_worker_ranks", ".healthy")
"""Metrics that only torch has, and what its agent sees only if it looks in time."""


def worker(*args):
    names = ("MASTER_ADDR", "MASTER_PORT")
    return (*args, *(os.environ[name] for name in names))


def fail(text):
    if os.environ["RANK"] == "1":
        raise ValueError(text)
    time.sleep(600)


class Metrics(metrics.MetricHandler):
    def __init__(self):
        self.names = set()

    def emit(self, data):
        if data.group_name == "torchelastic" and not any(each in data.name for each in NOT_ALWAYS):
            self.names.add(data.name if ".duration." in data.name else f"{data.name}={data.value}")


class Events(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        event = json.loads(record.getMessage())
        if not event["name"].endswith("ASSIGN_WORKER_RANKS"):
            self.found.append(event)


HEARD = Metrics(), Events()


def show():
    print(*sorted(HEARD[0].names), sep="\n")
    for event in HEARD[1].found:
        about = event["metadata"]
        details = json.loads(about["metadata"])
        details.pop("worker_pid", None)
        is_timed = isinstance(about["duration_ms"], float)
        shown = [about[name] for name in ("run_id", "global_rank", "group_rank", "role", "rdzv_backend", "agent_restarts")]
        print(event["source"], event["name"], *shown, about["worker_id"] is not None, is_timed, details, sorted(about) == KEYS)


KEYS = sorted(
    "run_id global_rank group_rank worker_id role hostname state total_run_time rdzv_backend raw_error metadata "
    "agent_restarts duration_ms".split()
)


def make_spec(entrypoint, args, **fields):
    parameters = RendezvousParameters("static", f"127.0.0.1:{PORT}", "job", 1, 1, rank=0)
    handler = get_rendezvous_handler(parameters)
    return WorkerSpec("trainer", 2, handler, entrypoint=entrypoint, args=args, event_log_handler="mine", **fields)


def run(spec):
    return LocalElasticAgent(spec, DefaultLogsSpecs(), "fork").run()  # no worker imports torch: it takes long


def scenario_success():
    agent = LocalElasticAgent(make_spec(worker, ("${local_rank}", "$$", 3)), DefaultLogsSpecs())
    result = agent.run()
    print(result.return_values == {rank: (str(rank), "$", 3, "127.0.0.1", str(PORT)) for rank in (0, 1)})
    print(agent.get_worker_group().workers)
    print(sorted(agent.get_event_succeeded().metadata) == KEYS)
    show()


def scenario_failure():
    config = LaunchConfig(1, 1, 2, run_id="job", rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{PORT}", rdzv_configs={"rank": 0}, start_method="fork", max_restarts=1, event_log_handler="mine")
    try:
        elastic_launch(config, fail)("the text")
    except ChildFailedError as error:
        print(sorted(error.failures))
    show()


def scenario_master():
    """Overrides of what the handler says; nothing listens there, and no worker connects."""
    spec = make_spec(worker, ("${local_rank}",), master_addr="127.0.0.2", master_port=1234)
    print(sorted(run(spec).return_values.items()))
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{PORT + 1}", "job", 1, 1)
    spec = WorkerSpec("trainer", 1, get_rendezvous_handler(parameters), entrypoint=worker, master_addr="127.0.0.2", master_port=1234)
    print(run(spec).return_values)


def scenario_missing():
    for program in ("/does/not/exist", "does-not-exist", __file__):
        try:
            start_processes("trainer", program, {0: ()}, {0: {}}, DefaultLogsSpecs())
        except OSError as error:
            print(type(error).__name__, error.errno)


def create_server(alive_callback, port, timeout):
    print("health check", abs(alive_callback() - time.time()) < 5, port, timeout)
    return Server()


class Server:
    def start(self):
        print("starts")

    def stop(self):
        print("stops")


def scenario_health():
    """A server in the place of torch's, which opens no port."""
    from torch.distributed.elastic.agent.server import local_elastic_agent

    os.environ["TORCHELASTIC_HEALTH_CHECK_PORT"] = "1234"
    local_elastic_agent.create_healthcheck_server = create_server
    run(make_spec(worker, ()))
    os.environ["TORCHELASTIC_HEALTH_CHECK_PORT"] = "no number"
    run(make_spec(worker, ()))


if __name__ == "__main__":
    metrics.configure(HEARD[0])
    events.handlers._log_handlers["mine"] = HEARD[1]
    for scenario in (scenario_success, scenario_failure, scenario_master, scenario_missing, scenario_health):
        print(f"-- {scenario.__name__}")
        HEARD[0].names.clear()
        HEARD[1].found.clear()
        scenario()
