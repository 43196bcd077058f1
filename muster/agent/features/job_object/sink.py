"""Tells users of kubectl how the job fares, by Events and annotations of its Job, if an adapter asks for it.

The agent of group rank 0 does this with the pod's service account, in a thread of its own. Only the agent's end waits
for the API server, for `_CLOSE_S`. What cannot be sent is sent later. If the account lacks the right, one line says so
once. `http.client` and `ssl` are imported when there is something to send.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from muster._shared.contract import Env, show_controls
from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.runtime.loop import SideThread

if TYPE_CHECKING:
    import http.client

    from muster._shared.job_view import JobStatus
    from muster.agent.config import AgentConfig
    from muster.agent.features.sink import SinkContext
    from muster.agent.runtime.event_log import EventRecord

_PREFIX = "muster.torchx/"
"""The prefix of annotations."""
_FAILED, _HANG, _DRAIN = "MusterFailed", "MusterHang", "MusterDrain"
_RESIZED, _RESTARTED = "MusterResized", "MusterRestarted"
_PROGRESS_S = 30.0
_AGAIN_S = 5.0
"""Time until a failed request is sent again."""
_COLLECT_S = 0.3
"""A report of a hang has several lines, which are collected into one Event."""
_CLOSE_S = 2.0
_ANSWER_S = 5.0
"""How long the API server may take."""
_KEPT = 20
"""The most Events that wait for the API server."""
_LIMIT_BYTES = 1000
"""Limit on a message without a role's name; Kubernetes' limit is 1,024."""
_SHORTEST = 4
"""Shorter values of secret variables are not searched for."""
_PASSING = (401, 408, 429)
"""The only 4xx codes after which the same request may succeed: a token expires, a server is busy."""


class JobObject:
    """The Job object of one app, or of one role of it; an `EventSink`."""

    def __init__(self, environ: Mapping[str, str], node_index: int | None, print_line: Callable[[str], None]) -> None:
        """Send nothing yet.

        Args:
            environ: the agent's, including what the adapter and Kubernetes have set.
            node_index: this node's. Before the first round, node 0 reports.
            print_line: prints a line. It is called in any thread.
        """
        self._path, _, role = environ[Env.JOB_OBJECT].partition(" ")
        self._account_dir = environ[Env.ACCOUNT_DIR]
        self._address = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._pod = environ.get(Env.NODE_NAME, "")
        secrets = (environ.get(name, "") for name in environ.get(Env.SECRET_NAMES, "").split())
        self._secrets = sorted((each for each in secrets if len(each) >= _SHORTEST), key=len, reverse=True)
        self._prefix = f"{role}: " if role else ""
        self._annotation = f"{_PREFIX}{role}." if role else _PREFIX
        self._node_index = node_index
        self._print_line = print_line
        self._story = _Story()
        self._thread = SideThread(self._run, "muster-job-object")
        self._events: list[dict[str, str]] = []
        self._annotations: dict[str, str] = {}
        self._owner: dict[str, object] = {}
        """The Job as Events refer to it, once it is known."""
        self._count = 0
        self._progress = ""
        self._progress_s: float | None = None
        self._has_given_up = False
        self._has_complained = False

    # -- on the loop --------------------------------------------------------------------------------------------------

    def write(self, record: "EventRecord") -> None:
        """See `EventSink`."""
        news = self._story.read(record)
        is_teller = record.node == 0 or (record.node is None and self._node_index == 0)
        if news is None or not is_teller:
            return
        reason, kind, text = news
        with self._thread.changed:
            self._add(record.time_s, reason, kind, text)
            self._thread.wake()

    def _add(self, time_s: float, reason: str, kind: str, text: str) -> None:
        """Add an Event, and the annotation of the same name."""
        last = self._events[-1] if self._events else {}
        if reason == _HANG and (last.get("reason"), last.get("type")) == (reason, kind):
            text = f"{last['text']}; {text}"
            self._events.pop()
        stamp, clean = _format_time(time_s), self._clean(text)
        self._count += 1
        event = {
            "name": f"{self._path.rpartition('/')[2]}.{int(time_s * 1e6):x}{self._count:x}",
            "reason": reason,
            "type": kind,
            "text": text,
            "message": f"{self._prefix}{clean}",
            "stamp": stamp,
        }
        self._events.append(event)
        del self._events[:-_KEPT]
        self._annotations[self._annotation + reason.removeprefix("Muster").lower()] = f"{stamp} {clean}"

    def write_status(self, status: "JobStatus") -> None:
        """Report the job's progress, at most twice a minute. `status` is what `telemetry.StatusFile` writes."""
        progress = self._clean(status.describe())
        if not progress:  # before its first step, keep the last
            return
        now_s = time.monotonic()
        self._progress = progress
        if self._progress_s is None or now_s - self._progress_s >= _PROGRESS_S:
            self._progress_s = now_s
            self._add_progress()

    def close(self) -> None:
        """See `EventSink`. Waiting Events are sent, within a limit."""
        if self._progress:
            self._add_progress()
        if not self._thread.close(_CLOSE_S):
            why = f"the API server did not take them within {_CLOSE_S:g} s"
            self._print_line(f"the job's last Events and annotations are missing: {why}; the job is not affected")

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = show_controls(" ".join(text.split()))
        return text.encode(errors="replace")[:_LIMIT_BYTES].decode(errors="ignore")

    def _add_progress(self) -> None:
        """Add the step and when it was seen."""
        with self._thread.changed:
            self._annotations[self._annotation + "progress"] = f"{_format_time(time.time())} {self._progress}"
            self._thread.wake()
        self._progress = ""

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        thread = self._thread
        while True:
            with thread.changed:
                thread.changed.wait_for(lambda: thread.is_closing or self._events or self._annotations)
                if not self._events and not self._annotations:
                    return
                thread.wait_closing(_COLLECT_S)
                events, self._events = self._events, []
                annotations, self._annotations = self._annotations, {}
            problem = self._send(events, annotations)
            if not problem:
                continue
            self._complain(problem)
            if self._has_given_up:
                return
            with thread.changed:
                self._events = [*events, *self._events][-_KEPT:]
                self._annotations = {**annotations, **self._annotations}
                thread.wait_closing(_AGAIN_S)
            time.sleep(_COLLECT_S)  # even when closing

    def _send(self, events: list[dict[str, str]], annotations: dict[str, str]) -> str:
        """Send all, and remove those that were sent. Return why not all were, or "" if they were."""
        try:
            import http.client
            import ssl

            context = ssl.create_default_context(cafile=os.path.join(self._account_dir, "ca.crt"))
            # Set by Python 3.13. Clusters' CAs often lack the key identifier.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            host, port = self._address
            connection = http.client.HTTPSConnection(host, int(port), timeout=_ANSWER_S, context=context)
            try:
                if annotations or not self._owner:
                    self._patch(connection, annotations)
                    annotations.clear()
                while events:
                    self._create(connection, events[0])
                    del events[0]
            finally:
                connection.close()
        except (FileNotFoundError, ImportError) as error:  # no token, or no TLS
            self._has_given_up = True
            return str(error)
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__
        return ""

    def _patch(self, connection: "http.client.HTTPSConnection", annotations: Mapping[str, str]) -> None:
        change = {"metadata": {"annotations": annotations}}
        found = json.loads(self._ask(connection, "PATCH", self._path, change, "application/merge-patch+json"))
        self._owner = {name: found[name] for name in ("apiVersion", "kind")}
        self._owner.update((name, found["metadata"][name]) for name in ("name", "namespace", "uid"))

    def _create(self, connection: "http.client.HTTPSConnection", event: Mapping[str, str]) -> None:
        namespace = self._owner["namespace"]
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": event["name"], "namespace": namespace},
            "involvedObject": self._owner,
            **{name: event[name] for name in ("reason", "type", "message")},
            "source": {"component": "muster"},
            "firstTimestamp": event["stamp"],
            "lastTimestamp": event["stamp"],
            "count": 1,
            "reportingComponent": "muster",
            "reportingInstance": self._pod[:128],
        }
        self._ask(connection, "POST", f"/api/v1/namespaces/{namespace}/events", body, "application/json")

    def _ask(
        self, connection: "http.client.HTTPSConnection", verb: str, path: str, body: object, content_type: str
    ) -> bytes:
        """Send one request, and return the answer's body.

        Raises:
            OSError, http.client.HTTPException: the request was not carried out; `_has_given_up` if it never will be.
        """
        with open(os.path.join(self._account_dir, "token"), encoding="ascii") as file:  # replaced hourly
            token = file.read().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type, "Accept": "application/json"}
        connection.request(verb, f"{path}?fieldManager=muster", json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status < 300 or (verb == "POST" and answer.status == 409):  # 409: a lost answer
            return content
        self._has_given_up = 400 <= answer.status < 500 and answer.status not in _PASSING
        raise OSError(_read_reason(content) or f"status {answer.status}")

    def _complain(self, problem: str) -> None:
        """Print the first problem."""
        if not self._has_complained:
            self._has_complained = True
            what = "the job has no Events and annotations" if self._has_given_up else "Events and annotations are late"
            self._print_line(f"{what}: {show_controls(problem)}; the job is not affected")


def _read_reason(content: bytes) -> str:
    """Return the message of a Status; "" if there is none."""
    try:
        return str(json.loads(content)["message"])
    except (KeyError, TypeError, ValueError):
        return ""


def _format_time(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))


class _Story:
    """What has been recorded of the job so far; finds what a new record has to report."""

    def __init__(self) -> None:
        self._nodes = 0
        """Number of nodes in the last round; 0 if there was none."""
        self._attempt = 0
        self._broken = ""
        """Why the last round ended."""
        self._verb = ""
        """What the ranks do at the step of the last drain."""

    def read(self, record: "EventRecord") -> tuple[str, str, str] | None:
        """Return the reason, type and message of an Event; None if there is nothing to report."""
        detail = record.detail
        match record.what:
            case "hang_named" | "stood_still":
                return _HANG, "Warning", str(detail["text"])
            case "hang_ended" | "moved_again":
                return _HANG, "Normal", str(detail["text"])
            case "drain_begun":
                self._verb = Layout.VERBS[str(detail["kind"])]
            case "drain_committed":
                return _DRAIN, "Normal", f"all ranks {self._verb} at step {detail['step']}"
            case "drain_withdrawn":
                return _DRAIN, "Normal", f"the ranks go on: {detail['reason']}"
            case "round_broken":
                self._broken = str(detail["reason"])
                return (_HANG, "Warning", self._broken) if detail["hang"] else None
            case "round_formed":
                return self._read_round(record)
            case "job_ended" if detail["reason"]:
                return _FAILED, "Warning", str(detail["reason"])
            case "rendezvous_lost":
                return _FAILED, "Warning", str(detail["reason"])
        return None

    def _read_round(self, record: "EventRecord") -> tuple[str, str, str] | None:
        nodes, before = int(str(record.detail["nodes"])), self._nodes
        has_failed, self._nodes, self._attempt = record.attempt > self._attempt, nodes, record.attempt
        because = f": {self._broken}" if self._broken else ""
        ranks = int(str(record.detail["world_size"]))
        where = f"{nodes} node{'s' * (nodes > 1)} with {ranks} rank{'s' * (ranks > 1)}"
        if not before and record.round == 1:
            return None
        if before and nodes != before and not has_failed:
            return _RESIZED, "Normal", f"the job runs on {where}, before on {before}{because}"
        text = f"the workers start again on {where}, attempt {record.attempt}{because}"
        return _RESTARTED, "Warning" if has_failed else "Normal", text


def connect(context: "SinkContext") -> "AgentConfig":
    """Report the job of an agent."""
    config = context.config
    job_object = JobObject(context.environ, config.rendezvous.node_index, context.logs.print_notice)
    context.event_log.add_sink(job_object)
    context.event_log.status_readers.append(job_object.write_status)
    return config
