"""What the `muster` command does, as functions: ask a running app for something, or remove it.

    from muster.cli import operations

    answer = operations.checkpoint("local_cwd://torchx/train-x7k2")
    print(answer.step, answer.line)

Each returns an `Answer`, even if some ranks are late or refuse, which `outcome` says. It raises `ControlError` if the
request could not be passed on: there is no such app, it has ended, or its scheduler cannot be asked. Then nothing was
changed.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Final

from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppState, Role, is_terminal

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.control import ANSWER_LIMIT_S, CommandExit, ControlError
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster.cli.adapters import create_scheduler
from muster.cli.handles import LAST, AppName, find_app
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.agent_command import is_agent_role
from muster.schedulers.errors import (
    EndedAppError,
    EngineError,
    RightError,
    SchedulerError,
    UnknownAppError,
    describe_os_error,
)

_REACH_LIMIT_S: Final = 10.0


def stop(handle: str, *, limit_s: float = ANSWER_LIMIT_S, now: bool = False) -> Answer:
    """Let all ranks save and stop at one step, and end the app. Ranks that cannot agree get the polite signal.

    If a node that runs cannot be asked, nothing is changed (`AskOutcome.UNREACHED`): its ranks might have saved.

    Args:
        handle: of the app, as `torchx run` prints it: `local_cwd://torchx/train-x7k2`. It may also be the app's name,
            the beginning of its name if no other app begins so, or `last`, see `handles`.
        limit_s: how long the agreement and the ranks may take.
        now: send the polite signal, and ask nothing before.

    Raises:
        ControlError: see the module.
    """
    with open_scheduler(handle) as (scheduler, app_id):
        if now:
            return _cancel(scheduler, app_id)
        answer = None
        with suppress(ControlError):  # it cannot be asked anything: it has ended, or waits, or has no agents
            answer = scheduler.ask_app(app_id, AskKind.REACH, _REACH_LIMIT_S)
        if answer is None or answer.outcome is not AskOutcome.UNREACHED:
            answer = scheduler.stop_app(app_id, limit_s)
        if answer.outcome is AskOutcome.UNREACHED:
            hint = "`muster stop --now` ends the job, and its ranks are not asked to save"
            return replace(answer, line=f"{answer.line}; {hint}", is_unchanged=True)
        return answer


def _cancel(scheduler: PluginScheduler, app_id: str) -> Answer:
    app = describe(scheduler, app_id)
    if is_terminal(app.state):
        raise ControlError(f"{app_id} has ended already ({app.state.name})", CommandExit.ENDED, is_unchanged=True)
    scheduler.cancel(app_id)
    return Answer(outcome=AskOutcome.DONE, line=f"{app_id} is cancelled, and its ranks were not asked to save")


def checkpoint(handle: str, *, limit_s: float = ANSWER_LIMIT_S) -> Answer:
    """Let all ranks save at one step, and wait until all have. Arguments and errors as of `stop`."""
    return ask(handle, AskKind.CHECKPOINT, limit_s=limit_s)


def pause(handle: str, *, limit_s: float = ANSWER_LIMIT_S) -> Answer:
    """Let all ranks wait at one step until `resume`. Arguments and errors as of `stop`."""
    return ask(handle, AskKind.PAUSE, limit_s=limit_s)


def resume(handle: str, *, limit_s: float = ANSWER_LIMIT_S) -> Answer:
    """End a pause. Arguments and errors as of `stop`."""
    return ask(handle, AskKind.RESUME, limit_s=limit_s)


def stacks(handle: str, *, limit_s: float = ANSWER_LIMIT_S) -> Answer:
    """Return the Python stacks of all ranks, which run on. Arguments and errors as of `stop`."""
    return ask(handle, AskKind.STACKS, limit_s=limit_s)


def resize(handle: str, nodes: int, *, role: str | None = None) -> Answer:
    """Change the number of nodes of an elastic job, within the MIN:MAX of its `-j`.

    New nodes are started. Those with the highest indices are ended, as in a preemption: ranks that ask `should_stop`
    save first, and the others go on. On this machine and the Docker engine it returns when these have ended.

    Args:
        handle: of the app, as of `stop`.
        nodes: the new number.
        role: which. None: the only elastic one.

    Raises:
        ControlError: see the module. It is also raised for a number that is not allowed.
    """
    with open_scheduler(handle) as (scheduler, app_id):
        try:
            return scheduler.resize_app(app_id, nodes, role)
        except UnknownAppError:
            raise
        except EndedAppError as error:
            raise ControlError(str(error), CommandExit.ENDED, is_unchanged=True) from error
        except SchedulerError as error:
            raise ControlError(str(error), CommandExit.REFUSED) from error


def recover(handle: str) -> Answer:
    """Continue a job of this machine or its Docker engine whose supervisor was killed, or ended with the machine.

    What still runs is adopted, what has ended is started again: this uses no retries. Arguments and errors as `stop`.
    """
    with open_scheduler(handle) as (scheduler, app_id):
        return scheduler.recover_app(app_id)


def delete(handle: str) -> Answer:
    """Stop the app if it runs, and remove it with its logs.

    Raises:
        ControlError: see the module.
    """
    with open_scheduler(handle) as (scheduler, app_id):
        if scheduler.describe_app(app_id) is not None:
            scheduler.delete_app(app_id)
        elif not scheduler.delete_unfinished(app_id):
            raise UnknownAppError(app_id)
    return Answer(outcome=AskOutcome.DONE, line=f"{app_id} is removed, with its logs")


def ask(handle: str, kind: AskKind, *, limit_s: float) -> Answer:
    """Ask the agents of a job. Arguments and errors as of `stop`."""
    with open_scheduler(handle) as (scheduler, app_id):
        return scheduler.ask_app(app_id, kind, limit_s)


@contextmanager
def open_scheduler(handle: str) -> Iterator[tuple[PluginScheduler, str]]:
    """Create the scheduler of a handle. Yield it and the app's id. Errors of the adapter become a `ControlError`.

    However a command finds that there is no such app, it prints the same line: `PluginScheduler.describe_unknown`.
    """
    app = None
    try:
        app = find_app(handle, os.environ)
        with closing(create_scheduler(app.scheduler)) as scheduler:
            try:
                yield scheduler, app.app_id
            except (UnknownAppError, ControlError) as error:
                if isinstance(error, ControlError) and error.exit_code is not CommandExit.UNKNOWN:
                    raise
                line = scheduler.describe_unknown(app.app_id)
                raise ControlError(_explain_last(handle, app, line), CommandExit.UNKNOWN) from error
    except RightError as error:
        raise ControlError(str(error), CommandExit.REFUSED) from error
    except EngineError as error:
        raise ControlError(_explain_last(handle, app, str(error)), CommandExit.LOST) from error
    except SchedulerError as error:
        raise ControlError(str(error), CommandExit.LOST) from error
    except OSError as error:
        raise ControlError(describe_os_error(error, f"the folder of {handle}"), CommandExit.LOST) from error


def _explain_last(handle: str, app: AppName | None, why: str) -> str:
    """Say why an app cannot be asked. If it is `last`, also say which app that is."""
    return why if handle != LAST or app is None else f"last is {app}, and {why}"


def describe(scheduler: PluginScheduler, app_id: str) -> DescribeAppResponse:
    """Describe an app.

    Raises:
        UnknownAppError: there is none.
    """
    response = scheduler.describe_app(app_id)
    if response is None:
        raise UnknownAppError(app_id)
    return response


def check_runs(app_id: str, state: AppState, why: str = "") -> None:
    """Refuse what only a running app can do.

    Raises:
        ControlError: it does not run.
    """
    if state is not AppState.RUNNING:
        code = CommandExit.ENDED if is_terminal(state) else CommandExit.REFUSED
        raise ControlError(f"{app_id} is {state.name}{why and f': {why}'}", code, is_unchanged=True)


def list_agent_roles(app_id: str, roles: Iterable[Role], name: str | None = None) -> list[Role]:
    """Return the roles of an app that run agents, or the one of this name.

    Raises:
        ControlError: there is none.
    """
    found = [role for role in roles if is_agent_role(role)]
    if not found:
        raise ControlError(f"{app_id} runs no agents of muster", CommandExit.USAGE)
    named = [role for role in found if name in (None, role.name)]
    if not named:
        names = ", ".join(role.name for role in found)
        raise ControlError(f"{app_id} has no role {name!r} that runs agents; there is: {names}", CommandExit.USAGE)
    return named


def choose_agent_role(app_id: str, roles: Iterable[Role], name: str | None = None) -> Role:
    """Return the only role of an app that runs agents, or the one of this name. Raises as `list_agent_roles`."""
    named = list_agent_roles(app_id, roles, name)
    if len(named) > 1:
        names = ", ".join(role.name for role in named)
        raise ControlError(f"{app_id} has several roles: name one with --role: {names}", CommandExit.USAGE)
    return named[0]
