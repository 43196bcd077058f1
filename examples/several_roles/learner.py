"""Learns a line from samples that actors send: two ranks with DDP, of which rank 0 listens.

`rollouts.py` submits it. When a rank is killed, muster restarts both, and the actors connect again.
"""

import json
import os
import queue
import socket
import sys
import threading

import torch
import torch.distributed as dist

from muster import worker

BATCH = 32


def main(steps: int) -> None:
    """Learn for so many steps."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    samples: queue.Queue[tuple[float, float]] = queue.Queue(maxsize=16 * BATCH)
    if rank == 0:
        threading.Thread(target=serve, args=(int(os.environ["LEARNER_PORT"]), samples), daemon=True).start()
    print(f"rank {rank} is process {os.getpid()}", flush=True)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        batch = torch.tensor([samples.get() for _ in range(BATCH)]) if rank == 0 else torch.zeros(BATCH, 2)
        dist.broadcast(batch, 0)
        mine = batch[rank::world]
        loss = (model(mine[:, :1]) - mine[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.step(step, total=steps, loss=loss.item())
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def serve(port: int, samples: "queue.Queue[tuple[float, float]]") -> None:
    """Accept actors, each with a thread of its own."""
    with socket.create_server(("", port)) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=receive, args=(connection, samples), daemon=True).start()


def receive(connection: socket.socket, samples: "queue.Queue[tuple[float, float]]") -> None:
    """Put what an actor sends into the queue: a line of JSON for each sample, a number and its image."""
    with connection, connection.makefile() as lines:
        for line in lines:
            x, y = json.loads(line)
            samples.put((float(x), float(y)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
