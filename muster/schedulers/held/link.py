"""A process of this machine that stands for one node of a run on a hold elsewhere, and passes all on.

The supervisor starts it as it would start the replica. Its output and exit code are the replica's, and SIGTERM, SIGINT,
SIGTSTP, SIGCONT and SIGQUIT (for a kill) reach the replica. `node` is the other end, through `open_in_node` of the
hold's adapter. What the agent reports is written to the run's folder here.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from muster._shared.contract import describe_exit_code, print_line
from muster._shared.control import ControlError, ExitCode
from muster._shared.processes import READ, wait_events, wait_readable
from muster.schedulers.adapter.factories import list_entry_points
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.held import node
from muster.schedulers.held.link_names import LOST, STATE_NAME
from muster.schedulers.inside.frames import FrameReader, build_program, keep_file, pack
from muster.schedulers.inside.session import ALIVE_S, Order, Session, build_words, find_name

CLIENT: Final = "muster/agent/hold/client.py"
"""Marks the process on the node that stands for the run, see `inside.program.find_held`."""
_SIGNALS: Final = {
    signal.SIGTERM: "TERM",
    signal.SIGINT: "INT",
    signal.SIGTSTP: "TSTP",
    signal.SIGCONT: "CONT",
    signal.SIGQUIT: "KILL",
}
_CHUNK_BYTES: Final = 1 << 16
_POLL_S: Final = 0.5
_GATE_S: Final = 0.02
_LINE: Final = "muster: {}\n"


class LostError(Exception):
    """The node is lost. `str()` says why."""


def load_scheduler(name: str, session: str) -> Any:
    """Create the scheduler of this name, as `muster.cli.adapters` does. The caller closes it."""
    return list_entry_points()[name].load()(session)


def build_client(index: int) -> list[str]:
    """Build the command that runs `node` on a node of a hold."""
    source = build_program(node.__file__, "main(sys.argv[2])")
    # -I -S: it needs no installed package, and no variable of the hold's may lead it to other modules.
    return ["{muster-python}", "-I", "-S", "-c", source, CLIENT, node.HOLD_DIR, "--node-rank", str(index)]


class Link:
    """Holds the connection to one node of a run, to its end. It is for one use.

    Args:
        order: see `driver.HeldDriver`.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = order
        self._signals: list[str] = []
        self._frames = FrameReader()
        self._files: dict[str, int] = {}
        self._code: int | None = None
        self._wanted: list[str] = []
        self._sending: Iterator[bytes] = iter(())
        self._parent = os.getppid()
        self._has_passed = False
        """A signal, which may have ended what it reached."""
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for signum in _SIGNALS:
            signal.signal(signum, lambda signum, _frame: self._signals.append(_SIGNALS[signal.Signals(signum)]))

    def run(self) -> int:
        """Return the node's exit code, or `LOST` with the reason in its state."""
        hold = self._order["hold"]
        try:
            with contextlib.closing(load_scheduler(hold["scheduler"], hold["session"])) as scheduler:
                self._keep_others(scheduler)
                session = self._open(scheduler, self._order["index"])
                try:
                    return self._serve(session)
                finally:
                    session.close()
        # RuntimeError: no thread is left, or an engine's error.
        except (ControlError, RuntimeError, SchedulerError, LostError, OSError, LookupError, ValueError) as error:
            return self._give_up(str(error))

    def _open(self, scheduler: Any, index: int) -> Session:
        hold = self._order["hold"]
        pipe = scheduler.open_in_node(hold["app_id"], hold["role"], index, build_words())
        env = {"MUSTER_APP_ID": self._order["run"]}
        app = find_name(hold["app_id"])
        return Session(pipe, Order(app=app, index=index, command=build_client(index), env=env, is_hold=True))

    def _keep_others(self, scheduler: Any) -> None:
        """Claim the nodes that the run does not use, so that they count as used. A failure there does not matter."""

        def keep(index: int) -> None:
            while not os.path.exists(self._order["gate"]):
                time.sleep(_GATE_S)
            with contextlib.suppress(ControlError, EngineError, SchedulerError, OSError):
                session = self._open(scheduler, index)
                order = {**self._order["node"], "args": None, "workspace": None, "env": {}}
                session.send_input(pack(node.ORDER, json.dumps(order).encode()))
                while not session.is_over:
                    if wait_readable(session.fd, ALIVE_S):
                        list(session.receive())
                    else:
                        session.send_alive()
                        session.check()
                session.close()

        for index in self._order["others"]:
            threading.Thread(target=keep, args=(index,), name=f"muster-keep-{index}", daemon=True).start()

    def _serve(self, session: Session) -> int:
        alive_s = time.monotonic()
        has_sent = False
        while not session.is_over:
            if not has_sent and self._may_claim():
                has_sent = True
                session.send_input(pack(node.ORDER, json.dumps(self._order["node"]).encode()))
            is_waiting = not has_sent or (self._wanted and session.room_bytes <= 0)
            watched = dict.fromkeys((self._wake_read, session.fd), READ)
            if session.fd in wait_events(watched, _GATE_S if is_waiting else _POLL_S):
                for stream, data in session.receive():
                    if stream == 1:
                        for kind, content in self._frames.feed(data):
                            self._handle(kind, content)
                    else:
                        write_all(2, data)  # a traceback of the program there
            self._send_files(session)
            self._pass_on(session)
            if time.monotonic() - alive_s >= ALIVE_S:
                alive_s = time.monotonic()
                session.send_alive()
            session.check()
        if self._code is not None:
            return self._code
        if session.code is None:
            raise LostError(session.failure)
        if session.code == 0 or not self._has_passed:
            raise LostError(f"the run's client there {describe_exit_code(session.code)}")
        return session.code

    def _may_claim(self) -> bool:
        """Return whether the run has node 0, which is claimed first: of two runs at once one gets all nodes."""
        return self._order["index"] == 0 or os.path.exists(self._order["gate"])

    def _handle(self, kind: bytes, content: bytes) -> None:
        if kind in (node.OUT, node.ERR):
            write_all(1 if kind == node.OUT else 2, content)
        elif kind == node.FILE:
            keep_file(content, self._order["replica_dir"], self._order["role_dir"], self._files)
        elif kind == node.EXIT:
            self._code = int(content)
        elif kind == node.GONE:
            raise LostError("its holder was lost")
        elif kind == node.FAILED:
            self._code = int(ExitCode.USAGE)
            write_all(2, _LINE.format(content.decode(errors="replace")).encode())
        elif kind == node.CLAIMED and self._order["index"] == 0:
            Path(self._order["gate"]).touch()
        elif kind == node.BUSY:
            line = f"waiting for {content.decode(errors='replace')} on {self._order['hold']['handle']}"
            write_all(2, _LINE.format(line).encode())
        elif kind == node.WANTED:
            self._wanted = json.loads(content)
            self._sending = self._read_wanted()

    def _read_wanted(self) -> Iterator[bytes]:
        """Yield frames with the files that the node lacks.

        Of a file that has grown, send what it had when it was listed.
        """
        root = Path(self._order["root"])
        entries = {entry.get("digest"): entry for entry in self._order["node"]["workspace"] or ()}
        for digest in self._wanted:
            left = entries[digest]["size"]
            with (
                contextlib.suppress(OSError),
                (root / entries[digest]["name"]).open("rb") as file,
            ):  # or it does not fit
                while left and (data := file.read(min(left, _CHUNK_BYTES))):
                    left -= len(data)
                    yield pack(node.DATA, data)
            yield pack(node.END)

    def _send_files(self, session: Session) -> None:
        while session.room_bytes > 0:
            frame = next(self._sending, None)
            if frame is None:
                self._wanted = []
                return
            session.send_input(frame)

    def _pass_on(self, session: Session) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        if os.getppid() != self._parent:
            raise LostError("the supervisor has died")  # the holder ends the run at once
        while self._signals:
            self._has_passed = True
            session.send_signal(self._signals.pop(0))

    def _give_up(self, reason: str) -> int:
        line = f"node {self._order['index']} of {self._order['hold']['handle']}: {' '.join(reason.split())}"
        with contextlib.suppress(OSError):
            Path(self._order["replica_dir"], STATE_NAME).write_text(json.dumps({"reason": line}))
        return LOST


def write_all(fd: int, data: bytes) -> None:
    """Write all of it. Write nothing if its reader has gone."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]


def main(fd: int) -> int:
    """Run a link. Its order is JSON in the file of a descriptor."""
    with os.fdopen(fd, "rb") as file:
        order = json.load(file)
    try:
        return Link(order).run()
    except OSError as error:
        print_line(str(error))
        return LOST
