"""The image: a fork of the program, kept as it was when the job started, from which the agent has workers forked.

To the agent it is a template (`agent.workers.warm.template`) that has imported everything already.
"""

import gc
import os
import signal
import socket
import sys
from typing import NoReturn

from muster.agent.workers import program
from muster.agent.workers.warm import template
from muster.elastic.fork import worker
from muster.elastic.fork.call import ForkedCall
from muster.elastic.fork.descriptors import find_kernel_sockets, silence


def run_image(control: socket.socket, agent_pid: int, call: ForkedCall) -> NoReturn:
    """Fork workers on demand; in each of them, run it. Ends with the agent."""
    template.exit_with_agent(agent_pid)
    os.setsid()
    _reset_signals()
    silence(find_kernel_sockets())
    worker.forget_program()
    program.rename_process(["muster-image", *sys.orig_argv])
    # No collection visits what exists now, so its pages stay shared with the workers.
    gc.freeze()
    template.send(control, {"brings_torch": False})
    template.send(control, {"ready": {"modules": [], "pid": os.getpid(), "memory": {}}})
    parked = template.fork_on_demand(control, agent_pid)
    control.close()
    worker.run(call, template.wait_for_release(parked, program.rename_process))


def _reset_signals() -> None:
    """The program's handlers are the program's; what it ignores stays ignored, as after an exec."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
