"""All that the scheduler does with clusters: one session per scheduler, one client per kubeconfig and context."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs.api import AppState

from muster._shared.contract import AskKind, Env, print_line
from muster._shared.reports import Answer
from muster.schedulers.adapter.scheduler import ListedApp
from muster.schedulers.adapter.status import build_status, check_replica
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.client import Client, Clock, SystemClock
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import ApiError, read_if_allowed
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.app_id import AppRef, parse_app_id
from muster.schedulers.kubernetes.kinds import JOB, JOBSET, POD, Kind
from muster.schedulers.kubernetes.labels import BY_CANCEL, BY_STOP, LABEL_INSTANCE, LABEL_MANAGED_BY, MANAGED_BY
from muster.schedulers.kubernetes.live import asking, cancelling, kept_logs, operations
from muster.schedulers.kubernetes.live.logs import ConnectionLimits, LogReader, PodLogQuery, convert_to_stamp
from muster.schedulers.kubernetes.live.observation import list_pods, observe, read_gone
from muster.schedulers.kubernetes.live.role_stop import RoleStop
from muster.schedulers.kubernetes.live.status import (
    Observation,
    build_facts,
    decide_state,
    find_submitted_s,
    has_run,
    list_ends,
)
from muster.schedulers.kubernetes.live.submit import submit
from muster.schedulers.kubernetes.live.watch import PodSnapshot, PodWatch
from muster.schedulers.kubernetes.manifests.app_annotation import decode_roles
from muster.schedulers.kubernetes.manifests.request import Request
from muster.schedulers.kubernetes.options import Options
from muster.schedulers.node_program.pipe import NodePipe
from muster.schedulers.runner import callers
from muster.schedulers.wording.facts import AppFacts

_WAITS = frozenset({AppState.SUBMITTED, AppState.PENDING})
_LOOKS: Final = 4
_LOOK_S: Final = 0.5
"""How often the events of an app that has just been deleted are looked at, and between two looks: they come late."""
_END_STATES = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED, AppState.UNKNOWN)


class Session:
    """Safe to use from several threads: TorchX reads logs in many. Close it to drop its connections."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._limits = ConnectionLimits()
        self._clients: dict[Access, Client] = {}
        self._watches: dict[str, PodWatch] = {}
        self._role_stops: list[RoleStop] = []
        self._ends: dict[AppRef, dict[str, str]] = {}
        """See `Observation.ends`: what waits for an app knows them after `ttl_s`, too."""
        self._ran: set[AppRef] = set()
        """Apps that were seen to run: Kubernetes forgets it."""
        self._unended: dict[AppRef, Observation] = {}
        """What was seen last of apps that had not ended."""

    def close(self) -> None:
        """Stop what is left of apps that have failed, then drops all connections. Idempotent."""
        for role_stop in self._role_stops:
            role_stop.close()
        self._role_stops.clear()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._watches.clear()

    def _open(self, access: Access) -> Objects:
        return Objects(self._clients.setdefault(access, Client(access, clock=self._clock, notify=_print_notice)))

    def _open_place(self, options: Options) -> tuple[Objects, Access, str]:
        """Return the cluster and the namespace that the options name.

        If they name no namespace, it is the context's.
        """
        access = Access(kubeconfig=options.kubeconfig, context=options.context)
        resources = self._open(access)
        return resources, access, options.namespace or resources.client.connection.namespace

    def _find(self, app_id: str) -> tuple[AppRef, Objects]:
        if ":" not in app_id:
            app_id = f"{self._open(Access()).client.connection.namespace}:{app_id}"
        ref = parse_app_id(app_id)
        return ref, self._open(ref.access)

    def describe_place(self, app_id: str | None) -> str:
        """Name the namespace and the context in which an app is looked for. None: those of an app without any."""
        if app_id is None:
            connection = self._open(Access()).client.connection
            return f"namespace {connection.namespace!r} of {connection.origin}"
        ref, resources = self._find(app_id)
        return f"namespace {ref.namespace!r} of {resources.client.connection.origin}"

    # -- apps ---------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> str:
        """Create all objects of a request, or none. Returns the app's id."""
        resources, access, namespace = self._open_place(request.options)
        submit(resources, request, namespace=namespace, notify=_print_notice)
        ref = AppRef(namespace=namespace, name=request.name, access=access)
        if request.has_several_jobs:
            self._role_stops.append(RoleStop(resources, ref, notify=_print_notice))
        return str(ref)

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Return the app's state, with reasons. Return None if it does not exist.

        Only `torchx status` runs a command in a pod for it: programs look again and again. It changes nothing, unless
        TorchX's `Runner.cancel` asks: of an app that has failed, other roles may run, and TorchX would leave them.

        Raises:
            EngineError: TorchX's `Runner.wait` waits for an app that has ended, and how is not known. It takes UNKNOWN
                for a state that passes, and would never return.
        """
        facts = self.read_facts(app_id, asks_agents=callers.shows_status())
        if facts is None:
            return None
        response = build_status(facts)
        if response.state is AppState.UNKNOWN and callers.is_wait():
            raise EngineError(f"{app_id} has ended as UNKNOWN: {response.msg}; the roles that are left have succeeded")
        if response.state is AppState.FAILED and callers.is_cancel():
            self.cancel(app_id)
        return response

    def read_facts(self, app_id: str, *, asks_agents: bool) -> AppFacts | None:
        """Return what is known of an app. Return None if it does not exist.

        Args:
            app_id: the app's.
            asks_agents: read what its agents report, in a pod.
        """
        ref, resources = self._find(app_id)
        observation = observe(resources, ref) or self._find_gone(resources, ref)
        if observation is None:
            self._forget(ref)
            return None
        ends = self._note_ends(ref, [*observation.parents, *self._list_gone(resources, ref, observation.parents)])
        observation = replace(observation, ends=ends, ran_before=ref in self._ran)
        if has_run(observation):
            self._ran.add(ref)
        state = decide_state(observation)
        if state in _END_STATES:
            self._unended.pop(ref, None)
        else:
            self._unended[ref] = observation
        if asks_agents and state is AppState.RUNNING:
            observation = replace(observation, jobs=asking.read_jobs(resources, ref, observation))
        return build_facts(app_id, observation)

    def read_run_file(self, app_id: str, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:
        """See `asking.read_run_file`."""
        ref, resources = self._find(app_id)
        return asking.read_run_file(resources, ref, role, index, name, limit_bytes)

    def run_in_node(
        self, app_id: str, role: str, index: int, command: Sequence[str], limit_s: float
    ) -> tuple[int, str, str]:
        """See `asking.run_in_node`."""
        ref, resources = self._find(app_id)
        return asking.run_in_node(resources, ref, role, index, command, limit_s)

    def open_in_node(self, app_id: str, role: str, index: int, words: Sequence[str]) -> NodePipe:
        """See `asking.open_in_node`."""
        ref, resources = self._find(app_id)
        return asking.open_in_node(resources, ref, role, index, words)

    def end_node(self, app_id: str, role: str, index: int) -> None:
        """See `asking.end_node`."""
        ref, resources = self._find(app_id)
        asking.end_node(resources, ref, role, index)

    def _note_ends(self, ref: AppRef, parents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return how Jobs have ended that this session has seen to end, now or before."""
        self._ends[ref] = {**self._ends.get(ref, {}), **list_ends(parents)}
        return self._ends[ref]

    def _list_gone(
        self, resources: Objects, ref: AppRef, parents: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Return the Jobs, as they ended, that `ttl_s` has deleted since the last look while others are left."""
        last = self._unended.get(ref)
        names = {parent["metadata"]["name"] for parent in parents}
        gone = [] if last is None else [each for each in last.parents if each["metadata"]["name"] not in names]
        return [ended for each in gone for ended in read_gone(resources, ref, [each])]

    def _find_gone(self, resources: Objects, ref: AppRef) -> Observation | None:
        """Return the end of an app that `ttl_s` has deleted before this session saw it. None: it is not known."""
        last = self._unended.get(ref)
        if last is None:
            return None
        for look in range(_LOOKS):
            if look:
                self._clock.sleep(_LOOK_S)
            parents = read_gone(resources, ref, last.parents)
            if parents:
                ended = [fact for fact in last.pods if fact.phase in ("Succeeded", "Failed")]
                return replace(last, parents=parents, pods=ended)
        return None

    def _forget(self, ref: AppRef) -> None:
        self._unended.pop(ref, None)
        self._ends.pop(ref, None)
        self._ran.discard(ref)

    def cancel(self, app_id: str, by: str = BY_CANCEL) -> None:
        """See `cancelling.cancel`."""
        ref, resources = self._find(app_id)
        parents = operations.find_parents(resources, ref)
        if all(operations.read_job_end(parent) is not None for parent in parents):
            return
        kept_logs.stop_and_keep_logs(
            resources.client,
            ref,
            lambda: list_pods(resources, ref),
            lambda: cancelling.cancel(resources, ref, by),
            _print_notice,
        )
        cancelling.confirm_cancel(resources, ref, self._clock, _print_notice, by)

    def ask(self, app_id: str, kind: AskKind, limit_s: float) -> Answer:
        """See `asking.ask_app`."""
        ref, resources = self._find(app_id)
        return asking.ask_app(resources, ref, kind, limit_s)

    def stop(self, app_id: str, limit_s: float) -> Answer:
        """See `asking.stop_app`."""
        ref, resources = self._find(app_id)
        return asking.stop_app(resources, ref, limit_s, lambda: self.cancel(app_id, BY_STOP), self._clock)

    def delete(self, app_id: str) -> bool:
        """See `operations.delete`."""
        ref, resources = self._find(app_id)
        found = operations.delete(resources, ref)
        kept_logs.forget_logs(ref)
        self._forget(ref)
        return found

    def resize(self, app_id: str, nodes: int, role: str | None = None) -> None:
        """See `operations.resize`."""
        ref, resources = self._find(app_id)
        operations.resize(resources, ref, list_pods(resources, ref), nodes, role)

    def list_apps(self, options: Options) -> list[ListAppResponse]:
        """Return the apps of a namespace."""
        resources, access, namespace = self._open_place(options)
        apps: dict[AppRef, list[dict[str, Any]]] = {}
        for kind in (JOBSET, JOB):
            for item in _list_parents(resources, kind, namespace):
                if not operations.is_inner(item):
                    name = item["metadata"]["labels"][LABEL_INSTANCE]
                    apps.setdefault(AppRef(namespace=namespace, name=name, access=access), []).append(item)
        states = {ref: self._decide_state(ref, parents) for ref, parents in apps.items()}
        ran = _find_started(resources, namespace) if not _WAITS.isdisjoint(states.values()) else frozenset()
        ran -= {ref.name for ref, parents in apps.items() if any(map(operations.is_suspended, parents))}
        return [
            ListedApp(
                app_id=str(ref),
                state=AppState.RUNNING if state in _WAITS and ref.name in ran else state,
                submitted_s=find_submitted_s(apps[ref]),
            )
            for ref, state in sorted(states.items(), key=lambda item: item[0].name)
        ]

    def _decide_state(self, ref: AppRef, parents: Sequence[dict[str, Any]]) -> AppState:
        """Return the state without the pods. It does not distinguish an app that runs from one that waits."""
        ends = self._note_ends(ref, parents)
        return decide_state(Observation(parents=parents, pods=(), ends=ends, ran_before=ref in self._ran))

    # -- logs ---------------------------------------------------------------------------------------------------------

    def read_log(
        self, app_id: str, role: str, index: int, *, since: datetime | None, until: datetime | None, tail: bool
    ) -> Iterator[str]:
        """Return the log of one node, a line at a time.

        Raises:
            SchedulerError: no such app, role or replica.
        """
        ref, resources = self._find(app_id)
        parents = operations.find_parents(resources, ref)
        if not parents:
            raise SchedulerError(f"there is no app {ref.name!r} in namespace {ref.namespace!r}")
        label, log_dir = _find_label(app_id, parents, role, index)
        query = PodLogQuery(
            namespace=ref.namespace,
            role=label,
            index=index,
            since=None if since is None else convert_to_stamp(since),
            until=None if until is None else convert_to_stamp(until),
            tail=tail,
            log_dir=log_dir,
            kept=lambda: kept_logs.read_kept_logs(ref, label, index),
            has_succeeded=lambda: list_ends(operations.find_parents(resources, ref)).get(label) == "Complete",
            find_stopper=lambda: operations.describe_stopper(operations.find_parents(resources, ref)),
        )
        reader = LogReader(resources.client, self._limits, self._clock)
        if not tail:
            return reader.read(query, PodSnapshot(list_pods(resources, ref)))
        return _follow(reader, query, self._find_watch(app_id, ref, resources))

    def _find_watch(self, app_id: str, ref: AppRef, resources: Objects) -> PodWatch:
        """Return one watch for all log readers of an app."""

        def has_ended() -> bool:
            current = operations.find_parents(resources, ref)
            return not current or self._decide_state(ref, current) in _END_STATES

        return self._watches.setdefault(app_id, PodWatch(resources, ref, check_ended=has_ended))


def _follow(reader: LogReader, query: PodLogQuery, watch: PodWatch) -> Iterator[str]:
    with watch:
        yield from reader.read(query, watch)


def _find_label(app_id: str, parents: Sequence[dict[str, Any]], role: str, index: int) -> tuple[str, str]:
    """Return the label of a role, and its `MUSTER_LOG_DIR`. "": it has none."""
    found = {each.name: (label, each) for label, each in decode_roles(parents[0]).items()}
    check_replica(app_id, {name: each.num_replicas for name, (_, each) in found.items()}, role, index)
    label, wanted = found[role]
    return label, wanted.env.get(Env.LOG_DIR, "")


def _list_parents(resources: Objects, kind: Kind, namespace: str) -> list[dict[str, Any]]:
    try:
        return resources.list_all(kind, namespace, labels=f"{LABEL_MANAGED_BY}={MANAGED_BY}")[0]
    except ApiError as error:
        if error.refusal.status == 404 or (error.refusal.status == 403 and kind != JOB):
            return []
        raise


def _find_started(resources: Objects, namespace: str) -> frozenset[str]:
    """Return the names of the apps with a pod that runs or has ended.

    Parents do not distinguish such a pod from one that waits. One request for all apps, for the metadata alone: a
    list must not read every pod. An account that may not list pods sees PENDING.
    """
    labels, fields = f"{LABEL_MANAGED_BY}={MANAGED_BY}", "status.phase!=Pending"
    none: list[dict[str, Any]] = []
    items = read_if_allowed(lambda: resources.list_metadata(POD, namespace, labels=labels, fields=fields), none)
    return frozenset(str((item["metadata"].get("labels") or {}).get(LABEL_INSTANCE)) for item in items)


def _print_notice(text: str) -> None:
    print_line(f"muster: {text}")
