"""At which addresses a round's store answers, and who hosts a store at other addresses."""

import sys
from pathlib import Path

import pytest
from harness import AGENT, find_free_port, run_tree

PROGRAM = """
import os, select, socket, sys
import torch.distributed
from muster.agent.runtime.ports import bind_address
from muster.agent.workers.warm import store

ours, theirs = socket.socketpair()
pid = 0
for address in sys.argv[1:]:
    listener = bind_address(address, 0)
    listener.listen()
    if pid:
        socket.send_fds(ours, [store.HOST], [listener.fileno()])
    else:
        pid = os.fork()
        if pid == 0:
            ours.close()
            store.serve(theirs, listener.fileno())
        theirs.close()
    answered = select.select([ours], (), (), 20)[0]
    client = socket.create_connection(listener.getsockname()[:2], timeout=20)
    listener.close()
    print(address, ours.recv(1) if answered else "no answer", flush=True)
    ours.send(store.DROP)
    assert client.recv(1) == b"", "the round's connections have ended"
ours.close()  # ends it
if not answered:
    os.kill(pid, 9)
os.waitpid(pid, 0)
"""
ADDRESSES = ("127.0.0.1", "127.0.0.2", "::1", "not-of-this-machine.invalid")
"""The second is one at which no other loopback address answers, as that of a network interface. The last is a name: the
socket listens at all addresses."""


@pytest.mark.torch
def test_one_process_serves_each_rounds_store_at_its_address() -> None:
    """It asked at 127.0.0.1 only, and the agent ended a job on several machines after minutes."""
    outcome = run_tree([sys.executable, "-c", PROGRAM, *ADDRESSES])
    assert outcome.stdout.splitlines() == [f"{address} b's'" for address in ADDRESSES], outcome.explain()


STORES = """
import datetime, os, sys
from torch import distributed, ones

own, url = sys.argv[1:]  # two: torch closes the store of a group some time after its end
rank, limit = int(os.environ["RANK"]), datetime.timedelta(seconds=20)

def reduce(where, **options):
    distributed.init_process_group("gloo", timeout=limit, **options)
    count = ones(1)
    distributed.all_reduce(count)
    distributed.destroy_process_group()
    print(f"{where} {int(count)}\\n", end="", flush=True)

reduce("agent's")
reduce("again")
os.environ["MASTER_ADDR"] = "127.0.0.2"
reduce("other address")
os.environ["MASTER_PORT"] = own
reduce("own port", rank=rank, world_size=2)
reduce("url", init_method=f"tcp://localhost:{url}", rank=rank, world_size=2)
"""


@pytest.mark.torch
def test_a_script_may_name_its_own_store_and_make_groups_again(tmp_path: Path) -> None:
    """torch only connects, also where nothing listens, and finds the keys of the group before."""
    script = tmp_path / "main.py"
    script.write_text(STORES)
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "0", "--start", "warm"]
    ports = (str(find_free_port()), str(find_free_port()))
    argv = [*AGENT, *words, str(script), *ports]
    outcome = run_tree(argv, timeout_s=200).check()
    assert outcome.stdout.count("url 2") == 2, outcome.explain()
