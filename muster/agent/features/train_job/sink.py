"""Reports progress to a TrainJob of Kubeflow for scripts without a transformers Trainer, which reports it itself.

The node that writes the status does this in a separate thread. Only the agent's end waits for the server, for
`_CLOSE_S`. Only steps that the script reports count. Steps of a script with a Trainer, and those of a progress bar, are
not reported.

Source: pkg/statusserver of kubeflow/trainer; `update_trainjob_status` of the kubeflow SDK 0.5.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from muster._shared.contract import KubeflowEnv, show_controls
from muster._shared.job_view import JobState, JobStatus
from muster.agent.runtime.loop import SideThread

if TYPE_CHECKING:
    import http.client

    from muster.agent.config import AgentConfig
    from muster.agent.features.sink import SinkContext
    from muster.agent.runtime.event_log import EventRecord

_EVERY_S = 5.0
_ANSWER_S = 5.0
"""How long the server may take."""
_CLOSE_S = 2.0
_VALUE_CHARS = 64
"""The server's limit for the name and the value of a metric."""
_PASSING = (401, 408, 429)
"""The only 4xx codes after which a later request may succeed: a token expires, a server is busy."""


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether the agent runs inside a TrainJob that takes its progress."""
    return bool(environ.get(KubeflowEnv.URL) and environ.get(KubeflowEnv.TOKEN)) and environ.get(
        KubeflowEnv.OFF, ""
    ).upper() not in ("TRUE", "1")


class TrainJob:
    """The TrainJob that contains the agent; an `EventSink`, which closes it."""

    def __init__(self, environ: Mapping[str, str], print_line: Callable[[str], None]) -> None:
        """Send nothing yet.

        Args:
            environ: the agent's; see `is_wanted`.
            print_line: prints a line. It is called in any thread.
        """
        self._url = environ[KubeflowEnv.URL]
        self._token_path = environ[KubeflowEnv.TOKEN]
        self._ca_path = environ.get(KubeflowEnv.CA) or None
        self._print_line = print_line
        self._thread = SideThread(self._run, "muster-train-job")
        self._waiting: dict[str, object] | None = None
        """The newest status that is not sent."""
        self._has_given_up = False
        self._has_complained = False

    def write_status(self, status: JobStatus) -> None:
        """Report the status soon, at most once in `_EVERY_S`. `status` is what `StatusFile` writes."""
        content = build_progress(status, time.time())
        if content is None or self._has_given_up:
            return
        with self._thread.changed:
            self._waiting = content
            self._thread.wake()

    def write(self, record: "EventRecord") -> None:
        """See `EventSink`. Records contain nothing to report here."""

    def close(self) -> None:
        """See `EventSink`. What waits is sent within a limit."""
        if not self._thread.close(_CLOSE_S) and not self._has_complained:
            why = f"its server did not answer within {_CLOSE_S:g} s"
            self._print_line(f"the TrainJob lacks the last progress of the job: {why}")

    def _run(self) -> None:
        thread = self._thread
        while True:
            with thread.changed:
                thread.changed.wait_for(lambda: thread.is_closing or self._waiting is not None)
                content, self._waiting = self._waiting, None
            if content is None:
                return
            problem = self._send(content)
            if problem and not self._has_complained:
                self._has_complained = True
                self._print_line(f"the TrainJob gets no progress of the job: {show_controls(problem)}")
            if self._has_given_up:
                return
            with thread.changed:
                if problem and self._waiting is None and not thread.is_closing:
                    self._waiting = content
            thread.wait_closing(_EVERY_S)

    def _send(self, content: Mapping[str, object]) -> str:
        """Send, and return why it was not accepted; "" if it was."""
        try:
            import http.client

            with open(self._token_path, encoding="ascii") as file:  # replaced hourly
                token = file.read().strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection, path = self._connect()
            try:
                connection.request("POST", path, json.dumps(content), headers)
                answer = connection.getresponse()
                answer.read(1 << 16)
            finally:
                connection.close()
        except (OSError, ValueError, ImportError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__
        self._has_given_up = 400 <= answer.status < 500 and answer.status not in _PASSING
        return "" if answer.status < 300 else f"its server answers with status {answer.status} {answer.reason}".rstrip()

    def _connect(self) -> "tuple[http.client.HTTPConnection, str]":
        """Return an unopened connection, and the path of requests. No proxy is used, because the server is near.

        Raises:
            ValueError: the address is invalid.
        """
        import http.client
        from urllib.parse import urlsplit

        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            self._has_given_up = True
            raise ValueError(f"{KubeflowEnv.URL} is {self._url!r}, which is not the address of an HTTP server")
        path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_ANSWER_S), path
        import ssl

        context = ssl.create_default_context(cafile=self._ca_path)
        # Set by Python 3.13. Clusters' CAs often lack the key identifier.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_ANSWER_S, context=context), path


def build_progress(status: JobStatus, time_s: float) -> dict[str, object] | None:
    """Build the body of a request.

    Args:
        status: the job's.
        time_s: now, by the wall clock.

    Returns:
        What the server accepts; None if the script has reported no step.
    """
    has_steps = any(rank.step is not None for rank in status.ranks) or any(
        node.step is not None for node in status.nodes
    )
    if status.step is None or not has_steps:
        return None
    has_succeeded = status.state is JobState.ENDED and status.exit_code == 0
    metrics = [("current_step", f"{status.step}")]
    if status.total is not None:
        metrics.append(("total_steps", f"{status.total}"))
    metrics += [(name, f"{value}") for name, value in status.values]
    progress: dict[str, object] = {
        "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s)),
        "metrics": [
            {"name": name[:_VALUE_CHARS], "value": value[:_VALUE_CHARS]} for name, value in metrics if name and value
        ],
    }
    if has_succeeded:
        progress["progressPercentage"] = 100
        progress["estimatedRemainingSeconds"] = 0
    elif status.total:
        progress["progressPercentage"] = min(99, 100 * status.steps_done // status.total)
    if status.eta_s is not None and not has_succeeded:
        progress["estimatedRemainingSeconds"] = round(status.eta_s)
    return {"trainerStatus": progress}


def connect(context: "SinkContext") -> "AgentConfig":
    """Report the progress of an agent's job, if the TrainJob takes it."""
    if is_wanted(context.environ):
        train_job = TrainJob(context.environ, context.logs.print_notice)
        context.event_log.add_sink(train_job)
        context.event_log.status_readers.append(train_job.write_status)
    return context.config
