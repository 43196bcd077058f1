"""Turns what the API server refuses into one line that says what to do. The only place that words these."""

import json
import re
from dataclasses import dataclass
from typing import Any

from muster.schedulers.errors import EngineError, SchedulerError

_MISSING_KINDS = {
    "jobset.x-k8s.io": "JobSet is not installed in this cluster; install it, or use flavor=job, which needs nothing",
    "batch.volcano.sh": "Volcano is not installed in this cluster; install it, or use flavor=job, which needs nothing",
    "scheduling.volcano.sh": "Volcano is not installed in this cluster; use gang=none or gang=auto",
    "scheduling.k8s.io": "this cluster has no PodGroups of its own; use gang=none or gang=auto",
    "kueue.x-k8s.io": "Kueue is not installed in this cluster; leave out queue, or install it",
}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An answer of the API server that is not success."""

    status: int
    reason: str
    """Kubernetes' word: "AlreadyExists", "Forbidden"..."""
    message: str
    retry_after_s: float | None = None
    maybe_done: bool = False
    """The request may have been carried out all the same: an attempt of it got no answer, or a 5xx."""

    @classmethod
    def parse(cls, status: int, body: bytes, retry_after: str | None = None) -> "Refusal":
        """Reads a `Status` object, or whatever a proxy between us answered instead."""
        reason, message = "", ""
        try:
            answer: Any = json.loads(body)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            reason, message = str(answer.get("reason") or ""), str(answer.get("message") or "")
        if not message:
            message = body.decode(errors="replace")[:300]
        wait = float(retry_after) if retry_after and re.fullmatch(r"\d+(\.\d+)?", retry_after) else None
        return cls(status=status, reason=reason, message=" ".join(message.split()), retry_after_s=wait)


class ApiError(EngineError):
    """The API server refused; `refusal` has the details."""

    def __init__(self, message: str, refusal: Refusal) -> None:
        super().__init__(message)
        self.refusal = refusal


class RequestError(SchedulerError):
    """The API server refused what the caller asked for; `refusal` has the details."""

    def __init__(self, message: str, refusal: Refusal) -> None:
        super().__init__(message)
        self.refusal = refusal


class Unreachable(EngineError):
    """No answer from the API server."""


def explain(refusal: Refusal, *, verb: str, what: str, path: str, origin: str) -> ApiError | RequestError:
    """The exception for a refusal.

    Args:
        refusal: the answer.
        verb: "create", "list"...
        what: the object for people: "job/main-x1".
        path: of the request, which names the API group.
        origin: which cluster, as whom.
    """
    said = refusal.message
    if refusal.status == 401:
        text = f"{origin}: the API server does not accept these credentials; log in again ({said})"
        return ApiError(text, refusal)
    if refusal.status == 403:
        return _explain_forbidden(refusal, verb, what, origin)
    if refusal.status == 404:
        return ApiError(_explain_missing(refusal, verb, what, path), refusal)
    if refusal.status == 409 and refusal.reason == "AlreadyExists":
        return RequestError(f"{what} exists already; choose another --name, or delete it", refusal)
    if refusal.status == 413:
        return RequestError(f"{what} is too large for the API server: {said}", refusal)
    if refusal.status in (400, 422):
        return RequestError(f"the cluster refuses {what}: {said}", refusal)
    return ApiError(f"cannot {verb} {what}: the API server answers {refusal.status} {said}", refusal)


def _explain_forbidden(refusal: Refusal, verb: str, what: str, origin: str) -> ApiError | RequestError:
    if "exceeded quota" in refusal.message:
        text = (
            f"{what} exceeds the namespace's quota: {refusal.message}; ask for less, or delete what is no longer needed"
        )
        return RequestError(text, refusal)
    if "PodSecurity" in refusal.message:
        text = f"the namespace's pod security refuses {what}: {refusal.message}; try -cfg security=restricted"
        return RequestError(text, refusal)
    text = f"{origin} may not {verb} {what}: {refusal.message}; ask for a role that may, or choose another namespace"
    return ApiError(text, refusal)


def _explain_missing(refusal: Refusal, verb: str, what: str, path: str) -> str:
    namespace = re.search(r'namespaces "([^"]+)" not found', refusal.message)
    if namespace:
        return f"namespace {namespace[1]!r} does not exist; create it, or choose another with -cfg namespace=NAME"
    group = next((group for group in _MISSING_KINDS if f"/apis/{group}/" in path), None)
    # an object that is missing is named in quotes; a kind that is missing is not
    if group is not None and re.search(r'"[^"]+" not found', refusal.message) is None:
        return _MISSING_KINDS[group]
    return f"cannot {verb} {what}: {refusal.message}"
