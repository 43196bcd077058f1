"""Asks the agents of an app in a cluster: runs `muster-agent ask job ...` in any running pod of each role."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, Final

from muster._shared.contract import STATUS_LIMIT_BYTES, AskKind, AskOutcome
from muster._shared.control import NO_AGENT, NOT_REACHED, ControlError, ExitCode, RoleNodes, ask_roles, close_stop
from muster._shared.reports import Answer
from muster.schedulers.adapter.records import RecordReader
from muster.schedulers.agent_command import build_ask_command, find_run_file, is_agent_role
from muster.schedulers.errors import EngineError, RightError
from muster.schedulers.kubernetes.api.client import Clock
from muster.schedulers.kubernetes.api.errors import NotRunning, Unreachable
from muster.schedulers.kubernetes.api.execution import open_in_pod, run_in_pod
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.kinds import JOB, POD, parse_kind
from muster.schedulers.kubernetes.labels import BY_STOP, CANCEL_ANNOTATION
from muster.schedulers.kubernetes.live.observation import list_pods
from muster.schedulers.kubernetes.live.operations import find_parents, is_cancelled, read_job_end
from muster.schedulers.kubernetes.live.pod_status import PodFact, find_latest_pods
from muster.schedulers.kubernetes.live.status import Observation, count_replaced_pods
from muster.schedulers.kubernetes.manifests.app_annotation import decode_roles
from muster.schedulers.kubernetes.names import CONTAINER
from muster.schedulers.node_program.pipe import NodePipe
from muster.schedulers.wording.job_facts import JobFacts

EXEC_MARGIN_S: Final = 40.0
"""How much longer than the limit the command in the pod may take."""

RECORD_MARGIN_S: Final = 180
"""How much longer than the limit a Job lives after its stop was recorded, if nothing ends it before: the clocks of the
cluster and of this machine may differ."""

END_LIMIT_S: Final = 120.0
"""How long to wait for the end of the Jobs."""

LOOK_S: Final = 0.5
_CHECK_LIMIT_S: Final = 20.0
_LOOK_LIMIT_S: Final = 5.0
_TAIL_BYTES: Final = STATUS_LIMIT_BYTES
"""How much of the records is read."""


def ask_app(resources: Objects, ref: AppRef, kind: AskKind, limit_s: float) -> Answer:
    """Ask the app's agents, and return what became of it.

    Raises:
        ControlError: the app does not exist, has ended, is being stopped, or runs no agents.
        EngineError: the cluster refuses or does not answer.
    """
    return _ask_roles(resources, ref, _find_running(resources, ref), kind, limit_s)


def stop_app(resources: Objects, ref: AppRef, limit_s: float, cancel: Callable[[], None], clock: Clock) -> Answer:
    """Stop all ranks at one step, and the app with them.

    The stop is recorded in the Jobs first, with a deadline: they end also if this command is killed. The Job controller
    replaces a pod that has ended only after 10 s. `cancel` comes before. If the agents cannot be asked, the app goes on
    (`AskOutcome.UNREACHED`).

    Args:
        resources: of the cluster.
        ref: the app.
        limit_s: how long the agreement and the ranks may take.
        cancel: ends the Jobs: their pods get SIGTERM, if any are left.
        clock: for the wait for their end.

    Raises:
        ControlError: see `ask_app`.
        EngineError: the cluster refuses or does not answer.
    """
    parents = _find_running(resources, ref)
    began_s = time.monotonic()
    waits = _describe_waiting(list_pods(resources, ref), parents)
    if waits:  # no agent can be asked
        cancel()
        has_ended = _wait_ended(resources, ref, clock)
        took_s = time.monotonic() - began_s
        if has_ended:
            return Answer(outcome=AskOutcome.DONE, line=f"{waits}; it is cancelled", took_s=took_s)
        return close_stop(Answer(outcome=AskOutcome.LOST, line=waits), "pods", took_s, has_ended=False)
    _check_right(resources, ref, parents)
    # A mark would report an end, but it can still start.
    recorded = [parent for parent in parents if not parent["spec"].get("suspend")]
    for parent in recorded:
        _record_stop(resources, ref, parent, len(parents) * limit_s)  # roles are asked in turn
    goes_on = False
    try:
        running = _list_running(resources, ref)
        asked = _ask_roles(resources, ref, parents, AskKind.STOP, limit_s)
        goes_on = asked.outcome is AskOutcome.UNREACHED and _stay(resources, ref, running, limit_s, clock)
    except ControlError as error:  # it runs no agents
        asked = Answer(outcome=AskOutcome.REFUSED, line=str(error))
    finally:
        if goes_on:
            for parent in recorded:
                _withdraw_stop(resources, ref, parent)
        elif recorded:
            _cancel_recorded(cancel)
        else:
            cancel()
    if goes_on:
        return asked
    has_ended = _wait_ended(resources, ref, clock)
    return close_stop(asked, "pods", time.monotonic() - began_s, has_ended=has_ended)


def _find_running(resources: Objects, ref: AppRef) -> list[dict[str, Any]]:
    """Return the app's Jobs, or its JobSet. Some of it has not ended."""
    parents = find_parents(resources, ref)
    if not parents:
        raise ControlError(f"there is no app {ref.name!r} in namespace {ref.namespace!r}", ExitCode.UNKNOWN)
    ends = [read_job_end(parent) for parent in parents]
    if None not in ends:
        how = "failed" if "Failed" in ends else "succeeded"
        how = "cancelled" if how == "failed" and any(map(is_cancelled, parents)) else how
        raise ControlError(f"{ref.name} has ended already ({how}): nothing was changed", ExitCode.ENDED)
    if any(map(is_cancelled, parents)):
        raise ControlError(f"{ref.name} is being stopped already: nothing was changed", ExitCode.REFUSED)
    return parents


def _describe_waiting(pods: Sequence[PodFact], parents: Sequence[Mapping[str, Any]]) -> str:
    """Say that no node of an app runs, and why. Return "" if a pod runs or has ended."""
    latest = list(find_latest_pods(pods).values())
    if any(fact.phase != "Pending" for fact in latest):
        return ""
    ran = count_replaced_pods(Observation(parents=parents, pods=pods)) > 0
    state = "no pod of the job was running" if ran else "the job had not started"
    if latest:
        count = len(latest)
        return f"{state}: its {f'{count} pods were' if count > 1 else 'pod was'} pending"
    suspended = bool((parents[0].get("spec") or {}).get("suspend"))
    return f"{state}: it {'was suspended, or waited in its queue' if suspended else 'had no pods'}"


def _check_right(resources: Objects, ref: AppRef, parents: Sequence[Mapping[str, Any]]) -> None:
    """Run something harmless in a pod: without the right to it, nothing may be changed.

    Raises:
        EngineError: the account lacks the right.
    """
    with contextlib.suppress(Unreachable):
        for asker in _build_askers(resources, ref, parents, _CHECK_LIMIT_S).values():
            for name in asker.names:
                asker.run(name, ["ask", "--help"])
                return


def _record_stop(resources: Objects, ref: AppRef, parent: Mapping[str, Any], limit_s: float) -> None:
    if read_job_end(parent) is not None:
        return
    change: dict[str, Any] = {"metadata": {"annotations": {CANCEL_ANNOTATION: BY_STOP}}}
    kind = parse_kind(parent)
    started = (parent.get("status") or {}).get("startTime")
    if kind == JOB and started:
        age_s = (datetime.now(timezone.utc) - datetime.fromisoformat(started.replace("Z", "+00:00"))).total_seconds()
        deadline_s = math.ceil(max(0.0, age_s) + limit_s) + RECORD_MARGIN_S
        known_s = parent["spec"].get("activeDeadlineSeconds")
        change["spec"] = {"activeDeadlineSeconds": min(deadline_s, known_s or deadline_s)}
    resources.patch(kind, ref.namespace, parent["metadata"]["name"], change)


def _withdraw_stop(resources: Objects, ref: AppRef, parent: Mapping[str, Any]) -> None:
    """Undo `_record_stop`: `parent` is as it was before."""
    change: dict[str, Any] = {"metadata": {"annotations": {CANCEL_ANNOTATION: None}}}
    kind = parse_kind(parent)
    if kind == JOB:
        change["spec"] = {"activeDeadlineSeconds": parent["spec"].get("activeDeadlineSeconds")}
    resources.patch(kind, ref.namespace, parent["metadata"]["name"], change)


def _list_running(resources: Objects, ref: AppRef) -> set[str]:
    return {fact.name for fact in list_pods(resources, ref) if fact.phase == "Running"}


def _stay(resources: Objects, ref: AppRef, pods: set[str], limit_s: float, clock: Clock) -> bool:
    """Return whether all of these pods run until the limit, so that no agent has got the request."""
    deadline_s = clock.now_s() + limit_s
    while pods <= _list_running(resources, ref):
        if clock.now_s() >= deadline_s:
            return True
        clock.sleep(LOOK_S)
    return False


def _cancel_recorded(cancel: Callable[[], None]) -> None:
    """Cancel an app whose stop is recorded: a right that is missing now does not mean that nothing was changed."""
    try:
        cancel()
    except RightError as error:
        raise EngineError(f"the stop is recorded, and its pods were not told to end: {error}") from error


def _ask_roles(
    resources: Objects, ref: AppRef, parents: Sequence[Mapping[str, Any]], kind: AskKind, limit_s: float
) -> Answer:
    askers = _build_askers(resources, ref, parents, limit_s + EXEC_MARGIN_S)
    roles = {
        role: RoleNodes(names=asker.names, ask=asker, none=_describe_silence(role, asker))
        for role, asker in askers.items()
    }
    return ask_roles(ref.name, roles, kind, limit_s)


def _describe_silence(role: str, asker: "_PodAsker") -> str:
    if not asker.names:
        return f"no pod of {role} runs: `muster status` says why"
    return f"no pod of {role} has an agent that answers: its workers have not run for a second yet"


def _build_askers(
    resources: Objects, ref: AppRef, parents: Sequence[Mapping[str, Any]], limit_s: float
) -> "dict[str, _PodAsker]":
    """Map each role that runs agents to what asks its running pods."""
    running = [fact for fact in list_pods(resources, ref) if fact.phase == "Running"]
    return {
        role.name: _PodAsker(resources, ref, [fact for fact in running if fact.role == label], limit_s)
        for label, role in decode_roles(parents[0]).items()
        if is_agent_role(role)
    }


def read_jobs(resources: Objects, ref: AppRef, observation: Observation) -> dict[str, JobFacts]:
    """Return what the agents of an app that runs have reported, by role, from the first node of each that runs.

    Where node 0 is lost, the next one takes over.

    It runs `tail` in a pod, and changes nothing. Without the right to it, or without an answer soon, nothing is known.
    """
    try:
        roles = decode_roles(observation.parents[0])
    except EngineError:  # damaged, as the status says
        return {}
    running = sorted(
        (fact for fact in observation.pods if fact.phase == "Running" and fact.index >= 0), key=lambda fact: -fact.index
    )
    first = {fact.role: fact for fact in running}
    pods = {role.name: first[label] for label, role in roles.items() if is_agent_role(role) and label in first}
    return {
        role: RecordReader(partial(_read_records, resources, ref, pod), pod.created).job for role, pod in pods.items()
    }


def run_in_node(
    resources: Objects, ref: AppRef, role: str, index: int, command: Sequence[str], limit_s: float
) -> tuple[int, str, str]:
    """Run a command in the pod of a node. This needs the right to `pods/exec`.

    Raises:
        ControlError: it has no pod that runs.
        EngineError: the cluster refuses or does not answer.
    """
    pod = _need_pod(resources, ref, role, index)
    return _PodAsker(resources, ref, [pod], limit_s).execute(pod.name, command)


def open_in_node(resources: Objects, ref: AppRef, role: str, index: int, words: Sequence[str]) -> NodePipe:
    """Start a Python in the pod of a node. Raises as `run_in_node`."""
    pod = _need_pod(resources, ref, role, index)
    command = [pod.command[0] if pod.command else "python3", *words]
    return open_in_pod(resources.client.connection, ref.namespace, pod.name, CONTAINER, command)


def end_node(resources: Objects, ref: AppRef, role: str, index: int) -> None:
    """Delete the pod of a node, with its grace period. Its Job replaces it. Raises as `run_in_node`."""
    resources.delete(POD, ref.namespace, _need_pod(resources, ref, role, index).name)


def _need_pod(resources: Objects, ref: AppRef, role: str, index: int) -> PodFact:
    pod = _find_pod(resources, ref, role, index)
    if pod is None:
        raise ControlError(f"node {index} of {role} has no pod that runs", ExitCode.ENDED)
    return pod


def _find_pod(resources: Objects, ref: AppRef, role: str, index: int) -> PodFact | None:
    """Return the pod of a node that runs. `list_pods` lists those of this app only."""
    parents = find_parents(resources, ref)
    labels = [label for label, each in decode_roles(parents[0]).items() if each.name == role] if parents else []
    pods = (pod for pod in list_pods(resources, ref) if pod.role in labels and pod.index == index)
    return next((pod for pod in pods if pod.phase == "Running"), None)


def read_run_file(resources: Objects, ref: AppRef, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:
    """Read the end of a file of the run's folder in the pod of a node that runs. None: it is not there.

    It runs `tail` in the pod, and changes nothing. It needs the right to `pods/exec`.

    Raises:
        EngineError: the cluster refuses or does not answer.
    """
    pod = _find_pod(resources, ref, role, index)
    path = find_run_file(pod.command, pod.log_dir, name) if pod is not None else None
    if pod is None or path is None:
        return None
    asker = _PodAsker(resources, ref, [pod], _CHECK_LIMIT_S)
    code, output, _ = asker.execute(pod.name, ["tail", "-c", str(limit_bytes), path])
    return output.encode() if code == 0 else None


def _read_records(resources: Objects, ref: AppRef, pod: PodFact, names: Sequence[str]) -> tuple[bytes, bytes]:
    """Return the ends of an agent's records and of its status, which is one line. See `records.ReadBytes`.

    Nothing where the command is refused.
    """
    paths = [path for name in names if (path := find_run_file(pod.command, pod.log_dir, name)) is not None]
    content = b""
    if paths:
        asker = _PodAsker(resources, ref, [pod], _LOOK_LIMIT_S)
        with contextlib.suppress(EngineError):
            content = asker.execute(pod.name, ["tail", "-q", "-c", str(_TAIL_BYTES), *paths])[1].encode()
    return content, content.rstrip().rpartition(b"\n")[2]


class _PodAsker:
    """A `_shared.control.AskNode` for pods, by name."""

    def __init__(self, resources: Objects, ref: AppRef, pods: Sequence[PodFact], limit_s: float) -> None:
        self._resources = resources
        self._ref = ref
        self._pods = {pod.name: pod for pod in pods}
        self._limit_s = limit_s

    @property
    def names(self) -> list[str]:
        """The names of the pods, in order."""
        return list(self._pods)

    def run(self, node: str, words: Sequence[str]) -> tuple[int, str, str]:
        """Run the agent's command with these words in a pod. Raises as `run_in_pod`."""
        return self.execute(node, build_ask_command(self._pods[node].command, words))

    def execute(self, node: str, command: Sequence[str]) -> tuple[int, str, str]:
        """Run a command in a pod. Raises as `run_in_pod`."""
        connection, namespace = self._resources.client.connection, self._ref.namespace
        return run_in_pod(connection, namespace, node, CONTAINER, command, limit_s=self._limit_s)

    def __call__(self, node: str, words: Sequence[str]) -> tuple[int, str, str]:
        """See `_shared.control.AskNode`."""
        try:
            return self.run(node, words)
        except NotRunning as error:
            return NO_AGENT, "", str(error)
        except Unreachable as error:  # a silent kubelet
            return NOT_REACHED, "", str(error)


def _wait_ended(resources: Objects, ref: AppRef, clock: Clock) -> bool:
    """Wait until no pod of the app runs. Return False after the limit."""
    deadline_s = clock.now_s() + END_LIMIT_S
    while True:
        if not any(fact.phase in ("Pending", "Running") for fact in list_pods(resources, ref)):
            return True
        if clock.now_s() >= deadline_s:
            return False
        clock.sleep(LOOK_S)
