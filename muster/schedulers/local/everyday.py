"""What `local_cwd` does with the user's default hold: a client in an agent's place, and the hold's start.

It is imported only if the user wants one.

See `muster._shared.holds.default`. The hold itself is `muster/agent/hold/pool.py`.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import muster
from muster._shared.contract import HOLD_FLAG
from muster._shared.holds import default as default_hold
from muster.schedulers.agent_command import AGENT_ENTRY, build_ask_command
from muster.schedulers.processes.launch import Launch

if TYPE_CHECKING:  # a supervisor imports no torchx
    from muster.schedulers.local.request import LocalRequest

_CLIENT: Final = str(Path(muster.__file__).parent / "agent/hold/client.py")
_START_LIMIT_S: Final = 10.0


def replace_launch(launch: Launch, caller_env: Mapping[str, str], name: str) -> Launch:
    """Return what starts an agent on the default hold, or the launch as it is if there is none.

    Args:
        launch: of an agent.
        caller_env: the environment of the program that has submitted the job.
        name: the app's id.
    """
    words = _find_words(launch.command)
    if words is None or default_hold.read_idle_limit_s(caller_env) is None:
        return launch
    folder = default_hold.find_folder(caller_env, words, muster.__version__)
    if not default_hold.may_have_agents(folder):
        return launch
    # -I -S: no variable of the job leads to other modules.
    client = [sys.executable, "-I", "-S", _CLIENT, "--default", folder, name, str(len(words))]
    return replace(launch, command=[*client, *launch.command])


def start_hold(request: "LocalRequest", caller_env: Mapping[str, str], job_pid: int) -> None:
    """Start the default hold after a job's start, if the user wants it and there is none.

    Args:
        request: the job's.
        caller_env: this process's.
        job_pid: of a process that ends with the job, or after it.
    """
    idle_limit_s = default_hold.read_idle_limit_s(caller_env)
    if idle_limit_s is None or not default_hold.may_start(caller_env):
        return
    orders: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for plans in request.replicas.values():
        for plan in plans:
            words = _find_words(plan.command) if plan.runs_agent else None
            if words is not None:
                order = {
                    "name": request.app_id,
                    "command": words,
                    "args": plan.command[len(words) :],
                    "env": {**caller_env, **plan.env},
                    "cpus": sorted(os.sched_getaffinity(0)),
                }
                orders.setdefault(tuple(words), []).append(order)
    for command, found in orders.items():
        folder = default_hold.find_folder(caller_env, command, muster.__version__)
        if not default_hold.may_have_agents(folder):
            fd = default_hold.write_order(found, idle_limit_s=idle_limit_s, after_pid=job_pid)
            _start(default_hold.build_command(command, folder), default_hold.build_environment(caller_env), fd)


def _find_words(command: Sequence[str]) -> list[str] | None:
    """Return the command without the agent's flags. None: its agent is none that the hold could have.

    Agents from a bundle are of another installation, and those of `muster hold` are holders.
    """
    words = build_ask_command(command, ())
    is_other = len(words) != 2 or words[1] != AGENT_ENTRY or list(command[2:3]) == [HOLD_FLAG]
    return None if is_other else words


def _start(command: list[str], env: Mapping[str, str], orders_fd: int) -> None:
    try:
        # A started job goes on without it.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                command,
                stdin=orders_fd,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                timeout=_START_LIMIT_S,
                check=False,
            )
    finally:
        os.close(orders_fd)
