"""Logs and agents' files of nodes that share no folder with this machine. They are read there, while the job runs."""

import base64
import json
import os
import time
from collections.abc import Sequence
from typing import Final

from muster.schedulers.adapter import AgentReports, ByteSource, JobFacts, RecordReader, ReplicaId
from muster.schedulers.slurm import client
from muster.schedulers.slurm.node import HOSTS_NAME, RUNS_DIR, list_replicas
from muster.schedulers.slurm.running_apps import App

_LIMIT_S: Final = 60.0
_WAIT_S: Final = 2.0
"""Between two looks at a log: each is a step of Slurm's."""
_TAIL_BYTES: Final = 1 << 18

_READ: Final = """
import base64, glob, json, os, sys
found = []
for pattern, offset, limit in json.loads(sys.argv[1]):
    paths = sorted(filter(os.path.isfile, glob.glob(pattern)), key=os.path.getmtime)
    size, data = None, b""
    if paths:
        with open(paths[-1], "rb") as file:
            size = os.path.getsize(paths[-1])
            file.seek(offset if offset >= 0 else max(0, size + offset))
            data = file.read(limit)
    found.append([size, base64.b64encode(data).decode()])
print(json.dumps(found))
"""


def read_there(app: App, node: str, wanted: Sequence[tuple[str, int, int]]) -> list[tuple[int | None, bytes]]:
    """Read parts of files on a node. Return (size, bytes) of each.

    None: there is no such file, or no job that could read it.

    Args:
        app: its job runs.
        node: where.
        wanted: pattern of the path (the newest file counts), offset (from the end if negative), most bytes.
    """
    none: list[tuple[int | None, bytes]] = [(None, b"")] * len(wanted)
    if app.entry is None:
        return none
    command = [app.spec.python, "-c", _READ, json.dumps(list(wanted))]
    code, output, _ = client.run_on_node(app.entry.job_id, node, command, os.environ, _LIMIT_S)
    if code != 0:
        return none
    return [(size, base64.b64decode(data)) for size, data in json.loads(output)]


def read_reports(app: App) -> AgentReports:
    """Return what the agents of an app that runs report. Any node of a role will do."""
    jobs: dict[str, JobFacts] = {}
    restarts = 0
    for role in app.spec.roles:
        nodes = list(app.find_running(role.name).values())
        if not role.runs_agent or not nodes:
            continue
        log_dir = app.remote_folder.role_dir(role.name)

        def read(names: Sequence[str], node: str = nodes[0], log_dir: object = log_dir) -> list[bytes]:
            wanted = [(f"{log_dir}/*/{name}", -_TAIL_BYTES, _TAIL_BYTES) for name in names]
            return [data for _, data in read_there(app, node, wanted)]

        reader = RecordReader(read)
        jobs[role.name] = reader.job
        restarts += reader.restarts
    return AgentReports(jobs=jobs, restarts=restarts)


def _find_nodes(app: App) -> dict[ReplicaId, str]:
    """Find the nodes of replicas. Where the job has lost some, the others know in which order they were."""
    placed = app.find_running()
    replicas = list_replicas(app.spec)
    if not placed or app.entry is None or len(app.entry.nodes) >= len(replicas):
        return placed
    pattern = f"{app.remote_folder.state_dir}/{RUNS_DIR}/{app.entry.job_id}.*/{HOSTS_NAME}"
    [(_, data)] = read_there(app, app.entry.nodes[0], [(pattern, 0, _TAIL_BYTES)])
    hosts = zip(replicas, data.decode().split(), strict=False)
    return {each: host for each, host in hosts if host in app.entry.nodes}


class NodeSource(ByteSource):
    """One replica's log on its node. Times are not read from there."""

    def __init__(self, app: App, replica: ReplicaId, stream: str) -> None:
        self._app = app
        self._node = _find_nodes(app).get(replica)
        self._path = str(app.remote_folder.replica_dir(replica) / f"{stream}.log")

    def find_size(self) -> int | None:
        """See `ByteSource`."""
        return None if self._node is None else read_there(self._app, self._node, [(self._path, 0, 0)])[0][0]

    def read(self, offset: int, limit_bytes: int) -> bytes:
        """See `ByteSource`."""
        if self._node is None:
            return b""
        return read_there(self._app, self._node, [(self._path, offset, limit_bytes)])[0][1]

    def wait(self, limit_s: float) -> None:
        """See `ByteSource`."""
        del limit_s
        time.sleep(_WAIT_S)
