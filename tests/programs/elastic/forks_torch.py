"""torch's own names with start_method="fork": `forks_torch.py SCENARIO`."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

from muster.elastic import ChildFailedError, LaunchConfig, LocalElasticAgent, WorkerSpec, elastic_launch, start_processes


def config(**changed):
    values = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "start_method": "fork", "rdzv_endpoint": "localhost:0"}
    return LaunchConfig(**{"max_restarts": 0, **values, **changed})


def read_optimizer_steps():
    path, _, slot = os.environ["MUSTER_STATUS_PAGE"].rsplit(":", 2)
    with open(path, "rb") as file:
        file.seek(4096 * (int(slot) + 1) + 8 * 6)
        return int.from_bytes(file.read(8), sys.byteorder)


def everything():
    """After the thread pool of this process was used: workers use theirs all the same."""
    matrix = torch.ones(600, 600)
    (matrix @ matrix).sum()
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp().sum()

    def work(factor):
        dist.init_process_group("gloo")
        total = (matrix @ matrix).sum() * factor
        dist.all_reduce(total)
        torch.ones(1 << 20).exp().sum()
        dist.destroy_process_group()
        return total.item()

    print(elastic_launch(config(), work)(2))
    spec = WorkerSpec(role="r", local_world_size=2, entrypoint=lambda: int(os.environ["RANK"]), args=(), max_restarts=0)
    print(LocalElasticAgent(spec, DefaultLogsSpecs(), start_method="fork").run().return_values)
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(
            "name",
            lambda value: (value, os.environ["MARK"]),
            {0: (1,), 1: (2,)},
            {0: {"MARK": "a"}, 1: {"MARK": "b"}},
            DefaultLogsSpecs(log_dir=folder),
            start_method="fork",
        )
        print(context.wait().return_values)

    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail():
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            sgd.step()
        raise ValueError(f"the page has {read_optimizer_steps()} steps by optimizer")

    try:
        elastic_launch(config(), fail)()
    except ChildFailedError as error:
        print(type(error.__cause__).__name__, error.__cause__)


def backend():
    """The agent, which starts without installed packages, imports torch for it."""
    print(elastic_launch(config(rdzv_backend="c10d-torch"), lambda: int(os.environ["RANK"]))())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
