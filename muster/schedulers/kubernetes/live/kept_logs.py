"""Keeps the logs of a job that is cancelled: Kubernetes deletes its running pods, and their logs with them.

They are collected before the cancel, into the folder for muster's state on the machine that cancels, and `torchx log`
on that machine reads them from there once the pods are gone. What pods write after the cancel is lost.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from muster.schedulers.errors import EngineError, SchedulerError, UnsafeFolderError
from muster.schedulers.kubernetes.api.client import Client
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.live.pod_status import PodFact
from muster.schedulers.kubernetes.names import CONTAINER
from muster.schedulers.supervision.registry import find_state_dir

POD_LIMIT: Final = 64
"""Pods whose logs are kept, those of the first nodes; a cancel must not take minutes."""

LOG_LIMIT_BYTES: Final = 16 << 20
"""Of one pod, its beginning."""

_AT_ONCE: Final = 8


def keep_logs(
    client: Client, ref: AppRef, read_pods: Callable[[], Sequence[PodFact]], notify: Callable[[str], None]
) -> None:
    """Collects the logs of the pods that run, and says where they are. Errors are reported, not raised.

    Args:
        client: of the cluster.
        ref: the app.
        read_pods: lists those of the app.
        notify: called with the line for the user.
    """
    try:
        running = sorted(
            (fact for fact in read_pods() if fact.phase == "Running"), key=lambda fact: (fact.index, fact.role)
        )
        if not running:
            return
        folder = find_folder(ref)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            is_cut = any(list(pool.map(lambda fact: _keep_log(client, ref, folder, fact), running[:POD_LIMIT])))
    except (EngineError, SchedulerError, OSError) as error:
        notify(f"the pods' logs are deleted with them, and could not be kept: {error}")
        return
    of_each = f" (of each the first {LOG_LIMIT_BYTES >> 20} MiB)" if is_cut else ""
    more = f"; those of {len(running) - POD_LIMIT} other nodes are lost" if len(running) > POD_LIMIT else ""
    notify(f"Kubernetes deletes the pods and their logs; what they had written is kept in {folder}{of_each}{more}")


def _keep_log(client: Client, ref: AppRef, folder: Path, fact: PodFact) -> bool:
    """Returns whether it is longer than what is kept."""
    path = f"/api/v1/namespaces/{ref.namespace}/pods/{fact.name}/log"
    query = {"container": CONTAINER, "timestamps": "true", "limitBytes": str(LOG_LIMIT_BYTES)}
    content = client.read_bytes(path, what=f"log of {fact.name}", query=query)
    target = _find_file(folder, fact.role, fact.index)
    temporary = target.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(target)
    return len(content) >= LOG_LIMIT_BYTES


def find_folder(ref: AppRef) -> Path:
    """Where the logs of a cancelled app are kept."""
    return find_state_dir(os.environ) / "kubernetes-logs" / ref.namespace / ref.name


def _find_file(folder: Path, role: str, index: int) -> Path:
    return folder / f"{role}-{index}.log"


def read_kept_log(ref: AppRef, role: str, index: int) -> Iterator[bytes]:
    """The kept lines of one node, each with its time; none if none were kept here."""
    try:
        with _find_file(find_folder(ref), role, index).open("rb") as lines:
            yield from lines
    except (FileNotFoundError, UnsafeFolderError):
        return


def forget_logs(ref: AppRef) -> None:
    """Removes what was kept of a deleted app."""
    try:
        folder = find_folder(ref)
    except UnsafeFolderError:  # then none were kept
        return
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
