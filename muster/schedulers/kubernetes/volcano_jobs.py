"""Jobs of Volcano (batch.volcano.sh), which versions that had `flavor=volcano` submitted: what is read and sent. Pure.

Every role was one task, except an elastic one. Its node 0 was the task `lead`, so that Volcano never started the others
without it. Volcano counts each task from 0, so the pods of the other nodes have labels that are one too low. A variable
of theirs says so.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

from muster.schedulers.kubernetes.kinds import VOLCANO_COMMAND, build_document, build_owner_reference
from muster.schedulers.kubernetes.labels import read_role

_INDEX_LABEL: Final = "volcano.sh/task-index"
_LEADER_TASK: Final = "lead"
ABORTED: Final = "Aborted"
"""The phase after a cancel, also by Volcano's own command."""

_SHIFTED: Final = "MUSTER_NODE_INDEX"
"""Variable of the pods whose index is the label's plus 1."""


def read_state(parent: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the phase, reason and message of a job of Volcano. Return {} for other kinds."""
    return (parent.get("status") or {}).get("state") or {}


def find_index(pod: Mapping[str, Any]) -> int | None:
    """Return the node's index. Return None if the pod is not of a job of Volcano."""
    text = str((pod["metadata"].get("labels") or {}).get(_INDEX_LABEL, ""))
    if not text.isdecimal():
        return None
    containers = (pod.get("spec") or {}).get("containers") or ()
    return int(text) + any(each["name"] == _SHIFTED for item in containers for each in item.get("env") or ())


def count_nodes(job: Mapping[str, Any], label: str) -> int | None:
    """Return how many nodes the role with this label has now. None: not known."""
    own = [task for task in job["spec"].get("tasks") or () if read_role(task["template"]) == label]
    return sum(task["replicas"] for task in own) if own else None


def resize_tasks(job: Mapping[str, Any], label: str, nodes: int) -> dict[str, Any]:
    """Return the change of the job's spec that gives a role this number of nodes."""
    tasks = copy.deepcopy(job["spec"]["tasks"])
    names = [task["name"] for task in tasks]
    tasks[names.index(label)]["replicas"] = nodes - 1 if _LEADER_TASK in names else nodes
    return {"tasks": tasks}


def build_abort_command(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Command that ends a job. Volcano executes it and then deletes it."""
    metadata, reference = job["metadata"], {**build_owner_reference(job), "controller": True}
    name, namespace = f"{metadata['name']}-abort", metadata["namespace"]
    head = {"name": name, "namespace": namespace, "ownerReferences": [reference]}
    return build_document(VOLCANO_COMMAND, head, action="AbortJob", target=reference)
