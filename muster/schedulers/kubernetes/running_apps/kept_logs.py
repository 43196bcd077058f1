"""Keeps the logs of a job that is cancelled: Kubernetes deletes its running pods, and their logs with them.

Its logs are opened first, because a cluster may remove a pod as soon as it has ended. That takes a second at most, and
the job is stopped in any case: neither a node that does not answer nor a Ctrl-C can keep it running. What its pods
have written, and what they write until they end, is collected on the machine that cancels, in the folder for
muster's state. Once the pods are gone, `torchx log` on that machine reads it from there. Of a long log the end is kept,
because people look there.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from muster._shared.foreign_files import read_regular
from muster.schedulers.errors import EngineError, SchedulerError, UnsafeFolderError
from muster.schedulers.kubernetes.api.client import Client, Stream
from muster.schedulers.kubernetes.kinds import POD
from muster.schedulers.kubernetes.names import CONTAINER
from muster.schedulers.kubernetes.running_apps.app import AppRef
from muster.schedulers.kubernetes.running_apps.pod_status import PodFact
from muster.schedulers.lines import CHUNK_BYTES, LineSplitter
from muster.schedulers.supervision.registry import find_state_dir

POD_LIMIT: Final = 64
"""How many pods' logs are kept, those of the first nodes. A cancel must not take minutes."""

LOG_LIMIT_BYTES: Final = 16 << 20
"""How much of the log of one pod is kept: its end."""

_LINE_LIMIT: Final = 100_000
"""Lines of one pod: the server can begin a log at a line, not at a byte."""

OPEN_LIMIT_S: Final = 1.0
"""How long the stop waits for the logs to be opened."""

ANSWER_LIMIT_S: Final = 5.0
"""How long a node may take to begin with a pod's log."""

COLLECT_LIMIT_S: Final = 20.0
"""How long pods may go on writing after the stop. Most end within a second or two."""

_SUFFIX: Final = ".log"

_NAMES_LIMIT: Final = 5
"""Pods that the line for the user names."""


def stop_and_keep_logs(
    client: Client,
    ref: AppRef,
    read_pods: Callable[[], Sequence[PodFact]],
    stop: Callable[[], None],
    notify: Callable[[str], None],
) -> None:
    """Open the logs of the app's pods that run, stop it, collect the logs until the pods end, and say where they are.

    Args:
        client: of the cluster.
        ref: the app.
        read_pods: lists those of the app.
        stop: stops the app. Its errors are raised, and nothing is collected. Errors of logs are reported, not raised.
        notify: called with the line for the user.
    """
    collection = _Collection(client, ref)
    try:
        with suppress(EngineError, SchedulerError):  # said below if it is still so
            collection.open(read_pods())
        collection.wait_open()
    finally:  # also after a Ctrl-C
        try:
            stop()
        except BaseException:
            collection.close()
            raise
    try:
        collection.keep(read_pods)
    except (EngineError, SchedulerError, OSError) as error:
        if not any(log.is_kept for log in collection.logs):
            notify(f"the pods' logs are deleted with them, and could not be kept: {error}")
            return
    if collection.logs:
        notify(_describe(find_folder(ref), collection.logs, collection.others))


class _Collection:
    """The logs of an app's pods that run."""

    def __init__(self, client: Client, ref: AppRef) -> None:
        self._client = client
        self._ref = ref
        self.logs: list[_PodLog] = []
        self.others = 0
        """How many pods more there are than logs are kept of."""

    def open(self, facts: Sequence[PodFact]) -> None:
        """Begin to read the logs of the pods that run, those of the first nodes, and are not read yet."""
        known = {log.fact.name for log in self.logs}
        running = [fact for fact in facts if fact.phase == "Running" and fact.name not in known]
        running.sort(key=lambda fact: (fact.index, fact.role))
        new = [_PodLog(fact) for fact in running[: max(0, POD_LIMIT - len(self.logs))]]
        self.others = len(running) - len(new)
        self.logs += new
        for log in new:
            arguments, name = (self._client, self._ref.namespace), f"muster-read-log-{log.fact.name}"
            threading.Thread(target=log.read, args=arguments, name=name, daemon=True).start()

    def wait_open(self) -> None:
        """Wait a moment for the logs."""
        deadline_s = time.monotonic() + OPEN_LIMIT_S
        for log in self.logs:
            log.answered.wait(max(0.0, deadline_s - time.monotonic()))

    def close(self) -> None:
        """Read no more: the app was not stopped."""
        for log in self.logs:
            log.close()

    def keep(self, read_pods: Callable[[], Sequence[PodFact]]) -> None:
        """Collect what the pods write until they end, also those that have started since, and write it.

        Raises:
            EngineError, SchedulerError, OSError: what was read before is written, unless the disk refuses.
        """
        try:
            self.open(read_pods())
        finally:  # also after a Ctrl-C
            if self.logs:
                folder = find_folder(self._ref)
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                try:
                    _collect(self.logs)
                finally:
                    for log in self.logs:
                        log.write(folder)


class _PodLog:
    """The log of one pod while it is collected. A thread of its own reads it."""

    def __init__(self, fact: PodFact) -> None:
        self.fact = fact
        self.error = ""
        self.is_cut = False
        """It is longer than what is kept."""
        self.is_kept = False
        """Some of it is."""
        self.answered = threading.Event()
        self.ended = threading.Event()
        self._content = bytearray()
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._is_closed = False

    def read(self, client: Client, namespace: str) -> None:
        """Read until the pod ends."""
        path = f"{POD.build_path(namespace, self.fact.name)}/log"
        query = {"container": CONTAINER, "timestamps": "true", "follow": "true", "tailLines": str(_LINE_LIMIT)}
        try:
            with client.stream(path, what=f"log of {self.fact.name}", verb="read", query=query, budget_s=0) as stream:
                self._stream = stream
                self.answered.set()
                for chunk in stream.read_chunks():
                    if self._is_closed:
                        break
                    self._add(chunk)
        except (EngineError, SchedulerError) as error:
            self.error = str(error)
        finally:
            self.ended.set()
            self.answered.set()

    def close(self) -> None:
        """End the thread that reads."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.interrupt()

    def _add(self, chunk: bytes) -> None:
        with self._lock:
            self._content += chunk
            if len(self._content) > 2 * LOG_LIMIT_BYTES:
                del self._content[:-LOG_LIMIT_BYTES]
                self.is_cut = True

    def write(self, folder: Path) -> None:
        """Write whole lines: the end of what was read. Nothing, if nothing was read.

        Raises:
            OSError: the disk refuses.
        """
        with self._lock:
            content = bytes(self._content[-LOG_LIMIT_BYTES:])
            if self.is_cut or len(self._content) > len(content):
                self.is_cut = True
                content = content[content.find(b"\n") + 1 :]
            self.is_cut = self.is_cut or content.count(b"\n") >= _LINE_LIMIT
        if not content:
            return
        target = folder / f"{_begin_name(self.fact.role, self.fact.index)}{self.fact.uid}{_SUFFIX}"
        temporary = target.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(content)
        temporary.replace(target)
        self.is_kept = True


def _collect(logs: Sequence[_PodLog]) -> None:
    """Wait until the pods have ended or a limit is over. Threads that hang are left behind."""
    began_s = time.monotonic()
    for log in logs:
        log.answered.wait(max(0.0, began_s + ANSWER_LIMIT_S - time.monotonic()))
    for log in logs:
        if log.answered.is_set():
            log.ended.wait(max(0.0, began_s + COLLECT_LIMIT_S - time.monotonic()))
        else:
            log.error = f"cannot read log of {log.fact.name}: its node does not answer"


def _describe(folder: Path, logs: Sequence[_PodLog], others: int) -> str:
    failed = [log for log in logs if log.error]
    if len(failed) == len(logs) and not any(log.is_kept for log in logs):
        text = f"the pods' logs are deleted with them, and could not be kept: {failed[0].error}"
        return text + (f"; those of {_name_pods(failed[1:])} are lost, too" if failed[1:] else "")
    text = f"Kubernetes deletes the pods and their logs; what they have written is kept in {folder}"
    if any(log.is_cut for log in logs):
        text += f" (of each the last {LOG_LIMIT_BYTES >> 20} MiB or {_LINE_LIMIT:,} lines)"
    running = [log for log in logs if not log.ended.is_set() and not log.error]
    if running:
        text += (
            f"; what {running[0].fact.name if len(running) == 1 else f'{len(running)} pods'} will still write is not"
        )
    if failed:
        text += f"; the logs of {_name_pods(failed)} are lost or incomplete: {failed[0].error}"
    return text + (f"; those of {others} other nodes are lost" if others else "")


def _name_pods(logs: Sequence[_PodLog]) -> str:
    text = ", ".join(log.fact.name for log in logs[:_NAMES_LIMIT])
    return text + (f" and {len(logs) - _NAMES_LIMIT} more" if len(logs) > _NAMES_LIMIT else "")


def find_folder(ref: AppRef) -> Path:
    """Return where the logs of a cancelled app are kept."""
    return find_state_dir(os.environ) / "kubernetes-logs" / ref.namespace / ref.name


def _begin_name(role: str, index: int) -> str:
    """Return how the names of a node's files begin. No role's label has a dot."""
    return f"{role}-{index}."


def read_kept_logs(ref: AppRef, role: str, index: int) -> dict[str, Iterator[bytes]]:
    """Return the kept lines of each pod of one node, with their times, by the pod's uid. {}: none were kept here."""
    beginning = _begin_name(role, index)
    try:
        found = sorted(find_folder(ref).glob(f"{beginning}*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    except (FileNotFoundError, UnsafeFolderError):
        return {}
    return {path.name[len(beginning) : -len(_SUFFIX)]: _read_lines(path) for path in found}


def _read_lines(path: Path) -> Iterator[bytes]:
    lines, position = LineSplitter(), 0
    with suppress(FileNotFoundError):  # deleted since it was listed
        while piece := read_regular(path, CHUNK_BYTES, position):
            position += len(piece)
            yield from lines.feed(piece)
    if lines.has_rest():
        yield lines.take_rest()


def forget_logs(ref: AppRef) -> None:
    """Remove what was kept of a deleted app."""
    try:
        folder = find_folder(ref)
    except UnsafeFolderError:  # then none were kept
        return
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
