"""Everything the scheduler does with clusters; one per scheduler, with one client for each way to a cluster."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs.api import AppState

from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes.api.client import Client, Pace, SystemPace
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import ApiError
from muster.schedulers.kubernetes.api.objects import JOB, JOBSET, VOLCANO_JOB, Kind, Objects
from muster.schedulers.kubernetes.app_id import AppRef, parse_app_id
from muster.schedulers.kubernetes.labels import LABEL_INSTANCE, LABEL_MANAGED_BY, MANAGED_BY
from muster.schedulers.kubernetes.live import operations
from muster.schedulers.kubernetes.live.logs import LogReader, PodLogQuery, Slots, to_stamp
from muster.schedulers.kubernetes.live.observation import find_lead, list_pods, observe
from muster.schedulers.kubernetes.live.status import Observation, build_status, decide_state
from muster.schedulers.kubernetes.live.submit import submit
from muster.schedulers.kubernetes.live.watch import PodSnapshot, PodWatch
from muster.schedulers.kubernetes.manifests.request import Request
from muster.schedulers.kubernetes.names import label_roles
from muster.schedulers.kubernetes.options import Options

_OVER = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)


class Session:
    """Close it to drop its connections. Safe to use from several threads: TorchX reads logs in many."""

    def __init__(self, *, pace: Pace | None = None, slots: Slots | None = None) -> None:
        self._pace: Pace = pace or SystemPace()
        self._slots = slots or Slots()
        self._clients: dict[Access, Client] = {}
        self._boards: dict[str, PodWatch] = {}

    def close(self) -> None:
        """Drops all connections. Idempotent."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._boards.clear()

    def _open(self, access: Access) -> Objects:
        return Objects(self._clients.setdefault(access, Client(access, pace=self._pace)))

    def _find(self, app_id: str) -> tuple[AppRef, Objects]:
        if ":" not in app_id:
            app_id = f"{self._open(Access()).client.connection.namespace}:{app_id}"
        ref = parse_app_id(app_id)
        return ref, self._open(ref.access)

    # -- apps ---------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> str:
        """Creates everything of a request, or nothing; the app's id."""
        options = request.options
        access = Access(kubeconfig=options.kubeconfig, context=options.context)
        resources = self._open(access)
        namespace = options.namespace or resources.client.connection.namespace
        submit(resources, request, namespace=namespace, say=_say)
        return str(AppRef(namespace=namespace, name=request.name, access=access))

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """The app's state, with reasons; None when it does not exist."""
        ref, resources = self._find(app_id)
        seen = observe(resources, ref)
        if seen is None:
            return None
        if len(seen.parents) > 1:
            _stop_rest(resources, ref, seen.parents)
        return build_status(app_id, seen)

    def cancel(self, app_id: str) -> None:
        """See `operations.cancel`."""
        ref, resources = self._find(app_id)
        operations.cancel(resources, ref)

    def delete(self, app_id: str) -> None:
        """See `operations.delete`."""
        ref, resources = self._find(app_id)
        operations.delete(resources, ref)

    def resize(self, app_id: str, nodes: int) -> None:
        """See `operations.resize`."""
        ref, resources = self._find(app_id)
        operations.resize(resources, ref, nodes)

    def list_apps(self, options: Options) -> list[ListAppResponse]:
        """The apps of a namespace."""
        access = Access(kubeconfig=options.kubeconfig, context=options.context)
        resources = self._open(access)
        namespace = options.namespace or resources.client.connection.namespace
        apps: dict[str, list[dict[str, Any]]] = {}
        for kind in (JOBSET, VOLCANO_JOB, JOB):
            for item in _list_parents(resources, kind, namespace):
                owners = item["metadata"].get("ownerReferences") or []
                if not any(owner["kind"] == "JobSet" for owner in owners):
                    name = item["metadata"]["labels"].get(LABEL_INSTANCE, item["metadata"]["name"])
                    apps.setdefault(name, []).append(item)
        return [
            ListAppResponse(
                app_id=str(AppRef(namespace=namespace, name=name, access=access)), state=_guess_state(parents)
            )
            for name, parents in sorted(apps.items())
        ]

    # -- logs ---------------------------------------------------------------------------------------------------------

    def read_log(
        self, app_id: str, role: str, index: int, *, since: datetime | None, until: datetime | None, tail: bool
    ) -> Iterator[str]:
        """The log of one node, a line at a time.

        Raises:
            SchedulerError: no such app or role.
        """
        ref, resources = self._find(app_id)
        parents = operations.find_parents(resources, ref)
        if not parents:
            raise SchedulerError(f"there is no app {ref.name!r} in namespace {ref.namespace!r}")
        query = PodLogQuery(
            namespace=ref.namespace,
            role=_find_label(app_id, parents, role),
            index=index,
            since=None if since is None else to_stamp(since),
            until=None if until is None else to_stamp(until),
            tail=tail,
        )
        reader = LogReader(resources.client, self._slots, self._pace)
        if not tail:
            return reader.read(query, PodSnapshot(list_pods(resources, ref, lead=find_lead(parents[0]))))
        return _follow(reader, query, self._find_board(app_id, ref, resources, parents))

    def _find_board(self, app_id: str, ref: AppRef, resources: Objects, parents: Sequence[dict[str, Any]]) -> PodWatch:
        """One board for all readers of an app."""

        def is_over() -> bool:
            current = operations.find_parents(resources, ref)
            if len(current) > 1:
                _stop_rest(resources, ref, current)
            return not current or decide_state(Observation(parents=current, pods=())) in _OVER

        return self._boards.setdefault(app_id, PodWatch(resources, ref, lead=find_lead(parents[0]), is_over=is_over))


def _follow(reader: LogReader, query: PodLogQuery, board: PodWatch) -> Iterator[str]:
    with board:
        yield from reader.read(query, board)


def _find_label(app_id: str, parents: Sequence[dict[str, Any]], role: str) -> str:
    names = [item.name for item in build_status(app_id, Observation(parents=parents, pods=())).roles]
    if role not in names:
        raise SchedulerError(f"app {app_id!r} has no role {role!r}; it has: {', '.join(names)}")
    return label_roles(names)[names.index(role)]


def _stop_rest(resources: Objects, ref: AppRef, jobs: Sequence[Mapping[str, Any]]) -> None:
    try:
        if operations.stop_rest(resources, ref, jobs):
            _say(f"{ref.name}: one role has failed, the others are stopped")
    except ApiError as fault:
        if fault.refusal.status != 403:  # who may only look, looks
            raise


def _list_parents(resources: Objects, kind: Kind, namespace: str) -> list[dict[str, Any]]:
    try:
        items, _ = resources.list_all(kind, namespace, labels=f"{LABEL_MANAGED_BY}={MANAGED_BY}")
    except ApiError as fault:
        if fault.refusal.status == 404 or (fault.refusal.status == 403 and kind != JOB):
            return []
        raise
    return [{**item, "apiVersion": kind.api_version, "kind": kind.kind} for item in items]


def _guess_state(parents: list[dict[str, Any]]) -> AppState:
    """The state as the parents alone tell it: a list must not ask for the pods of every app."""
    state = decide_state(Observation(parents=parents, pods=()))
    ready = any((parent.get("status") or {}).get("ready") for parent in parents)
    return AppState.RUNNING if state is AppState.PENDING and ready else state


def _say(text: str) -> None:
    sys.stderr.write(f"muster: {text}\n")
