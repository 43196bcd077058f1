"""The program on a held node that stands there for one node of a run from another machine.

It is standard library only, and one text with `frames`: the Python of the node runs it, see `link`, which talks to it
over its standard input and output. It claims the node, makes the run's folder with its workspace, and gives the run to
the holder, as `muster/agent/hold/client.py` does on this machine. The run's output comes back in frames, and what its
agent tells of it. When this program ends, the holder ends the run; it ends with the connection, see `inside.program`.

    HOLD/runs/RUN/work    the run's working folder, unless it has another one
    HOLD/runs/RUN/log     what its agent writes
    HOLD/store/DIGEST     contents of the last run's workspace: what is here need not travel again

A workspace is a list of entries, each with a name, a kind, permission bits, a time, and the target of a link or the
SHA-256 of a file. The run begins only when all of it is there. What is left of a former run is removed then.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from muster._shared.folders import remove_folder
from muster._shared.processes import READ, WRITE, wait_events
from muster.schedulers.inside.frames import FRAME, ChangedFiles, OutputPipes, pack

ORDER, DATA, END = b"O", b"D", b"E"
"""The link's. ORDER: JSON, see `link`. DATA: of the file that was asked for next. END: of that file."""
CLAIMED, WANTED, OUT, ERR, FILE, EXIT, FAILED, BUSY, GONE = b"C", b"W", b"1", b"2", b"F", b"X", b"R", b"U", b"G"
"""What goes out. CLAIMED: no other run can begin here. WANTED: JSON, digests of the files that are missing here. FILE:
see `frames`. EXIT: the agent's exit code. FAILED: why there is no run. BUSY: the name of the run that this one waits
for. GONE: the holder was lost during the run."""
HOLD_DIR: Final = "{muster-hold}"
"""In arguments and variables: the holder's folder."""
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
_REST_S: Final = 0.5
"""For output that was written before the end."""
_AGAIN_S: Final = 0.3
_CHUNK_BYTES: Final = 1 << 16
_LIMIT_BYTES: Final = 1 << 20
_MESSAGE_BYTES: Final = 65536


class RefusedError(Exception):
    """There is no run on this node. It is one line."""


def main(folder: str) -> int:
    """Run. The exit code does not matter, because a frame reports the outcome to the link.

    Args:
        folder: the holder's.
    """
    stdin = os.fdopen(0, "rb")
    try:
        kind, content = read_frame(stdin)
        if kind == ORDER:
            NodeRun(folder, json.loads(content), stdin).run()
    except RefusedError as error:
        send(FAILED, str(error).encode(errors="replace"))
    except OSError as error:
        send(FAILED, f"{error.filename or 'this node'}: {error.strerror}".encode(errors="replace"))
    return 0


def read_frame(stdin: io.BufferedReader) -> tuple[bytes, bytes]:
    """Return the next frame. (b"", b""): there is none, because the link is gone."""
    head = stdin.read(FRAME.size)
    if len(head) < FRAME.size:
        return b"", b""
    kind, length = FRAME.unpack(head)
    content = stdin.read(length)
    return (kind, content) if len(content) == length else (b"", b"")


def send(kind: bytes, content: bytes = b"") -> None:
    """Send a frame, however long that takes."""
    data = pack(kind, content)
    while data:
        wait_events({1: WRITE})
        with contextlib.suppress(BlockingIOError):
            data = data[os.write(1, data) :]


class NodeRun:
    """One node of a run. It is for one use.

    Args:
        folder: the holder's.
        order: see `link.build_order`.
        stdin: more frames of the link.
    """

    def __init__(self, folder: str, order: Mapping[str, Any], stdin: io.BufferedReader) -> None:
        self._folder, self._order, self._stdin = folder, order, stdin
        self._run_dir = os.path.join(folder, "runs", order["run"])
        self._work_dir = os.path.join(self._run_dir, "work")
        self._files = ChangedFiles(self._run_dir, FILE)
        self._pending = bytearray()
        self._outputs = OutputPipes()
        self._end: bytes | None = None
        self._holder = self._connect()

    def run(self) -> None:
        """Claim the node, and let the run go on it to its end, or keep it for the others of the run."""
        self._claim()
        send(CLAIMED)
        if self._order["args"] is None:
            self._stdin.read(1)  # until the link ends
            return
        self._make_folder()
        self._give()
        os.set_blocking(1, False)
        self._serve()

    # -- the holder -----------------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # its path may be too long
        try:
            made.connect(f"/proc/self/fd/{fd}/socket")
        except OSError as error:
            raise RefusedError(f"the hold has ended ({error.strerror})") from error
        finally:
            os.close(fd)
        _pid, uid, _gid = struct.unpack("3i", made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            raise RefusedError(f"another user's process, uid {uid}, answers for the hold")
        return made

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the holder, and return its answer. If the link goes during the wait, this process ends."""
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
        told = ""
        while "refused" in (answer := self._ask({"claim": self._order["run"]})):
            if not self._order["waits"] or not answer.get("run"):
                raise RefusedError(answer["refused"])
            if told != answer["run"]:
                told = answer["run"]
                send(BUSY, told.encode())
            time.sleep(_AGAIN_S)

    def _give(self) -> None:
        """Give the run to the holder, with the pipes for its output."""
        env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        env |= {name: self._fill(value) for name, value in self._order["env"].items()}
        cwd = self._order["cwd"] or (self._work_dir if os.path.isdir(self._work_dir) else os.getcwd())
        order = {"args": [self._fill(word) for word in self._order["args"]], "env": env, "cwd": cwd}
        if not os.path.isdir(cwd):
            raise RefusedError(f"{cwd} is no folder of this node; submit with a workspace")
        fd, null = os.memfd_create("order"), os.open(os.devnull, os.O_RDWR)
        os.write(fd, json.dumps(order).encode())
        fds = [fd, null, *self._outputs.write_fds]
        try:
            socket.send_fds(self._holder, [json.dumps({"run": self._order["run"]}).encode()], fds)
        except OSError as error:
            raise RefusedError("the hold has ended") from error
        os.close(fd)
        os.close(null)
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
        send(WANTED, json.dumps(wanted).encode())
        for digest in wanted:
            self._receive(store, digest, names[digest])
        os.mkdir(self._work_dir)
        for entry in entries:
            self._make_entry(store, entry)
        for entry in reversed(entries):
            if entry["kind"] == "folder":
                os.chmod(os.path.join(self._work_dir, entry["name"]), entry["mode"] | 0o700)
        for name in os.listdir(store):
            if name not in digests:
                os.unlink(os.path.join(store, name))

    def _receive(self, store: str, digest: str, name: str) -> None:
        path, hashed = os.path.join(store, f".{os.getpid()}"), hashlib.sha256()
        with open(path, "wb") as file:
            while True:
                kind, content = read_frame(self._stdin)
                if kind != DATA:
                    break
                hashed.update(content)
                file.write(content)
        if kind != END:
            sys.exit(1)  # the link is gone
        if hashed.hexdigest() != digest:
            os.unlink(path)
            raise RefusedError(f"{name} changed while it was sent: run again")
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

    # -- while it runs --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        for signum in _FORWARDED:
            signal.signal(signum, lambda _signum, _frame: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        outputs = self._outputs.fileno()
        looked_s = time.monotonic()
        while self._end is None or self._pending or not self._outputs.is_over:
            ready = self._wait([wake_read, outputs] if len(self._pending) < _LIMIT_BYTES else [wake_read])
            if outputs in ready:
                for number, data, _ in self._outputs.read():
                    self._pending += pack((OUT, ERR)[number - 1], data)
            if wake_read in ready:
                self._pass_on(os.read(wake_read, 4096))
            if self._end is None and (self._holder.fileno() in ready or time.monotonic() - looked_s >= _LOOK_S):
                looked_s = time.monotonic()
                if self._holder.fileno() in ready:
                    self._end = self._read_end()
                self._pending += self._files.read()
            self._flush()
            if self._end is not None and not ready:
                break  # a writer that could not be ended
        os.set_blocking(1, True)
        self._pending += self._end or b""
        while self._pending:
            del self._pending[: os.write(1, self._pending)]

    def _wait(self, fds: Sequence[int]) -> dict[int, int]:
        """Return which of these can be read, with the holder and where this process writes."""
        wanted = dict.fromkeys(fds, READ)
        if self._end is None:
            wanted[self._holder.fileno()] = READ
        if self._pending:
            wanted[1] = WRITE
        return wait_events(wanted, _LOOK_S if self._end is None else _REST_S)

    def _read_end(self) -> bytes:
        """Return the last frame."""
        answer = self._hear()
        if "exit" in answer:
            return pack(EXIT, str(answer["exit"]).encode())
        if "cold" in answer:
            return pack(FAILED, f"no run can start on this node: {answer['cold']}".encode())
        return pack(GONE) if not answer.get("run") else pack(FAILED, answer["refused"].encode())

    def _pass_on(self, signums: bytes) -> None:
        with contextlib.suppress(OSError):  # the next read reports its end
            for number in dict.fromkeys(signums):
                self._holder.send(json.dumps({"signal": number}).encode())

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._pending:
                del self._pending[: os.write(1, self._pending[:_CHUNK_BYTES])]
