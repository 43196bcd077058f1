"""Asks the agents of an app that runs under a supervisor, for local_cwd and Docker alike.

The adapter gives an `AskNode`, which runs `muster-agent ask job ...` where one replica's agent is, and returns what
that prints. Any live node of a role will do, because its agent passes the question on to the leader. Each role that
runs agents is a job of its own and is asked by itself.

A change of the number of nodes needs no agent. The supervisor starts those that are missing, and ends those that are
too many.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias
from urllib.parse import quote

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.control import CommandExit, ControlError, RoleNodes, ask_roles, close_stop, count_nodes
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster.schedulers.errors import describe_os_error
from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import DRAIN_WORD, RESIZE_WORD, AppFolder, AppRecord, AppSpec
from muster.schedulers.supervision.state import AppPhase, ReplicaId, ReplicaStatus, SupervisedApp, SupervisedRole
from muster.schedulers.wording.words import word, word_all

ASK_MARGIN_S: Final = 30.0
"""How much longer than the limit the command may take."""

DRAIN_MARGIN_S: Final = 30.0
"""How much longer than the limit the supervisor lets agents end by themselves."""

RECORD_LIMIT_S: Final = 20.0
"""How long a supervisor may take to record a stop."""

AskNode: TypeAlias = Callable[[AppSpec, ReplicaId, Sequence[str], float], tuple[int, str, str]]
"""(spec, replica, words, limit_s) -> exit code, standard output and standard error of the agent's command."""


def ask_app(folder: AppFolder, kind: AskKind, limit_s: float, ask_node: AskNode) -> Answer:
    """Ask the app's agents, and return what became of it.

    Raises:
        ControlError: the app has ended, or runs no agents.
    """
    spec, record = read_running(folder)
    if record.app.phase is AppPhase.ENDING:
        raise ControlError(f"{spec.app_id} is being stopped: {word_all(record.app.reasons)}", CommandExit.REFUSED)
    return _ask_roles(spec, record, kind, limit_s, ask_node)


def read_running(folder: AppFolder) -> tuple[AppSpec, AppRecord]:
    """Return an app that has not ended.

    Raises:
        ControlError: it has, its supervisor has died, or it runs where this process cannot reach it.
    """
    spec, record = client.read_app(folder)
    lost = client.find_loss(folder, record)
    if lost is not None:
        raise ControlError(f"{spec.app_id}: {word(lost)}", CommandExit.LOST)
    if record is None:
        raise ControlError(f"{spec.app_id} is being started: ask again", CommandExit.REFUSED)
    if client.has_ended(record) or not spec.details:  # these go first
        outcome = record.app.outcome.value if record.app.outcome is not None else "ended"
        raise ControlError(f"{spec.app_id} has ended already ({outcome})", CommandExit.ENDED, is_unchanged=True)
    if not client.runs_here(record):
        raise ControlError(f"{spec.app_id} runs on {record.machine.host}: ask there", CommandExit.LOST)
    return spec, record


def _ask_roles(spec: AppSpec, record: AppRecord, kind: AskKind, limit_s: float, ask_node: AskNode) -> Answer:
    running = {str(replica): replica for replica in record.app.running()}

    def ask(name: str, words: Sequence[str]) -> tuple[int, str, str]:
        return ask_node(spec, running[name], words, limit_s + ASK_MARGIN_S)

    def find_nodes(role: str) -> RoleNodes:
        none = f"no agent of {role} answers: its workers have not run for a second yet, or it is being started again"
        return RoleNodes(names=[str(each) for each in record.app.running([role])], ask=ask, none=none)

    roles = {role.name: find_nodes(role.name) for role in spec.roles if role.runs_agent}
    return ask_roles(spec.app_id, roles, kind, limit_s)


def stop_app(folder: AppFolder, limit_s: float, ask_node: AskNode) -> Answer:
    """Stop all ranks at one step, and the app with them.

    If the app's supervisor has died, the rest of the app is ended. That the app ends is recorded first, so that nothing
    is started again. Ranks that cannot agree on a step get the polite signal, all at once. If the agents cannot be
    asked, the app goes on (`AskOutcome.UNREACHED`).

    Raises:
        ControlError: the app has ended, or is being stopped already.
    """
    if client.is_lost(folder, client.read_app(folder)[1]):
        return _end_lost(folder)
    spec, record = read_running(folder)
    if record.app.phase is AppPhase.ENDING:
        raise ControlError(
            f"{spec.app_id} is being stopped already: {word_all(record.app.reasons)}", CommandExit.REFUSED
        )
    began_s = time.monotonic()
    jobs = sum(role.runs_agent for role in spec.roles)  # asked in turn
    refusal = client.request_stop(folder, sends=f"{DRAIN_WORD}{jobs * limit_s + DRAIN_MARGIN_S:g}")
    if refusal is None:  # a full disk: the record never changes
        _wait_recorded(folder, lambda app: app.phase in (AppPhase.ENDING, AppPhase.ENDED))
    none = Answer(outcome=AskOutcome.REFUSED, line="it runs no agents of muster")
    answer = _ask_roles(spec, record, AskKind.STOP, limit_s, ask_node) if jobs else none
    if answer.outcome is AskOutcome.DONE and client.wait_ended(folder, limit_s=RECORD_LIMIT_S):
        return answer
    if answer.outcome is AskOutcome.UNREACHED:
        if client.wait_ended(folder, limit_s=limit_s):  # they had got the request
            return replace(answer, outcome=AskOutcome.DONE, line=f"{answer.line}; all replicas have ended")
        if _withdraw(folder):
            return answer
    folder.send_request("cancel")
    is_over = client.wait_ended(folder, limit_s=spec.longest_grace_s + DRAIN_MARGIN_S)
    took_s = time.monotonic() - began_s
    if is_over and answer.outcome is AskOutcome.DONE:
        return replace(answer, line=f"{answer.line}; what else ran got SIGTERM")
    return close_stop(answer, "replicas", took_s, has_ended=is_over)


def _end_lost(folder: AppFolder) -> Answer:
    """End what still runs of an app whose supervisor has died. Nothing is started again."""
    began_s = time.monotonic()
    client.request_stop(folder)
    is_over = client.wait_ended(folder, limit_s=folder.read_spec().longest_grace_s + DRAIN_MARGIN_S)
    took_s = time.monotonic() - began_s
    if not is_over:
        line = f"its supervisor was lost; what still runs was told to end, and runs after {took_s:.1f} s"
        return Answer(outcome=AskOutcome.LATE, line=line, took_s=took_s)
    line = "its supervisor was lost; the job is cancelled, and what still ran got SIGTERM: no common step"
    return Answer(outcome=AskOutcome.DONE, line=line, took_s=took_s)


def recover_app(folder: AppFolder) -> Answer:
    """Continue an app whose supervisor has died: what still runs is adopted, what has ended is started again.

    This uses no retries.

    Raises:
        ControlError: it has ended, or its supervisor runs.
    """
    spec, before = client.read_app(folder)
    if before is None or not client.is_lost(folder, before):
        read_running(folder)
        raise ControlError(f"{spec.app_id} has a supervisor, which runs", CommandExit.REFUSED, is_unchanged=True)
    client.start_supervisor(folder, spec, recovers=True)
    after = client.read_app(folder)[1] or before
    if after.app.phase is AppPhase.ENDING or client.has_ended(after):
        return Answer(outcome=AskOutcome.DONE, line=f"{spec.app_id} was being stopped, and ends now")
    started = [each for each, known in after.app.replicas.items() if known.starts > before.app.replicas[each].starts]
    again, adopted = len(started), len(set(before.app.running()) - set(started))
    line = f"{spec.app_id} goes on: {again} {'replica' if again == 1 else 'replicas'} started again"
    return Answer(outcome=AskOutcome.DONE, line=f"{line}, {adopted} still ran")


def resize_app(folder: AppFolder, nodes: int, choose_role: Callable[[AppSpec], SupervisedRole]) -> Answer:
    """Change the number of nodes of an elastic role, and wait until those that are too many have ended.

    If two requests come at once, the second is carried out after the first is recorded.

    Args:
        folder: the app's.
        nodes: the new number.
        choose_role: checks the number, too. Its errors are passed on.

    Raises:
        ControlError: the app has ended, or is being stopped, or its disk is full.
    """
    began_s = time.monotonic()
    with _wait_for_turn(folder):
        spec, record = read_running(folder)
        role = choose_role(spec)
        ids = [ReplicaId(role.name, index) for index in range(role.replicas)]
        changed = record
        if not _has_succeeded(record, role.name):
            _check_space(folder)
            changed = _request_resize(folder, spec, record, f"{RESIZE_WORD}{nodes}:{quote(role.name, safe='')}")
        if _has_succeeded(changed, role.name):
            raise ControlError(f"role {role.name!r} of {spec.app_id!r} has ended already", CommandExit.ENDED)
    old, new = record.app, changed.app
    starts = [each for each in ids if new.is_wanted(each) and each not in (*old.running(), *old.leaving)]
    gone = [each for each in ids if old.is_wanted(each) and not new.is_wanted(each)]
    ends = [each for each in gone if each in (*old.running(), *new.running(), *new.leaving)]  # or it has left already
    again = [each for each in ids if each in old.leaving and new.is_wanted(each)]
    if not (starts or ends or again) and old.sizes.get(role.name, role.replicas) == nodes:
        return Answer(outcome=AskOutcome.DONE, line=f"{spec.app_id} has {count_nodes(nodes)} already")
    happens = [f"{each} starts again when it has ended" for each in again]
    if starts:
        happens.append(f"{_join(starts)} started")
    line = f"{spec.app_id} has {count_nodes(nodes)} from now on" + (": " if happens else "") + ", ".join(happens)
    if not ends:
        return Answer(outcome=AskOutcome.DONE, line=line)
    return _wait_left(folder, spec, f"{line}, " if happens else f"{line}: ", ends, began_s)


def _has_succeeded(record: AppRecord, role: str) -> bool:
    """Return whether a role's job has: one of its agents says so."""
    replicas = record.app.replicas.items()
    return any(each.role == role and known.status is ReplicaStatus.SUCCEEDED for each, known in replicas)


def _check_space(folder: AppFolder) -> None:
    """Refuse if the disk is full.

    A number that is not recorded is lost with the supervisor, and the command would wait on.
    """
    try:
        folder.check_space()
    except FileNotFoundError:  # deleted
        raise
    except OSError as error:
        line = describe_os_error(error, str(folder.path))
        raise ControlError(line, CommandExit.REFUSED, is_unchanged=True) from error


def _request_resize(folder: AppFolder, spec: AppSpec, before: AppRecord, request: str) -> AppRecord:
    """Return the app's record with the new number of nodes."""
    if before.app.phase is not AppPhase.ENDING:
        deadline_s, supervisor = time.monotonic() + RECORD_LIMIT_S, None
        while time.monotonic() < deadline_s:
            client.revive_app(folder)
            record = read_running(folder)[1]
            if record.app.phase is AppPhase.ENDING:
                before = record
                break
            if record.app.resizes > before.app.resizes:
                return record
            if supervisor != record.supervisor and folder.send_request(request):  # one that died has forgotten it
                supervisor = record.supervisor
            time.sleep(0.02)
        else:
            raise ControlError(f"the supervisor of {spec.app_id} does not answer", CommandExit.LOST)
    line = f"{spec.app_id} is being stopped: {word_all(before.app.reasons)}"
    raise ControlError(line, CommandExit.REFUSED, is_unchanged=True)


def _wait_left(folder: AppFolder, spec: AppSpec, line: str, ends: Sequence[ReplicaId], began_s: float) -> Answer:
    """Wait until replicas that the role does not have any more have ended. `line` begins the answer's.

    Raises:
        ControlError: the app ends before that.
    """
    deadline_s = time.monotonic() + spec.longest_grace_s + RECORD_LIMIT_S
    left = list(ends)
    while left and time.monotonic() < deadline_s:
        record = folder.read_record()
        if record is None or client.has_ended(record):
            raise ControlError(f"{spec.app_id} has ended while it was being resized", CommandExit.ENDED)
        if any(map(record.app.is_wanted, ends)):
            size = count_nodes(record.app.sizes[ends[0].role])
            return Answer(outcome=AskOutcome.DONE, line=f"{line}but it was resized again, to {size}")
        left = [each for each in ends if each in (*record.app.running(), *record.app.leaving)]
        if left and client.is_supervised(folder, record) is False:
            client.revive_app(folder)
        elif left:
            time.sleep(0.02)
    took_s = time.monotonic() - began_s
    if left:
        late = f"{line}after {took_s:.1f} s still running: {', '.join(map(str, left))}"
        return Answer(outcome=AskOutcome.LATE, line=late, took_s=took_s)
    return Answer(outcome=AskOutcome.DONE, line=f"{line}{_join(ends)} ended, after {took_s:.1f} s", took_s=took_s)


def _join(replicas: Sequence[ReplicaId]) -> str:
    return ", ".join(map(str, replicas)) + (" was" if len(replicas) == 1 else " were")


@contextmanager
def _wait_for_turn(folder: AppFolder) -> Iterator[None]:
    """Wait until no other command changes the number of nodes."""
    deadline_s = time.monotonic() + RECORD_LIMIT_S
    fd = os.open(folder.resize_lock_file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    line = f"another command resizes {folder.path.name}"
                    raise ControlError(line, CommandExit.REFUSED, is_unchanged=True) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _withdraw(folder: AppFolder) -> bool:
    """Withdraw a stop for which no agent could be asked. Return False if some have ended."""
    folder.send_request(f"{DRAIN_WORD}0")
    try:
        record = _wait_recorded(folder, lambda app: not (app.is_draining and app.lingering))
    except ControlError:
        return False
    return record is not None and record.app.phase is AppPhase.RUNNING


def _wait_recorded(folder: AppFolder, is_so: Callable[[SupervisedApp], bool]) -> AppRecord | None:
    """Wait until the supervisor has recorded what it was asked for, and return the record. None: the app is deleted.

    Raises:
        ControlError: it does not.
    """
    deadline_s = time.monotonic() + RECORD_LIMIT_S
    while time.monotonic() < deadline_s:
        record = folder.read_record()
        if record is None or is_so(record.app):
            return record
        time.sleep(0.02)
    raise ControlError(f"the supervisor of {folder.path.name} does not answer", CommandExit.LOST)
