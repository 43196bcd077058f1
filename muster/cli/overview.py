"""`muster status` and `muster list`: the one line of a job (`schedulers.wording.job_line`), and what is behind it."""

import contextlib
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar, cast

from torchx.specs import AppDef, AppState

from muster._shared.contract import HOLD_FLAG, print_line
from muster._shared.control import CommandExit, ControlError
from muster._shared.reports import format_duration
from muster.cli.adapters import create_scheduler, describe_error
from muster.cli.answers import say
from muster.cli.handles import AppName, list_newest
from muster.cli.operations import open_scheduler
from muster.schedulers.adapter.properties import list_properties
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.errors import EngineError, NotConfiguredError, SchedulerError, UnknownAppError
from muster.schedulers.runner.roles import read_policy
from muster.schedulers.supervision.registry import find_state_dir
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.job_line import build_data, build_reasons, format_line
from muster.schedulers.wording.reasons import Code, Reason
from muster.schedulers.wording.replica_lines import explain_replicas, find_reason

if TYPE_CHECKING:
    from muster.cli.history.log_folder import RunFolder

STATE_CODES: Final[Mapping[AppState, int]] = {
    AppState.SUCCEEDED: 0,
    AppState.FAILED: 1,
    AppState.CANCELLED: 7,
    AppState.UNKNOWN: 8,
    AppState.RUNNING: 10,
    AppState.PENDING: 11,
    AppState.SUBMITTED: 11,
    AppState.UNSUBMITTED: 11,
}
"""The exit code of `muster status`. 2, 3 and 6 are those of every command, see `CommandExit`."""

_App = TypeVar("_App")
_ANSWER_LIMIT_S: Final = 20.0
"""How long `muster list` waits for a scheduler."""


def read_app(word: str) -> tuple[str, AppFacts]:
    """Read what is known of the app that a person means, or of the job whose log folder is named.

    Returns:
        Its handle, without a session, or the folder of its run; and the facts.

    Raises:
        ControlError: there is no such app, or its scheduler cannot be asked.
    """
    with open_job(word) as (scheduler, app_id):
        facts = _read_facts(cast("PluginScheduler", scheduler), app_id)  # of a folder no role is a hold
        if facts is None:
            raise UnknownAppError(app_id)
        return str(AppName(scheduler.backend, app_id)) if scheduler.backend else app_id, facts


@contextlib.contextmanager
def open_job(word: str) -> "Iterator[tuple[PluginScheduler | RunFolder, str]]":
    """Yield what answers for the job that a person means, and its name: of an app its scheduler, or its log folder.

    Raises:
        ControlError: there is no such app, or its scheduler cannot be asked.
    """
    if os.path.isdir(word):
        from muster.cli.history import log_folder, sources

        if sources.is_log_folder(word):
            run = log_folder.find_run(word)
            yield log_folder.RunFolder(run), str(run)
            return
    with open_scheduler(word) as found:
        yield found


def _read_facts(scheduler: PluginScheduler, app_id: str) -> AppFacts | None:
    """Read an app's facts. Of a hold, also read what it runs, or since when it is idle."""
    facts = scheduler.read_facts(app_id)
    if facts is None or facts.state is not AppState.RUNNING:
        return facts
    if not any(HOLD_FLAG in role.args for role in facts.app.roles):
        return facts
    from muster.schedulers.held.holds import explain_remote

    reasons = explain_remote(find_state_dir(os.environ), scheduler, app_id, facts.app.roles)
    return replace(facts, reasons=(*reasons, *facts.reasons))


def print_status(handle: str, *, as_json: bool) -> int:
    """Print the line of an app, its roles and its replicas. Return the exit code, which says its state.

    Raises:
        ControlError: see `read_app`.
    """
    handle, facts = read_app(handle)
    code = STATE_CODES[facts.state]
    if as_json:
        print(json.dumps({**build_entry(handle, facts), "roles": _build_roles(facts), "exit_code": code}))
        return code
    print_line(f"{handle}  {format_line(facts)}", sys.stdout)
    extra = {role.name for role in facts.app.roles if not read_policy(role).critical}
    for each in explain_replicas(facts):
        reasons = [*filter(None, [find_reason(each)]), *(["not critical"] if each.role in extra else [])]
        why = f" ({'; '.join(reasons)})" if reasons else ""
        host = f"  {each.hostname}" if each.hostname else ""
        print_line(f"  {each.role}/{each.id}  {each.state.name}{why}{host}", sys.stdout)
    if where := facts.ui_url or facts.logs:
        print_line(f"  logs: {where}", sys.stdout)
    return code


def build_entry(handle: str, facts: AppFacts) -> dict[str, object]:
    """Build what `--json` of `status` and `list` have of an app."""
    return {"handle": handle, **build_data(facts), "ui_url": facts.ui_url}


def _build_roles(facts: AppFacts) -> list[dict[str, object]]:
    replicas = explain_replicas(facts)
    return [
        {
            "role": role.name,
            "critical": read_policy(role).critical,
            "replicas": [
                {
                    "id": each.id,
                    "state": each.state.name,
                    "host": each.hostname,
                    "reason": find_reason(each),
                    "reasons": build_reasons(each.reasons),
                }
                for each in replicas
                if each.role == role.name
            ],
        }
        for role in facts.app.roles
    ]


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One app of a list."""

    handle: str
    submitted_s: float | None
    has_other_home: bool
    facts: AppFacts


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The apps of one scheduler."""

    scheduler: str
    apps: tuple[Listed, ...] = ()
    count: int = 0
    """How many apps it has. Only the newest are read."""
    problem: str = ""
    """Why it cannot be reached, in one line.

    "": it can, or it is not configured, was not asked for, and has no job from here.
    """


def print_list(schedulers: Sequence[str], *, limit: int, as_json: bool) -> int:
    """Print the newest apps of schedulers, one line each, and the schedulers that cannot be reached.

    Return the exit code.

    Args:
        schedulers: their names. Empty: all that are made with `muster.schedulers.adapter`.
        limit: how many apps at most.
        as_json: as one line of JSON.
    """
    listings = read_listings(schedulers or list_properties(), limit, are_named=bool(schedulers))
    apps = sort_apps(app for each in listings for app in each.apps)[-limit:]
    problems = {each.scheduler: each.problem for each in listings if each.problem}
    code = CommandExit.LOST if schedulers and problems else CommandExit.DONE
    if as_json:
        entries = [build_entry(app.handle, app.facts) for app in reversed(apps)]
        print(json.dumps({"apps": entries, "not_reachable": problems, "exit_code": int(code)}))
        return int(code)
    _print_apps(apps[::-1])
    left = sum(each.count for each in listings) - len(apps)
    if left:
        print_line(f"{left} older not shown; `-n {limit + left}` shows all", sys.stdout)
    for scheduler, problem in problems.items():
        say(f"{scheduler}: {problem}")
    return int(code)


def sort_apps(apps: Iterable[_App]) -> list[_App]:
    """Sort apps by the time of their submission, the newest last. Those of another home folder come first."""
    return sorted(
        apps, key=lambda app: (not getattr(app, "has_other_home", False), getattr(app, "submitted_s", None) or 0.0)
    )


def _print_apps(apps: Iterable[Listed]) -> None:
    rows = [(app.handle, format_age(app.submitted_s), format_line(app.facts)) for app in apps]
    if not rows:
        print("no jobs")
        return
    widths = [max(len(row[place]) for row in rows) for place in (0, 1)]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for handle, age, line in rows:
        text = f"{handle:{widths[0]}}  {age:{widths[1]}}  {line}"
        print_line(f"{text[: columns - 1]}…" if columns and len(text) > columns else text, sys.stdout)


def format_age(since_s: float | None) -> str:
    """Return how long ago, for people. "": it is not known."""
    return "" if since_s is None else f"{format_duration(time.time() - since_s, 0)} ago"


def read_listings(names: Iterable[str], limit: int, *, are_named: bool) -> list[Listing]:
    """Read the newest apps of several schedulers at the same time. One that does not answer in time is a problem.

    Args:
        names: the schedulers'.
        limit: how many apps of each at most.
        are_named: a person has named them: one that is not made with the seam is a problem, too.
    """
    found: queue.SimpleQueue[Listing] = queue.SimpleQueue()

    def read(name: str) -> None:
        found.put(_read_listing(name, limit, is_named=are_named))

    unique = list(dict.fromkeys(names))
    for name in unique:
        threading.Thread(target=read, args=(name,), name=f"muster-list-{name}", daemon=True).start()
    listings: dict[str, Listing] = {}
    deadline_s = time.monotonic() + _ANSWER_LIMIT_S
    while len(listings) < len(unique):
        try:
            listing = found.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            break
        listings[listing.scheduler] = listing
    late = f"it has not answered in {_ANSWER_LIMIT_S:g} s"
    return [listings.get(name) or Listing(scheduler=name, problem=late) for name in unique]


def _read_listing(name: str, limit: int, *, is_named: bool) -> Listing:
    try:
        scheduler = create_scheduler(name)
        with closing(scheduler):
            apps = sort_apps(scheduler.list_apps({}))
            read = [_read_app(scheduler, name, str(app.app_id), app) for app in apps[-limit:]]
            known = tuple(filter(None, read))
            return Listing(scheduler=name, apps=known, count=len(apps) - len(read) + len(known))
    except ControlError as error:
        is_other = error.exit_code is CommandExit.USAGE and not is_named
        return Listing(scheduler=name, problem="" if is_other else str(error))
    except NotConfiguredError as error:
        return Listing(scheduler=name, problem=describe_error(error) if is_named or _has_submitted(name) else "")
    except Exception as error:  # noqa: BLE001  # another package's: the others are listed all the same
        return Listing(scheduler=name, problem=describe_error(error))


def _has_submitted(name: str) -> bool:
    """Return whether a job was submitted to a scheduler from here."""
    with contextlib.suppress(EngineError, OSError):
        return any(each.scheduler == name for each in list_newest(os.environ))
    return False


def _read_app(scheduler: PluginScheduler, name: str, app_id: str, app: object) -> Listed | None:
    """Read an app. None: another shell has just deleted it. One that cannot be read says so in its line."""
    submitted_s: float | None = getattr(app, "submitted_s", None)
    has_other_home = bool(getattr(app, "has_other_home", False))
    try:
        facts = _read_facts(scheduler, app_id)
    except (EngineError, SchedulerError, OSError) as error:
        unread = Reason(code=Code.UNREADABLE, text=describe_error(error))
        facts = AppFacts(app_id=app_id, app=AppDef(name=""), state=AppState.UNKNOWN, replicas=None, reasons=(unread,))
    if facts is None:
        return None
    return Listed(
        handle=str(AppName(name, app_id)),
        submitted_s=submitted_s or facts.submitted_s,
        has_other_home=has_other_home,
        facts=facts,
    )
