"""Stands for one node of a run on a hold: gives the node's holder what this process was started with.

    python -I -S client.py [--default] FOLDER NAME WORDS COMMAND ...

FOLDER is the holder's, NAME the run's, and COMMAND the agent's whole command, whose first WORDS words are not its
flags. Arguments, environment, folder, limits and descriptors go to an agent that waits there. Signals are passed on,
and the agent's exit code becomes this process's. If the hold cannot run the command as this process would, one line
says why, and this process becomes the agent, which starts cold. When this process ends, the holder ends the run.

With --default the folder is that of the default hold (`pool`). That hold hands the connection to the guard of the run
and has no further part in the run. The guard sends this process its own pid and later the exit code, and gets signals
from it. If that hold has no agent, or has ended, this process silently becomes the agent.

This file is started for every run, so it imports next to nothing. It does not travel, because muster is installed where
a run is submitted.
"""

import json
import os
import select
import signal
import socket
import sys
import time

DEFAULT = "--default"
LISTENER = "MUSTER_RDZV_FD"
"""`Env.RDZV_FD`."""
STOPS_TOGETHER = "MUSTER_STOPS_TOGETHER"
"""`Env.STOPS_TOGETHER`: no shell may see that this process stops."""
_USAGE = 2
"""`ExitCode.USAGE`: the last line of this process is the reason, and no retry would help."""
_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGCONT),
)
_MESSAGE_BYTES = 65536
_ANSWER_S = 5.0
"""A stopped default hold must not delay a job."""


def _read_environ() -> "dict[str, str]":
    """Return the environment as it was given; the interpreter may have added a variable to `os.environ`."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [os.fsdecode(each).partition("=") for each in file.read().split(b"\0") if b"=" in each]
    return {name: value for name, _, value in pairs}


def _build_order(words: int, command: "list[str]") -> "tuple[bytes, list[int]]":
    """Build the holder's message: JSON, and the descriptors beside it."""
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
    """Run and return the exit code."""
    is_default = argv[:1] == [DEFAULT]
    folder, name, words, *command = argv[is_default:]
    parent = os.getppid()
    if is_default:
        code = run_on_default(folder, name, int(words), command, parent=parent)
        return _become_agent(command) if code is None else code
    wake_fd = _watch_signals()
    try:
        holder = _send_order(folder, name, int(words), command)
    except OSError as error:
        return _fail(f"the hold has ended ({error.strerror})")
    answer = _converse(holder, wake_fd, parent, is_default=False)
    if "exit" in answer:
        return int(answer["exit"])
    if "refused" in answer:
        return _fail(answer["refused"])
    _say_cold(answer["cold"])
    os.set_inheritable(holder.fileno(), True)  # marks the hold as used while the guard lives
    return _become_agent(command)


def run_on_default(
    folder: str, name: str, words: int, command: "list[str]", *, parent: "int | None" = None
) -> "int | None":
    """Run on the default hold and return the exit code.

    None means that this process must run the agent, and nothing has begun.

    In that case the connection stays open until this process and its forks have ended; the hold imports after that.

    Args:
        folder: the hold's.
        name: the job's.
        words: how many of the command's words are not the agent's flags.
        command: the agent's.
        parent: a process with which this one ends; None if there is none.
    """
    from muster._shared.holds.default import check_folder

    try:
        check_folder(folder)
        holder = _send_order(folder, name, words, command)
    except PermissionError as error:
        _say_cold(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}")
        return None
    except OSError:
        return None  # it has just ended
    was = {signum: signal.getsignal(signum) for signum in _FORWARDED}
    wake_fd = _watch_signals()
    answer = _converse(holder, wake_fd, parent, is_default=True)
    if "exit" in answer:
        return int(answer["exit"])
    os.close(signal.set_wakeup_fd(-1))
    for signum, handler in was.items():
        signal.signal(signum, handler)
    for number in _read_signals(wake_fd):
        os.kill(os.getpid(), number)
    os.close(wake_fd)
    reason = answer.get("cold") or answer.get("late")
    if reason:
        _say_cold(reason)
    if "late" in answer:
        holder.close()  # prevents a late start
    else:
        os.set_inheritable(holder.detach(), True)
    return None


def _converse(holder: socket.socket, wake_fd: int, parent: "int | None", *, is_default: bool) -> "dict[str, str]":
    """Pass signals on until the run has ended or cannot be here; return the answer."""
    poller = select.poll()
    poller.register(holder, select.POLLIN)
    poller.register(wake_fd, select.POLLIN)
    guard_fd, early = -1, bytearray()
    deadline_s = time.monotonic() + _ANSWER_S
    while True:
        limit_s = deadline_s - time.monotonic() if is_default and guard_fd < 0 else None
        ready = [each for each, _ in poller.poll(None if limit_s is None else max(0.0, limit_s * 1000))]
        if not ready:
            return {"late": "the default hold does not answer"}
        if wake_fd in ready:
            if parent is not None and os.getppid() != parent:
                return {"exit": str(128 + signal.SIGTERM)}  # the run ends with its supervisor
            early += os.read(wake_fd, 4096)
        if holder.fileno() in ready:
            answer, fds = _read_answer(holder)
            if "started" in answer:
                (guard_fd,) = fds
            elif answer:
                return answer
            elif guard_fd >= 0:
                return {"exit": str(128 + signal.SIGKILL)}  # killed before reporting
            else:
                return {"cold": ""} if is_default else {"refused": "the hold ended during this run"}
        if not is_default:
            _pass_on(holder, bytes(early))
            early.clear()
        elif guard_fd >= 0:
            _signal_guard(guard_fd, bytes(early))
            early.clear()


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


def _read_signals(wake_fd: int) -> bytes:
    try:
        return os.read(wake_fd, 4096)
    except BlockingIOError:
        return b""


def _send_order(folder: str, name: str, words: int, command: "list[str]") -> socket.socket:
    from muster._shared.holds.connection import connect

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
        return  # ended: the next read reports it


def _signal_guard(guard_fd: int, signums: bytes) -> None:
    for number in dict.fromkeys(signums):
        try:
            signal.pidfd_send_signal(guard_fd, number)
        except ProcessLookupError:
            return  # ended: the next read reports it
        if number == signal.SIGTSTP and os.environ.get(STOPS_TOGETHER) != "1":
            os.kill(os.getpid(), signal.SIGSTOP)  # for the waiting shell


def _read_answer(holder: socket.socket) -> "tuple[dict[str, str], list[int]]":
    try:
        message, fds, _flags, _address = socket.recv_fds(holder, _MESSAGE_BYTES, 1)
    except OSError:
        message, fds = b"", []
    answer: dict[str, str] = json.loads(message or b"{}")
    return answer, list(fds)


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
