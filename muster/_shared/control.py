"""What a person asks of a running job and gets as an answer, shared by adapters and the `muster` command.

The agents' side of it is `agent.rendezvous.consensus.actions.Answer`: the same fields, as JSON.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Final, TypeAlias, TypeVar

from muster._shared.contract import AskKind, AskOutcome, describe_exit_code, parse_json

T = TypeVar("T")


class ExitCode(IntEnum):
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


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """A rank that has not done in time what was agreed on."""

    global_rank: int
    step: int | None
    """The last that it has reported; None: none."""
    silent_s: float | None
    """Since then."""
    role: str = ""
    """Where several roles were asked."""


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """The Python stacks of one rank."""

    global_rank: int
    text: str
    role: str = ""
    """Where several roles were asked."""


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """How far one rank is."""

    global_rank: int
    step: int | None
    """The last that it has reported; None: none."""
    total: int | None
    optimizer_steps: int | None
    """Where it has reported none, those of its busiest optimizer."""
    rate: float
    """Steps a second, during the last one."""
    values: Mapping[str, float | str]
    """What it shows beside its step; "nan", "inf" or "-inf" are text."""
    has_moved: bool
    """It has done a step or entered or completed a collective, during the last second."""
    role: str = ""
    """Where several roles were asked."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a request."""

    outcome: AskOutcome
    line: str
    """For people."""
    step: int | None = None
    """The step that was agreed on; of `stacks` that of the rank that has done the fewest."""
    ranks: int = 0
    """How many it concerns."""
    took_s: float = 0.0
    late: tuple[LateRank, ...] = ()
    stacks: tuple[RankStack, ...] = ()
    progress: tuple[RankProgress, ...] = ()
    """With `stacks`."""

    @property
    def exit_code(self) -> ExitCode:
        """That of the `muster` command."""
        return ExitCode[self.outcome.name]

    def to_json(self) -> dict[str, object]:
        """A dict of JSON types."""
        return {**asdict(self), "outcome": self.outcome.value, "exit_code": int(self.exit_code)}


class ControlError(RuntimeError):
    """A request could not be passed on; one line. `exit_code` is that of the `muster` command."""

    def __init__(self, line: str, exit_code: ExitCode) -> None:
        super().__init__(line)
        self.exit_code = exit_code


NO_AGENT: Final = 3
"""Exit code of `muster-agent ask job` when no agent of the job answers it."""

AskNode: TypeAlias = Callable[[str, Sequence[str]], tuple[int, str, str]]
"""(node, words) -> exit code, standard output and standard error of the agent's command there."""


def build_words(kind: AskKind, limit_s: float) -> list[str]:
    """What follows the agent's command on a node."""
    return ["ask", "job", kind.value, "--limit", f"{limit_s:g}"]


def ask_first(nodes: Iterable[str], words: Sequence[str], ask_node: AskNode, none: str) -> Answer:
    """Ask nodes until an agent answers: any of them passes the question on to the leader.

    Args:
        nodes: names of live ones, in order.
        words: see `build_words`.
        ask_node: runs them on a node.
        none: the line if no agent answers.
    """
    for node in nodes:
        code, output, errors = ask_node(node, words)
        if code == 0:
            try:
                return parse_answer(output)
            except ValueError as error:
                return Answer(outcome=AskOutcome.LOST, line=f"{node} gave no answer that can be read ({error})")
        if code != NO_AGENT:
            lines = errors.strip().splitlines()
            why = lines[-1] if lines else f"its command {describe_exit_code(code)}"
            return Answer(outcome=AskOutcome.LOST, line=f"{node} cannot be asked: {why}")
    return Answer(outcome=AskOutcome.LOST, line=none)


def call_limited(call: Callable[[], T], limit_s: float) -> T:
    """Call something that has no limit of its own: a client library whose server may never answer.

    Raises:
        TimeoutError: it goes on in its thread; what it returns is dropped.
    """
    from concurrent.futures import Future, wait  # programs with `Events` import this module, too

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
    """One answer of an app whose roles are jobs of their own, by role; the worst outcome counts."""
    if len(answers) == 1:
        return next(iter(answers.values()))
    worst = max(answers.values(), key=lambda answer: answer.exit_code)
    line = "; ".join(f"{role}: {answer.line}" for role, answer in answers.items())
    stacks = tuple(replace(each, role=role) for role, answer in answers.items() for each in answer.stacks)
    late = tuple(replace(each, role=role) for role, answer in answers.items() for each in answer.late)
    progress = tuple(replace(each, role=role) for role, answer in answers.items() for each in answer.progress)
    ranks = sum(answer.ranks for answer in answers.values())
    return replace(worst, line=line, stacks=stacks, progress=progress, late=late, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class RoleNodes:
    """The live nodes of one role that runs agents."""

    names: Sequence[str]
    """In the order in which they are asked; a node that has no agent is passed over."""
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
        One answer for all roles; the worst outcome counts.

    Raises:
        ControlError: no role runs agents.
    """
    if not roles:
        raise ControlError(f"{app_id} runs no agents of muster that could be asked", ExitCode.REFUSED)
    words = build_words(kind, limit_s)
    return merge_answers({name: ask_first(each.names, words, each.ask, each.none) for name, each in roles.items()})


def close_stop(asked: Answer, what: str, took_s: float, *, has_ended: bool) -> Answer:
    """Return the answer to a stop whose agents were asked, and whose app was told to end then.

    Args:
        asked: the agents' answer.
        what: "replicas" or "pods": what got the polite signal.
        took_s: seconds since the stop began.
        has_ended: whether all of them have ended.
    """
    if not has_ended:
        line = f"{asked.line}; its {what} were told to end, and some still run after {took_s:.1f} s"
        return replace(asked, outcome=AskOutcome.LATE, line=line, took_s=took_s)
    if asked.outcome is AskOutcome.DONE:
        return asked
    line = f"{asked.line}; so all {what} got SIGTERM at once and have ended, after {took_s:.1f} s: no common step"
    return Answer(outcome=AskOutcome.DONE, line=line, took_s=took_s, late=asked.late)


def count_nodes(nodes: int) -> str:
    """1 node, 2 nodes."""
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"


def parse_answer(text: str) -> Answer:
    """Read the line that `muster-agent ask job` prints.

    Raises:
        ValueError: it is no answer; says what is wrong.
    """
    content = _read_object(parse_json(text))
    return Answer(
        outcome=AskOutcome(content.get("outcome")),
        line=_read(content, "line", _read_text, ""),
        step=_read(content, "step", _read_optional_int, None),
        ranks=_read(content, "ranks", _read_int, 0),
        took_s=_read(content, "took_s", _read_float, 0.0),
        late=_read(content, "late", lambda rows: tuple(map(_read_late, _read_list(rows))), ()),
        stacks=_read(content, "stacks", lambda rows: tuple(map(_read_stack, _read_list(rows))), ()),
        progress=_read(content, "progress", lambda rows: tuple(map(_read_progress, _read_list(rows))), ()),
    )


def _read(content: Mapping[str, object], name: str, read: Callable[[object], T], default: T) -> T:
    if name not in content:
        return default
    try:
        return read(content[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _read_object(value: object) -> Mapping[str, object]:
    if isinstance(value, dict):
        return value
    raise ValueError("not an object")


def _read_list(value: object) -> list[object]:
    if isinstance(value, list):
        return value
    raise ValueError("not a list")


def _read_text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("not text")


def _read_int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("not an integer")


def _read_optional_int(value: object) -> int | None:
    return None if value is None else _read_int(value)


def _read_float(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError("not a number")


def _read_late(value: object) -> LateRank:
    row = _read_object(value)
    silent = row.get("silent_s")
    return LateRank(
        global_rank=_read_int(row.get("global_rank")),
        step=_read_optional_int(row.get("step")),
        silent_s=None if silent is None else _read_float(silent),
    )


def _read_progress(value: object) -> RankProgress:
    row = _read_object(value)
    return RankProgress(
        global_rank=_read_int(row.get("global_rank")),
        step=_read_optional_int(row.get("step")),
        total=_read_optional_int(row.get("total")),
        optimizer_steps=_read_optional_int(row.get("optimizer_steps")),
        rate=_read_float(row.get("rate")),
        values=dict(map(_read_value, _read_list(row.get("values")))),
        has_moved=row.get("moved") is not None,
    )


def _read_value(value: object) -> tuple[str, float | str]:
    name, text = map(_read_text, _read_list(value))
    number = float(text)
    return name, number if math.isfinite(number) else text


def _read_stack(value: object) -> RankStack:
    row = _read_object(value)
    return RankStack(global_rank=_read_int(row.get("global_rank")), text=_read_text(row.get("text")))
