"""Stands for one node of a run on a hold: gives the node's holder what this process was started with.

    python -I -S client.py FOLDER NAME WORDS COMMAND ...

FOLDER is the holder's, NAME the run's, and COMMAND the agent's whole command, whose first WORDS words are not its
flags. Arguments, environment, folder, limits and descriptors go to an agent that waits there; signals are passed on,
and its exit code becomes this process's. Where the hold cannot run it as this process would, one line says why, and
this process becomes the agent: it starts cold. When this process ends, the holder ends the run.

It is started for every run, so it imports next to nothing. It does not travel: who submits has muster installed.
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
"""`ExitCode.USAGE`: what this process says in its last line is the reason, and no retry would help."""
_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGCONT),
)
_MESSAGE_BYTES = 65536


def _read_environ() -> "dict[str, str]":
    """Return the environment as it was given: the interpreter may have added a variable to its own."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [os.fsdecode(each).partition("=") for each in file.read().split(b"\0") if b"=" in each]
    return {name: value for name, _, value in pairs}


def _build_order(words: int, command: "list[str]") -> "tuple[bytes, list[int]]":
    """Build what the holder gets: JSON, and the descriptors beside it."""
    from muster.agent.hold.facts import read_facts, read_settings

    env, facts = _read_environ(), read_facts()
    order = {
        "command": command[:words],
        "args": command[words:],
        "env": env,
        **read_settings(facts),
        "facts": facts,
    }
    fds = [0, 1, 2]
    if LISTENER in env:
        fds.append(int(env[LISTENER]))
    return json.dumps(order).encode(), fds


def main(argv: "list[str]") -> int:
    """Run; the exit code."""
    folder, name, words, *command = argv
    parent = os.getppid()
    wake_fd = _watch_signals()
    try:
        holder = _send_order(folder, name, int(words), command)
    except OSError as error:
        return _fail(f"the hold has ended ({error.strerror})")
    poller = select.poll()
    poller.register(holder, select.POLLIN)
    poller.register(wake_fd, select.POLLIN)
    while True:
        ready = [each for each, _ in poller.poll()]
        if wake_fd in ready:
            if os.getppid() != parent:
                return 128 + signal.SIGTERM  # its supervisor has died: the holder ends the run at once
            _pass_on(holder, os.read(wake_fd, 4096))
        if holder.fileno() in ready:
            answer = _read_answer(holder)
            if "exit" in answer:
                return int(answer["exit"])
            if "refused" in answer:
                return _fail(answer["refused"])
            _become_agent(answer["cold"], command, holder)


def _watch_signals() -> int:
    """Have each signal that is passed on written to a pipe; the end to read. What is ignored stays so."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    for signum in _FORWARDED:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda _signum, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return wake_read


def _send_order(folder: str, name: str, words: int, command: "list[str]") -> socket.socket:
    from muster.agent.hold.facts import connect

    data, fds = _build_order(words, command)
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
        return  # it has ended: the next read says so


def _read_answer(holder: socket.socket) -> "dict[str, str]":
    try:
        message = holder.recv(_MESSAGE_BYTES)
    except OSError:
        message = b""
    answer: dict[str, str] = json.loads(message or b'{"refused": "the hold has ended while this run was on it"}')
    return answer


def _fail(line: str) -> int:
    os.write(2, f"muster: {line}\n".encode(errors="backslashreplace"))
    return _USAGE


def _become_agent(reason: str, command: "list[str]", holder: socket.socket) -> None:
    """Run the agent in this process. Its guard inherits the connection: the hold is in use until it ends."""
    os.write(2, f"muster: this node starts cold, not from the hold: {reason}\n".encode(errors="backslashreplace"))
    os.set_inheritable(holder.fileno(), True)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)  # the interpreter ignores them; those with a handler become so by exec
    os.execve(command[0], command, _read_environ())  # noqa: S606  # no shell, on purpose


if __name__ == "__main__":
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))
    sys.exit(main(sys.argv[1:]))
