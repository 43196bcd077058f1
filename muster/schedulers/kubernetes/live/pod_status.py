"""Reads one pod: which node of the job it is, how it is, and in plain words why it is not well. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.schedulers.kubernetes.labels import JOB_INDEX_LABEL, LABEL_COMPONENT, TASK_INDEX_LABEL, TASK_LABEL
from muster.schedulers.kubernetes.names import CONTAINER, LEAD

_IMAGE_REASONS: Final = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")
_WAITING_QUIETLY: Final = ("ContainerCreating", "PodInitializing", "")
_LOST_NODE: Final = ("DeletionByTaintManager", "DeletionByPodGC")
_CAUSES: Final = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "PreemptionByKubeScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "its node was lost or tainted",
    "EvictionByEvictionAPI": "evicted (a node is drained)",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "ended by its node (pressure or shutdown)",
}


@dataclass(frozen=True, kw_only=True)
class PodFact:
    """What matters of one pod."""

    name: str
    role: str
    """Label of the role."""
    index: int
    """The node's index; -1 for a pod without one."""
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    created: str
    """RFC 3339, by the API server's clock; orders the pods of one index."""
    node: str = ""
    why: str = ""
    """In plain words what it waits for, or what ended it; pods with the same are one group."""
    exit_code: int | None = None
    finished: str = ""
    report: Mapping[str, Any] | None = None
    """The agent's structured report."""
    text: str = ""
    """The termination message, if it is no report."""
    needs_events: bool = False
    """Only an event can say what it waits for."""
    leaving: bool = False
    """Told to end, not yet gone."""
    uid: str = ""
    restarts: int = 0


def read_pod(pod: Mapping[str, Any], *, lead: str = "") -> PodFact:
    """Reads a pod as the API server gives it.

    Args:
        pod: a v1 Pod.
        lead: Volcano: label of the elastic role. Its node 0 is a task of its own, so that indices of the rest are one
            off. "": there is none.
    """
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    terminated = _find_terminated(status)
    report, text = _read_message(str(terminated.get("message") or ""))
    phase = status.get("phase") or "Unknown"
    leaving = metadata.get("deletionTimestamp") is not None
    why = _explain_end(pod, status, terminated) if phase == "Failed" else _explain_wait(pod, status, leaving=leaving)
    return PodFact(
        name=metadata["name"],
        role=labels.get(LABEL_COMPONENT, ""),
        index=_read_index(labels, lead),
        phase=phase,
        created=metadata.get("creationTimestamp") or "",
        node=(pod.get("spec") or {}).get("nodeName") or "",
        why=why,
        exit_code=terminated.get("exitCode"),
        finished=terminated.get("finishedAt") or "",
        report=report,
        text=text,
        needs_events=phase == "Pending" and not why,
        leaving=leaving,
        uid=metadata.get("uid") or "",
        restarts=sum(item.get("restartCount", 0) for item in status.get("containerStatuses") or []),
    )


def latest_pods(facts: Sequence[PodFact]) -> dict[tuple[str, int], PodFact]:
    """The newest pod of every (role, index)."""
    newest: dict[tuple[str, int], PodFact] = {}
    for fact in sorted(facts, key=lambda fact: (fact.created, fact.phase != "Failed", fact.name)):
        newest[fact.role, fact.index] = fact
    return newest


def _read_index(labels: Mapping[str, str], lead: str) -> int:
    text = labels.get(JOB_INDEX_LABEL) or labels.get(TASK_INDEX_LABEL) or ""
    if not text.isdecimal():
        return -1
    is_rest = bool(lead) and labels.get(LABEL_COMPONENT) == lead and labels.get(TASK_LABEL) != LEAD
    return int(text) + is_rest


def _find_container(statuses: Sequence[Mapping[str, Any]] | None) -> Mapping[str, Any]:
    named = [status for status in statuses or () if status.get("name") == CONTAINER]
    return named[0] if named else {}


def _find_terminated(status: Mapping[str, Any]) -> Mapping[str, Any]:
    state = _find_container(status.get("containerStatuses")).get("state") or {}
    return state.get("terminated") or {}


def _read_message(message: str) -> tuple[Mapping[str, Any] | None, str]:
    if message.startswith("{"):
        try:
            report = json.loads(message)
        except ValueError:
            return None, message
        if isinstance(report, dict) and ("failures" in report or "reason" in report):
            return report, ""
    return None, message.strip()


# -- why it waits -----------------------------------------------------------------------------------------------------


def _explain_wait(pod: Mapping[str, Any], status: Mapping[str, Any], *, leaving: bool) -> str:
    if leaving:
        return _explain_leaving(pod, status)
    if status.get("phase") != "Pending":
        return ""
    scheduled = _find_condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return _shorten_scheduling(str(scheduled.get("reason") or ""), str(scheduled.get("message") or ""))
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), _one_line(str(waiting.get("message") or ""))
        if reason in _IMAGE_REASONS:
            return f"{reason}: cannot get image {container.get('image')!r}: {message or 'see the image name'}"
        if reason not in _WAITING_QUIETLY:
            return f"{reason}: {message}" if message else reason
    return ""


def _explain_leaving(pod: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    disruption = _find_condition(status, "DisruptionTarget")
    node = (pod.get("spec") or {}).get("nodeName") or ""
    if disruption.get("reason") in _LOST_NODE and node:
        # podReplacementPolicy Failed: no replacement until the API server hears of this pod's end, which only its
        # node or a person can bring about.
        taint = f"kubectl taint nodes {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        return f"Terminating on node {node}, which does not answer; if the machine is gone for good: {taint}"
    return "Terminating"


def _shorten_scheduling(reason: str, message: str) -> str:
    """Makes "Insufficient cpu (3 of 3 nodes)" of "0/3 nodes are available: 3 Insufficient cpu. preemption: ..."."""
    if reason == "SchedulingGated":
        return "waits for its gang or queue to be admitted"
    found = re.match(r"\d+/(\d+) nodes are available: (.*)", message)
    if not found:
        return _one_line(message) or reason or "not scheduled yet"
    total, causes = found[1], re.split(r"\.(?:\s|$)", found[2])[0]
    parts = []
    for cause in causes.split(", "):
        counted = re.match(r"(\d+) (.*)", cause)
        parts.append(f"{counted[2]} ({counted[1]} of {total} nodes)" if counted else cause)
    return ", ".join(parts)


def _find_condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((item for item in status.get("conditions") or [] if item.get("type") == kind), {})


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


# -- why it ended -----------------------------------------------------------------------------------------------------


def _explain_end(pod: Mapping[str, Any], status: Mapping[str, Any], terminated: Mapping[str, Any]) -> str:
    disruption = _find_condition(status, "DisruptionTarget")
    if disruption.get("status") == "True":
        cause = str(disruption.get("reason") or "")
        return f"{_CAUSES.get(cause, cause)}: {_one_line(str(disruption.get('message') or cause))}"
    if status.get("reason") == "Evicted":
        return f"Evicted by its node: {_one_line(str(status.get('message') or ''))}"
    if terminated.get("reason") == "OOMKilled":
        # The cgroup's group kill takes agent and workers together: nobody is left to report.
        return f"OOMKilled: out of memory, {_describe_limit(pod)}"
    return _explain_exit(status, terminated)


def _explain_exit(status: Mapping[str, Any], terminated: Mapping[str, Any]) -> str:
    for container in status.get("initContainerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            detail = _one_line(str(ended.get("message") or ended.get("reason") or ""))
            return f"the workspace could not be unpacked with the image's tar (exit {ended['exitCode']}): {detail}"
    if terminated.get("reason") in ("StartError", "ContainerCannotRun"):
        return f"could not start: {_one_line(str(terminated.get('message') or ''))}"
    code = terminated.get("exitCode")
    if code is None:
        return _one_line(str(status.get("message") or status.get("reason") or "ended without an exit code"))
    if code == 143:
        return "exit 143: ended by SIGTERM"
    if code == 137:
        return "exit 137: killed by SIGKILL"
    return f"exit {code}"


def _describe_limit(pod: Mapping[str, Any]) -> str:
    for container in pod["spec"]["containers"]:
        limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
        if container["name"] == CONTAINER and limit:
            return f"limit {limit}; ask for more with --memMB"
    return "no limit of its own; its node ran out, ask for more with --memMB"
