"""What one task of the job runs, on its node: one replica of the app, supervised. Standard library only.

It starts again what was lost, as the supervisor of local_cwd does (`supervision.decisions`), keeps the log, and records
its state beside those of the other nodes. A signal of Slurm's, or the end of the time limit, lets the agents stop at
one step. Then the job is queued again, or a follow-up is submitted. The job's script does none of this, so that what is
left of a job whose first node is lost goes on.
"""

import contextlib
import functools
import glob
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from muster._shared import processes
from muster._shared.contract import HOLD_FLAG, NEVER_RETRY, STATUS_LIMIT_BYTES, Env, ExitCode, LogNames, print_line
from muster._shared.foreign_files import parse_json, read_regular, read_whole
from muster._shared.records import replace as replace_fields
from muster.schedulers.processes.driver import Launch, ProcessDriver
from muster.schedulers.role_variables import build_role_env
from muster.schedulers.slurm.hosts import expand_hosts, parse_fields, parse_time
from muster.schedulers.supervision import decisions
from muster.schedulers.supervision.app_folder import (
    AppFolder,
    AppRecord,
    AppSpec,
    StateError,
    build_role_dir_name,
    write_text,
)
from muster.schedulers.supervision.decisions import LINGER_S
from muster.schedulers.supervision.driver import EventQueue
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import (
    AppPhase,
    Outcome,
    ReplicaId,
    ReplicaState,
    SupervisedApp,
    SupervisedRole,
)
from muster.schedulers.supervision.supervisor import Supervisor
from muster.schedulers.wording.reasons import Code, Reason, Reasons, has_code, parse_reasons, to_data
from muster.schedulers.wording.words import word, word_all

RUNS_DIR: Final = "runs"
"""In the app's state folder: a folder per run of the job, `JOBID.RESTARTS`, with one per replica."""
JOBS_NAME: Final = "jobs"
"""In the app's state folder: the ids of its jobs, one per line."""
NODE_NAME: Final = "node"
"""In a replica's folder of a run: the node's name."""
HOSTS_NAME: Final = "hosts"
"""In a run's folder: the names of its nodes, in the order of the tasks. Slurm forgets those that it has lost."""
LOG_NAME: Final = "slurm.log"
"""In the app's state folder: what the script of its job and srun print, in all runs."""
SCRIPT_NAME: Final = "job.sh"
"""In the app's state folder: the script of its job."""
END_NAME: Final = "end"
"""In a run's folder: why one of its nodes has ended the job, as JSON."""
ENDED_NAME: Final = "ended"
"""In a run's folder, `ended.ROLE`: a role has ended that others serve, or that is not critical."""
STOP_WORD: Final = "stop"
STOPS: Final = {STOP_WORD: Code.STOPPED, "cancel": Code.CANCELLED}
"""What a request that is recorded in the app's folder means."""
SIZES_NAME: Final = "sizes"
"""In the app's state folder: `ROLE NODES` per line, of roles that have fewer nodes than submitted."""
NOT_OURS: Final = 98
"""Exit code of a node on which another user owns the app's folder, or can write to it. Programs rarely use it."""
GO_ON: Final = 250
"""Exit code of a node that has none of Slurm's commands and whose job is to go on: the script sees to it. It is above
those of signals, because srun returns the highest."""
FILES_DIR: Final = "files/"
"""In the zip: what a node without the shared folder unpacks into the app's state folder."""

_COMMAND_LIMIT_S: Final = 20.0
_STATE_TRIES: Final = 5
_UPDATE_TRIES: Final = 3
_NO_NODES: Final = "(null)"
_NOT_PREEMPTED: Final = "None"
_STATE_PAUSE_S: Final = 2.0
_LOOK_S: Final = 3600.0
"""The time limit may have been changed: at least so often it is read."""
_SPREAD_S: Final = 0.02
"""Between two nodes' questions to the controller."""
_MOST_SPREAD_S: Final = 5.0
_MOST_WITNESSES: Final = 8
"""How many nodes see to the end of a job that has lost its first one, or one of whose roles has failed."""
_MOST_WATCHERS: Final = 4
"""How many nodes look whether Slurm has lost others."""
_LOSSES_PAUSE_S: Final = 60.0
"""Between two of their looks: the controller has other jobs, too."""
_PROBE_PAUSE_S: Final = 5.0
_END_PAUSE_S: Final = 5.0
"""Between two looks whether another node ends the job, where no signal can tell it."""
_ROLES_PAUSE_S: Final = 1.0
"""Between two looks whether other roles have ended."""
_LAST_WORDS_S: Final = 1.0
"""Agents of a job end at the same moment, and their nodes then record it."""
_PORTS: Final = range(20000, 30000)
"""Below those that the system gives to anybody."""
_SEARCH_S: Final = 3.0
"""How long the record of a run that has ended waits for Slurm's answer, which was asked for at the signal."""
_RUN: Final = re.compile(r"[0-9]+\.[0-9]+")
"""The folder of a run. A file system may put folders of its own beside them."""
_LOST_NODES: Final = re.compile(rb"srun: error: Node failure on (\S+)")
_SENDERS: Final = "usually for `scancel`, a preemption, a lost node or the time limit"
_LOG_LIMIT_BYTES: Final = 1 << 20
_SIGNAL_SPREAD_S: Final = 60.0
"""Slurm may send the signal of `--signal` so much earlier than it was asked to."""
_HANDLED: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_IGNORE: Final = """trap '' USR1; exec "$0" "$@\""""
_GOES_ON: Final = ("RUNNING", "PREEMPTED", "TIMEOUT")
"""States of a job that has not been cancelled, and that is not queued again already."""
_ENDS: Final = ("COMPLETING", "FAILED", "NODE_FAIL")
_SCRIPT_LOST: Final = ("JobLaunchFailure", "NodeDown")
"""Slurm's reasons for the end of a job whose script was killed on a node that is DOWN."""

T = TypeVar("T")


class NodeFolder(AppFolder):
    """The app's folder, with the state of one replica in one run of the job."""

    def __init__(self, path: str | Path, run: str, replica: ReplicaId) -> None:
        super().__init__(path)
        self.app_state_dir = self.state_dir
        self.run_dir = self.app_state_dir / RUNS_DIR / run
        self.state_dir = self.run_dir / build_role_dir_name(replica.role) / str(replica.index)
        self.state_file = self.state_dir / "state.json"

    def remove_secrets(self) -> None:
        """Leave the secrets: the next run of the job needs them."""


def list_runs(folder: AppFolder) -> tuple[str, ...]:
    """Return the runs of an app's jobs of which nodes have recorded something, oldest first."""
    try:
        names = [each.name for each in (folder.state_dir / RUNS_DIR).iterdir() if _RUN.fullmatch(each.name)]
    except FileNotFoundError:
        return ()
    return tuple(sorted(names, key=lambda name: tuple(map(int, name.split(".")))))


def read_sizes(state_dir: Path) -> dict[str, int]:
    """Return how many nodes roles have that were resized."""
    try:
        rows = [line.rpartition(" ") for line in read_whole(state_dir / SIZES_NAME).decode().splitlines()]
    except FileNotFoundError:
        return {}
    return {role: int(nodes) for role, _, nodes in rows}


def list_replicas(spec: AppSpec) -> list[ReplicaId]:
    """Return all replicas in the order of the job's tasks, spares last."""
    plans: Mapping[str, Any] = spec.details["replicas"]
    sizes = {role.name: role.replicas for role in spec.roles}
    ordinary = [ReplicaId(role, index) for role, count in sizes.items() for index in range(count)]
    return [*ordinary, *(ReplicaId(role, index) for role in plans for index in range(sizes[role], len(plans[role])))]


def place_replicas(spec: AppSpec, sizes: Mapping[str, int], nodes: int) -> list[ReplicaId]:
    """List the replicas in the order of the job's tasks.

    Of a job with fewer nodes than submitted, list those it still has.

    Args:
        spec: of the app.
        sizes: see `read_sizes`.
        nodes: of the job, as it runs now.
    """
    replicas = list_replicas(spec)
    if nodes >= len(replicas):
        return replicas
    return [each for each in replicas if each.index < sizes.get(each.role, each.index + 1)][:nodes]


@dataclass(frozen=True)
class Allocation:
    """What Slurm gives a task in its environment."""

    job_id: str
    restarts: str
    task: int
    hosts: tuple[str, ...]
    end_s: float | None
    cluster: str = ""

    @property
    def run(self) -> str:
        """Names this run of the job."""
        return f"{self.job_id}.{self.restarts}"

    @staticmethod
    def of(env: Mapping[str, str]) -> "Allocation":
        """Read it."""
        end_s = env.get("SLURM_JOB_END_TIME", "")  # since 23.02
        return Allocation(
            job_id=env["SLURM_JOB_ID"],
            restarts=env.get("SLURM_RESTART_COUNT", "0"),
            task=int(env["SLURM_PROCID"]),
            hosts=tuple(expand_hosts(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])),
            end_s=float(end_s) if end_s.isdecimal() else None,
            cluster=env.get("SLURM_CLUSTER_NAME", ""),
        )


class SlurmDriver(ProcessDriver):
    """Starts the replica of this node. Node 0 of a role is the node of its first task."""

    LISTENS = False

    def build_launch(self, replica: ReplicaId, start_number: int) -> Launch:
        """Build the command, after the user's prefix, for instance `apptainer exec IMAGE`.

        Slurm sends a signal to every process of a job. SIGUSR1, which ends a program by default, is for this one only.
        """
        launch = super().build_launch(replica, start_number)
        os.makedirs(launch.cwd, exist_ok=True)
        command = ["/bin/sh", "-c", _IGNORE, *self.spec.details["prefix"], *launch.command]
        # A later start is of the same incarnation.
        env = {name: value for name, value in launch.env.items() if name != Env.JOB_INCARNATION or start_number == 1}
        return replace(launch, command=command, env=env)


class NodeSupervisor(Supervisor):
    """A `Supervisor` of one replica that knows what Slurm's signals and time limit mean."""

    def __init__(
        self, folder: NodeFolder, spec: AppSpec, queue: EventQueue, driver: SlurmDriver, allocation: Allocation
    ) -> None:
        # Alone it cannot know how many of its role are left: see `_end_others`.
        self._whole = spec
        alone = tuple(
            replace(role, replicas=1, min_replicas=None, policy=replace(role.policy, critical=True, ends_with=""))
            for role in spec.roles
        )
        super().__init__(folder, replace(spec, roles=alone), queue, driver)
        self._elastic = {role.name for role in spec.roles if role.is_elastic}
        self._allocation = allocation
        self._slurm_driver = driver
        self.grace_s = spec.grace_s
        self.end_s = allocation.end_s
        """Wall-clock seconds of the end of the time limit. None: none is known."""
        self.has_to_continue = False
        """The replica was ended because the job is to go on in another allocation."""
        self._is_at_limit = False
        """The time limit was why. False: it was not, or a signal that Slurm also sends then."""
        self._left_s = 0.0
        self._lost: list[str] = []
        self._search: threading.Thread | None = None
        """Asks which node's loss made Slurm end the run."""
        self._run_dir = folder.run_dir
        self._end_file = folder.run_dir / END_NAME
        self._log = folder.app_state_dir / LOG_NAME
        self._log_bytes = _find_size(self._log)
        """What earlier runs have written, and the beginning of this one."""
        self._earlier = _read_checkpoints(folder, spec)

    def handle_event(self, event: decisions.Event | Callable[[], None]) -> None:
        """Ask Slurm what happens to the job before an agent that was preempted starts again."""
        if callable(event):  # what a thread or a signal handler reports
            event()
            return
        if isinstance(event, decisions.ReplicaEnded) and not event.reasons and event.exit_code not in NEVER_RETRY:
            where = Reason(code=Code.ON_HOST, host=self._allocation.hosts[self._allocation.task])
            event = replace_fields(event, reasons=(where,))
        code = event.exit_code if isinstance(event, decisions.ReplicaEnded) else None
        role = self._find_role()
        is_own = not role.runs_agent and role.policy.restart is not None  # its policy says what follows
        if code not in (ExitCode.TERMINATED, ExitCode.RENDEZVOUS) or self.record.app.phase is AppPhase.ENDING or is_own:
            super().handle_event(event)
        elif code == ExitCode.RENDEZVOUS:
            self.ask_slurm(lambda: _find_lost_nodes(self._allocation), lambda lost: self._go_elsewhere(event, lost))
        elif self.end_s is not None and time.time() > self.end_s - 2 * self.grace_s:
            self._leave_at_limit()  # another node's agent told it
            super().handle_event(event)
        else:
            self.ask_slurm(
                lambda: _may_go_on(self._folder, self._allocation), lambda goes_on: self._replace(event, goes_on)
            )

    def _replace(self, event: decisions.Event, goes_on: bool) -> None:
        if not goes_on:
            self.leave(self._find_why() or Reason(code=Code.CANCELLED), continues=False)
        elif self._find_role().name not in self._elastic:
            self.leave(Reason(code=Code.OTHER_PREEMPTED), continues=True)
        super().handle_event(event)

    def _go_elsewhere(self, event: decisions.Event, lost: Sequence[str]) -> None:
        """Have the job queued again if its agents could not go on without nodes that Slurm has lost, too."""
        if lost and self._spec.details["continues"] != "no" and self._find_role().policy.critical:
            self.leave(Reason(code=Code.NODES_LOST, hosts=tuple(lost)), continues=True)
        super().handle_event(event)

    def ask_slurm(self, ask: Callable[[], T], then: Callable[[T], None]) -> None:
        """Ask in a thread: the controller may not answer, and output must be read."""
        delay_s = min(_MOST_SPREAD_S, self._allocation.task * _SPREAD_S)

        def run() -> None:
            time.sleep(delay_s)
            answer = ask()
            self._event_queue.post(lambda: then(answer))

        threading.Thread(target=run, daemon=True).start()

    def leave(self, why: Reason, *, continues: bool) -> None:
        """Let the replica save and end. `continues`: the job goes on later."""
        self.has_to_continue = self.has_to_continue or continues
        if not self._left_s:
            self._print_reason(why)
            self._left_s = time.time()
        super().handle_event(decisions.CancelRequested(reasons=(why,)))

    def _print_reason(self, why: Reason) -> None:
        """Print why the job stops in the log of the first node: the agent only knows of the signal that it gets."""
        if self._allocation.task == 0 and self.record.app.phase is not AppPhase.ENDING:
            text = word(why) + (f" ({_SENDERS})" if why.code is Code.SLURM_SIGNALLED else "")
            if why.code is Code.TIME_LIMIT and self.end_s is not None:
                end = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.end_s))
                text = f"Slurm job {self._allocation.job_id} reaches its time limit at {end}: it stops before"
            self._slurm_driver.print_line(next(iter(self.record.app.replicas)), f"[muster] {text}")

    def _leave_at_limit(self) -> None:
        self._is_at_limit = True
        self.leave(Reason(code=Code.TIME_LIMIT), continues=True)

    def close(self) -> None:
        """Record how it has ended. A job that ends at its limit without a new checkpoint does not go on.

        It would run for ever, and always do the same steps. A preemption is not the fault of the job: Slurm itself
        queues it again, as often as it preempts it.
        """
        if self._search is not None:
            self._search.join(_SEARCH_S)
            may_lose = self._spec.details["may_lose"]
            lost = self._lost or ([] if may_lose else _read_lost(self._log, self._log_bytes))
            if lost and self.record.app.outcome is Outcome.CANCELLED:
                app = replace(self.record.app, reasons=(Reason(code=Code.NODES_LOST, hosts=tuple(lost)),))
                self.record = replace(self.record, app=app)
        app = self.record.app
        if self.has_to_continue and app.outcome is Outcome.CANCELLED and self._would_repeat():
            self.has_to_continue = False
            app = replace(app, outcome=Outcome.FAILED, reasons=(Reason(code=Code.NOTHING_SAVED),))
            self.record = replace(self.record, app=app)
        super().close()

    def _would_repeat(self) -> bool:
        """Return whether the time limit has ended this run, and no run of this app's agents has a new checkpoint."""
        runs_agents = any(role.runs_agent for role in self._spec.roles)
        has_saved = _read_checkpoints(self._folder, self._spec) != self._earlier  # none: the job has succeeded
        if not runs_agents or self._spec.details["continues"] == "no" or has_saved:
            return False
        return self._is_at_limit or self._was_told_of_limit()

    def _was_told_of_limit(self) -> bool:
        """Return whether the signal that ended the run came from the time limit, as far as Slurm says it."""
        job = _read_job(self._allocation)
        if job.get("PreemptTime", _NOT_PREEMPTED) != _NOT_PREEMPTED:  # it also sets another end
            return False
        end_s = parse_time(job.get("EndTime", ""))
        margin_s = self.grace_s + self._spec.details.get("signal_s", 0) + _SIGNAL_SPREAD_S
        is_near = end_s is not None and self._left_s > end_s - margin_s
        return job.get("JobState") == "TIMEOUT" or (job.get("JobState") == "RUNNING" and is_near)

    def watch_signals(self) -> None:
        """Treat SIGTERM and SIGUSR1 as a preemption, and SIGHUP as fewer nodes of the role from now on."""
        for signum in _HANDLED:
            signal.signal(signum, self._note_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)  # the zip's main has blocked them

    def _note_signal(self, signum: int, _frame: object) -> None:
        continues = signum != signal.SIGHUP

        def act() -> None:
            why = self._find_why() or Reason(code=Code.SLURM_SIGNALLED, signal=signal.Signals(signum).name)
            self.leave(why if continues else Reason(code=Code.ROLE_RESIZED), continues=continues)
            if continues:
                self._search_loss()

        self._event_queue.post(act)

    def _find_why(self) -> Reason | None:
        """Return why muster itself ends the job. None: it does not, or this node is not told."""
        with contextlib.suppress(OSError):
            content = read_whole(self._end_file)
            with contextlib.suppress(KeyError, TypeError, ValueError):
                return Reason(code=Code.JOB_ENDS, causes=parse_reasons(parse_json(content)))
            return Reason(code=Code.JOB_ENDS)
        with contextlib.suppress(OSError):
            code = STOPS.get(self._folder.read_request() or "")
            return None if code is None else Reason(code=code)
        return None

    def _search_loss(self) -> None:
        """Ask at once, and only once, whether a lost node is why: Slurm soon forgets which nodes a run had.

        A job that may lose nodes may have lost one long before: it gets a signal only if its script was lost.
        """
        if self._search is None and self._allocation.task < _MOST_WITNESSES:

            def run() -> None:
                if not self._spec.details["may_lose"]:
                    self._lost = _find_down_nodes(self._allocation)
                elif _has_lost_script(self._allocation):
                    self._lost = [self._allocation.hosts[0]]

            self._search = threading.Thread(target=run, daemon=True)
            self._search.start()

    def watch_deadline(self) -> None:
        """Let the replica end at `grace_s` before the end of the time limit, which may have moved until then."""
        if self.end_s is None:
            self.ask_slurm(lambda: _read_end_s(self._allocation), self._arm)
        else:
            self._arm(self.end_s)

    def _arm(self, end_s: float | None) -> None:
        self.end_s = end_s
        if end_s is not None:
            wait_s = min(_LOOK_S, max(0.0, end_s - self.grace_s - time.time()))
            self._event_queue.set_timer("deadline", wait_s, self._check_deadline)

    def _check_deadline(self) -> None:
        def act(end_s: float | None) -> None:
            self.end_s = end_s or self.end_s
            if self.end_s is not None and self.end_s - self.grace_s - time.time() > 1.0:
                self._arm(self.end_s)
            else:
                self._leave_at_limit()

        self.ask_slurm(lambda: _read_end_s(self._allocation), act)

    def watch_end(self) -> None:
        """Let the replica end soon after another node has recorded that the job ends, which no signal tells here."""

        def look() -> None:
            if self._end_file.exists():
                self.leave(self._find_why() or Reason(code=Code.JOB_ENDS), continues=False)  # it may be gone again
            else:
                self.watch_end()

        if lacks_commands(self._spec):
            self._event_queue.set_timer("end", _END_PAUSE_S, look)

    def watch_losses(self, replicas: Sequence[ReplicaId]) -> None:
        """Have the job queued again once Slurm has lost nodes, and fewer are left than the app needs.

        A Slurm job cannot grow, so those that are left would wait for nodes in vain. A node whose replica has failed,
        and is not started again, is not left either: when it ended, there may have been enough others.

        Args:
            replicas: of the job's tasks, in their order.
        """
        details, task = self._spec.details, self._allocation.task
        if not details["may_lose"] or details["continues"] == "no" or task >= _MOST_WATCHERS:
            return
        if lacks_commands(self._spec):
            return
        if not _is_of_hold(self._spec, replicas[task]):
            check = functools.partial(self._check_losses, replicas)
            self._event_queue.set_timer("losses", _LOSSES_PAUSE_S, check)

    def _check_losses(self, replicas: Sequence[ReplicaId]) -> None:
        def ask() -> tuple[list[str], list[ReplicaId]]:
            lost = _find_lost_nodes(self._allocation)
            return lost, _list_failed(self._folder, self._whole, self._allocation, replicas) if lost else []

        def act(found: tuple[list[str], list[ReplicaId]]) -> None:
            lost, failed = found
            hosts = dict(zip(replicas, self._allocation.hosts, strict=False))
            left = Counter(each.role for each, host in hosts.items() if host not in lost and each not in failed)
            needed = {role.name: role.needed for role in self._whole.roles if role.policy.critical}
            if lost and any(left[role] < count for role, count in needed.items()):
                ended = tuple(f"{each} on {hosts[each]}" for each in failed if hosts.get(each) not in lost)
                why = Reason(code=Code.NODES_LOST, hosts=tuple(lost), replicas=ended, is_final=True)
                self.leave(why, continues=True)
            else:
                self.watch_losses(replicas)

        self.ask_slurm(ask, act)

    def watch_roles(self) -> None:
        """Let the replica end once the role that it serves has ended, or its own has failed, which is not critical.

        Nodes that end say so in the run's folder.
        """
        role = self._find_role()
        served = role.policy.ends_with

        def look() -> None:
            if served and _find_mark(self._run_dir, served).exists():
                self.leave(Reason(code=Code.SERVED_ENDED, role=served), continues=False)
            elif _has_failed(self._run_dir, role.name):
                self.leave(Reason(code=Code.STOPPED_WITH_ROLE, role=role.name), continues=False)
            else:
                self._event_queue.set_timer("roles", _ROLES_PAUSE_S, look)

        if (served or not role.policy.critical) and self._whole.details["shared"]:
            look()

    def _find_role(self) -> SupervisedRole:
        name = next(iter(self.record.app.replicas)).role
        return next(each for each in self._whole.roles if each.name == name)


def _find_mark(run_dir: Path, role: str) -> Path:
    """Return the file that says that a role has ended."""
    return run_dir / f"{ENDED_NAME}.{build_role_dir_name(role)}"


def _has_failed(run_dir: Path, role: str) -> bool:
    with contextlib.suppress(OSError):
        return read_whole(_find_mark(run_dir, role)) == Outcome.FAILED.value.encode()
    return False


def _mark_role(
    folder: AppFolder, spec: AppSpec, allocation: Allocation, replica: ReplicaId, app: SupervisedApp
) -> None:
    """Say that a role has ended, where others look: a job of agents by its success, other roles with their last node.

    A role that is not critical has also ended with fewer nodes than it needs. Without a shared folder no node looks.
    """
    role = next(each for each in spec.roles if each.name == replica.role)
    is_served = any(each.policy.ends_with == role.name for each in spec.roles)
    if not spec.details["shared"] or not (is_served or not role.policy.critical):
        return
    sizes = read_sizes(folder.state_dir)
    own = [each for each in list_replicas(spec) if each.role == role.name]
    own = [each for each in own if each.index < sizes.get(role.name, role.replicas)]
    ended = {**_list_ended(folder, allocation, own), replica: app.outcome}
    has_failed = len(own) - sum(each is Outcome.FAILED for each in ended.values()) < role.needed
    is_job_over = role.runs_agent and app.outcome is Outcome.SUCCEEDED
    has_failed = has_failed and not (is_job_over or role.policy.critical)
    if is_job_over or has_failed or len(ended) >= len(own):
        with contextlib.suppress(OSError):
            run_dir = NodeFolder(folder.path, allocation.run, replica).run_dir
            write_text(_find_mark(run_dir, role.name), Outcome.FAILED.value if has_failed else "")


def main(arguments: list[str]) -> int:
    """Run this node's replica of the app in a folder, and return the exit code.

    Args:
        arguments: the zip, and the app's folder.
    """
    bundle, path = arguments
    allocation = Allocation.of(os.environ)
    if _brings_files(bundle):
        _claim_folder(path)
        _remove_earlier(bundle, path)
    folder = AppFolder(path)
    if not folder.spec_file.exists():
        _unpack_files(bundle, folder)
    sizes = read_sizes(folder.state_dir)
    spec = folder.read_spec()
    replicas = place_replicas(spec, sizes, len(allocation.hosts))
    if allocation.task >= len(replicas):
        return 0  # resized, and another role lost a node
    replica = replicas[allocation.task]
    if replica.index >= sizes.get(replica.role, replica.index + 1):
        return 0  # the role was resized
    incarnation = describe_incarnation(folder, spec, allocation, replica)
    spec = _complete_spec(spec, replicas, allocation, os.path.abspath(bundle), incarnation)
    node = NodeFolder(path, allocation.run, replica)
    node.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    started = AppRecord(
        app=SupervisedApp(replicas={replica: ReplicaState()}), machine=Machine.here(), submitted_s=time.time()
    )
    (node.state_dir / NODE_NAME).write_text(allocation.hosts[allocation.task])
    (node.run_dir / HOSTS_NAME).write_text("\n".join(allocation.hosts))
    node.write_record(started)
    if allocation.task == 0:
        limit_child_of_srun(arguments)
    processes.become_subreaper()
    event_queue = EventQueue()
    driver = SlurmDriver(spec=spec, event_queue=event_queue)
    supervisor = NodeSupervisor(node, spec, event_queue, driver, allocation)
    supervisor.watch_signals()
    supervisor.watch_deadline()
    supervisor.watch_losses(replicas)
    supervisor.watch_end()
    supervisor.watch_roles()
    supervisor.begin()
    supervisor.run()
    supervisor.close()
    for signum in _HANDLED:  # Slurm may signal every process, commands included
        signal.signal(signum, signal.SIG_IGN)
    return _end_run(folder, spec, allocation, supervisor.record.app, has_to_continue=supervisor.has_to_continue)


def limit_child_of_srun(arguments: Sequence[str]) -> None:
    """Keep srun's child on this node from killing all tasks at once when srun is killed.

    The child waits for the end of srun. If srun was killed, the child asks the controller to kill the step by SIGKILL,
    so no node can save or queue the job again. When an administrator sets the node of the script to DOWN, Slurm kills
    both, and the child is sometimes quicker. Without its request Slurm ends the job when its script has ended, and
    sends SIGTERM first. A process that may open no file cannot ask the controller. The child does nothing else.

    Args:
        arguments: of this program, with which the command of its srun ends.
    """
    argv = [os.fsencode(each) for each in arguments]
    parents = processes.list_parents()
    commands = {pid: processes.read_command(pid).split(b"\0")[:-1] for pid in parents}
    commands = {pid: command for pid, command in commands.items() if command[-len(argv) :] == argv}
    for pid, command in commands.items():
        if os.path.basename(command[0]) == b"srun" and commands.get(parents[pid]) == command:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))


def describe_incarnation(folder: AppFolder, spec: AppSpec, allocation: Allocation, replica: ReplicaId) -> str:
    """Return the value of `Env.JOB_INCARNATION`. "": this run of the job is its first.

    Without a shared folder, the nodes of this run need not be those of the one before, and only Slurm has counted.
    """
    earlier = [run for run in list_runs(folder) if run != allocation.run]
    number = 1 + (len(earlier) if spec.details["shared"] else int(allocation.restarts))
    if number == 1:
        return ""
    reasons: list[Reasons] = []
    if earlier:
        for each in dict.fromkeys((replica, *list_replicas(spec)[:_MOST_WITNESSES])):
            with contextlib.suppress(StateError):
                record = NodeFolder(folder.path, earlier[-1], each).read_record()
                reasons.append(() if record is None else record.app.reasons)
    return f"{number} {word_all(choose_reasons(reasons))}".strip()


def choose_reasons(reasons: Sequence[Reasons]) -> Reasons:
    """Choose why a run has ended of what its nodes have recorded: the first nodes know whether one was lost.

    Args:
        reasons: empty of a node that has recorded none. Without a lost node, the first one counts.
    """
    return next((each for each in reasons if has_code(each, Code.NODES_LOST)), reasons[0] if reasons else ())


def _end_run(
    folder: AppFolder, spec: AppSpec, allocation: Allocation, app: SupervisedApp, *, has_to_continue: bool
) -> int:
    """See to what becomes of the job, and return the exit code of this task.

    An agent that stops at a common step exits with 143. If it exits with 0, 1 or 2, its job had ended when it was told.
    Another program may exit with 0 when it has saved.
    """
    [(replica, known)] = app.replicas.items()
    role = next(role for role in spec.roles if role.name == replica.role)
    is_over = role.runs_agent and (known.exit_code == 0 or known.exit_code in NEVER_RETRY)
    continues = has_to_continue and not is_over
    is_cut_off = lacks_commands(spec)
    if continues and not is_cut_off:
        _continue_job(folder, spec, allocation)
    is_lost = app.outcome is Outcome.FAILED and not is_over and not has_code(app.reasons, Code.NOTHING_SAVED)
    if not continues:
        _mark_role(folder, spec, allocation, replica, app)
    is_alone = not continues and (not role.policy.critical or has_code(app.reasons, Code.SERVED_ENDED))
    if is_lost and not is_alone and not _can_go_on(folder, spec, allocation, replica):
        _end_others(folder, allocation, app.reasons)
    has_failed = is_over and known.exit_code != 0
    if has_failed and not is_alone and len(spec.roles) > 1 and replica.index < _MOST_WITNESSES:
        time.sleep(LINGER_S)  # the others of its role know it, and one of them prints the report
        _end_others(folder, allocation, app.reasons)
    if not is_cut_off:
        _end_without_script(folder, spec, allocation)
    if is_alone or app.outcome is Outcome.SUCCEEDED or (is_over and known.exit_code == 0):
        return 0
    if continues and is_cut_off and spec.details["continues"] != "no" and not folder.request_file.exists():
        return GO_ON
    code = known.exit_code or 1
    if code == GO_ON:  # a program's own
        code = 1
    return ExitCode.TERMINATED if continues else code


def lacks_commands(spec: AppSpec) -> bool:
    """Return whether this task runs in an image that has none of Slurm's commands."""
    return bool(spec.details.get("in_image")) and shutil.which("scontrol") is None


def _read_checkpoints(folder: AppFolder, spec: AppSpec) -> dict[str, bytes]:
    """Read what the agents keep of the job's last checkpoint, by its path: for each job of a role one, or none."""
    found = {}
    for role in spec.roles:
        for path in folder.role_dir(role.name).glob(f"*/{LogNames.CHECKPOINT}"):
            with contextlib.suppress(OSError):
                found[str(path)] = read_whole(path)
    return found


def _can_go_on(folder: AppFolder, spec: AppSpec, allocation: Allocation, lost: ReplicaId) -> bool:
    """Return whether the app can do without a replica that has failed, and that is not started again.

    It is the rule of `supervision.decisions`. A replica that has recorded nothing is perhaps just starting. Without a
    shared folder the records of the others cannot be read. What is left of a hold can be used.
    """
    role = next(each for each in spec.roles if each.name == lost.role)
    if _is_of_hold(spec, lost):
        return True
    if not (spec.details["shared"] and spec.details["may_lose"]):
        return bool(spec.details["may_lose"])
    others = [each for each in list_replicas(spec) if each.role == role.name and each != lost]
    return len(others) - len(_list_failed(folder, spec, allocation, others)) >= role.needed


def _list_failed(
    folder: AppFolder, spec: AppSpec, allocation: Allocation, replicas: Sequence[ReplicaId]
) -> list[ReplicaId]:
    """List the replicas that have ended in this run without success, by their records: without a folder none."""
    ended = _list_ended(folder, allocation, replicas if spec.details["shared"] else ())
    return [each for each, outcome in ended.items() if outcome is not Outcome.SUCCEEDED]


def _list_ended(
    folder: AppFolder, allocation: Allocation, replicas: Sequence[ReplicaId]
) -> dict[ReplicaId, Outcome | None]:
    """Return how those of these replicas have ended that have, in this run, by the records of their nodes."""
    found = {}
    for each in replicas:
        with contextlib.suppress(OSError, StateError):
            record = NodeFolder(folder.path, allocation.run, each).read_record()
            if record is not None and record.app.phase is AppPhase.ENDED:
                found[each] = record.app.outcome
    return found


def _is_of_hold(spec: AppSpec, replica: ReplicaId) -> bool:
    return HOLD_FLAG in spec.details["replicas"][replica.role][replica.index]["command"]


def _end_others(folder: AppFolder, allocation: Allocation, why: Reasons) -> None:
    """Let all other nodes of the job end, and not queue it again.

    They would wait for a node that does not come, or run on without a role that has failed. Record why, for them.
    """
    with contextlib.suppress(OSError):
        content = json.dumps([to_data(each) for each in why])
        write_text(folder.state_dir / RUNS_DIR / allocation.run / END_NAME, content)
    _run("scontrol", "update", f"JobId={allocation.job_id}", "Requeue=0")
    _run("scancel", "--signal=USR1", allocation.job_id)


def _read_end_s(allocation: Allocation) -> float | None:
    """Return when the limit ends. None: no limit, or no answer."""
    return parse_time(_read_job(allocation).get("EndTime", ""))


def _read_state(allocation: Allocation) -> str:
    """Ask for the job's state. A controller that is just restarted is asked again. "": it does not answer."""
    for number in range(_STATE_TRIES):
        time.sleep(number and _STATE_PAUSE_S)
        state = _read_job(allocation).get("JobState", "")
        if state:
            return state
    return ""


def _find_lost_nodes(allocation: Allocation) -> list[str]:
    """Find the nodes of this run that are no longer in the job. Find none if the controller does not answer."""
    job = _read_job(allocation)
    left = expand_hosts(job.get("NodeList", "")) if job.get("JobState") == "RUNNING" else []
    return [host for host in allocation.hosts if left and host not in left]


def _find_down_nodes(allocation: Allocation) -> list[str]:
    """Find the nodes of this run that are down, of those that the job no longer has.

    While a job ends, it also has no longer the nodes that have ended their part. Find none without an answer.
    """
    left = expand_hosts(_read_job(allocation).get("NodeList", ""))
    gone = [host for host in allocation.hosts if host not in left]
    if not gone:
        return []
    nodes = map(parse_fields, _run("scontrol", "-o", "show", "node", ",".join(gone)).splitlines())
    down = {each.get("NodeName") for each in nodes if "DOWN" in each.get("State", "")}
    return [host for host in gone if host in down]


def _find_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_lost(log: Path, offset: int) -> list[str]:
    """Find the nodes that srun has lost. It names also one that is in service again when Slurm is asked.

    Args:
        log: where srun writes. Without a shared folder there is none.
        offset: from where on it is of this run.
    """
    try:
        named = _LOST_NODES.findall(read_regular(log, _LOG_LIMIT_BYTES, offset))
    except OSError:
        return []
    return list(dict.fromkeys(host for each in named for host in expand_hosts(each.decode(errors="replace"))))


def _may_go_on(folder: AppFolder, allocation: Allocation) -> bool:
    """Return whether the job may run again: a cancel forbids it first, in two ways, so that no node queues it again."""
    return not folder.request_file.exists() and _read_job(allocation).get("Requeue") != "0"


def _read_job(allocation: Allocation) -> dict[str, str]:
    """Ask what the controller knows of the job. Empty: it does not answer."""
    return parse_fields(_run("scontrol", "-o", "show", "job", allocation.job_id))


def _end_without_script(folder: AppFolder, spec: AppSpec, allocation: Allocation) -> None:
    """End a job that has lost the node of its script: before Slurm 25.11 nothing else ends it but its time limit.

    Slurm may not have noticed the loss yet, so the node is asked: by its record, else by a step. One step that fails
    proves nothing: the controller may be busy, or just restarted.
    """
    if not spec.details["may_lose"] or not 0 < allocation.task <= _MOST_WITNESSES:
        return
    first = NodeFolder(folder.path, allocation.run, list_replicas(spec)[0])
    probe = ("srun", "--overlap", f"--jobid={allocation.job_id}", f"--nodelist={allocation.hosts[0]}", "--nodes=1")
    for pause_s in (_LAST_WORDS_S, _PROBE_PAUSE_S):
        time.sleep(pause_s)
        if _read_state(allocation) != "RUNNING":
            return  # another node may have queued it again, and it then waits for the end of this one
        with contextlib.suppress(StateError):
            record = first.read_record()
            if record is not None and record.app.phase is AppPhase.ENDED:
                return
        if _run(*probe, "--ntasks=1", "--mem=0", "--quiet", "--input=none", "echo", "lives"):
            return
    # Only if it still runs: a job that was queued again completes or waits, and a cancel would end it for good.
    _run("scancel", "--state=RUNNING", allocation.job_id)


def _continue_job(folder: AppFolder, spec: AppSpec, allocation: Allocation) -> None:
    """Queue the job again, or submit its follow-up, unless Slurm or the user has decided otherwise."""
    how = spec.details["continues"]
    state = _read_state(allocation)
    goes_on = state in _GOES_ON or (state in _ENDS and _has_lost_script(allocation))
    if how == "no" or not goes_on or not _may_go_on(folder, allocation):
        return
    if how == "follow-up":
        with contextlib.suppress(FileExistsError):  # another node was first
            (folder.state_dir / RUNS_DIR / allocation.run / "followed").touch(exist_ok=False)
            _submit_follow_up(folder, spec, allocation)
        return
    time.sleep(_LAST_WORDS_S)  # the others need it, too, before a requeue
    excluded = _choose_excluded(folder, spec, allocation)
    update = f"update JobId={allocation.job_id} ExcNodeList={','.join(excluded)}"
    requeue = f"requeue {'expedite ' if how == 'expedite' else ''}{allocation.job_id}"
    # One command: the requeue soon ends this process, and a running job cannot be changed.
    _run("scontrol", text=f"{requeue}\n{update}\n" if excluded else f"{requeue}\n")
    for _ in range(_UPDATE_TRIES):
        if set(excluded) <= set(_read_excluded(allocation)):
            break
        _run("scontrol", text=f"{update}\n")


def _has_lost_script(allocation: Allocation) -> bool:
    """Return whether Slurm ends the job because an administrator has set the node of its script to DOWN.

    If that node has crashed instead, it ends no job. A node that is lost is no longer among the job's.
    """
    job = _read_job(allocation)
    left = expand_hosts(job.get("NodeList", ""))
    return job.get("Reason") in _SCRIPT_LOST and bool(left) and allocation.hosts[0] not in left


def _submit_follow_up(folder: AppFolder, spec: AppSpec, allocation: Allocation) -> None:
    excluded = _choose_excluded(folder, spec, allocation)
    options = [f"--exclude={','.join(excluded)}"] if excluded else []
    script = str(folder.state_dir / SCRIPT_NAME)
    for number in range(_STATE_TRIES):  # the controller may be restarting
        time.sleep(number and _STATE_PAUSE_S)
        job_id = _run("sbatch", "--parsable", *options, f"--dependency=afterany:{allocation.job_id}", script)
        if job_id:
            print(job_id, flush=True)
            record_job(folder, job_id.partition(";")[0])
            break


def record_job(folder: AppFolder, job_id: str) -> None:
    """Add a job to those of an app."""
    with (folder.state_dir / JOBS_NAME).open("a") as file:
        file.write(f"{job_id}\n")


def _choose_excluded(folder: AppFolder, spec: AppSpec, allocation: Allocation) -> list[str]:
    """Choose the nodes that the next run of the job is to leave out. Empty: no more than before.

    Those that the leader suspects, with those that are left out already: perhaps by another node that ends, too. None
    where the job could not run without them.
    """
    suspected = {host for role in spec.roles for host in _read_suspected(folder.role_dir(role.name))}
    before = _read_excluded(allocation)
    names = [host for host in allocation.hosts if host in suspected.difference(before)]
    if not names:
        return []
    excluded = [*before, *names]
    if _call("sbatch", "--test-only", f"--exclude={','.join(excluded)}", str(folder.state_dir / SCRIPT_NAME)) is None:
        return []
    print_line(f"muster: {', '.join(names)} is suspected: the job's next run leaves it out", sys.stdout)
    return excluded


def _read_excluded(allocation: Allocation) -> list[str]:
    text = _read_job(allocation).get("ExcNodeList", _NO_NODES)
    return [] if text == _NO_NODES else expand_hosts(text)


def _read_suspected(role_dir: Path) -> Iterator[str]:
    """Find the hosts of the nodes that the leader suspects, as the status file of the job says."""
    for path in role_dir.glob(f"*/{LogNames.STATUS}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            yield from (
                str(node["host"])
                for node in json.loads(read_whole(path, STATUS_LIMIT_BYTES))["nodes"]
                if node.get("suspicion")
            )


def _run(*command: str, text: str = "") -> str:
    """Run a command of Slurm's. Return what it prints, or "" if it fails."""
    return _call(*command, text=text) or ""


def _call(*command: str, text: str = "") -> str | None:
    """Run a command of Slurm's, which gets none of this task's own settings.

    Return what it prints, or None if it fails.

    Args:
        command: the program and its arguments.
        text: its standard input.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    try:
        done = subprocess.run(
            command,
            env=env,
            input=text,
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:  # in an image, see `lacks_commands`
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        print_line(f"muster: {error}")
        return None
    if done.returncode != 0:
        print_line(f"muster: {' '.join(command)}: {done.stderr.strip()}")
        return None
    return done.stdout


def _brings_files(bundle: str) -> bool:
    """Return whether the nodes share no folder."""
    with zipfile.ZipFile(bundle) as archive:
        return any(name.startswith(FILES_DIR) for name in archive.namelist())


def _claim_folder(path: str) -> None:
    """Make the app's folder on this node, whose parent any user can write to. An existing one must be ours.

    Raises:
        SystemExit: it is not. Standard error gets one line, and the status reads the exit code.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not (stat.S_ISDIR(status.st_mode) and is_ours):
            why = Reason(code=Code.FOLDER_FOREIGN, text=path, host=os.uname().nodename)
            print_line(f"muster: {word(why)}")
            sys.exit(NOT_OURS)


def _remove_earlier(bundle: str, path: str) -> None:
    """Remove what earlier runs of the job have brought to this node."""
    for other in glob.glob(f"{glob.escape(path)}.*.zip"):
        if other != bundle:
            with contextlib.suppress(OSError):
                os.unlink(other)


def _unpack_files(bundle: str, folder: AppFolder) -> None:
    """Unpack the app's files, which the zip has brought, without a shared folder."""
    folder.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with zipfile.ZipFile(bundle) as archive:
        for name in archive.namelist():
            if name.startswith(FILES_DIR):
                temporary = folder.state_dir / f".{os.getpid()}"
                temporary.write_bytes(archive.read(name))
                temporary.chmod(0o600)
                temporary.replace(folder.state_dir / name[len(FILES_DIR) :])


def _complete_spec(
    spec: AppSpec, replicas: Sequence[ReplicaId], allocation: Allocation, bundle: str, incarnation: str
) -> AppSpec:
    """Add what is known only on a node of the allocation."""
    details: dict[str, Any] = {**spec.details, "base_env": {**os.environ, **spec.details["base_env"]}}
    hosts: dict[str, list[str]] = {role.name: [] for role in spec.roles}
    for number, each in enumerate(replicas):
        hosts[each.role].append(allocation.hosts[number])
    first = {role: places[0] for role, places in hosts.items() if places}
    plans: dict[str, list[dict[str, Any]]] = {}
    for number, role in enumerate(spec.roles):
        host = first.get(role.name if role.runs_agent else spec.roles[0].name, "")
        # Different for jobs of a node and clusters of a machine.
        key = zlib.crc32(allocation.cluster.encode()) + int(allocation.job_id) * 8 + number
        port = _PORTS[key % len(_PORTS)]
        env = {Env.RANK0_HOST: host, Env.RDZV_PORT: str(port)}
        env[Env.NODE_NAME] = allocation.hosts[allocation.task]
        env |= build_role_env(spec.roles, spec.app_id, role.name, hosts)
        if incarnation and role.runs_agent:
            env[Env.JOB_INCARNATION] = incarnation
        plans[role.name] = [{**plan, "env": {**plan["env"], **env}} for plan in details["replicas"][role.name]]
    return replace(spec, details={**details, "replicas": plans}, python=sys.executable, import_root=bundle)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
