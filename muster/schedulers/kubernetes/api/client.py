"""HTTP to the API server: retries failed requests, renews expired credentials, always ends.

The client library provides the configuration and the connection pool. Requests are our own, so that documents stay
plain dicts, streams stay bytes, and versions 36 and 37 of the library, whose typed calls differ, behave alike.

Retries are our own, too, for three reasons: urllib3's Retry cannot read the credentials again between two attempts. It
cannot tell the caller that an attempt may have been carried out. And it counts attempts where a limit in seconds is
wanted.
"""

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlencode

from muster.schedulers.kubernetes.api.connection import Access, Connection, open_connection
from muster.schedulers.kubernetes.api.errors import Refusal, Unreachable, explain

CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 30.0
STREAM_TIMEOUT_S: Final = 30.0
"""A stream without data for this long counts as broken and is resumed, which a server that is silent does not answer:
nothing else is asked of it while a log is followed."""

RETRY_BUDGET_S: Final = 150.0
"""From the first attempt of a request to its last, once the server has answered a request. A control plane that is
upgraded or restarted is away for seconds to a minute or two, and its jobs go on."""

REACH_BUDGET_S: Final = 20.0
"""The same for a server that has never answered: most likely the address is wrong, and the user waits."""

_FIRST_WAIT_S: Final = 0.2
_MAX_WAIT_S: Final = 8.0
_REFUSED_LIMIT: Final = 3
"""When a server that has never answered refuses the connection: waiting longer rarely helps, and the user waits for the
message."""

_TELL_AFTER_S: Final = 3.0
"""A server that is away for longer is reported."""

_CONTENT_TYPES: Final = {"PATCH": "application/merge-patch+json"}


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Monotonic time, so that tests control it."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request."""

    method: str
    path: str
    what: str
    """The object, for messages: "job/main-x1"."""
    verb: str
    query: Mapping[str, str]
    body: Any = None
    accept: str = ""
    """The form of the response. "": JSON."""
    budget_s: float | None = None
    """From the first attempt to the last. None: as for any request."""
    read_s: float = READ_TIMEOUT_S
    """How long the server may be silent."""


class Client:
    """Requests to one cluster. Safe to use from several threads. Close it to drop its connections."""

    def __init__(
        self,
        access: Access,
        *,
        clock: Clock | None = None,
        connect: Callable[[Access], Connection] = open_connection,
        notify: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._access = access
        self._notify = notify
        self._clock: Clock = clock or Clock()
        self._connect = connect
        self._connection: Connection | None = None
        self._responded = False
        """The server has answered a request, if only with a refusal that is not an error of its own."""
        self._allowed: set[tuple[str, str]] = set()
        """Verb and path, without names of pods, of what the account was allowed to read."""
        self._is_away_told = False
        self._lock = threading.Lock()

    @property
    def connection(self) -> Connection:
        """The current connection, opened when first needed."""
        with self._lock:
            if self._connection is None:
                self._connection = self._connect(self._access)
            return self._connection

    def _reconnect(self, stale: Connection) -> None:
        """Read the configuration again, unless another thread just did."""
        with self._lock:
            if self._connection is stale:
                self._connection = self._connect(self._access)
                stale.pool.clear()

    def close(self) -> None:
        """Drop all connections. The client can be used again."""
        with self._lock:
            if self._connection is not None:
                self._connection.pool.clear()
                self._connection = None

    def request(  # `Call`, field by field
        self,
        method: str,
        path: str,
        *,
        what: str,
        verb: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        accept: str = "",
    ) -> Any:
        """Send a request and return the decoded response.

        Retries 429, 5xx and broken or refused connections until `RETRY_BUDGET_S` is spent (`REACH_BUDGET_S` until the
        server has answered), and a 401 once, after reading the credentials again. A server that starts answers 403
        until it has read the rights. So a 403 is retried for what the account was allowed to read before. So is a POST,
        because `Objects.create` recognises an object that its own attempt created.

        Raises:
            ApiError, RequestError: the server refused. `refusal.maybe_done` is true if an attempt may have been carried
                out.
            Unreachable: no response, or that of another server.
        """
        call = Call(method=method, path=path, what=what, verb=verb, query=query or {}, body=body, accept=accept)
        response = self._send(call, streams=False)
        try:
            content = json.loads(response.data) if response.data else {}
        except ValueError:  # a proxy's page
            content = None
        if isinstance(content, dict):
            return content
        text = " ".join(response.data.decode(errors="replace").split())[:100]
        connection = self.connection
        raise Unreachable(f"{connection.host} ({connection.origin}) is no API server of Kubernetes: it sent {text!r}")

    def read_bytes(self, path: str, *, what: str, query: Mapping[str, str], limit_s: float) -> bytes:
        """Get a response that is not JSON: a log. Raises like `request`.

        Args:
            path: of the log.
            what: see `request`.
            query: see `request`.
            limit_s: for all attempts, and how long the server may be silent.
        """
        call = Call(method="GET", path=path, what=what, verb="read", query=query, budget_s=limit_s, read_s=limit_s)
        data: bytes = self._send(call, streams=False).data
        return data

    @contextmanager
    def stream(
        self,
        path: str,
        *,
        what: str,
        verb: str,
        query: Mapping[str, str],
        budget_s: float,
    ) -> Iterator[Iterator[bytes]]:
        """Open a response without a fixed end, a followed log, with attempts for `budget_s`. Raises like `request`.

        Yields:
            Its bytes as they arrive, until the server ends it. Unreachable: the connection broke, or had no data for
            `STREAM_TIMEOUT_S`.
        """
        call = Call(
            method="GET", path=path, what=what, verb=verb, query=query, budget_s=budget_s, read_s=STREAM_TIMEOUT_S
        )
        response = self._send(call, streams=True)
        try:
            yield _read_chunks(response)
        finally:
            response.close()
            response.release_conn()

    # -- attempts ---------------------------------------------------------------------------------------------------

    def _send(self, call: Call, *, streams: bool) -> Any:
        attempt, renewed, maybe_done = 0, False, False
        started_s = self._clock.now_s()
        while True:
            attempt += 1
            connection = self.connection
            outcome = self._attempt(connection, call, streams=streams)
            if not isinstance(outcome, (Refusal, Unreachable)):
                self._note_answer(connection, call)
                return outcome
            self._responded = self._responded or (isinstance(outcome, Refusal) and outcome.status < 500)
            maybe_done = maybe_done or isinstance(outcome, Unreachable) or outcome.status >= 500
            if _is_stale(outcome) and not renewed:
                renewed = True
                self._reconnect(connection)
                continue
            wait_s = _decide_wait_s(
                outcome, attempt, responded=self._responded, was_allowed=_key(call) in self._allowed
            )
            spent_s = self._clock.now_s() - started_s
            budget_s = call.budget_s
            if budget_s is None:
                budget_s = RETRY_BUDGET_S if self._responded else REACH_BUDGET_S
            if wait_s is None or spent_s + wait_s > budget_s:
                if isinstance(outcome, Refusal):
                    outcome = replace(outcome, maybe_done=maybe_done)
                    raise explain(outcome, verb=call.verb, what=call.what, origin=connection.origin)
                raise Unreachable(
                    f"the API server {connection.host} ({connection.origin}) cannot be reached: {outcome}; "
                    "check that the cluster is up and that the context is right"
                )
            # A log's node, not the server, does not answer.
            if spent_s >= _TELL_AFTER_S and self._responded and call.budget_s is None:
                self._tell_away(connection, outcome, budget_s)
            self._clock.sleep(wait_s)

    def _note_answer(self, connection: Connection, call: Call) -> None:
        with self._lock:
            self._responded = True
            was_told, self._is_away_told = self._is_away_told, False
            if call.method == "GET":
                self._allowed.add(_key(call))
        if was_told:
            self._notify(f"the API server {connection.host} answers again")

    def _tell_away(self, connection: Connection, outcome: Refusal | Unreachable, budget_s: float) -> None:
        """Say that the command waits for the server: once for all threads, until it answers again."""
        with self._lock:
            told, self._is_away_told = self._is_away_told, True
        if not told:
            how = f"{outcome.status} {outcome.message}" if isinstance(outcome, Refusal) else str(outcome)
            self._notify(f"the API server {connection.host} does not answer ({how}): trying again for {budget_s:.0f} s")

    def _attempt(self, connection: Connection, call: Call, *, streams: bool) -> Any:
        """Send the request once. Return the response, or the reason for its failure."""
        import urllib3
        from urllib3.exceptions import HTTPError

        query = urlencode({key: value for key, value in call.query.items() if value})
        try:
            response = connection.pool.request(
                call.method,
                f"{connection.host}{call.path}{'?' if query else ''}{query}",
                headers=_build_headers(connection, call),
                body=None if call.body is None else json.dumps(call.body).encode(),
                preload_content=not streams,
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=call.read_s),
                retries=False,
                redirect=False,
            )
        except (HTTPError, OSError) as error:
            return Unreachable(re.sub(r"<[\w.]+ object at \w+>: ", "", f"{type(error).__name__}: {error}"))
        if 200 <= response.status < 300:
            return response
        refusal = Refusal.parse(response.status, response.data, response.headers.get("Retry-After"))
        if streams:
            response.release_conn()
        return refusal


def _read_chunks(response: Any) -> Iterator[bytes]:
    from urllib3.exceptions import HTTPError

    try:
        yield from response.stream(65536)
    except (HTTPError, OSError) as error:
        raise Unreachable(f"the stream broke: {type(error).__name__}: {error}") from error


def _build_headers(connection: Connection, call: Call) -> dict[str, str]:
    accept = call.accept or "application/json, */*"
    headers = {"Accept": accept, "User-Agent": "torchx-muster", **connection.build_auth_headers()}
    if call.body is not None:
        headers["Content-Type"] = _CONTENT_TYPES.get(call.method, "application/json")
    return headers


def _is_stale(outcome: Refusal | Unreachable) -> bool:
    """Return whether reading the credentials again may help: a 401, or an expired client certificate."""
    if isinstance(outcome, Refusal):
        return outcome.status == 401
    return "SSL" in str(outcome) and "certificate" in str(outcome).lower()


def _key(call: Call) -> tuple[str, str]:
    """Return what the account needs one right for: the pods of a job come and go, the right to their logs is one."""
    return call.verb, re.sub(r"(?<=/pods/)[^/]+", "*", call.path)


def _decide_wait_s(outcome: Refusal | Unreachable, attempt: int, *, responded: bool, was_allowed: bool) -> float | None:
    """Return the seconds until the next attempt. None: no more attempts.

    Args:
        outcome: of the last attempt.
        attempt: its number, from 1.
        responded: the server has answered before.
        was_allowed: it has allowed this request before.
    """
    backoff_s: float = min(_MAX_WAIT_S, _FIRST_WAIT_S * 2 ** (attempt - 1)) * random.uniform(0.8, 1.2)  # noqa: S311
    if isinstance(outcome, Refusal):
        if outcome.status == 429 or outcome.status >= 500 or (outcome.status == 403 and was_allowed):
            return max(backoff_s, outcome.retry_after_s or 0.0)
        return None
    refused = "refused" in str(outcome) or "resolve" in str(outcome)
    return None if refused and not responded and attempt >= _REFUSED_LIMIT else backoff_s
