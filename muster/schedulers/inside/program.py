"""The program on a node that runs one command beside the workers of a job. It arrives over standard input.

It is standard library only, and one text with `frames` and `processes`, for the Python of any image. The command gets
the variables of the node's workers and the working directory of its agent, and leads a session of its own. All of it,
also what it has left in the background, is ended with it, when the other side asks for it, and when the other side is
gone: at the end of the connection, or when no answer came for `LOST_S`. If this program is killed, the command is, too.

A frame is a kind, a length and a content. After each frame that goes out comes a newline, which the other side skips,
because Slurm passes on whole lines only.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Any

from muster._shared.processes import (
    READ,
    WRITE,
    become_subreaper,
    kill_descendants,
    list_parents,
    read_stat,
    spawn,
    wait_events,
)
from muster.schedulers.inside.frames import FRAME, FrameReader, pack

MAGIC = b"\0muster-exec\n"
"""Ends what a login may print before."""
ORDER, INPUT, CLOSED, SIGNAL, SIZE, ALIVE = b"O", b"I", b"C", b"S", b"W", b"H"
"""What comes in. ORDER: JSON, see `session.Order`. INPUT: for the command. CLOSED: there is no more. SIGNAL: a name.
SIZE: rows and columns of the terminal."""
STARTED, OUT, ERR, TAKEN, EXIT, FAILED = b"R", b"1", b"2", b"T", b"X", b"F"
"""What goes out, and ALIVE as an answer. TAKEN: how many bytes of input have been used up. EXIT: the exit code. FAILED:
why no command runs."""
NUMBER = struct.Struct("!I")
LOST_S = 40.0
"""After this long without a frame the other side is gone."""

_LIMIT_BYTES = 1 << 18
"""How much output may wait. A command that writes more waits, too."""
_CHUNK_BYTES = 1 << 16
_LOOK_S = 0.5
_GRACE_S = 3.0
"""Between the polite signal and SIGKILL, when the other side is gone."""
_KILL_LIMIT_S = 10.0
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_HOLD_FLAG = b"--muster-hold"
_HOLD_DIR = "{muster-hold}"
_RELEASE = "/memfd:release"
"""The agent's file with the spec of the worker of local rank 0 that its template has forked."""
_OF_AGENTS = ("MUSTER_TOKEN", "MUSTER_REQUIRE_TOKEN", "MUSTER_RDZV_FD", "MUSTER_RDZV_PORT")
_OF_ONE_PROCESS = (
    *("MUSTER_STATUS_PAGE", "MUSTER_SNAPSHOTS", "MUSTER_STACK_FILE", "MUSTER_WATCHED", "MUSTER_RUN_FIRST"),
    "TORCHELASTIC_ERROR_FILE",
)
"""They say where a worker writes: a command that has them would write over it."""
_BREAKPOINT = ("PYTHONBREAKPOINT", "muster.worker.breakpoint")


class NoNodeError(Exception):
    """No command can run here. It is one line."""


# -- the node ---------------------------------------------------------------------------------------------------------


def find_agent(app: str, index: int, root: int) -> int:
    """Find the agent of a node among the processes that this one sees.

    Args:
        app: the value of MUSTER_APP_ID.
        index: of the node, which its agent has as `--node-rank`, if it has that flag.
        root: the agent is this process or below it. 0: anywhere.

    Returns:
        Its process id.

    Raises:
        NoNodeError: there is none, or it belongs to another user.
    """
    parents = list_parents()
    found: dict[int, int] = {}
    others: set[int] = set()
    for pid in parents:
        if root and not is_below(pid, root, parents):
            continue
        try:
            uid = os.stat(f"/proc/{pid}").st_uid
            if uid != os.geteuid():
                others.add(uid)
                continue
            env = read_environment(pid)
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue  # it has ended
        if env.get("MUSTER_APP_ID") == app and "MUSTER_TOKEN" in env and _runs_node(words, index):
            found[pid] = _read_start(pid)
    tops = sorted((pid for pid in found if parents[pid] not in found), key=found.__getitem__)
    if not tops:
        if root and others:
            raise NoNodeError(f"the job belongs to uid {min(others)}, and this is uid {os.geteuid()}")
        raise NoNodeError("no agent of it runs: its node is being started, or was lost")
    agent = tops[0]
    while below := [pid for pid in found if parents[pid] == agent]:  # a container's init, the guard, the agent
        agent = min(below, key=found.__getitem__)
    return find_held(agent, parents) or agent


def find_holder(app: str, index: int, root: int) -> int:
    """Find the holder of a node of a hold. Arguments and errors are those of `find_agent`."""
    parents = list_parents()
    found: dict[int, int] = {}
    for pid in parents:
        words = _read_words(pid)
        at = words.index(_HOLD_FLAG) + 1 if _HOLD_FLAG in words[:-1] else 0
        if not at or not words[at].startswith(b"%d:" % index) or (root and not is_below(pid, root, parents)):
            continue
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid() and read_environment(pid).get("MUSTER_APP_ID") == app:
                found[pid] = _read_start(pid)
    if not found:
        raise NoNodeError("nothing holds this node: it is being started, or was lost")
    return next(pid for pid in found if pid not in [parents[other] for other in found])


def complete_order(
    holder: int, index: int, env: Mapping[str, str], words: Sequence[str], given: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Put what is known only on a node of a hold into a command and its variables.

    `{muster-hold}` at the beginning of each becomes the holder's folder, and a first word `{muster-python}` or
    `{muster-agent}` what the holder was started with: its interpreter, or all before its flags.
    """
    prefix = [os.fsdecode(word) for word in _read_words(holder)]
    prefix = prefix[: prefix.index(os.fsdecode(_HOLD_FLAG))]
    begins = {"{muster-python}": prefix[:1], "{muster-agent}": prefix}
    folder = f"{env.get('MUSTER_LOG_DIR', '')}/hold-{index}"

    def fill(text: str) -> str:
        return folder + text[len(_HOLD_DIR) :] if text.startswith(_HOLD_DIR) else text

    rest = [fill(word) for word in words[1:]]
    return [*begins.get(words[0], words[:1]), *rest], {name: fill(value) for name, value in given.items()}


def find_held(client: int, parents: Mapping[int, int]) -> int | None:
    """Return the agent below a hold that a process stands for, see `muster/agent/hold/client.py`. None: it is none."""
    words = _read_words(client)
    place = next((at for at, word in enumerate(words) if word.endswith(b"agent/hold/client.py")), None)
    if place is None:
        return None
    with open(os.path.join(os.fsdecode(words[place + 1]), "hold.json"), "rb") as file:
        holder = int(json.loads(file.read())["pid"])
    held = {pid for pid in parents if is_below(pid, holder, parents) and b"--muster-waiting" in _read_words(pid)}
    return next((pid for pid in held if parents[pid] in held), None)


def _read_words(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().split(b"\0")
    return []


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
    names = [env.get("SHELL", ""), "bash", "sh"]
    folders = env.get("PATH", os.defpath).split(os.pathsep)
    for name in filter(None, names):
        for path in [name] if "/" in name else [os.path.join(folder, name) for folder in folders]:
            if os.access(path, os.X_OK):
                return path
    return "/bin/sh"


# -- the command ------------------------------------------------------------------------------------------------------


class Command:
    """One command and the connection. It is for one use.

    Args:
        order: see `session.Order`.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._pending = bytearray()
        self._input = bytearray()
        self._input_closed = False
        self._frames = FrameReader()
        self._heard_s = time.monotonic()
        self._suspended = False
        self._kill_s: float | None = None
        self._code: int | None = None
        self._told_exit = False
        self._is_lost = False
        self._is_tty = order["tty"]
        find = find_holder if order.get("is_hold") else find_agent
        agent = find(order["app"], order["index"], order["root"])
        try:
            env = read_environment(agent) if order.get("is_hold") else build_environment(agent)
            cwd = os.readlink(f"/proc/{agent}/cwd")
        except OSError as error:
            raise NoNodeError(f"its agent has just ended ({error.strerror})") from error
        given = order["env"]
        words = order["command"] or [choose_shell({**env, **given})]
        if order.get("is_hold"):
            words, given = complete_order(agent, order["index"], env, words, given)
        env.update(given)
        self._wake, wake_end = os.pipe()
        for fd in (self._wake, wake_end):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self._pid, self._stdin, self._outputs = self._spawn(words, env, cwd, order["size"])

    def _spawn(
        self, words: Sequence[str], env: Mapping[str, str], cwd: str, size: Sequence[int]
    ) -> tuple[int, int, dict[int, bytes]]:
        """Start the command. Returns its process id, where its input goes, and where its output comes from."""
        if self._is_tty:
            ours, theirs = os.openpty()
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
            inside, stdin, outputs = [theirs, theirs, theirs], ours, {ours: OUT}
        else:
            pipes = os.pipe(), os.pipe()[::-1], os.pipe()[::-1]
            inside = [pair[0] for pair in pipes]
            stdin, out, err = (pair[1] for pair in pipes)
            outputs = {out: OUT, err: ERR}

        def become() -> None:
            if self._is_tty:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            os.chdir(cwd)
            os.execvpe(words[0], list(words), env)  # noqa: S606  # no shell

        failed: OSError | None = None
        try:
            pid = spawn(become, inside, death_signal=signal.SIGKILL)
        except OSError as error:
            failed = error
        for fd in set(inside):
            os.close(fd)
        if failed is not None:
            where = cwd if failed.filename == cwd else words[0]
            self._send(ERR, f"muster: {where}: {failed.strerror}\n".encode())
            self._code = _NOT_FOUND if failed.errno == errno.ENOENT else _NOT_EXECUTABLE
            for fd in {stdin, *outputs}:
                os.close(fd)
            return 0, -1, {}
        for fd in (stdin, *outputs):
            os.set_blocking(fd, False)
        self._send(STARTED, str(pid).encode())
        return pid, stdin, outputs

    def run(self, rest: bytes) -> None:
        """Run until the command has ended and all of its output is sent, or nothing can be sent any more.

        Args:
            rest: of what came with the order.
        """
        self._feed(rest)
        while not self._is_over():
            for fd, events in wait_events(self._choose_events(), _LOOK_S).items():
                self._act(fd, events)
            self._reap()
            self._look_at_clock()

    def _choose_events(self) -> dict[int, int]:
        wanted = {self._wake: READ}
        if not self._is_lost:
            wanted[0] = READ
            if self._pending:
                wanted[1] = WRITE
        if len(self._pending) < _LIMIT_BYTES:
            wanted |= dict.fromkeys(self._outputs, READ)
        if self._stdin >= 0 and self._input:
            wanted[self._stdin] = wanted.get(self._stdin, 0) | WRITE
        return wanted

    def _act(self, fd: int, events: int) -> None:
        if fd == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 4096)
        elif fd == 0:
            self._receive()
        elif fd == 1:
            self._flush()
        else:
            if fd in self._outputs and events & ~WRITE:
                self._read(fd)
            if fd == self._stdin and events & ~READ:
                self._write()

    def _is_over(self) -> bool:
        if self._code is None or self._outputs:
            return False
        if not self._told_exit:
            self._told_exit = True
            self._send(EXIT, str(self._code).encode())
        return self._is_lost or not self._pending

    # -- what comes from the command

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # EIO: no process has the terminal
            data = b""
        if data:
            self._send(self._outputs[fd], data)
            return
        del self._outputs[fd]
        if fd == self._stdin:
            self._stdin = -1
        os.close(fd)

    def _write(self) -> None:
        if self._stdin < 0:
            return
        try:
            count = os.write(self._stdin, self._input[:_CHUNK_BYTES])
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            self._drop_input()
            return
        del self._input[:count]
        self._send(TAKEN, NUMBER.pack(count))
        self._close_input()

    def _close_input(self) -> None:
        if self._input_closed and not self._input and self._stdin >= 0 and not self._is_tty:
            os.close(self._stdin)
            self._stdin = -1

    def _drop_input(self) -> None:
        if self._input:
            self._send(TAKEN, NUMBER.pack(len(self._input)))
            self._input.clear()
        if self._stdin >= 0 and self._stdin not in self._outputs:
            os.close(self._stdin)
            self._stdin = -1

    def _reap(self) -> None:
        """Collect what has ended. What the command has left ends with it."""
        was_running = self._code is None
        self._collect()
        if was_running and self._code is not None:
            self._drop_input()
            self.kill_all()

    def _collect(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._code = code if code >= 0 else 128 - code

    def kill_all(self) -> None:
        """Kill all below this process, which is the parent of what has lost its own."""
        until_s = time.monotonic() + _KILL_LIMIT_S
        while time.monotonic() < until_s:
            below = kill_descendants(os.getpid())
            self._collect()
            if not below:
                return
            time.sleep(0.005)

    # -- what comes from the other side

    def _receive(self) -> None:
        try:
            data = os.read(0, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._feed(data)
        else:
            self._lose()

    def _feed(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        self._suspended = False
        for kind, content in self._frames.feed(data):
            self._handle(kind, content)

    def _handle(self, kind: bytes, content: bytes) -> None:
        if kind == INPUT:
            self._input += content
            if self._stdin < 0:
                self._drop_input()
        elif kind == CLOSED:
            self._input_closed = True
            self._close_input()
        elif kind == SIGNAL:
            self._signal(content.decode())
        elif kind == SIZE and self._is_tty and self._stdin >= 0:
            fcntl.ioctl(self._stdin, termios.TIOCSWINSZ, struct.pack("HHHH", *struct.unpack("!HH", content), 0, 0))
        elif kind == ALIVE:
            self._send(ALIVE)

    def _signal(self, name: str) -> None:
        if self._code is not None or not self._pid:
            return
        self._suspended = name == "STOP"
        if name == "KILL":
            self.kill_all()
            return
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.Signals[f"SIG{name}"])

    def _lose(self) -> None:
        """End the command: the other side is gone."""
        if self._is_lost:
            return
        self._is_lost = True
        self._pending.clear()
        self._signal("HUP" if self._is_tty else "TERM")
        self._signal("CONT")
        self._kill_s = time.monotonic() + _GRACE_S

    def _look_at_clock(self) -> None:
        now_s = time.monotonic()
        if not self._is_lost and not self._suspended and now_s - self._heard_s > LOST_S:
            self._lose()
        if self._kill_s is not None and now_s > self._kill_s:
            self.kill_all()

    # -- what goes to the other side

    def _send(self, kind: bytes, content: bytes = b"") -> None:
        if not self._is_lost:
            self._pending += pack(kind, content) + b"\n"
            self._flush()

    def _flush(self) -> None:
        try:
            while self._pending:
                del self._pending[: os.write(1, self._pending[:_CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self._lose()


def main(stdin: io.BufferedReader) -> None:
    """Do what the order says.

    Args:
        stdin: the connection, after this program.
    """
    become_subreaper()
    for signum in (signal.SIGINT, signal.SIGQUIT):  # they are for the command
        signal.signal(signum, signal.SIG_IGN)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: sys.exit(0))
    os.write(1, MAGIC)
    head = stdin.read(FRAME.size)
    if len(head) < FRAME.size:
        os._exit(1)
    length = FRAME.unpack(head)[1]
    content = stdin.read(length)
    if len(content) < length:
        os._exit(1)
    order = json.loads(content)
    os.set_blocking(0, False)
    try:
        command = Command(order)
        os.set_blocking(1, False)
        try:
            command.run(stdin.peek())
        finally:
            command.kill_all()
    except (NoNodeError, OSError) as error:
        why = str(error) if isinstance(error, NoNodeError) else f"{error.filename or 'the command'}: {error.strerror}"
        with contextlib.suppress(OSError):
            os.write(1, pack(FAILED, why.encode()) + b"\n")
    os._exit(0)
