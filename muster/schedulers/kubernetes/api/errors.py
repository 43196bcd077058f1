"""Explains a refusal of the API server in one line that says what to do."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from muster.schedulers.errors import EngineError, RightError, SchedulerError

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An error response of the API server."""

    status: int
    reason: str
    """Kubernetes' reason: "AlreadyExists", "Forbidden"..."""
    message: str
    retry_after_s: float | None = None
    maybe_done: bool = False
    """The request may have been carried out: an attempt got no response, or a 5xx."""

    @classmethod
    def parse(cls, status: int, body: bytes, retry_after: str | None = None) -> "Refusal":
        """Parse a `Status` object, or whatever a proxy in between sent instead."""
        reason, message = "", ""
        try:
            response: Any = json.loads(body)
        except ValueError:
            response = None
        if isinstance(response, dict):
            reason, message = str(response.get("reason") or ""), str(response.get("message") or "")
        if not message:
            message = body.decode(errors="replace")[:300]
        wait_s = _parse_retry_after(retry_after)
        return cls(status=status, reason=reason, message=" ".join(message.split()), retry_after_s=wait_s)


def _parse_retry_after(text: str | None) -> float | None:
    """Return the seconds. Return None without the header, or when a proxy wrote a date."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


class _Refused(Exception):
    def __init__(self, message: str, refusal: Refusal) -> None:
        super().__init__(message)
        self.refusal = refusal


class ApiError(_Refused, EngineError):
    """The API server refused a request. `refusal` has the details."""


class ForbiddenError(ApiError, RightError):
    """The API server refused a request because the account lacks the right."""


def read_if_allowed(read: Callable[[], _Result]) -> _Result | None:
    """Return what `read` returns, or None if the account lacks the right to it."""
    try:
        return read()
    except ForbiddenError:
        return None


class RequestError(_Refused, SchedulerError):
    """The API server refused a request that the caller must change. `refusal` has the details."""


class Unreachable(EngineError):
    """No response from the API server, or from a node."""


class NotRunning(Unreachable):
    """The container does not run."""


def explain(refusal: Refusal, *, verb: str, what: str, origin: str) -> ApiError | RequestError:
    """Return the exception for a refusal.

    Args:
        refusal: the error response.
        verb: "create", "list"...
        what: the object, for the message: "job/main-x1".
        origin: of the credentials, for the message.
    """
    detail = refusal.message
    if refusal.status == 401:
        text = f"{origin}: the API server does not accept these credentials; log in again ({detail})"
        return ApiError(text, refusal)
    if refusal.status == 403:
        return _explain_forbidden(refusal, verb, what, origin)
    if refusal.status == 404:
        return ApiError(_explain_missing(refusal, verb, what), refusal)
    if refusal.status == 409 and refusal.reason == "AlreadyExists":
        return RequestError(f"{what} already exists; choose another --name, or delete it", refusal)
    if refusal.status == 413:
        return RequestError(f"{what} is too large for the API server: {detail}", refusal)
    if refusal.status in (400, 422):
        return RequestError(f"the cluster rejected {what}: {detail}", refusal)
    if "/containerLogs/" in detail:  # the kubelet's: `Get "https://NODE:10250/containerLogs/...": dial`
        return ApiError(f"cannot {verb} {what}: its node does not answer ({detail.rpartition(': ')[2]})", refusal)
    return ApiError(f"cannot {verb} {what}: the API server responded with {refusal.status} {detail}", refusal)


def _explain_forbidden(refusal: Refusal, verb: str, what: str, origin: str) -> ApiError | RequestError:
    if "exceeded quota" in refusal.message:
        text = f"{what} exceeds the namespace's quota: {refusal.message}; request less, or delete unused objects"
        return RequestError(text, refusal)
    if "PodSecurity" in refusal.message:
        text = f"the namespace's pod security standard rejects {what}: {refusal.message}; try -cfg security=restricted"
        return RequestError(text, refusal)
    advice = (
        "ask for this right, or set -cfg gang=none"
        if what.startswith("podgroup/")
        else ("ask for this right, or use another namespace")
    )
    text = f"{origin} is not allowed to {verb} {what}: {refusal.message}; {advice}"
    return ForbiddenError(text, refusal)


def _explain_missing(refusal: Refusal, verb: str, what: str) -> str:
    namespace = re.search(r'namespaces "([^"]+)" not found', refusal.message)
    if namespace:
        return f"namespace {namespace[1]!r} does not exist; create it, or choose another one with -cfg namespace=NAME"
    return f"cannot {verb} {what}: {refusal.message}"
