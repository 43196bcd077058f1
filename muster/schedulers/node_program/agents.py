"""Finds a node's agent or holder, on the node, and what a command beside it gets. It is sent to nodes.

Standard library only.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence

from muster._shared.processes import list_parents, read_command, read_stat
from muster.schedulers.node_program.frames import HOLD_DIR, NodeError

_HOLD_FLAG = b"--muster-hold"
_RELEASE = "/memfd:release"
"""The agent's file with the spec of the worker of local rank 0 that its template has forked."""
_OF_AGENTS = ("MUSTER_TOKEN", "MUSTER_REQUIRE_TOKEN", "MUSTER_RDZV_FD", "MUSTER_RDZV_PORT")
_OF_ONE_PROCESS = (
    *(
        "MUSTER_STATUS_PAGE",
        "MUSTER_SNAPSHOTS",
        "MUSTER_STACK_FILE",
        "MUSTER_WATCHED",
        "MUSTER_RUN_FIRST",
        "MUSTER_IMPORT_HOOK",
    ),
    "TORCHELASTIC_ERROR_FILE",
)
"""They say where a worker writes: a command that has them would write over it."""
_BREAKPOINT = ("PYTHONBREAKPOINT", "muster.worker.breakpoint")


def find_agent(app: str, index: int, root: int) -> int:
    """Find the agent of a node among the processes that this one sees.

    Args:
        app: the value of MUSTER_APP_ID.
        index: of the node, which its agent has as `--node-rank`, if it has that flag.
        root: the agent is this process or below it. 0: anywhere.

    Returns:
        Its process id.

    Raises:
        NodeError: there is none, or it belongs to another user.
    """
    parents = list_parents()
    others: set[int] = set()
    found = {
        pid: _read_start(pid)
        for pid, env, words in _list_own(app, root, parents, others)
        if "MUSTER_TOKEN" in env and _runs_node(words, index)
    }
    tops = sorted((pid for pid in found if parents[pid] not in found), key=found.__getitem__)
    if not tops:
        if root and others:
            raise NodeError(f"the job belongs to uid {min(others)}, and this is uid {os.geteuid()}")
        raise NodeError("no agent of it runs: its node is being started, or was lost")
    agent = tops[0]
    while below := [pid for pid in found if parents[pid] == agent]:  # a container's init, the guard, the agent
        agent = min(below, key=found.__getitem__)
    return find_held(agent, parents) or agent


def _list_own(
    app: str, root: int, parents: Mapping[int, int], others: set[int]
) -> Iterator[tuple[int, dict[str, str], list[bytes]]]:
    """List an app's processes, of this user and below `root`, with variables and command line.

    Users of whatever else is below `root` are added to `others`.
    """
    for pid in parents:
        if root and not is_below(pid, root, parents):
            continue
        with contextlib.suppress(OSError):  # it has ended
            uid = os.stat(f"/proc/{pid}").st_uid
            if uid != os.geteuid():
                others.add(uid)
            elif (env := read_environment(pid)).get("MUSTER_APP_ID") == app:
                yield pid, env, read_command(pid).split(b"\0")


def find_holder(app: str, index: int, root: int) -> int:
    """Find the holder of a node of a hold. Arguments and errors are those of `find_agent`."""
    parents = list_parents()
    found = [
        pid
        for pid, _, words in _list_own(app, root, parents, set())
        if _HOLD_FLAG in words[:-1] and words[words.index(_HOLD_FLAG) + 1].startswith(b"%d:" % index)
    ]
    if not found:
        raise NodeError("nothing holds this node: it is being started, or was lost")
    return next(pid for pid in found if pid not in [parents[other] for other in found])


def complete_order(
    holder: int, index: int, env: Mapping[str, str], words: Sequence[str], given: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Put what is known only on a node of a hold into a command and its variables.

    `{muster-hold}` at the beginning of each becomes the holder's folder, and a first word `{muster-python}` or
    `{muster-agent}` what the holder was started with: its interpreter, or all before its flags.
    """
    prefix = [os.fsdecode(word) for word in read_command(holder).split(b"\0")]
    prefix = prefix[: prefix.index(os.fsdecode(_HOLD_FLAG))]
    begins = {"{muster-python}": prefix[:1], "{muster-agent}": prefix}
    folder = f"{env.get('MUSTER_LOG_DIR', '')}/hold-{index}"

    def fill(text: str) -> str:
        return folder + text[len(HOLD_DIR) :] if text.startswith(HOLD_DIR) else text

    rest = [fill(word) for word in words[1:]]
    return [*begins.get(words[0], words[:1]), *rest], {name: fill(value) for name, value in given.items()}


def find_held(client: int, parents: Mapping[int, int]) -> int | None:
    """Return the agent below a hold that a process stands for, see `muster/agent/hold/client.py`. None: it is none."""
    words = read_command(client).split(b"\0")
    place = next((at for at, word in enumerate(words) if word.endswith(b"agent/hold/client.py")), None)
    if place is None:
        return None
    with open(os.path.join(os.fsdecode(words[place + 1]), "hold.json"), "rb") as file:
        holder = int(json.loads(file.read())["pid"])
    below = (pid for pid in parents if is_below(pid, holder, parents))
    held = {pid for pid in below if b"--muster-waiting" in read_command(pid).split(b"\0")}
    return next((pid for pid in held if parents[pid] in held), None)


def _runs_node(words: Sequence[bytes], index: int) -> bool:
    """Return whether a command line is that of a node's agent, and not of what asks one."""
    if b"--node-rank" in words:
        return words[words.index(b"--node-rank") + 1] == b"%d" % index
    return any(word.startswith(b"--nnodes") for word in words)


def build_environment(agent: int) -> dict[str, str]:
    """Return the variables that a command gets beside the workers of this agent.

    A worker that the template has forked shows the template's variables in /proc: its own are in the file with which
    the agent has released it. While no worker runs, it is what all have in common.
    """
    env = find_released(agent)
    workers: dict[int, dict[str, str]] = {}
    for pid, parent in list_parents().items():
        with contextlib.suppress(OSError):
            if parent == agent:
                workers[pid] = read_environment(pid)
    cold = [each for each in workers.values() if "LOCAL_RANK" in each and "MUSTER_TOKEN" not in each]
    if cold:
        env = min(cold, key=lambda each: int(each["LOCAL_RANK"]))
    if env is None:
        env = next((each for each in workers.values() if "MUSTER_TOKEN" not in each), None) or read_environment(agent)
    env = {name: value for name, value in env.items() if name not in (*_OF_AGENTS, *_OF_ONE_PROCESS)}
    if env.get(_BREAKPOINT[0]) == _BREAKPOINT[1]:
        del env[_BREAKPOINT[0]]
    return env


def find_released(agent: int) -> dict[str, str] | None:
    """Return the variables of local rank 0 from the agent's file. None: no warm worker was released."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{agent}/fd"):
            path = f"/proc/{agent}/fd/{name}"
            with contextlib.suppress(OSError, ValueError, KeyError):
                if os.readlink(path).startswith(_RELEASE):
                    with open(path, "rb") as file:
                        return dict(json.loads(file.read())["env"])
    return None


def _read_start(pid: int) -> int:
    stat = read_stat(pid)
    return int(stat[19]) if stat else 0


def read_environment(pid: int) -> dict[str, str]:
    """Return the variables with which a process was started."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        rows = (os.fsdecode(row).partition("=") for row in file.read().split(b"\0") if row)
        return {name: value for name, equals, value in rows if equals}


def is_below(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    """Return whether a process is `root`, or a descendant of it."""
    while pid and pid != root:
        pid = parents.get(pid) or 0
    return pid == root


def choose_shell(env: Mapping[str, str]) -> str:
    """Return $SHELL if it is here, else bash or sh."""
    names = (env.get("SHELL", ""), "bash", "sh")
    return next(filter(None, (shutil.which(name, path=env.get("PATH")) for name in names)), "/bin/sh")
