"""Runs `--notify` once for each event that `decisions` names, with its environment.

A file per event in the run's folder says that the event is reported, so that no other agent of the run reports it
again. The next run with the same folder moves these files away with the report (`logs.files`).
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster._shared.contract import DEFAULT_RUN_ID, RDZV_BACKENDS, STATUS_LIMIT_BYTES, Env, ExitCode, LogNames
from muster._shared.foreign_files import parse_json, read_whole
from muster._shared.records import replace
from muster.agent.config import AgentConfig
from muster.agent.features.notify.decisions import Notification, NotifyStory
from muster.agent.logs import LogRouter
from muster.agent.node.actions import Finish
from muster.agent.node.events import Event
from muster.agent.node.outcome import WITNESS_END_S, describe_job, format_page
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.signals import ChildWatch

if TYPE_CHECKING:
    from muster.agent.features.limited_command import LimitedCommand
    from muster.agent.features.sink import SinkContext
    from muster.agent.round import Round
    from muster.agent.runtime.event_log import RunTimes

STOPPED_LIMIT_S = 3.0
"""How long the command may take after a signal has ended the job; every adapter's grace period allows this."""
_LINES_S = 0.2
"""How long after the first line about a hang all other lines have arrived."""
_HANDLE = "TORCHX_JOB_ID"


class Notifier:
    """The notifier of one agent; a `Witness`."""

    def __init__(self, config: AgentConfig, loop: Loop, children: ChildWatch, logs: LogRouter) -> None:
        self._config = config
        self._words: tuple[str, ...] = config.features["notify"]
        self._loop = loop
        self._children = children
        self._logs = logs
        rendezvous = config.rendezvous
        self._story = NotifyStory(is_agreed=rendezvous.standalone or rendezvous.backend in RDZV_BACKENDS)
        self._current: Round | None = None
        self._told: set[str] = set()
        self._commands: list[LimitedCommand] = []

    def read(self, event: Event, current: "Round | None") -> None:
        """Read an event of the node before it is decided."""
        self._current = current
        had_hang = self._story.has_hang
        notification = self._story.read(event, current)
        if notification is not None:
            self._run(notification)
        if self._story.has_hang and not had_hang:
            self._loop.call_later(_LINES_S, self._run_hang)

    def _run_hang(self) -> None:
        notification = self._story.build_hang(self._current)
        if notification is not None:
            self._run(notification)

    def read_end(self, finish: Finish, last: "Round | None", times: "RunTimes") -> None:
        """Read the job's end, after the agent is done and its report is printed."""
        self._run_hang()
        node_index, is_alone = self._config.rendezvous.node_index, self._config.rendezvous.max_nodes == 1
        is_first = last.group_rank == 0 if last is not None else is_alone or node_index == 0
        report = None if finish.ended is None else finish.ended.report
        page = "" if report is None else format_page(report, self._config, self._logs, last, has_colour=False)
        line = describe_job(times, self._config, self._logs.run_dir, finish.ended)
        notification = self._story.end(finish, last, is_first=is_first, line=line, page=page)
        is_stopped = int(finish.code) > ExitCode.of_signal(0)
        if notification is not None:
            self._run(notification)
        if is_stopped:
            for command in self._commands:
                command.shorten(STOPPED_LIMIT_S)

    def _run(self, notification: Notification) -> None:
        if notification.key in self._told:
            return
        self._told.add(notification.key)
        from muster.agent.features.limited_command import LimitedCommand

        command = LimitedCommand(
            self._loop,
            self._children,
            self._words,
            prepare=lambda: self._prepare(notification),
            text=f"{notification.text}\n",
            limit_s=WITNESS_END_S,
            label=f"--notify {self._words[0]}",
            on_line=lambda line: self._logs.print_line(f"--notify: {line}"),
            on_trouble=self._logs.print_line,
        )
        self._commands = [*(each for each in self._commands if not each.is_over), command]

    @property
    def is_busy(self) -> bool:
        """Whether a command runs that the agent must wait for."""
        return any(not command.is_over for command in self._commands)

    def shorten(self, limit_s: float) -> None:
        """End all commands after at most this time; 0 means at once."""
        for command in self._commands:
            command.shorten(limit_s)

    # -- in the command's thread --------------------------------------------------------------------------------------

    def _prepare(self, notification: Notification) -> Mapping[str, str] | None:
        """Return the command's environment; None if another agent of this run has reported the event."""
        run_dir = self._logs.run_dir
        if run_dir is not None and notification.round > 0 and self._is_shared() and not _claim(run_dir, notification):
            return None
        if notification.step is None and run_dir is not None:
            notification = replace(notification, step=read_step(run_dir, notification.round))
        return build_env(self._config, notification, run_dir)

    def _is_shared(self) -> bool:
        """Return whether other agents of this run, and no other run, may use the folder."""
        return self._config.logs.base_dir is not None and self._config.rendezvous.run_id != DEFAULT_RUN_ID


def build_env(config: AgentConfig, notification: Notification, run_dir: str | None) -> dict[str, str]:
    """Return the workers' environment, which has no token, with the known facts of the event."""
    facts = {
        "RUN_ID": config.rendezvous.run_id,
        "APP": config.base_env.get(_HANDLE),
        "STEP": notification.step,
        "ATTEMPT": notification.attempt,
        "EXIT_CODE": notification.exit_code,
        "LOG_DIR": run_dir,
        "HOST": config.node_name,
    }
    about = {Env.NOTIFY_EVENT: notification.event, Env.NOTIFY_REASON: notification.reason}
    known = {f"MUSTER_NOTIFY_{name}": str(fact) for name, fact in facts.items() if fact is not None and fact != ""}
    return {**config.base_env, **{name: value.replace("\0", "") for name, value in {**about, **known}.items()}}


def _claim(run_dir: str, notification: Notification) -> bool:
    """Claim an event; return False if it is reported already. A disk that takes no file suppresses no notification."""
    folder = os.path.join(run_dir, LogNames.NOTIFIED)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(os.path.join(folder, notification.key), flags, 0o600))
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def read_step(run_dir: str, round_number: int) -> int | None:
    """Return the step of the job's status in this round; None if it is unknown."""
    try:
        status = parse_json(read_whole(os.path.join(run_dir, LogNames.STATUS), STATUS_LIMIT_BYTES))
    except (OSError, ValueError):
        return None
    step = status.get("step") if isinstance(status, dict) and status.get("round") == round_number else None
    return step if isinstance(step, int) else None


def connect(context: "SinkContext") -> AgentConfig:
    """Notify of what happens to an agent's job."""
    context.add_witness(Notifier(context.config, context.loop, context.children, context.logs))
    return context.config
