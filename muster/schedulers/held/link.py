"""A link of a run on a hold elsewhere: it stands for one node. See `node_program.link` and, there, `held_run`.

SIGTERM, SIGINT, SIGTSTP, SIGCONT and SIGQUIT (for a kill) reach the replica. The node is reached through `open_in_node`
of the hold's adapter.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from muster._shared.control import CommandExit, ControlError
from muster._shared.processes import wait_events
from muster.schedulers.adapter.properties import list_entry_points
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.node_program.frames import HOLD_DIR, Kind, write_all
from muster.schedulers.node_program.link import UPLOAD_BYTES, Link, read_pieces, run_link
from muster.schedulers.node_program.session import (
    ALIVE_S,
    WORDS,
    Order,
    Session,
    build_program,
    find_name,
    start_command,
)
from muster.schedulers.wording.reasons import Code, Reason

CLIENT: Final = "muster/agent/hold/client.py"
"""Marks the process on the node that stands for the run, see `node_program.agents.find_held`."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT, signal.SIGQUIT)
_POLL_S: Final = 0.5
_GATE_S: Final = 0.02
_LINE: Final = "muster: {}\n"


def load_scheduler(name: str) -> Any:
    """Create the scheduler of this name, as `muster.cli.adapters` does. The caller closes it."""
    return list_entry_points()[name].load()("torchx")


def build_client(index: int) -> list[str]:
    """Build the command that runs `held_run` on a node of a hold."""
    # -I -S: it needs no installed package, and no variable of the hold's may lead it to other modules.
    source = build_program("held_run", "main(sys.argv[2])")
    return ["{muster-python}", "-I", "-S", "-c", source, CLIENT, HOLD_DIR, "--node-rank", str(index)]


class HeldLink(Link):
    """Holds the connection to one node of a run, to its end. It is for one use.

    Args:
        order: see `driver.HeldDriver`.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        super().__init__(order, _SIGNALS)
        self._has_claimed = False

    def run(self) -> int:
        """See `Link`."""
        hold = self._order["hold"]
        try:
            with contextlib.closing(load_scheduler(hold["scheduler"])) as scheduler:
                self._keep_others(scheduler)
                session = self._open(scheduler, self._order["index"])
                try:
                    return self._serve(session)
                finally:
                    session.close()
        # RuntimeError: no thread is left, or an engine's error.
        except (ControlError, RuntimeError, SchedulerError, OSError, LookupError, ValueError) as error:
            nodes = (self._order["index"],)
            return self._give_up(Reason(code=Code.LINK_LOST, nodes=nodes, job=hold["handle"], text=str(error)))

    def _open(self, scheduler: Any, index: int) -> Session:
        hold = self._order["hold"]
        order = Order(
            app=find_name(hold["app_id"]),
            index=index,
            command=build_client(index),
            env={"MUSTER_APP_ID": self._order["run"]},
            is_hold=True,
            takes_over=True,
        )
        pipe = scheduler.open_in_node(hold["app_id"], hold["role"], index, WORDS)
        return start_command(pipe, order, window_bytes=UPLOAD_BYTES)

    def _keep_others(self, scheduler: Any) -> None:
        """Claim the nodes that the run does not use, so that they count as used. A failure there does not matter."""

        def keep(index: int) -> None:
            while not os.path.exists(self._order["gate"]):
                time.sleep(_GATE_S)
            with contextlib.suppress(ControlError, EngineError, SchedulerError, OSError):
                session = self._open(scheduler, index)
                order = {**self._order["node"], "args": None, "workspace": None, "env": {}}
                while not session.is_over:
                    has_come = wait_events(session.wanted, ALIVE_S)
                    if has_come and Kind.READY in dict(session.receive_frames()):
                        session.send(Kind.ORDER, json.dumps(order).encode())
                    session.check()
                session.close()

        for index in self._order["others"]:
            threading.Thread(target=keep, args=(index,), name=f"muster-keep-{index}", daemon=True).start()

    def _serve(self, session: Session) -> int:
        while not session.is_over:
            # Node 0 is claimed first: of two runs at once one gets all nodes.
            may_claim = self._order["index"] == 0 or os.path.exists(self._order["gate"])
            if session.has_started and not self._has_claimed and may_claim:
                self._has_claimed = True
                session.send(Kind.ORDER, json.dumps(self._order["node"]).encode())
            self._move(session, _POLL_S if self._has_claimed else _GATE_S)
            if self._is_orphan():
                raise ControlError("the supervisor has died", CommandExit.LOST)  # the holder ends the run at once
            if session.has_started:
                while self._signals:
                    session.send_signal(self._signals.pop(0))
            session.check()
        if session.code is None:
            raise ControlError(session.failure, CommandExit.LOST)
        return session.code

    def _handle(self, session: Session, kind: bytes, content: bytes) -> None:
        """See `Link`."""
        if kind == Kind.REFUSED:
            session.code = int(CommandExit.USAGE)
            _print_line(content.decode(errors="replace"))
        elif kind == Kind.CLAIMED and self._order["index"] == 0:
            Path(self._order["gate"]).touch()
        elif kind == Kind.BUSY:
            _print_line(f"waiting for {content.decode(errors='replace')} on {self._order['hold']['handle']}")
        elif kind == Kind.WANTED:
            self._uploads = self._read_wanted(json.loads(content))

    def _read_wanted(self, digests: list[str]) -> Iterator[bytes]:
        """Yield the files that the node lacks, in pieces, and the end of each.

        Of a file that has grown, send what it had when it was listed.
        """
        entries = {entry.get("digest"): entry for entry in self._order["node"]["workspace"] or ()}
        for digest in digests:
            entry = entries[digest]
            with contextlib.suppress(OSError):  # or it does not fit
                yield from read_pieces(Path(self._order["root"], entry["name"]), entry["size"])
            yield b""


def _print_line(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        write_all(2, _LINE.format(text).encode())


main = partial(run_link, HeldLink)
