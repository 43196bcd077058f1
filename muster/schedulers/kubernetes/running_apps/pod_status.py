"""Reads one pod: which node of the job it is, its phase, and the reason why it waits or ended. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster._shared.contract import AGENT_MODULE, Env, show_controls
from muster._shared.records import replace
from muster._shared.reports import Report
from muster.schedulers.agent_command import find_run_file, unwrap_command
from muster.schedulers.failure_report import explain_start_failure, parse_report
from muster.schedulers.kubernetes import kube
from muster.schedulers.wording.reasons import Code, Reason

_IMAGE_REASONS: Final = ("InvalidImageName", "ErrImageNeverPull")
_PULL_REASONS: Final = (
    "ImagePullBackOff",
    "ErrImagePull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
)
"""They follow each other as long as an image cannot be pulled."""
_STEADY_REASON: Final = "CreateContainerConfigError"
"""Its message says what is missing. Those of other reasons have ids and times, which differ at each attempt."""
_SAME_REASONS: Final = {
    **dict.fromkeys(("FailedAttachVolume", "FailedMapVolume"), "FailedMount"),
    "BackOff": "CrashLoopBackOff",  # the event, between two attempts
}
"""Reasons that follow each other as long as a pod waits for the same thing -> the one that stands for them."""
_NORMAL_WAIT_REASONS: Final = ("ContainerCreating", "PodInitializing", "")
_LOST_NODE_REASONS: Final = ("DeletionByTaintManager", "DeletionByPodGC")
_LOST_VOLUMES: Final = {"emptyDir", "ephemeral", "configMap", "secret", "projected", "downwardAPI"}
"""Sources of volumes that end with their pod, or that it cannot write to."""
_LOST_LOGS: Final = (
    f"in the pods, and lost with them: `muster log` prints them; --env {Env.LOG_DIR}=FOLDER, on a volume, keeps them"
)
_SIGTERM_CODE: Final = 143
_CAUSES: Final = {
    "PreemptionByScheduler": Code.PREEMPTED,
    "PreemptionByKubeScheduler": Code.PREEMPTED,
    "DeletionByTaintManager": Code.NODE_TAINTED,
    "EvictionByEvictionAPI": Code.NODE_DRAINED,
    "DeletionByPodGC": Code.NODE_GONE,
    "TerminationByKubelet": Code.NODE_PRESSED,
}


@dataclass(frozen=True, kw_only=True)
class PodFact:
    """What we need to know of one pod."""

    name: str
    role: str
    """Label of the role."""
    index: int
    """The node's index. It is -1 for a pod without one."""
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    created: str
    """RFC 3339, by the API server's clock. It orders the pods of one index."""
    node: str = ""
    reason: Reason | None = None
    """Why it waits or ended. None: it runs, or nothing says why."""
    exit_code: int | None = None
    finished: str = ""
    report: Report | None = None
    """The agent's structured report."""
    text: str = ""
    """The termination message, if it is not a report."""
    needs_events: bool = False
    """It waits, and only an event can explain why."""
    terminating: bool = False
    """Deleted, but not yet ended."""
    uid: str = ""
    failed_before: int = 0
    """How many pods of this index that have failed it follows, also deleted ones. Only known for a fixed number of
    nodes."""
    drained_before: int = 0
    """The same of pods that were disrupted or drained. One drain of a job ends and replaces all its pods."""
    is_drained: bool = False
    """This pod was disrupted, or ended by SIGTERM."""
    command: Sequence[str] = ()
    """The command of our container, with its arguments, without what `agent_command.wrap_command` puts before it."""
    count_path: str = ""
    """Of the file that says how often the policy of its role had its command started again. It is "" if none does."""
    log_dir: str = ""
    """Where its agent writes. It is "" if the pod does not say."""
    logs: str = ""
    """Where its agent's logs are, for people. It is "" if the pod does not say."""


def read_pod(pod: Mapping[str, Any]) -> PodFact:
    """Read a v1 Pod as the API server gives it."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    container = _find_container((pod.get("spec") or {}).get("containers"))
    state = _find_container(status.get("containerStatuses")).get("state") or {}
    terminated = state.get("terminated") or {}
    report, text = _read_message(str(terminated.get("message") or ""))
    phase = status.get("phase") or "Unknown"
    terminating = metadata.get("deletionTimestamp") is not None
    has_failed = phase == "Failed"
    reason = (
        _explain_end(pod, status, terminated) if has_failed else _explain_wait(pod, status, terminating=terminating)
    )
    if reason is not None and reason.code in (Code.COULD_NOT_START, Code.IMAGE_LACKS_COMMAND):
        text = ""  # the reason has it
    command, count_path = unwrap_command((*(container.get("command") or ()), *(container.get("args") or ())))
    log_dir = next((each.get("value", "") for each in container.get("env") or () if each["name"] == Env.LOG_DIR), "")
    run_dir = find_run_file(command, log_dir, "") if len(command) > 1 else None
    volume = "" if run_dir is None else _find_volume(pod["spec"], container, run_dir)
    lost_dir = "" if volume else run_dir or ""
    if report is not None and lost_dir:
        # files that have ended with their pods
        failures = tuple(replace(each, log_path=None, error_file=None) for each in report.failures)
        report = replace(report, failures=failures)
    failed_before, drained_before = (
        _read_count(metadata.get("annotations") or {}, name) for name in kube.INDEX_FAILURES
    )
    return PodFact(
        name=metadata["name"],
        role=kube.read_role(pod),
        index=_read_index(pod),
        phase=phase,
        created=metadata.get("creationTimestamp") or "",
        node=(pod.get("spec") or {}).get("nodeName") or "",
        reason=reason,
        exit_code=terminated.get("exitCode"),
        finished=terminated.get("finishedAt") or "",
        report=report,
        text=text,
        needs_events=phase == "Pending" and reason is None,
        terminating=terminating,
        uid=metadata.get("uid") or "",
        failed_before=failed_before,
        drained_before=drained_before,
        is_drained=phase == "Failed" and (terminated.get("exitCode") == _SIGTERM_CODE or _is_disrupted(status)),
        command=command,
        count_path=count_path,
        log_dir=log_dir,
        logs=_LOST_LOGS if lost_dir else f"{run_dir.rstrip('/')} on volume {volume}" if run_dir else "",
    )


def _forget_pod(metadata: Mapping[str, Any], text: str) -> str:
    """Return a text without the pod's own name and uid, which some messages have."""
    for name in ("uid", "name"):
        text = text.replace(metadata.get(name) or "-", "-")
    return text


def _find_volume(spec: Mapping[str, Any], container: Mapping[str, Any], folder: str) -> str:
    """Name the volume on which a folder of a pod lies. "": the folder ends with the pod."""
    mounts = [each for each in container.get("volumeMounts") or () if folder.startswith(f"{each['mountPath']}/")]
    name = max(mounts, key=lambda each: len(each["mountPath"]))["name"] if mounts else ""
    scratch: Mapping[str, Any] = {"emptyDir": {}}
    volume = next((each for each in spec.get("volumes") or () if each["name"] == name), scratch)
    if volume.keys() & _LOST_VOLUMES:
        return ""
    return str((volume.get("persistentVolumeClaim") or {}).get("claimName", name))


def _read_count(annotations: Mapping[str, str], name: str) -> int:
    """Return a number that the Job controller writes to the pods of a Job with a limit per index."""
    text = annotations.get(name, "0")
    return int(text) if text.isdecimal() else 0


def find_latest_pods(facts: Sequence[PodFact]) -> dict[tuple[str, int], PodFact]:
    """Return the newest pod of every (role, index)."""
    newest: dict[tuple[str, int], PodFact] = {}
    for fact in sorted(facts, key=lambda fact: (fact.created, fact.phase != "Failed", fact.name)):
        newest[fact.role, fact.index] = fact
    return newest


def _read_index(pod: Mapping[str, Any]) -> int:
    text = (pod["metadata"].get("labels") or {}).get(kube.JOB_INDEX_LABEL, "")
    return int(text) if text.isdecimal() else -1


def _find_container(containers: Sequence[Mapping[str, Any]] | None) -> Mapping[str, Any]:
    """Find our container, or its status, in a list of them."""
    return next((each for each in containers or () if each.get("name") == kube.CONTAINER), {})


def _read_message(message: str) -> tuple[Report | None, str]:
    report = parse_report(message)
    return (None, show_controls(message.strip())) if report is None else (report, "")


# -- why it waits -----------------------------------------------------------------------------------------------------


def _explain_wait(pod: Mapping[str, Any], status: Mapping[str, Any], *, terminating: bool) -> Reason | None:
    if terminating:
        return _explain_terminating(pod, status)
    if status.get("phase") != "Pending":
        return None
    scheduled = _find_condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        word, message = str(scheduled.get("reason") or ""), str(scheduled.get("message") or "")
        return _explain_scheduling(word, message, pod["metadata"])
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        word, message = str(waiting.get("reason") or ""), _format_line(str(waiting.get("message") or ""))
        if word in (*_IMAGE_REASONS, *_PULL_REASONS):
            shown = word if word in _IMAGE_REASONS else ""
            image, text = container.get("image") or "", _shorten_pull_error(message)
            return Reason(code=Code.IMAGE_NOT_PULLED, word=shown, image=image, text=text)
        if word not in _NORMAL_WAIT_REASONS:
            what = _forget_pod(pod["metadata"], f"{word}: {message}") if word == _STEADY_REASON else word
            return Reason(code=Code.SCHEDULER_SAID, word=word, text=message, what=what)
    return None


def explain_event(word: str, text: str) -> Reason:
    """Return what a Warning event says of a pod, or of a Job that can create none."""
    code = Code.SCHEDULER_SAID
    if "PodSecurity" in text and "restricted" in text:
        code = Code.SECURITY_REFUSED
    elif "exceeded quota" in text:
        code = Code.QUOTA_EXCEEDED
    return Reason(code=code, word=word, text=text, what=_SAME_REASONS.get(word, word))


def _shorten_pull_error(message: str) -> str:
    """Find the cause at the end of what the container runtime says: `dial tcp: lookup registry: no such host`."""
    cause = re.sub(r'^Back-off pulling image "[^"]*"', "", message)
    return re.sub(r'^(: )?(ErrImagePull: )?(.*": |rpc error: code = \w+ desc = )?', "", cause)[:200]


def _explain_disruption(status: Mapping[str, Any]) -> Reason:
    disruption = _find_condition(status, "DisruptionTarget")
    cause = str(disruption.get("reason") or "")
    text = _format_line(str(disruption.get("message") or cause))
    return Reason(code=_CAUSES.get(cause, Code.SCHEDULER_SAID), word=cause, text=text)


def _explain_terminating(pod: Mapping[str, Any], status: Mapping[str, Any]) -> Reason:
    disruption = _find_condition(status, "DisruptionTarget")
    node = (pod.get("spec") or {}).get("nodeName") or ""
    if disruption.get("reason") in _LOST_NODE_REASONS and node:
        # podReplacementPolicy Failed: no replacement before the node, or a taint, reports the end.
        return Reason(code=Code.NODE_SILENT, host=node)
    return _explain_disruption(status) if _is_disrupted(status) else Reason(code=Code.TERMINATING)


def _explain_scheduling(word: str, message: str, metadata: Mapping[str, Any]) -> Reason:
    """Read what the cluster's scheduler says: "0/3 nodes are available: 3 Insufficient cpu. preemption: ..."."""
    if word == "SchedulingGated":
        return Reason(code=Code.GATED)
    found = re.match(r"\d+/(\d+) nodes are available: (.*)", message)
    if not found:
        text = _format_line(message) or word or "not scheduled yet"
        return Reason(code=Code.NOT_SCHEDULED, text=text, what=_forget_pod(metadata, text))
    causes = re.split(r"\.(?:\s|$)", found[2])[0].split(", ")
    counted = [re.fullmatch(r"(\d+) (.*)", cause) for cause in causes]
    lacks = tuple(cause if each is None else each[2] for cause, each in zip(causes, counted, strict=True))
    return Reason(
        code=Code.UNSCHEDULABLE,
        lacks=lacks,
        what=_forget_pod(metadata, ", ".join(sorted(lacks))),
        counts=tuple(-1 if each is None else int(each[1]) for each in counted),
        total=int(found[1]),
    )


def _find_condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((item for item in status.get("conditions") or [] if item.get("type") == kind), {})


def _format_line(text: str) -> str:
    return " ".join(text.split())[:500]


# -- why it ended -----------------------------------------------------------------------------------------------------


def _explain_end(pod: Mapping[str, Any], status: Mapping[str, Any], terminated: Mapping[str, Any]) -> Reason:
    if _is_disrupted(status):
        return _explain_disruption(status)
    if status.get("reason") == "Evicted":
        return Reason(code=Code.NODE_EVICTED, text=_format_line(str(status.get("message") or "")))
    if terminated.get("reason") == "OOMKilled":
        # The kernel kills the agent, too.
        return Reason(code=Code.OUT_OF_MEMORY, limit=_find_limit(pod))
    return _explain_exit(pod, status, terminated)


def _explain_exit(pod: Mapping[str, Any], status: Mapping[str, Any], terminated: Mapping[str, Any]) -> Reason:
    for container in status.get("initContainerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            text = _format_line(str(ended.get("message") or ended.get("reason") or ""))
            return Reason(code=Code.WORKSPACE_NOT_UNPACKED, exit_code=ended["exitCode"], text=text)
    if terminated.get("reason") in ("StartError", "ContainerCannotRun"):
        message = _shorten_start_error(str(terminated.get("message") or ""))
        container = _find_container(pod["spec"].get("containers"))
        program = next(iter(container.get("command") or ()), "")
        runs_agent = AGENT_MODULE in (container.get("args") or ())
        return explain_start_failure(message, container.get("image") or "", program, runs_agent=runs_agent)
    code = terminated.get("exitCode")
    if code is None:
        text = _format_line(str(status.get("message") or status.get("reason") or "ended without an exit code"))
        return Reason(code=Code.ENDED_WITHOUT_CODE, text=text)
    return Reason(code=Code.EXITED, exit_code=code)


def _shorten_start_error(message: str) -> str:
    """Find what the container runtime says at the end of its layers: `exec: "python3": executable file not found`."""
    line = _format_line(message)
    found = re.search(r'exec: "[^"]*": .*', line)
    return found[0] if found else line


def _is_disrupted(status: Mapping[str, Any]) -> bool:
    return _find_condition(status, "DisruptionTarget").get("status") == "True"


def _find_limit(pod: Mapping[str, Any]) -> str:
    limits = (_find_container(pod["spec"]["containers"]).get("resources") or {}).get("limits") or {}
    return str(limits.get("memory") or "")
