"""The base class of every scheduler of muster: one set of signatures for both lines of TorchX, and for `muster`.

TorchX 0.7 and its nightly differ here:

| item              | 0.7                                   | nightly                              |
|---                |---                                    |---                                   |
| `_validate`       | (app, scheduler)                      | (app, scheduler, cfg)                |
| `list`            | ()                                    | (cfg=None)                           |
| `delete`          | none                                  | `_delete_existing`                   |
| AppDryRunInfo     | `_app`, `_cfg`                        | `app`, `cfg`                         |
| workspace         | "file:///path"                        | "/path", or a `Workspace`            |
| RetryPolicy       | REPLICA, APPLICATION, HOT_SPARE       | REPLICA, APPLICATION, ROLE           |
| Role              | `base_image`                          | `workspace`, `overrides`             |
"""

import abc
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import AppDef, AppDryRunInfo, AppState
from torchx.specs.api import NONE

from muster._shared.contract import AskKind
from muster._shared.control import ControlError, ExitCode
from muster._shared.reports import Answer
from muster.schedulers.errors import SchedulerError
from muster.schedulers.interrupts import raise_dropped_interrupts
from muster.schedulers.runner import callers
from muster.schedulers.runner.command_line import print_errors_as_lines, unwind_on_signals
from muster.schedulers.runner.dry_run import hide_secrets
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.runner.shown.live_lines import LiveLines, repeat_failure


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogRequest:
    """Which part of which replica's output is wanted."""

    role: str
    index: int
    pattern: "re.Pattern[str] | None"
    """Only lines in which this is found; None: all."""
    since: datetime | None
    until: datetime | None
    follow: bool
    stream: Stream

    @property
    def since_s(self) -> float | None:
        """`since` in seconds since the epoch."""
        return None if self.since is None else self.since.timestamp()

    @property
    def until_s(self) -> float | None:
        """`until` in seconds since the epoch."""
        return None if self.until is None else self.until.timestamp()

    def matches(self, line: str) -> bool:
        """Whether the line is wanted."""
        return self.pattern is None or self.pattern.search(line) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leftover:
    """What one job left behind, for `muster prune`."""

    name: str
    """The app's handle without a session, for people."""
    what: str
    """In words: the outcome, and what there is."""
    size_bytes: int
    """Of files on this machine."""
    ended_s: float | None
    """Wall-clock seconds; None: not known."""
    remove: Callable[[], None]


class PluginScheduler(Scheduler, abc.ABC):  # type: ignore[misc]
    """A `Scheduler` with one set of signatures for both lines. Unknown options are refused on both.

    Subclasses define `_submit_dryrun`, `schedule`, `describe_app`, `_cancel_existing`, `add_options`, `list_apps`,
    `read_log`, `delete_app` and, if they refuse some AppDefs, `check_app`. Of what `muster` asks they define what they
    can do: `ask_app` carries `checkpoint`, `pause`, `resume`, `stacks` and `stop`, the other methods the command of
    their name.

    Args:
        backend: the scheduler's name, as in app handles.
        session_name: TorchX's.
    """

    def __init__(self, backend: str, session_name: str) -> None:
        super().__init__(backend, session_name)
        self._submitted: set[str] = set()
        """Apps of this process: it keeps their supervisors running while it reads their logs."""
        self._live_lines = LiveLines()
        """Shared by the readers of all replicas, which TorchX runs in threads of their own."""
        self._awaited: DescribeAppResponse | None = None
        """What `Runner.wait` was last told."""
        print_errors_as_lines()
        unwind_on_signals()

    @abc.abstractmethod
    def add_options(self, opts: StrictOpts) -> None:
        """Declare the options of `-cfg`."""

    @abc.abstractmethod
    def describe_app(self, app_id: str) -> DescribeAppResponse | None:
        """The app's current state; None when it is not known (any more).

        Raises:
            EngineError: the state cannot be read.
        """

    @abc.abstractmethod
    def list_apps(self, cfg: Mapping[str, Any]) -> list[ListAppResponse]:
        """The apps the scheduler knows of."""

    @abc.abstractmethod
    def delete_app(self, app_id: str) -> None:
        """Delete an app that exists; stop it first when it runs."""

    def delete_unfinished(self, app_id: str) -> bool:
        """Delete what a submission left that was interrupted before there was an app. False: it left nothing."""
        del app_id
        return False

    def ask_app(self, app_id: str, kind: AskKind, limit_s: float) -> Answer:
        """Ask the agents of a running app for a checkpoint, a pause, its end or their stacks.

        Args:
            app_id: of the app.
            kind: what is asked for.
            limit_s: how long the ranks may take.

        Raises:
            ControlError: it cannot be asked; nothing was changed.
        """
        del app_id, limit_s
        raise ControlError(f"{self.backend} jobs cannot be asked for {kind.value}", ExitCode.REFUSED)

    def stop_app(self, app_id: str, limit_s: float) -> Answer:
        """Record that the app ends, so that nothing is started again; then let all ranks stop at one step.

        Args:
            app_id: of the app.
            limit_s: how long the ranks may take. Those that agree on no step get the polite signal.

        Raises:
            ControlError: it cannot be stopped; nothing was changed.
        """
        return self.ask_app(app_id, AskKind.STOP, limit_s)

    def recover_app(self, app_id: str) -> Answer:
        """Continue an app whose supervisor has died: adopt what still runs, start again what has ended.

        Raises:
            ControlError: it cannot be continued; nothing was changed.
        """
        del app_id
        raise ControlError(f"{self.backend} jobs have no supervisor that could be lost", ExitCode.REFUSED)

    def resize_app(self, app_id: str, nodes: int, role: str | None) -> Answer:
        """Change the number of nodes of an elastic role, within its MIN:MAX.

        Args:
            app_id: of the app.
            nodes: the new number.
            role: which; None: the only elastic one.

        Raises:
            ControlError: it cannot be resized; nothing was changed.
            SchedulerError: no such app or role, not elastic, out of bounds, or it has ended.
        """
        del app_id, nodes, role
        raise ControlError(f"{self.backend} jobs cannot be resized", ExitCode.REFUSED)

    def find_leftovers(self) -> "Iterable[Leftover]":
        """Find what apps that have ended left behind; none of an app that runs."""
        return ()

    @abc.abstractmethod
    def read_log(self, app_id: str, request: LogRequest) -> Iterable[str]:
        """Lines of one replica.

        Raises:
            SchedulerError: no such app, role or replica.
        """

    def check_app(self, app: AppDef, cfg: Mapping[str, Any]) -> None:
        """Refuse what the scheduler cannot run. `cfg` is empty on 0.7.

        Raises:
            SchedulerError: one line that names what is wrong.
        """

    def _run_opts(self) -> StrictOpts:
        opts = StrictOpts(self.backend)
        self.add_options(opts)
        return opts

    def submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        """See TorchX; the result's AppDef is a copy that prints no secret."""
        return hide_secrets(super().submit_dryrun(app, cfg))

    def _validate(self, app: AppDef, scheduler: str, cfg: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        self.check_app(app, cfg or {})

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Lines of one replica; see `torchx.schedulers.api.Scheduler.log_iter`. Every parameter is honoured.

        Raises:
            SchedulerError: no such app, role or replica, or the regex is invalid.
        """
        try:
            pattern = re.compile(regex) if regex else None
        except re.error as error:
            raise SchedulerError(f"{regex!r} is not a valid regex: {error}") from error
        request = LogRequest(
            role=role_name,
            index=k,
            pattern=pattern,
            since=since,
            until=until,
            follow=should_tail,
            stream=streams or Stream.COMBINED,
        )
        return self._live_lines.show(self.read_log(app_id, request), role_name, k)

    def list(self, cfg: Mapping[str, Any] | None = None) -> "list[ListAppResponse]":
        """Lists the scheduler's apps; see `list_apps`."""
        return self.list_apps(cfg or {})

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """See `describe_app`.

        Raises:
            SchedulerError: a command of `torchx` names an app that does not exist, and would not say so.
        """
        with raise_dropped_interrupts():  # what waits for an app spends its time here
            response = self.describe_app(app_id)
        if response is None and callers.needs_app():
            raise self._build_unknown(app_id)
        if response is not None and self._live_lines.has_printed and response.structured_error_msg != NONE:
            response.structured_error_msg = remove_traceback(response.structured_error_msg)
        if callers.is_wait():
            self._awaited = response
        return response

    def close(self) -> None:
        """Print nothing more, but why a job has failed that a command has waited for. TorchX calls it at the end."""
        self._live_lines.close()
        awaited, self._awaited = self._awaited, None
        if awaited is not None and awaited.state == AppState.FAILED and awaited.msg != NONE:
            repeat_failure(awaited.app_id, awaited.msg)

    def delete(self, app_id: str) -> None:
        """Deletes an app; one that does not exist is fine. 0.7's command line has no `delete`: call it from Python."""
        if self.exists(app_id):
            self.delete_app(app_id)
        else:
            self.delete_unfinished(app_id)

    def _build_unknown(self, app_id: str) -> SchedulerError:
        return SchedulerError(f"{self.backend} has no app {app_id!r}; see `torchx list -s {self.backend}`")

    def _delete_existing(self, app_id: str) -> None:
        self.delete_app(app_id)


def remove_traceback(error: str) -> str:
    """An error in torch's format without its traceback, for a command that has printed the job's lines, too."""
    data = json.loads(error)
    message = data.get("message") if isinstance(data, dict) else None
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    if isinstance(extra, dict):
        extra.pop("py_callstack", None)
    return json.dumps(data)
