"""What other nodes compare: versions and digests. Reading them may block."""

import hashlib
import os

from muster._shared.preflight import Machine, read_versions
from muster.agent.config import AgentConfig
from muster.agent.features.preflight.messages import NodeFacts
from muster.agent.workers.spec import ProgramKind

_READ_BYTES = 1 << 20


def read_facts(config: AgentConfig, workspace: str, machine: Machine) -> NodeFacts:
    """Read versions and digests.

    Args:
        config: the agent's.
        workspace: the packed workspace that came with the job; "" if there is none.
        machine: the machine's facts as they were read.
    """
    program, devices = config.program, machine.devices
    is_script = program.kind in (ProgramKind.SCRIPT, ProgramKind.RUN_PATH) and os.path.isfile(program.target)
    versions = read_versions() if program.kind is not ProgramKind.COMMAND else ()
    if devices is not None and devices.driver:
        versions = (*versions, ("the driver", devices.driver))
    return NodeFacts(
        workspace=_compute_digest(workspace) if workspace else "",
        script=_compute_digest(program.target) if is_script and not workspace else "",
        versions=versions,
        nproc=config.nproc,
        devices=None if devices is None else len(devices.answering),
    )


def _compute_digest(path: str) -> str:
    """Compute the digest of a file; "" if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()[:16]
