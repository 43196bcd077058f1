"""Objects of the API server as plain dicts: create, read, patch, delete, list, watch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from muster.schedulers.kubernetes.api.client import Client
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError, Unreachable
from muster.schedulers.kubernetes.schema import parse_version

PAGE_LIMIT: Final = 500

WATCH_S: Final = "120"
"""The server ends a watch after so many seconds, so that one nobody wants any more does not linger."""

_PLURALS: Final = {
    "ConfigMap": "configmaps",
    "Event": "events",
    "Job": "jobs",
    "JobSet": "jobsets",
    "LocalQueue": "localqueues",
    "Node": "nodes",
    "Pod": "pods",
    "PodGroup": "podgroups",
    "Queue": "queues",
    "Secret": "secrets",
    "Service": "services",
    "Workload": "workloads",
    "Command": "commands",
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of object."""

    api_version: str
    kind: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "") -> str:
        """The path of the collection, or of one object."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{root}{scope}/{_PLURALS[self.kind]}" + (f"/{name}" if name else "")


POD: Final = Kind(api_version="v1", kind="Pod")
EVENT: Final = Kind(api_version="v1", kind="Event")
JOB: Final = Kind(api_version="batch/v1", kind="Job")
JOBSET: Final = Kind(api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet")
VOLCANO_JOB: Final = Kind(api_version="batch.volcano.sh/v1alpha1", kind="Job")
NODE: Final = Kind(api_version="v1", kind="Node", namespaced=False)


def kind_of(document: Mapping[str, Any]) -> Kind:
    """The kind of a document."""
    return Kind(api_version=document["apiVersion"], kind=document["kind"])


@dataclass(frozen=True, kw_only=True)
class WatchEvent:
    """One change: "ADDED", "MODIFIED" or "DELETED"."""

    type: str
    item: Mapping[str, Any]


class WatchExpired(Exception):
    """The version a watch began at is too old: list again."""


class Objects:
    """Typed by `Kind`, not by classes. Raises what `Client.request` raises."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def read_version(self) -> tuple[int, int]:
        """The server's version, (1, 31)."""
        answer = self.client.request("GET", "/version", what="the version", verb="read")
        return parse_version(f"{answer['major']}.{answer['minor']}")

    def find_group(self, group: str) -> list[str]:
        """The versions of an API group the server offers, preferred first: "kueue.x-k8s.io/v1beta1"; [] without it."""
        try:
            answer = self.client.request("GET", f"/apis/{group}", what=f"API group {group}", verb="discover")
        except ApiError as fault:
            if fault.refusal.status in (403, 404):
                return []
            raise
        preferred = answer.get("preferredVersion", {}).get("groupVersion")
        versions = [item["groupVersion"] for item in answer.get("versions", [])]
        return sorted(versions, key=lambda version: version != preferred)

    def has_kind(self, api_version: str, plural: str) -> bool:
        """Whether the server offers a kind in one version of a group."""
        try:
            answer = self.client.request("GET", f"/apis/{api_version}", what=api_version, verb="discover")
        except ApiError as fault:
            if fault.refusal.status in (403, 404):
                return False
            raise
        return any(item["name"] == plural for item in answer.get("resources", []))

    def create(self, document: Mapping[str, Any], *, dry_run: bool = False, needs_uid: bool = False) -> dict[str, Any]:
        """Creates an object once, whatever happens to the answer; the server refuses unknown fields.

        Args:
            document: what to create.
            dry_run: only let the server check it.
            needs_uid: the caller needs more of the object than that it exists.

        Returns:
            The object; without the server's part when the answer was lost and the object may not be read.

        Raises:
            RequestFault: it exists, and is not the one this call created.
        """
        kind, metadata = kind_of(document), document["metadata"]
        query = {"fieldValidation": "Strict", "fieldManager": "muster", **({"dryRun": "All"} if dry_run else {})}
        what = f"{kind.kind.lower()}/{metadata['name']}"
        path = kind.path(metadata["namespace"])
        try:
            created: dict[str, Any] = self.client.request(
                "POST", path, what=what, verb="create", query=query, body=document
            )
        except RequestError as fault:
            if dry_run or fault.refusal.reason != "AlreadyExists" or not fault.refusal.maybe_done:
                raise
            return self._read_back(document, fault, needs_uid=needs_uid)
        return created

    def _read_back(self, document: Mapping[str, Any], fault: RequestError, *, needs_uid: bool) -> dict[str, Any]:
        """The object that exists after an attempt of ours whose answer was lost.

        The submission's own annotation tells whether it is ours. Few accounts may read Secrets: what may not be read
        is ours too, since its name ends in random characters and the attempt before may have been carried out.
        """
        metadata = document["metadata"]
        try:
            existing = self.read(kind_of(document), metadata["namespace"], metadata["name"])
        except ApiError as forbidden:
            if forbidden.refusal.status != 403 or needs_uid:
                raise ApiError(str(forbidden), replace(forbidden.refusal, maybe_done=True)) from fault
            return dict(document)
        if existing is None or not _is_same(existing, document):
            raise RequestError(str(fault), replace(fault.refusal, maybe_done=False)) from fault
        return existing

    def read(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        """One object, or None."""
        try:
            found: dict[str, Any] = self.client.request(
                "GET", kind.path(namespace, name), what=f"{kind.kind.lower()}/{name}", verb="read"
            )
        except ApiError as fault:
            if fault.refusal.status == 404:
                return None
            raise
        return found

    def patch(self, kind: Kind, namespace: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Applies a merge patch: `change` says what becomes of fields, null removes one."""
        changed: dict[str, Any] = self.client.request(
            "PATCH",
            kind.path(namespace, name),
            what=f"{kind.kind.lower()}/{name}",
            verb="change",
            query={"fieldValidation": "Strict", "fieldManager": "muster"},
            body=dict(change),
        )
        return changed

    def delete(self, kind: Kind, namespace: str, name: str) -> bool:
        """Deletes an object and, in the background, what it owns. False: it was not there."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            self.client.request(
                "DELETE", kind.path(namespace, name), what=f"{kind.kind.lower()}/{name}", verb="delete", body=body
            )
        except ApiError as fault:
            if fault.refusal.status == 404:
                return False
            raise
        return True

    def list_all(self, kind: Kind, namespace: str, *, labels: str = "", fields: str = "") -> tuple[list[Any], str]:
        """All objects that match, in pages, and the version of the collection to watch from.

        A continue token that expired between two pages (410) begins the list anew.
        """
        try:
            return self._list_pages(kind, namespace, labels, fields)
        except ApiError as fault:
            if fault.refusal.status != 410:
                raise
        return self._list_pages(kind, namespace, labels, fields)

    def _list_pages(self, kind: Kind, namespace: str, labels: str, fields: str) -> tuple[list[Any], str]:
        items: list[Any] = []
        token = ""
        while True:
            answer = self.client.request(
                "GET",
                kind.path(namespace),
                what=f"{kind.kind.lower()}s",
                verb="list",
                query=_query(limit=str(PAGE_LIMIT), labelSelector=labels, fieldSelector=fields, **{"continue": token}),
            )
            items += answer.get("items") or []
            metadata = answer.get("metadata", {})
            token = metadata.get("continue") or ""
            if not token:
                return items, str(metadata.get("resourceVersion", ""))

    def watch(self, kind: Kind, namespace: str, *, labels: str, version: str) -> Iterator[WatchEvent | str]:
        """Changes after `version`, as they happen; a string is the version reached (a bookmark, or an item's).

        Ends when the server ends the watch: call again with the last version.

        Raises:
            WatchExpired: the version is too old.
            Unreachable: the connection broke; call again with the last version.
        """
        query = _query(
            watch="true",
            allowWatchBookmarks="true",
            labelSelector=labels,
            resourceVersion=version,
            timeoutSeconds=WATCH_S,
        )
        what = f"{kind.kind.lower()}s"
        try:
            with self.client.stream(kind.path(namespace), what=what, verb="watch", query=query) as stream:
                for line in _split_lines(stream.chunks()):
                    yield from _read_event(json.loads(line))
        except ApiError as fault:
            if fault.refusal.status == 410:
                raise WatchExpired from fault
            raise


def _is_same(existing: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    mark = document["metadata"].get("annotations", {}).get(SUBMISSION_ANNOTATION)
    return mark is not None and existing["metadata"].get("annotations", {}).get(SUBMISSION_ANNOTATION) == mark


SUBMISSION_ANNOTATION: Final = "muster.torchx/submission"
"""A random word on every object of one submission, by which a repeated request recognises its own work."""


def _query(**items: str) -> dict[str, str]:
    return {key: value for key, value in items.items() if value}


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line.strip())
    if rest.strip():
        # A watch that ends inside an event was cut off.
        raise Unreachable("the watch was cut off inside an event")


def _read_event(event: Mapping[str, Any]) -> Iterator[WatchEvent | str]:
    item = event["object"]
    if event["type"] == "ERROR":
        if item.get("code") == 410:
            raise WatchExpired
        raise Unreachable(f"the watch ended: {item.get('message', item)}")
    if event["type"] != "BOOKMARK":
        yield WatchEvent(type=event["type"], item=item)
    yield str(item["metadata"]["resourceVersion"])
