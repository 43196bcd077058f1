"""Agents with rendezvous handlers that this program made: `handlers.py SCENARIO`. Two nodes are two threads."""

import os
import sys
import threading

from muster.elastic import LocalElasticAgent, launcher

if __name__ == "__main__":  # workers need none of it: it imports torch, which takes them a second
    from muster.elastic import WorkerSpec

    launcher._PRELOADED = ()


def worker():
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "ROLE_RANK")
    return [int(os.environ[name]) for name in names], int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def make_handler(port, nodes=2):
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", nodes, nodes))


def make_own_handler():
    """A handler of this program's own class: one node, a store in memory."""
    import torch.distributed
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo

    class Handler(RendezvousHandler):
        def get_backend(self):
            return "mine"

        def next_rendezvous(self):
            print("asked in", threading.current_thread() is not threading.main_thread(), os.getpid() == own)
            return RendezvousInfo(torch.distributed.HashStore(), 0, 1, None)

        def is_closed(self):
            return False

        def set_closed(self):
            pass

        def num_nodes_waiting(self):
            return 0

        def get_run_id(self):
            return "mine"

        def shutdown(self):
            return True

        @property
        def use_agent_store(self):
            return False

    own = os.getpid()
    return Handler()


def run_nodes():
    port = int(sys.argv[2])
    results = {}

    def run(node):
        spec = WorkerSpec(
            role="trainer",
            local_world_size=2,
            rdzv_handler=make_handler(port),
            entrypoint=worker,
        )
        results[node] = LocalElasticAgent(spec, "spawn").run()

    threads = [threading.Thread(target=run, args=(node,)) for node in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def scenario_nodes():
    merged = {}
    for result in run_nodes().values():
        merged |= result.return_values
    print(sorted(merged.items()))


def scenario_own():
    spec = WorkerSpec(role="trainer", local_world_size=2, rdzv_handler=make_own_handler(), entrypoint=worker)
    print(LocalElasticAgent(spec, "spawn").run().return_values)


if __name__ == "__main__":
    globals()[f"scenario_{sys.argv[1]}"]()
