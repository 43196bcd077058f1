"""Objects of the API server as plain dicts: create, read, patch, delete, list."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.api.client import Client
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError
from muster.schedulers.kubernetes.schema import parse_version

_PAGE_LIMIT: Final = 500

_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, application/json"
"""Source: https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables, "metadata"."""


class Objects:
    """Objects of one cluster, as plain dicts by `Kind`. Raises what `Client.request` raises."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def read_version(self) -> tuple[int, int]:
        """Return the server's version, as in (1, 31)."""
        response = self.client.request("GET", "/version", what="the version", verb="read")
        return parse_version(f"{response['major']}.{response['minor']}")

    def list_group_versions(self, group: str) -> list[str]:
        """Return the server's versions of an API group, preferred first: ["kueue.x-k8s.io/v1beta1"].

        Return [] if the server does not have the group.
        """
        response = self._discover(group, f"API group {group}")
        preferred = response.get("preferredVersion", {}).get("groupVersion")
        versions = [item["groupVersion"] for item in response.get("versions", [])]
        return sorted(versions, key=lambda version: version != preferred)

    def has_kind(self, kind: kube.Kind) -> bool:
        """Return whether the server offers a kind in this version of its group."""
        found = self._discover(kind.api_version, kind.api_version)
        return any(item["name"] == kind.plural for item in found.get("resources", []))

    def _discover(self, place: str, what: str) -> Mapping[str, Any]:
        """Return what the server says of a group or one of its versions. Return {} without it, or without the right."""
        try:
            found: Mapping[str, Any] = self.client.request("GET", f"/apis/{place}", what=what, verb="discover")
        except ApiError as error:
            if error.refusal.status in (403, 404):
                return {}
            raise
        return found

    def create(self, document: Mapping[str, Any], *, dry_run: bool = False, needs_uid: bool = False) -> dict[str, Any]:
        """Create an object exactly once, even if responses are lost. The server refuses unknown fields.

        Args:
            document: the object.
            dry_run: the server only checks it.
            needs_uid: the caller needs the object as the server stores it.

        Returns:
            The object, or only `document` if the response was lost and the account may not read the object.

        Raises:
            RequestError: it already exists, and this call did not create it.
        """
        kind, metadata = kube.parse_kind(document), document["metadata"]
        query = {"fieldValidation": "Strict", "fieldManager": "muster", **({"dryRun": "All"} if dry_run else {})}
        what = f"{kind.kind.lower()}/{metadata['name']}"
        path = kind.build_path(metadata["namespace"])
        try:
            created: dict[str, Any] = self.client.request(
                "POST", path, what=what, verb="create", query=query, body=document
            )
        except RequestError as error:
            if dry_run or error.refusal.reason != "AlreadyExists" or not error.refusal.maybe_done:
                raise
            return self._read_back(document, error, needs_uid=needs_uid)
        return created

    def _read_back(self, document: Mapping[str, Any], error: RequestError, *, needs_uid: bool) -> dict[str, Any]:
        """Return the object that exists after an attempt whose response was lost.

        The submission's annotation shows whether this submission created it. Few accounts may read Secrets. An object
        that the account may not read counts as ours, because its name ends in random characters and an earlier attempt
        may have been carried out.
        """
        metadata = document["metadata"]
        try:
            existing = self.read(kube.parse_kind(document), metadata["namespace"], metadata["name"])
        except ApiError as read_error:
            if read_error.refusal.status != 403 or needs_uid:
                raise ApiError(str(read_error), replace(read_error.refusal, maybe_done=True)) from error
            return dict(document)
        if existing is None or not _is_same(existing, document):
            raise RequestError(str(error), replace(error.refusal, maybe_done=False)) from error
        return existing

    def read(self, kind: kube.Kind, namespace: str, name: str) -> dict[str, Any] | None:
        """Return one object, or None if it does not exist."""
        try:
            found: dict[str, Any] = self.client.request(
                "GET", kind.build_path(namespace, name), what=f"{kind.kind.lower()}/{name}", verb="read"
            )
        except ApiError as error:
            if error.refusal.status == 404:
                return None
            raise
        return found

    def patch(self, kind: kube.Kind, namespace: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Apply the merge patch `change`: new values of fields. null removes a field."""
        changed: dict[str, Any] = self.client.request(
            "PATCH",
            kind.build_path(namespace, name),
            what=f"{kind.kind.lower()}/{name}",
            verb="change",
            query={"fieldValidation": "Strict", "fieldManager": "muster"},
            body=dict(change),
        )
        return changed

    def delete(self, kind: kube.Kind, namespace: str, name: str) -> bool:
        """Delete an object and, in the background, all that it owns. False: it did not exist."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            self.client.request(
                "DELETE", kind.build_path(namespace, name), what=f"{kind.kind.lower()}/{name}", verb="delete", body=body
            )
        except ApiError as error:
            if error.refusal.status == 404:
                return False
            raise
        return True

    def list_all(
        self, kind: kube.Kind, namespace: str, *, labels: str = "", fields: str = "", metadata_only: bool = False
    ) -> list[Any]:
        """Return all objects that match, in pages. If the continue token expires between two (410), start again.

        Args:
            kind: theirs.
            namespace: theirs.
            labels: a selector.
            fields: a selector.
            metadata_only: leave out all but `metadata` of each: less than a tenth of a pod.
        """
        query = {"limit": str(_PAGE_LIMIT), "labelSelector": labels, "fieldSelector": fields, "continue": ""}
        accept, what = _METADATA_ONLY if metadata_only else "", f"{kind.kind.lower()}s"
        items: list[Any] = []
        while True:
            try:
                response = self.client.request(
                    "GET", kind.build_path(namespace), what=what, verb="list", query=query, accept=accept
                )
            except ApiError as error:
                if error.refusal.status != 410 or not query["continue"]:
                    raise
                items, query["continue"] = [], ""
                continue
            # A list's items lack both.
            items += [
                {**item, "apiVersion": kind.api_version, "kind": kind.kind} for item in response.get("items") or ()
            ]
            query["continue"] = response.get("metadata", {}).get("continue") or ""
            if not query["continue"]:
                return items

    def list_app(self, kind: kube.Kind, namespace: str, app: str) -> list[Any]:
        """Return all objects of an app, of one kind."""
        return self.list_all(kind, namespace, labels=f"{kube.LABEL_INSTANCE}={app}")


def _is_same(existing: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    submission = document["metadata"].get("annotations", {}).get(kube.SUBMISSION_ANNOTATION)
    return (
        submission is not None
        and existing["metadata"].get("annotations", {}).get(kube.SUBMISSION_ANNOTATION) == submission
    )
