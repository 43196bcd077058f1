"""Asks the agents of an app in a cluster: runs `muster-agent ask job ...` in any running pod of each role."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from muster._shared.contract import STATUS_LIMIT_BYTES, AskKind, AskOutcome
from muster._shared.control import NO_AGENT, NOT_REACHED, CommandExit, ControlError, RoleNodes, ask_roles, close_stop
from muster._shared.reports import Answer
from muster.schedulers.agent_command import build_ask_command, find_run_file, is_agent_role
from muster.schedulers.errors import EngineError, RightError
from muster.schedulers.failure_report import RecordReader
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.api.client import Clock
from muster.schedulers.kubernetes.api.errors import NotRunning, Unreachable
from muster.schedulers.kubernetes.api.execution import open_in_pod, run_in_pod
from muster.schedulers.kubernetes.manifests.bundles import decode_roles
from muster.schedulers.kubernetes.running_apps.app import App, is_cancelled, is_suspended, read_job_end
from muster.schedulers.kubernetes.running_apps.pod_status import PodFact, find_latest_pods
from muster.schedulers.kubernetes.running_apps.status import Observation
from muster.schedulers.node_program.pipe import NodePipe
from muster.schedulers.timestamps import parse_timestamp
from muster.schedulers.wording.reasons import JobFacts

EXEC_MARGIN_S: Final = 40.0
"""How much longer than the limit the command in the pod may take."""

RECORD_MARGIN_S: Final = 180
"""How much longer than the limit a Job lives after its stop was recorded, if nothing ends it before: the clocks of the
cluster and of this machine may differ."""

END_LIMIT_S: Final = 120.0
"""How long to wait for the end of the Jobs."""

LOOK_S: Final = 0.5
_READ_LIMIT_S: Final = 20.0
_LOOK_LIMIT_S: Final = 5.0
_READERS: Final = 16
_TAIL_BYTES: Final = STATUS_LIMIT_BYTES
"""How much of the records is read."""


def ask_app(app: App, kind: AskKind, limit_s: float) -> Answer:
    """Ask the app's agents, and return what became of it.

    Raises:
        ControlError: the app does not exist, has ended, is being stopped, or runs no agents.
        EngineError: the cluster refuses or does not answer.
    """
    return _ask_roles(app, _find_running(app), kind, limit_s)


def stop_app(app: App, limit_s: float, cancel: Callable[[], None], clock: Clock) -> Answer:
    """Stop all ranks at one step, and the app with them.

    The stop is recorded in the Jobs first, with a deadline: they end also if this command is killed. The Job controller
    replaces a pod that has ended only after 10 s. `cancel` comes before. If the agents cannot be asked, the app goes on
    (`AskOutcome.UNREACHED`).

    Args:
        app: which.
        limit_s: how long the agreement and the ranks may take.
        cancel: ends the Jobs: their pods get SIGTERM, if any are left.
        clock: for the wait for their end.

    Raises:
        ControlError: see `ask_app`.
        EngineError: the cluster refuses or does not answer.
    """
    parents = _find_running(app)
    began_s = time.monotonic()
    if all(fact.phase == "Pending" for fact in find_latest_pods(app.list_pods()).values()):  # no agent can be asked
        cancel()
        waits, has_ended = "no pod of the job was running", _wait_ended(app, clock)
        took_s = time.monotonic() - began_s
        if has_ended:
            return Answer(outcome=AskOutcome.DONE, line=f"{waits}; it is cancelled", took_s=took_s)
        return close_stop(Answer(outcome=AskOutcome.LOST, line=waits), "pods", took_s, has_ended=False)
    # A mark would report an end, but it can still start.
    recorded = [parent for parent in parents if not is_suspended(parent)]
    for parent in recorded:
        _record_stop(app, parent, len(parents) * limit_s)  # roles are asked in turn
    goes_on = False
    try:
        running = _list_running(app)
        asked = _ask_roles(app, parents, AskKind.STOP, limit_s)
        goes_on = asked.outcome is AskOutcome.UNREACHED and _stay(app, running, limit_s, clock)
    except ControlError as error:  # it runs no agents
        asked = Answer(outcome=AskOutcome.REFUSED, line=str(error))
    finally:
        if goes_on:
            for parent in recorded:
                _withdraw_stop(app, parent)
        else:
            _cancel_recorded(cancel, has_record=bool(recorded))
    if goes_on:
        return asked
    has_ended = _wait_ended(app, clock)
    return close_stop(asked, "pods", time.monotonic() - began_s, has_ended=has_ended)


def _find_running(app: App) -> list[dict[str, Any]]:
    """Return the app's Jobs, or its JobSet. Some of it has not ended."""
    name, parents = app.ref.name, app.need_parents()
    ends = [read_job_end(parent) for parent in parents]
    if None not in ends:
        how = "failed" if "Failed" in ends else "succeeded"
        how = "cancelled" if how == "failed" and any(map(is_cancelled, parents)) else how
        raise ControlError(f"{name} has ended already ({how})", CommandExit.ENDED, is_unchanged=True)
    if any(map(is_cancelled, parents)):
        raise ControlError(f"{name} is being stopped already", CommandExit.REFUSED, is_unchanged=True)
    return parents


def _record_stop(app: App, parent: Mapping[str, Any], limit_s: float) -> None:
    if read_job_end(parent) is not None:
        return
    change: dict[str, Any] = {"metadata": {"annotations": {kube.CANCEL_ANNOTATION: kube.BY_STOP}}}
    started = (parent.get("status") or {}).get("startTime")
    if kube.parse_kind(parent) == kube.JOB and started:
        age_s = time.time() - parse_timestamp(started)[0]
        deadline_s = math.ceil(max(0.0, age_s) + limit_s) + RECORD_MARGIN_S
        known_s = parent["spec"].get("activeDeadlineSeconds")
        change["spec"] = {"activeDeadlineSeconds": min(deadline_s, known_s or deadline_s)}
    app.patch(parent, change)


def _withdraw_stop(app: App, parent: Mapping[str, Any]) -> None:
    """Undo `_record_stop`: `parent` is as it was before."""
    change: dict[str, Any] = {"metadata": {"annotations": {kube.CANCEL_ANNOTATION: None}}}
    if kube.parse_kind(parent) == kube.JOB:
        change["spec"] = {"activeDeadlineSeconds": parent["spec"].get("activeDeadlineSeconds")}
    app.patch(parent, change)


def _list_running(app: App) -> set[str]:
    return {fact.name for fact in app.list_pods() if fact.phase == "Running"}


def _stay(app: App, pods: set[str], limit_s: float, clock: Clock) -> bool:
    """Return whether all of these pods run until the limit, so that no agent has got the request."""
    deadline_s = clock.now_s() + limit_s
    while pods <= _list_running(app):
        if clock.now_s() >= deadline_s:
            return True
        clock.sleep(LOOK_S)
    return False


def _wait_ended(app: App, clock: Clock) -> bool:
    """Wait until no pod of the app runs. Return False after the limit."""
    deadline_s = clock.now_s() + END_LIMIT_S
    while any(fact.phase in ("Pending", "Running") for fact in app.list_pods()):
        if clock.now_s() >= deadline_s:
            return False
        clock.sleep(LOOK_S)
    return True


def _cancel_recorded(cancel: Callable[[], None], *, has_record: bool) -> None:
    """Cancel an app. If its stop is recorded, a right that is missing now does not mean that nothing was changed."""
    try:
        cancel()
    except RightError as error:
        if not has_record:
            raise
        raise EngineError(f"the stop is recorded, and its pods were not told to end: {error}") from error


def _ask_roles(app: App, parents: Sequence[Mapping[str, Any]], kind: AskKind, limit_s: float) -> Answer:
    running = {fact.name: fact for fact in app.list_pods() if fact.phase == "Running"}

    def ask(name: str, words: Sequence[str]) -> tuple[int, str, str]:
        try:
            return _run(app, running[name], build_ask_command(running[name].command, words), limit_s + EXEC_MARGIN_S)
        except NotRunning as error:
            return NO_AGENT, "", str(error)
        except Unreachable as error:  # a silent kubelet
            return NOT_REACHED, "", str(error)

    def find_nodes(label: str, role: str) -> RoleNodes:
        names = [fact.name for fact in running.values() if fact.role == label]
        none = f"no pod of {role} runs: `muster status` says why"
        if names:
            none = f"no pod of {role} has an agent that answers: its workers have not run for a second yet"
        return RoleNodes(names=names, ask=ask, none=none)

    agents = {label: role.name for label, role in decode_roles(parents[0]).items() if is_agent_role(role)}
    return ask_roles(app.ref.name, {name: find_nodes(label, name) for label, name in agents.items()}, kind, limit_s)


def _run(app: App, pod: PodFact, command: Sequence[str], limit_s: float) -> tuple[int, str, str]:
    return run_in_pod(app.resources.client.connection, app.ref.namespace, pod.name, command, limit_s=limit_s)


# -- one node ---------------------------------------------------------------------------------------------------------


def open_in_node(app: App, role: str, index: int, words: Sequence[str]) -> NodePipe:
    """Start a Python in the pod of a node. This needs the right to `pods/exec`.

    Raises:
        ControlError: it has no pod that runs.
        EngineError: the cluster refuses or does not answer.
    """
    pod = _need_pod(app, role, index)
    command = [pod.command[0] if pod.command else "python3", *words]
    return open_in_pod(app.resources.client.connection, app.ref.namespace, pod.name, command)


def end_node(app: App, role: str, index: int) -> None:
    """Delete the pod of a node, with its grace period. Its Job replaces it. Raises as `open_in_node`."""
    app.resources.delete(kube.POD, app.ref.namespace, _need_pod(app, role, index).name)


def _need_pod(app: App, role: str, index: int) -> PodFact:
    pod = _find_pod(app, role, index)
    if pod is None:
        raise ControlError(f"node {index} of {role} has no pod that runs", CommandExit.ENDED)
    return pod


def _find_pod(app: App, role: str, index: int) -> PodFact | None:
    """Return the pod of a node that runs."""
    label, _ = app.list_roles().get(role, (None, None))
    pods = (pod for pod in app.list_pods() if (pod.role, pod.index) == (label, index))
    return next((pod for pod in pods if pod.phase == "Running"), None)


# -- what agents write ------------------------------------------------------------------------------------------------


def read_jobs(app: App, observation: Observation) -> dict[str, JobFacts]:
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
    return {role: RecordReader(partial(_read_records, app, pod), pod.created).job for role, pod in pods.items()}


def read_restarts(app: App, pods: Sequence[PodFact]) -> dict[tuple[str, int], int]:
    """Return how often policies had the commands of pods that run started again, by the label of the role and index.

    It runs `cat` in these pods. Where this is refused, or does not answer soon, nothing is known.
    """
    deadline_s = time.monotonic() + _LOOK_LIMIT_S

    def read(pod: PodFact) -> int:
        with contextlib.suppress(EngineError, ValueError):  # a pod that ends, or not restarted yet
            if (left_s := deadline_s - time.monotonic()) > 0:
                return int(_run(app, pod, ["cat", pod.count_path], left_s)[1])
        return 0

    counted = [pod for pod in find_latest_pods(pods).values() if pod.phase == "Running" and pod.count_path]
    with ThreadPoolExecutor(_READERS) as readers:
        return {(pod.role, pod.index): count for pod, count in zip(counted, readers.map(read, counted), strict=True)}


def read_run_file(app: App, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:
    """Read the end of a file of the run's folder in the pod of a node that runs. None: it is not there.

    It runs `tail` in the pod, and changes nothing. It needs the right to `pods/exec`.

    Raises:
        EngineError: the cluster refuses or does not answer.
    """
    pod = _find_pod(app, role, index)
    path = find_run_file(pod.command, pod.log_dir, name) if pod is not None else None
    if pod is None or path is None:
        return None
    code, output, _ = _run(app, pod, ["tail", "-c", str(limit_bytes), path], _READ_LIMIT_S)
    return output.encode() if code == 0 else None


def _read_records(app: App, pod: PodFact, names: Sequence[str]) -> tuple[bytes, bytes]:
    """Return the ends of an agent's records and of its status, which is one line. See `records.ReadBytes`.

    Nothing where the command is refused.
    """
    paths = [path for name in names if (path := find_run_file(pod.command, pod.log_dir, name)) is not None]
    content = b""
    if paths:
        with contextlib.suppress(EngineError):
            content = _run(app, pod, ["tail", "-q", "-c", str(_TAIL_BYTES), *paths], _LOOK_LIMIT_S)[1].encode()
    return content, content.rstrip().rpartition(b"\n")[2]
