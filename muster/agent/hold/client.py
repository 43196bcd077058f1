"""Stands for one node of a run on a hold: gives the node's holder what this process was started with.

    python -I -S client.py FOLDER NAME WORDS COMMAND ...

FOLDER is the holder's, NAME the run's, and COMMAND the agent's whole command, whose first WORDS words are not its
flags. Arguments, environment, folder, limits and descriptors go to an agent that waits there. Signals are passed on,
and the agent's exit code becomes this process's. If the hold cannot run the command as this process would, one line
says why, and this process becomes the agent, which starts cold. When this process ends, the holder ends the run.

This file is started for every run, so it imports next to nothing. It does not travel, because muster is installed where
a run is submitted.
"""

import json
import os
import select
import signal
import socket
import sys

LISTENER = "MUSTER_RDZV_FD"
"""`Env.RDZV_FD`."""
_USAGE = 2
"""`ExitCode.USAGE`: the last line of this process is the reason, and no retry would help."""
_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGCONT),
)
_MESSAGE_BYTES = 65536


def _read_environ() -> "dict[str, str]":
    """Return the environment as it was given; the interpreter may have added a variable to `os.environ`."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [os.fsdecode(each).partition("=") for each in file.read().split(b"\0") if b"=" in each]
    return {name: value for name, _, value in pairs}


def _build_order(count: int, command: "list[str]") -> "tuple[bytes, list[int]]":
    """Build the holder's message: JSON, and the descriptors beside it."""
    from muster.agent.hold.facts import read_facts, read_settings

    env, facts = _read_environ(), read_facts()
    order = {
        "command": command[:count],
        "args": command[count:],
        "env": env,
        **read_settings(facts),
        "facts": facts,
    }
    fds = [0, 1, 2]
    if LISTENER in env:
        fds.append(int(env[LISTENER]))
    return json.dumps(order).encode(), fds


def main(argv: "list[str]") -> int:
    """Run and return the exit code."""
    folder, name, count, *command = argv
    parent = os.getppid()
    wake_fd = _watch_signals()
    try:
        holder = _send_order(folder, name, int(count), command)
    except OSError as error:
        return _fail(f"the hold has ended ({error.strerror})")
    answer = _converse(holder, wake_fd, parent)
    if "exit" in answer:
        return int(answer["exit"])
    if "refused" in answer:
        return _fail(answer["refused"])
    _say_cold(answer["cold"])
    os.set_inheritable(holder.fileno(), True)  # marks the hold as used while the guard lives
    return _become_agent(command)


def _converse(holder: socket.socket, wake_fd: int, parent: int) -> "dict[str, str]":
    """Pass signals on until the run has ended or cannot be here; return the answer."""
    poller = select.poll()
    poller.register(holder, select.POLLIN)
    poller.register(wake_fd, select.POLLIN)
    while True:
        ready = [each for each, _ in poller.poll()]
        if wake_fd in ready:
            if os.getppid() != parent:
                return {"exit": str(128 + signal.SIGTERM)}  # the run ends with its supervisor
            _pass_on(holder, os.read(wake_fd, 4096))
        if holder.fileno() in ready:
            return _read_answer(holder) or {"refused": "the hold ended during this run"}


def _watch_signals() -> int:
    """Have each passed-on signal written to a pipe, and return the end to read. Ignored signals stay ignored."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    for signum in _FORWARDED:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda _signum, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return wake_read


def _send_order(folder: str, name: str, count: int, command: "list[str]") -> socket.socket:
    from muster._shared.holder_socket import connect

    data, fds = _build_order(count, command)
    holder = connect(folder)
    fd = os.memfd_create("order")
    os.write(fd, data)
    socket.send_fds(holder, [json.dumps({"run": name}).encode()], [fd, *fds])
    os.close(fd)
    return holder


def _pass_on(holder: socket.socket, signums: bytes) -> None:
    try:
        for number in dict.fromkeys(signums):
            holder.send(json.dumps({"signal": number}).encode())
    except OSError:
        return  # ended: the next read reports it


def _read_answer(holder: socket.socket) -> "dict[str, str]":
    try:
        answer: dict[str, str] = json.loads(holder.recv(_MESSAGE_BYTES) or b"{}")
    except OSError:
        return {}
    return answer


def _fail(line: str) -> int:
    os.write(2, f"muster: {line}\n".encode(errors="backslashreplace"))
    return _USAGE


def _say_cold(reason: str) -> None:
    os.write(2, f"muster: this node starts cold, not from the hold: {reason}\n".encode(errors="backslashreplace"))


def _become_agent(command: "list[str]") -> int:
    """Run the agent in this process."""
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)  # ignored by the interpreter, reset by exec
    os.execve(command[0], command, _read_environ())  # noqa: S606  # no shell, on purpose


if __name__ == "__main__":
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))
    sys.exit(main(sys.argv[1:]))
