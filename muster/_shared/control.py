"""How adapters and the `muster` command ask a running job what a person wants. The agent's side is `agent.control`."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias, TypeVar

from muster._shared.contract import AskKind, AskOutcome, check_format, describe_exit_code, show_controls
from muster._shared.foreign_files import parse_json
from muster._shared.records import replace
from muster._shared.reports import Answer

T = TypeVar("T")

ANSWER_LIMIT_S: Final = 60.0
"""How long the ranks of a job may take for what a person asks of them."""


class CommandExit(IntEnum):
    """Exit codes of the `muster` command."""

    DONE = 0
    REFUSED = 1
    """It was refused, and nothing was changed."""
    USAGE = 2
    UNKNOWN = 3
    """There is no such app."""
    ENDED = 4
    """The app has ended already."""
    LATE = 5
    """Some ranks have not done it in time, or have given no stack."""
    LOST = 6
    """No agent answers, or the node that was to answer was lost."""


def get_exit_code(answer: Answer) -> CommandExit:
    """Return the exit code of the `muster` command."""
    return CommandExit.LOST if answer.outcome is AskOutcome.UNREACHED else CommandExit[answer.outcome.name]


class ControlError(RuntimeError):
    """A request could not be passed on. `str()` is one line. `exit_code` is that of the `muster` command.

    If it is certain that nothing was changed (`is_unchanged`), the line says so.
    """

    def __init__(self, line: str, exit_code: CommandExit, *, is_unchanged: bool = False) -> None:
        super().__init__(show_controls(f"{line}: nothing was changed" if is_unchanged else line))
        self.exit_code = exit_code
        self.is_unchanged = is_unchanged


NO_AGENT: Final = 3
"""Exit code of `muster-agent ask job` when no agent of the job answers it."""

SILENT: Final = 4
"""Its exit code when an agent is there and does not greet: it is stopped, or answers too many others."""

NOT_REACHED: Final = 255
"""Exit code of an `AskNode` whose node was not reached: nothing was asked."""

AskNode: TypeAlias = Callable[[str, Sequence[str]], tuple[int, str, str]]
"""(node, words) -> exit code, standard output and standard error of the agent's command there."""


def build_words(kind: AskKind, limit_s: float) -> list[str]:
    """Return what follows the agent's command on a node."""
    return ["ask", "job", kind.value, "--limit", f"{limit_s:g}"]


def ask_first(nodes: Iterable[str], argv: Sequence[str], ask_node: AskNode, none: str) -> Answer:
    """Ask nodes until an agent answers: any of them passes the question on to the leader.

    Args:
        nodes: names of live ones, in order.
        argv: see `build_words`.
        ask_node: runs them on a node.
        none: the line if no agent answers.
    """
    unreached = None
    for node in nodes:
        code, output, errors = ask_node(node, argv)
        if code == 0:
            try:
                return parse_answer(output)
            except ValueError as error:
                line = f"{node} gave no answer that can be read ({error})"
                return Answer(outcome=AskOutcome.UNREACHED, line=line)
        if code != NO_AGENT:
            lines = errors.strip().splitlines()
            why = lines[-1] if lines else f"its command {describe_exit_code(code)}"
            lost = Answer(outcome=AskOutcome.UNREACHED, line=f"{node} cannot be asked: {why}")
            if code not in (SILENT, NOT_REACHED):
                return lost
            unreached = unreached or lost
    return unreached or Answer(outcome=AskOutcome.LOST, line=none)


def call_limited(call: Callable[[], T], limit_s: float) -> T:
    """Call something that has no limit of its own: a client library whose server may never answer.

    Raises:
        TimeoutError: the limit has passed. The call goes on in its thread, and what it returns is dropped.
    """
    from concurrent.futures import Future, wait  # programs with `Events` import this module too

    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised by the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="muster-ask", daemon=True).start()
    if not wait([future], limit_s).done:
        raise TimeoutError(f"no response in {limit_s:g} s")
    return future.result()


def merge_answers(answers: Mapping[str, Answer]) -> Answer:
    """Return one answer of an app whose roles are jobs of their own, by role. The worst outcome counts."""
    if len(answers) == 1:
        return next(iter(answers.values()))
    worst = max(answers.values(), key=lambda each: (get_exit_code(each), each.outcome is AskOutcome.UNREACHED))
    line = "; ".join(f"{role}: {answer.line}" for role, answer in answers.items())
    stacks = tuple(replace(each, role=role) for role, answer in answers.items() for each in answer.stacks)
    late = tuple(replace(each, role=role) for role, answer in answers.items() for each in answer.late)
    progress = tuple(replace(each, role=role) for role, answer in answers.items() for each in answer.progress)
    ranks = sum(answer.ranks for answer in answers.values())
    is_unchanged = all(answer.is_unchanged for answer in answers.values())
    return replace(
        worst, line=line, is_unchanged=is_unchanged, stacks=stacks, progress=progress, late=late, ranks=ranks
    )


@dataclass(frozen=True, kw_only=True)
class RoleNodes:
    """The live nodes of one role that runs agents."""

    names: Sequence[str]
    """In the order in which they are asked. A node that has no agent is passed over."""
    ask: AskNode
    """(name, words) -> exit code, output and errors of the agent's command with these words there."""
    none: str
    """The line of the answer if no agent of the role answers."""


def ask_roles(app_id: str, roles: Mapping[str, RoleNodes], kind: AskKind, limit_s: float) -> Answer:
    """Ask every role of an app that runs agents.

    Args:
        app_id: of the app, for messages.
        roles: by name.
        kind: what is asked for.
        limit_s: how long the ranks of one role may take, in seconds.

    Returns:
        One answer for all roles. The worst outcome counts.

    Raises:
        ControlError: no role runs agents.
    """
    if not roles:
        raise ControlError(f"{app_id} runs no agents of muster that could be asked", CommandExit.REFUSED)
    argv = build_words(kind, limit_s)
    return merge_answers({name: ask_first(each.names, argv, each.ask, each.none) for name, each in roles.items()})


def close_stop(asked: Answer, what: str, took_s: float, *, has_ended: bool) -> Answer:
    """Return the answer to a stop. The agents were asked, and then the app was told to end.

    Args:
        asked: the agents' answer.
        what: "replicas" or "pods": what got the polite signal.
        took_s: seconds since the stop began.
        has_ended: whether all of them have ended.
    """
    if not has_ended:
        line = f"{asked.line}; its {what} were told to end, and some still run after {took_s:.1f} s"
        return replace(asked, outcome=AskOutcome.LATE, line=line, is_unchanged=False, took_s=took_s)
    if asked.outcome is AskOutcome.DONE:
        return asked
    line = f"{asked.line}, so no common step was saved; all {what} got SIGTERM and have ended, after {took_s:.1f} s"
    return Answer(outcome=AskOutcome.DONE, line=line, took_s=took_s, late=asked.late)


def describe_answer(answer: Answer) -> str:
    """Say what became of a request."""
    return f"{answer.line}; nothing was changed" if answer.is_unchanged else answer.line


def count_nodes(nodes: int) -> str:
    """Say how many nodes: "1 node", "2 nodes"."""
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"


def parse_answer(text: str) -> Answer:
    """Read the line that `muster-agent ask job` prints.

    Raises:
        ValueError: it is no answer. The message says what is wrong.
    """
    from muster._shared.codec import decode

    data = parse_json(text)
    if isinstance(data, dict):
        check_format(data.get("format"), "the answer")
    return decode(Answer, data)
