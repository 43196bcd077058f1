"""The program on a node that runs one command beside the workers of a job. It arrives over standard input.

It is standard library only, for the Python of any image. The command gets the variables of the node's workers and the
working directory of its agent, and leads a session of its own. All of it, also what it has left in the background, is
ended with it, when the other side asks for it, and when the other side is gone: at the end of the connection, or when
no answer came for `LOST_S`. If this program is killed, the command is, too.
"""

import contextlib
import errno
import fcntl
import io
import os
import signal
import struct
import sys
import termios
from collections.abc import Mapping, Sequence
from typing import Any

from muster._shared.processes import READ, WRITE, become_subreaper, spawn_program, strip_process
from muster.schedulers.node_program.agents import (
    build_environment,
    choose_shell,
    complete_order,
    find_agent,
    find_holder,
    read_environment,
)
from muster.schedulers.node_program.frames import CHUNK_BYTES, NUMBER, Channel, Kind, NodeError, pack
from muster.schedulers.node_program.served import Served, collect_children, end_descendants, read_order

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


class Command(Served):
    """One command and the connection. It is for one use.

    Args:
        order: see `session.Order`.
        channel: the connection.
    """

    def __init__(self, order: Mapping[str, Any], channel: Channel) -> None:
        super().__init__(channel, [signal.SIGCHLD])
        self._input = bytearray()
        self._input_closed = False
        self._is_tty = order["tty"]
        words, env, cwd = find_place(order)
        self._pid, self._stdin, self._outputs = self._spawn(words, env, cwd, order["size"])

    def _spawn(
        self, words: Sequence[str], env: Mapping[str, str], cwd: str, size: Sequence[int]
    ) -> tuple[int, int, dict[int, bytes]]:
        """Start the command. Returns its process id, where its input goes, and where its output comes from."""
        if self._is_tty:
            ours, theirs = os.openpty()
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
            inside, stdin, outputs = [theirs, theirs, theirs], ours, {ours: Kind.OUT}
        else:
            pipes = os.pipe(), os.pipe()[::-1], os.pipe()[::-1]
            inside = [pair[0] for pair in pipes]
            stdin, out, err = (pair[1] for pair in pipes)
            outputs = {out: Kind.OUT, err: Kind.ERR}

        def take_terminal() -> None:
            if self._is_tty:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        failed: OSError | None = None
        try:
            pid = spawn_program(words, env, cwd, inside, death_signal=signal.SIGKILL, prepare=take_terminal)
        except OSError as error:
            failed = error
        for fd in set(inside):
            os.close(fd)
        if failed is not None:
            where = cwd if failed.filename == cwd else words[0]
            self.channel.send(Kind.ERR, f"muster: {where}: {failed.strerror}\n".encode())
            self._end(_NOT_FOUND if failed.errno == errno.ENOENT else _NOT_EXECUTABLE)
            for fd in {stdin, *outputs}:
                os.close(fd)
            return 0, -1, {}
        for fd in (stdin, *outputs):
            os.set_blocking(fd, False)
        self.channel.send(Kind.READY)
        return pid, stdin, outputs

    def list_sources(self) -> dict[int, int]:
        """See `Served`."""
        wanted = dict.fromkeys(self._outputs, READ) if self.has_room() else {}
        if self._stdin >= 0 and self._input:
            wanted[self._stdin] = wanted.get(self._stdin, 0) | WRITE
        return wanted

    def act(self, ready: Mapping[int, int]) -> None:
        """See `Served`."""
        for fd, events in ready.items():
            if fd in self._outputs and events & ~WRITE:
                self._read(fd)
            if fd == self._stdin and events & ~READ:
                self._write()
        ended = collect_children()
        if self._pid in ended:
            self._end(ended[self._pid])
            self._drop_input()
            self.kill()  # what the command has left ends with it

    def _end(self, code: int) -> None:
        self.last = pack(Kind.EXIT, b"%d" % code)

    def has_output(self) -> bool:
        """See `Served`."""
        return bool(self._outputs)

    # -- what comes from the command

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # EIO: no process has the terminal
            data = b""
        if data:
            self.channel.send(self._outputs[fd], data)
            return
        del self._outputs[fd]
        if fd == self._stdin:
            self._stdin = -1
        os.close(fd)

    def _write(self) -> None:
        try:
            count = os.write(self._stdin, self._input[:CHUNK_BYTES])
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            self._drop_input()
            return
        del self._input[:count]
        self.channel.send(Kind.TAKEN, NUMBER.pack(count))
        self._close_input()

    def _close_input(self) -> None:
        if self._input_closed and not self._input and self._stdin >= 0 and not self._is_tty:
            os.close(self._stdin)
            self._stdin = -1

    def _drop_input(self) -> None:
        if self._input:
            self.channel.send(Kind.TAKEN, NUMBER.pack(len(self._input)))
            self._input.clear()
        if self._stdin >= 0 and self._stdin not in self._outputs:
            os.close(self._stdin)
            self._stdin = -1

    # -- what comes from the other side

    def handle(self, kind: bytes, content: bytes) -> None:
        """See `Served`."""
        if kind == Kind.INPUT:
            self._input += content
            if self._stdin < 0:
                self._drop_input()
        elif kind == Kind.CLOSED:
            self._input_closed = True
            self._close_input()
        elif kind == Kind.SIZE and self._is_tty and self._stdin >= 0:
            fcntl.ioctl(self._stdin, termios.TIOCSWINSZ, struct.pack("HHHH", *struct.unpack("!HH", content), 0, 0))

    def send_signal(self, name: str) -> None:
        """See `Served`."""
        if self.last is None and self._pid:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.Signals[f"SIG{name}"])

    def choose_last_signal(self) -> str:
        """See `Served`."""
        return "HUP" if self._is_tty else "TERM"

    def kill(self) -> None:
        """Kill all below this process, which is the parent of what has lost its own."""
        ended = end_descendants()
        if self.last is None and self._pid in ended:
            self._end(ended[self._pid])


def find_place(order: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str]:
    """Return the command's words, its variables and its folder.

    Raises:
        NodeError: it has none here.
    """
    given = order["env"]
    if order["cwd"] is not None:
        return list(order["command"]), {**os.environ, **given}, order["cwd"]
    agent = (find_holder if order["is_hold"] else find_agent)(order["app"], order["index"], order["root"])
    try:
        env = read_environment(agent) if order["is_hold"] else build_environment(agent)
        cwd = os.readlink(f"/proc/{agent}/cwd")
    except OSError as error:
        raise NodeError(f"its agent has just ended ({error.strerror})") from error
    words = order["command"] or [choose_shell({**env, **given})]
    if order["is_hold"]:
        words, given = complete_order(agent, order["index"], env, words, given)
    return words, {**env, **given}, cwd


def main(stdin: io.BufferedReader) -> None:
    """Do what the order says.

    Args:
        stdin: the connection, after this program.
    """
    order = read_order(stdin)
    try:
        if order["takes_over"]:  # nothing comes before it says that it is there
            words, env, cwd = find_place(order)
            os.chdir(cwd)
            strip_process((0, 1, 2), ())
            os.execvpe(words[0], words, env)  # noqa: S606  # no shell
        become_subreaper()
        for signum in (signal.SIGINT, signal.SIGQUIT):  # they are for the command
            signal.signal(signum, signal.SIG_IGN)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda *_: sys.exit(0))
        channel = Channel(0, 1)
        command = Command(order, channel)
        try:
            command.run(stdin.peek())
        finally:
            command.kill()
    except (NodeError, OSError) as error:
        why = str(error) if isinstance(error, NodeError) else f"{error.filename or 'the command'}: {error.strerror}"
        with contextlib.suppress(OSError):
            os.write(1, pack(Kind.FAILED, why.encode()))
    os._exit(0)
