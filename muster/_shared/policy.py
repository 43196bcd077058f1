"""What a user wants to follow from a failure: the grammar of `--on`. Pure.

    RULES:     RULE; RULE; ...              the first rule that matches decides
    RULE:      CONDITION, CONDITION, ...: VERDICT
    CONDITION: exit N                       the exit code of the rank that failed first, 1 to 255; `exit 33,34` is two
               signal NAME                  the signal that ended it: signal SEGV
               CLASS                        usage, data, oom (host-oom or device-oom), device, disk, network,
                                            preemption, time-limit, hang, crash, unknown; any: every failure
               EXCEPTION                    ImportError, or torch.OutOfMemoryError: the name of what it raised, with its
                                            package or without; of Python's own also what is derived from it
               repeat                       the same cause at the same place twice in a row, and it is known that
                                            neither attempt has done a step
    VERDICT:   restart                      where the ranks are
               elsewhere                    the node of the rank leaves: a spare takes its place, or what the scheduler
                                            starts instead
               stop                         the job ends
    restart and elsewhere may be followed by
               N                            at most N times for one cause without progress; then the job ends
               free                         as often as it comes
    and then use none of the restarts that the job is allowed.

Components, which know nothing of the agent, check with the same grammar.
"""

import re
from typing import Final

from muster._shared.causes import CLASSES, DEVICE_OOM, GAVE_UP, HOST_OOM
from muster._shared.records import record

RESTART: Final = "restart"
ELSEWHERE: Final = "elsewhere"
STOP: Final = "stop"

ANY: Final = "any"
OOM: Final = "oom"
REPEAT: Final = "repeat"

_EXCEPTION: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_CHARS: Final = 2000
_MOST_RULES: Final = 64
_MOST_TIMES: Final = 1000
_VERDICTS: Final = "restart, elsewhere or stop; after the first two a number or free may follow"
_CLASSES: Final = tuple(each for each in CLASSES if each != GAVE_UP)
"""After GAVE_UP the job always stops."""
_CONDITIONS: Final = f"exit N, signal NAME, an exception, repeat, any, oom, {', '.join(_CLASSES)}"


class PolicyError(ValueError):
    """One line about a policy that cannot be read: the rule, and what is allowed."""


@record
class Condition:
    """One condition of a rule. One of the fields decides."""

    exit_codes: frozenset[int] = frozenset()
    signal: str = ""
    """"SIGSEGV"."""
    cause: str = ""
    """A class, `oom`, `any` or `repeat`."""
    exception: str = ""


@record
class Rule:
    """What follows from the failures that it matches."""

    conditions: tuple[Condition, ...]
    verdict: str
    """`RESTART`, `ELSEWHERE` or `STOP`."""
    most: int | None = None
    """How often for one cause without progress. None: no limit of its own."""
    is_free: bool = False
    """It uses none of the restarts that are allowed."""
    text: str = ""
    """As it was written."""


@record
class Happened:
    """What a rule is compared with."""

    cause: str
    exit_code: int | None = None
    signal: str = ""
    exception: str = ""
    """The name of the exception, with its package: "torch.OutOfMemoryError"."""
    is_repeat: bool = False


def parse_policy(text: str) -> tuple[Rule, ...]:
    """Read the rules. An empty text has none.

    Raises:
        PolicyError: it does not follow the grammar.
    """
    if len(text) > _MOST_CHARS:
        raise PolicyError(f"{text[:40]!r}...: must have at most {_MOST_CHARS} characters, not {len(text)}")
    if not text.strip():
        return ()
    parts = [part.strip() for part in text.split(";")]
    if len(parts) > _MOST_RULES:
        raise PolicyError(f"{text[:40]!r}...: must have at most {_MOST_RULES} rules, not {len(parts)}")
    if parts[-1] == "":
        parts.pop()
    return tuple(_parse_rule(part) for part in parts)


def _parse_rule(text: str) -> Rule:
    before, colon, after = text.partition(":")
    if not colon:
        raise PolicyError(f"{text!r}: must be CONDITION: VERDICT, as in 'exit 77: elsewhere'")
    conditions = _parse_conditions(before, text)
    parts = after.split()
    if not parts or parts[0] not in (RESTART, ELSEWHERE, STOP):
        raise PolicyError(f"{text!r}: what follows must be {_VERDICTS}, not {after.strip()!r}")
    verdict, more = parts[0], parts[1:]
    if not more:
        return Rule(conditions=conditions, verdict=verdict, text=text)
    is_number = more[0].isdecimal() and more[0].isascii() and 1 <= len(more[0]) <= 9
    if verdict == STOP or len(more) > 1 or not (is_number or more[0] == "free"):
        raise PolicyError(f"{text!r}: what follows must be {_VERDICTS}, not {after.strip()!r}")
    if more[0] == "free":
        return Rule(conditions=conditions, verdict=verdict, is_free=True, text=text)
    most = int(more[0])
    if not 1 <= most <= _MOST_TIMES:
        raise PolicyError(f"{text!r}: the number must be 1 to {_MOST_TIMES}, not {more[0]}")
    return Rule(conditions=conditions, verdict=verdict, most=most, is_free=True, text=text)


def _parse_conditions(before: str, rule: str) -> tuple[Condition, ...]:
    """Read what stands before the colon. A number continues the exit codes before it."""
    conditions: list[Condition] = []
    for word in (each.strip() for each in before.split(",")):
        last = conditions[-1] if conditions else None
        if word.isdecimal() and last is not None and last.exit_codes:
            conditions[-1] = Condition(exit_codes=last.exit_codes | {_parse_code(word, rule)})
        else:
            conditions.append(_parse_condition(word, rule))
    return tuple(conditions)


def _parse_condition(word: str, rule: str) -> Condition:
    kind, _, value = word.partition(" ")
    value = value.strip()
    if kind == "exit":
        return Condition(exit_codes=frozenset({_parse_code(value, rule)}))
    if kind == "signal":
        return Condition(signal=_parse_signal(value, rule))
    if word in _CLASSES or word in (ANY, OOM, REPEAT):
        return Condition(cause=word)
    # Only exceptions begin with a capital.
    if _EXCEPTION.fullmatch(word) and word.rpartition(".")[2][0].isupper():
        return Condition(exception=word)
    raise PolicyError(f"{rule!r}: {word!r} must be one of: {_CONDITIONS}")


def _parse_code(word: str, rule: str) -> int:
    if not (word.isdecimal() and word.isascii() and len(word) <= 3 and 1 <= int(word) <= 255):
        raise PolicyError(f"{rule!r}: an exit code must be 1 to 255, not {word!r}")
    return int(word)


def _parse_signal(word: str, rule: str) -> str:
    import signal

    name = word.upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in signal.Signals.__members__:
        raise PolicyError(f"{rule!r}: {word!r} is not a signal; write signal SEGV, or signal KILL")
    return name


def find_rule(rules: tuple[Rule, ...], happened: Happened) -> Rule | None:
    """Find the first rule that matches. None: none does."""
    return next((rule for rule in rules if any(_matches(each, happened) for each in rule.conditions)), None)


def _matches(condition: Condition, happened: Happened) -> bool:
    if condition.exit_codes:
        return happened.exit_code in condition.exit_codes
    if condition.signal:
        return condition.signal == happened.signal
    if condition.exception:
        return _is_kind_of(happened.exception, condition.exception)
    if condition.cause == REPEAT:
        return happened.is_repeat
    if condition.cause == OOM:
        return happened.cause in (HOST_OOM, DEVICE_OOM)
    return condition.cause in (ANY, happened.cause)


def _is_kind_of(raised: str, wanted: str) -> bool:
    """Return whether an exception has this name, or is one of Python's own that is derived from it."""
    if not raised:
        return False
    if raised == wanted or ("." not in wanted and raised.rpartition(".")[2] == wanted):
        return True
    import builtins

    one, other = (getattr(builtins, name.removeprefix("builtins."), None) for name in (raised, wanted))
    return isinstance(one, type) and isinstance(other, type) and issubclass(one, other)
