"""accelerate's `notebook_launcher`, as a notebook's cell would call it, with muster in place of torch's launcher."""

import socket

import torch.distributed.launcher.api
from accelerate import Accelerator, notebook_launcher

from muster.elastic import LaunchConfig, elastic_launch

torch.distributed.launcher.api.LaunchConfig = LaunchConfig
torch.distributed.launcher.api.elastic_launch = elastic_launch

scale = torch.tensor(10.0)


def find_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def main():
    def train(factor):  # a closure: only fork can start it
        accelerator = Accelerator(cpu=True)
        value = accelerator.reduce(scale * factor * (accelerator.process_index + 1))
        accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type.value}, {value.item()}")
        if factor == 0:
            raise ValueError("the text")
        accelerator.end_training()

    notebook_launcher(train, args=(2,), num_processes=2, use_port=find_port())
    try:
        notebook_launcher(train, args=(0,), num_processes=2, use_port=find_port())
    except torch.distributed.elastic.multiprocessing.errors.ChildFailedError as error:
        print(type(error.__cause__).__name__, error.__cause__)


if __name__ == "__main__":
    main()
