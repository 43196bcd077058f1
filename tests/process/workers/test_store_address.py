"""The store's process answers its agent at whatever address its socket listens."""

import sys

import pytest
from harness import run_tree

PROGRAM = """
import os, select, socket, sys
import torch.distributed
from muster.agent.runtime.ports import bind_address
from muster.agent.workers.warm import store

for address in sys.argv[1:]:
    listener = bind_address(address, 0)
    listener.listen()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        store.serve(theirs, 2, listener.fileno())
    theirs.close()
    answered = select.select([ours], (), (), 20)[0]
    print(address, ours.recv(1) if answered else "no answer", flush=True)
    ours.close()  # ends it
    if not answered:
        os.kill(pid, 9)
    os.waitpid(pid, 0)
"""
ADDRESSES = ("127.0.0.1", "127.0.0.2", "::1", "not-of-this-machine.invalid")
"""The second is one at which no other loopback address answers, as that of a network interface. The last is a name: the
socket listens at all addresses."""


@pytest.mark.torch
def test_it_answers_at_each_address() -> None:
    """It asked at 127.0.0.1 only, and the agent ended a job on several machines after minutes."""
    outcome = run_tree([sys.executable, "-c", PROGRAM, *ADDRESSES], timeout_s=120)
    assert outcome.stdout.splitlines() == [f"{address} b's'" for address in ADDRESSES], outcome.explain()
