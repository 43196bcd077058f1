"""The files that are copied into an app's containers; the app's state keeps them for containers created later."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster._contract import AGENT_BUNDLE_NAME
from muster.schedulers.docker.spec import AppRequest


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What is copied into containers."""

    agent: bytes
    """The agent's bundle; empty when no container gets it."""
    workspaces: Mapping[str, bytes]
    """Key -> packed folder."""


def build_payload(payload: Payload) -> dict[str, bytes]:
    """Name -> content of the files that store the payload beside the app's state."""
    return {AGENT_BUNDLE_NAME: payload.agent, **payload.workspaces}


def read_payload(folder: Path, app: AppRequest) -> Payload:
    """The inverse of `build_payload`."""
    keys = {container.workspace for container in app.containers if container.workspace is not None}
    return Payload(
        agent=(folder / AGENT_BUNDLE_NAME).read_bytes(),
        workspaces={key: (folder / key).read_bytes() for key in keys},
    )
