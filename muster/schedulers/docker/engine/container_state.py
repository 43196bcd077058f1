"""Parses the engine's description of a container into a record: pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.schedulers.docker.spec import Label


@dataclass(frozen=True, kw_only=True)
class ContainerFacts:
    """The current state of a container."""

    id: str
    name: str
    labels: Mapping[str, str]
    status: str
    """created, running, paused, restarting, removing, exited or dead."""
    exit_code: int | None
    """None unless it has ended."""
    oom_killed: bool
    error: str
    """Why the engine could not run it. It is empty otherwise."""
    started_at: str
    finished_at: str
    """RFC 3339, from the engine. It is "0001-..." if it has not happened."""
    gpu_ids: tuple[str, ...] = ()
    memory_bytes: int = 0

    @property
    def incarnation(self) -> int:
        """How often its replica was started before. 0 also for a container of no replica."""
        return int(self.labels.get(Label.INCARNATION, "0"))

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.status in ("running", "paused", "restarting")


def parse_container(data: Mapping[str, Any]) -> ContainerFacts:
    """Parse the answer of `GET /containers/ID/json`."""
    state, host = data["State"], data.get("HostConfig") or {}
    # "removing" occurs before and after the end.
    ended = state["Status"] in ("exited", "dead") or (state["Status"] == "removing" and not state.get("Running"))
    ids = tuple(i for request in host.get("DeviceRequests") or () for i in request.get("DeviceIDs") or ())
    return ContainerFacts(
        id=data["Id"],
        name=data["Name"].lstrip("/"),
        labels=data["Config"].get("Labels") or {},
        status=state["Status"],
        exit_code=state["ExitCode"] if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        error=state.get("Error") or "",
        started_at=state.get("StartedAt") or "",
        finished_at=state.get("FinishedAt") or "",
        gpu_ids=ids,
        memory_bytes=host.get("Memory") or 0,
    )
