"""The program on a held node that stands there for one node of a run from another machine.

It is standard library only. The Python of the node runs it, with the variables of the hold, in the place of `command`:
see `held.link`, which talks to it. It claims the node, makes the run's folder with its workspace, and gives the run to
the holder, as `muster/agent/hold/client.py` does on this machine. The run's output comes back in frames, and what its
agent tells of it. When this program ends, the holder ends the run. It ends with the connection, see `served`.

    HOLD/runs/RUN/work    the run's working folder, unless it has another one
    HOLD/runs/RUN/log     what its agent writes
    HOLD/store/DIGEST     contents of the last run's workspace: what is here need not travel again

A workspace is a list of entries, each with a name, a kind, permission bits, a time, and the target of a link or the
SHA-256 of a file. The run begins only when all of it is there. What is left of a former run is removed then.

ORDER of the link is JSON, see `held.driver`; INPUT is of the file that was asked for next, to CLOSED. Back come
CLAIMED: no other run can begin here; WANTED: JSON, digests of the files that are missing here; BUSY: the name of the
run that this one waits for; REFUSED: why there is no run.
"""

import contextlib
import hashlib
import json
import os
import queue
import shutil
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from muster._shared.folders import remove_folder
from muster._shared.holder_socket import connect
from muster._shared.processes import READ
from muster.schedulers.node_program.frames import HOLD_DIR, NUMBER, Channel, Kind, NodeError, pack
from muster.schedulers.node_program.output_pipes import OutputPipes
from muster.schedulers.node_program.run_files import ChangedFiles
from muster.schedulers.node_program.served import Served

_DROPPED: Final = (
    *("MUSTER_INCARNATION", "MUSTER_CHECKPOINT", "MUSTER_WORKSPACE", "MUSTER_WORKSPACE_DIR", "MUSTER_RDZV_FD"),
    *("MUSTER_JOB_OBJECT", "MUSTER_ACCOUNT_DIR", "MUSTER_SECRET_NAMES", "MUSTER_DRAIN_LIMIT_S", "MUSTER_LIVE_BARS"),
    *("MUSTER_JOB_INCARNATION", "MUSTER_DRAINED_PODS", "MUSTER_LOGS_HERE"),
)
"""Variables of the hold's own app, which a run has not."""
_FORWARDED: Final = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGCONT),
)
_LOOK_S: Final = 1.0
_AGAIN_S: Final = 0.3
_MESSAGE_BYTES: Final = 65536


def main(folder: str) -> None:
    """Run.

    Args:
        folder: the holder's.
    """
    channel = Channel(0, 1)
    channel.send(Kind.READY)
    HeldRun(folder, channel).run()
    os._exit(0)


class HeldRun(Served):
    """One node of a run. It is for one use.

    A thread does what may take long before the run begins, so that the connection is served meanwhile.

    Args:
        folder: the holder's.
        channel: the connection.
    """

    def __init__(self, folder: str, channel: Channel) -> None:
        super().__init__(channel, _FORWARDED)
        self._folder = folder
        self._order: Mapping[str, Any] = {}
        self._inputs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """Contents of files; b"": the end of one."""
        self._outputs = OutputPipes()
        self._prepared, self._tells_prepared = os.pipe()
        self._is_prepared = self._is_given = False
        self._lock = threading.Lock()
        """Of `last` and `_is_given`: what has been stopped is not given."""
        self._is_silent = False
        """A writer that could not be ended is left."""
        self._looked_s = 0.0

    # -- the connection -------------------------------------------------------------------------------------------

    def list_sources(self) -> dict[int, int]:
        """See `Served`."""
        sources = [self._outputs.fileno()] if self.has_room() else []
        if not self._is_prepared:
            sources.append(self._prepared)
        elif self._is_given and self.last is None:
            sources.append(self._holder.fileno())
        return dict.fromkeys(sources, READ)

    def act(self, ready: Mapping[int, int]) -> None:
        """See `Served`."""
        self._is_prepared |= self._prepared in ready
        if self._outputs.fileno() in ready:
            for number, data, _ in self._outputs.read():
                self.channel.send((Kind.OUT, Kind.ERR)[number - 1], data)
        if self.last is not None:
            self._is_silent = not ready and self.has_room()
        elif self._is_prepared and self._is_given:
            has_ended = self._holder.fileno() in ready
            if has_ended or time.monotonic() - self._looked_s >= _LOOK_S:
                self._looked_s = time.monotonic()
                self.channel.write(self._files.read())
            if has_ended:
                self.last = self._read_end()

    def has_output(self) -> bool:
        """See `Served`. There is none before the run has begun."""
        return self._is_given and not self._is_silent and not self._outputs.is_over

    def handle(self, kind: bytes, content: bytes) -> None:
        """See `Served`."""
        if kind == Kind.ORDER:
            self._order = json.loads(content)
            self._run_dir = os.path.join(self._folder, "runs", self._order["run"])
            self._work_dir = os.path.join(self._run_dir, "work")
            self._files = ChangedFiles(self._run_dir)
            threading.Thread(target=self._prepare, daemon=True).start()
        elif kind in (Kind.INPUT, Kind.CLOSED):
            self._inputs.put(content)

    def pass_on(self, signums: bytes) -> None:
        """See `Served`."""
        for number in dict.fromkeys(signums):
            with self._lock, contextlib.suppress(OSError):  # the next read reports the holder's end
                if self._is_given:
                    self._holder.send(json.dumps({"signal": number}).encode())
                elif number not in (signal.SIGTSTP, signal.SIGCONT):
                    self.last = self.last or pack(Kind.EXIT, b"%d" % (128 + number))

    def send_signal(self, name: str) -> None:
        """See `Served`."""
        self.pass_on(bytes([signal.Signals[f"SIG{name}"]]))

    def kill(self) -> None:
        """Let the holder end the run at once."""
        with self._lock:
            self.last = self.last or pack(Kind.EXIT, b"%d" % (128 + signal.SIGKILL))
            if self._is_given:
                self._holder.close()

    def _read_end(self) -> bytes:
        """Return the last frame."""
        answer = self._hear()
        if "exit" in answer:
            return pack(Kind.EXIT, str(answer["exit"]).encode())
        if "cold" in answer:
            return pack(Kind.REFUSED, f"no run can start on this node: {answer['cold']}".encode())
        return (
            pack(Kind.REFUSED, answer["refused"].encode())
            if answer.get("run")
            else pack(Kind.FAILED, b"its holder was lost")
        )

    # -- the holder -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Claim the node, and begin the run on it, or keep it for the others of the run."""
        try:
            self._claim()
            self.channel.send(Kind.CLAIMED)
            if self._order["args"] is not None:
                self._make_folder()
                self._give()
        except NodeError as error:
            self.last = pack(Kind.REFUSED, str(error).encode(errors="replace"))
        except OSError as error:
            line = f"{error.filename or 'this node'}: {error.strerror}"
            self.last = pack(Kind.REFUSED, line.encode(errors="replace"))
        except Exception as error:  # noqa: BLE001  # the loop waits for it
            self.last = pack(Kind.FAILED, f"{type(error).__name__}: {error}".encode())
        finally:
            os.close(self._tells_prepared)

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the holder, and return its answer."""
        self._holder.send(json.dumps(message).encode())
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        try:
            message = self._holder.recv(_MESSAGE_BYTES)
        except OSError:
            message = b""
        gone = b'{"refused": "the hold ended during this run", "run": ""}'
        answer: dict[str, Any] = json.loads(message or gone)
        return answer

    def _claim(self) -> None:
        try:
            self._holder = connect(self._folder)
        except OSError as error:
            raise NodeError(f"the hold has ended ({error.strerror})") from error
        reported = ""
        while "refused" in (answer := self._ask({"claim": self._order["run"]})):
            if not self._order["waits"] or not answer.get("run"):
                raise NodeError(answer["refused"])
            if reported != answer["run"]:
                reported = answer["run"]
                self.channel.send(Kind.BUSY, reported.encode())
            time.sleep(_AGAIN_S)

    def _give(self) -> None:
        """Give the run to the holder, with the pipes for its output."""
        env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        env |= {name: self._fill(value) for name, value in self._order["env"].items()}
        cwd = self._order["cwd"] or (self._work_dir if os.path.isdir(self._work_dir) else os.getcwd())
        order = {"args": [self._fill(word) for word in self._order["args"]], "env": env, "cwd": cwd}
        if not os.path.isdir(cwd):
            raise NodeError(f"{cwd} is no folder of this node; submit with a workspace")
        fd, null = os.memfd_create("order"), os.open(os.devnull, os.O_RDWR)
        os.write(fd, json.dumps(order).encode())
        fds = [fd, null, *self._outputs.write_fds]
        with self._lock:
            try:
                if self.last is None:
                    socket.send_fds(self._holder, [json.dumps({"run": self._order["run"]}).encode()], fds)
                    self._is_given = True
            except OSError as error:
                raise NodeError("the hold has ended") from error
        for each in (fd, null):
            os.close(each)
        self._outputs.close_write_ends()

    def _fill(self, text: str) -> str:
        return text.replace(HOLD_DIR, self._folder)

    # -- the folder -----------------------------------------------------------------------------------------------

    def _make_folder(self) -> None:
        runs = os.path.dirname(self._run_dir)
        if os.path.isdir(runs):
            for name in os.listdir(runs):
                remove_folder(os.path.join(runs, name), ignores_errors=True)
        os.makedirs(os.path.join(self._run_dir, "log"), mode=0o700, exist_ok=True)
        entries = self._order["workspace"]
        if entries is None:
            return
        store = os.path.join(self._folder, "store")
        os.makedirs(store, mode=0o700, exist_ok=True)
        digests = dict.fromkeys(entry["digest"] for entry in entries if entry["kind"] == "file")
        here = set(os.listdir(store))
        wanted = [digest for digest in digests if digest not in here]
        names = {entry["digest"]: entry["name"] for entry in entries if entry["kind"] == "file"}
        self.channel.send(Kind.WANTED, json.dumps(wanted).encode())
        for digest in wanted:
            self._receive_file(store, digest, names[digest])
        os.mkdir(self._work_dir)
        for entry in entries:
            self._make_entry(store, entry)
        for entry in reversed(entries):
            if entry["kind"] == "folder":
                os.chmod(os.path.join(self._work_dir, entry["name"]), entry["mode"] | 0o700)
        for name in os.listdir(store):
            if name not in digests:
                os.unlink(os.path.join(store, name))

    def _receive_file(self, store: str, digest: str, name: str) -> None:
        path, hashed = os.path.join(store, f".{os.getpid()}"), hashlib.sha256()
        with open(path, "wb") as file:
            while content := self._inputs.get():
                hashed.update(content)
                file.write(content)
                self.channel.send(Kind.TAKEN, NUMBER.pack(len(content)))
        if hashed.hexdigest() != digest:
            os.unlink(path)
            raise NodeError(f"{name} changed while it was sent: run again")
        os.replace(path, os.path.join(store, digest))

    def _make_entry(self, store: str, entry: Mapping[str, Any]) -> None:
        path = os.path.join(self._work_dir, entry["name"])
        if entry["kind"] == "folder":
            os.mkdir(path)
        elif entry["kind"] == "link":
            os.symlink(entry["target"], path)
        else:
            shutil.copyfile(os.path.join(store, entry["digest"]), path)  # the run may write into it
            os.chmod(path, entry["mode"])
            os.utime(path, (entry["time_s"], entry["time_s"]))
