"""Fills the template of a reason with its facts. Slurm's own names of reasons and states are here in plain words."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from string import Formatter
from typing import Any, Final

from muster._shared.causes import name_class
from muster._shared.contract import describe_exit_code
from muster._shared.reports import format_duration
from muster.schedulers.wording.reasons import Code, Reason

REASONS: Final = {
    "Priority": "jobs with a higher priority are before it",
    "Resources": "it waits for free nodes",
    "Dependency": "it waits for the end of another job",
    "DependencyNeverSatisfied": "the job that it waits for can no longer end as required",
    "BeginTime": "its time to begin has not come",
    "JobHeldUser": "a user holds it: scontrol release JOBID lets it go on",
    "job requeued in held state": "a user holds it: scontrol release JOBID lets it go on",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "it waits for its reservation",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition starts no jobs",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives one job",
    "PartitionTimeLimit": "it asks for more time than its partition gives one job",
    "PartitionConfig": "its partition cannot give what it asks for",
    "BadConstraints": "no node has what it asks for",
    "NodeDown": "a node that it needs is down",
    "Licenses": "it waits for a license",
    "AssocGrpGRES": "its account uses as many GPUs as it may",
    "AssocMaxJobsLimit": "its account runs as many jobs as it may",
    "QOSMaxWallDurationPerJobLimit": "it asks for more time than its quality of service allows",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its quality of service is not valid",
    "launch failed requeued held": "it could not be started, and is held: scontrol release JOBID tries again",
}
_PREFIXES: Final = {
    "QOS": "a limit of its quality of service is reached",
    "Assoc": "a limit of its account is reached",
    "ReqNodeNotAvail": REASONS["ReqNodeNotAvail"],
    "MaxMem": "it asks for more memory than one job may",
}
ENDS: Final = {
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "a person or a program cancelled it with scancel",
    "DEADLINE": "it could not end before its deadline",
    "NODE_FAIL": "a node that the job needs was lost",
    "OUT_OF_MEMORY": "it needed more memory than it had",
    "PREEMPTED": "another job took its nodes",
    "REVOKED": "another cluster runs it",
    "TIMEOUT": "its time limit is over",
}


def explain_reason(name: str, job: str) -> str:
    """Return why a job waits, with Slurm's name of the reason, for which people search."""
    if not name:
        return "Slurm has not looked at it yet"
    word = name.partition(",")[0].strip("()")
    words = REASONS.get(word) or next((each for start, each in _PREFIXES.items() if word.startswith(start)), "")
    return f"{words.replace('JOBID', job)} ({name})" if words else name


_MOST_NAMED: Final = 8
_HALF_DAY_S: Final = 12 * 3600
_OPTIONAL: Final = re.compile(r"\[([^\[\]]*)\]")
_HEADS: Final = dict.fromkeys((Code.CANCELLED, Code.SUPERVISOR_SIGNALLED, Code.SUBMITTER_ENDED), "cancelled")
"""What begins the words of a code, unless the name of the state before them says it."""
_MEANINGS: Final[Mapping[int | None, str]] = {
    1: "its workers failed for good; see its log for the report",
    2: "its command line is wrong; see its log",
}
"""Exit codes of agents."""


def word_all(reasons: Iterable[Reason], *, state: str = "") -> str:
    """Return reasons in one line, each once.

    Args:
        reasons: the most important first.
        state: the name of the state that is printed before them, in lower case: what only repeats it is left out.
    """
    return "; ".join(dict.fromkeys(filter(None, (word(each, state=state) for each in reasons))))


def word(reason: Reason, *, state: str = "") -> str:
    """Return a reason in words. See `word_all`."""
    facts = _Facts(reason)
    text = facts.format(_OPTIONAL.sub(lambda part: part[1] if facts.knows(part[1]) else "", reason.code.template))
    text = " ".join(text.split())  # what others say may have several lines
    head = _HEADS.get(reason.code, "")
    return ": ".join(filter(None, ("" if head == state else head, text)))


class _Facts(Formatter):
    """Formats the facts of a reason, by their names in templates."""

    def __init__(self, reason: Reason) -> None:
        self._reason = reason

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        """Return a fact, or what a rule makes of some."""
        del args, kwargs
        return _RULES[key](self._reason) if key in _RULES else getattr(self._reason, key)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a fact in words. See `Code`."""
        if format_spec in _STYLES:
            return _STYLES[format_spec](value)
        if "|" in format_spec:
            one, other = format_spec.split("|")
            return one if value == 1 or (isinstance(value, str) and value) else other
        if isinstance(value, bool):
            return format_spec if value else ""
        if isinstance(value, tuple):
            return _name_some(value, format_spec)
        if format_spec:
            return f"{value} {format_spec}{'s' if value != 1 else ''}"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def knows(self, template: str) -> bool:
        """Return whether all facts in a part of a template are known."""
        names = (name for _, name, _, _ in self.parse(template) if name)
        return all(self.get_value(name, (), {}) not in (None, "", ()) for name in names)


def _name_some(names: Sequence[object], what: str) -> str:
    """Name some things: "node 1", "nodes 0, 1". Without any: "a node"."""
    more = len(names) - _MOST_NAMED
    shown = ", ".join(map(str, names[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
    if not what:
        return shown
    return f"{what}{'s' if len(names) > 1 else ''} {shown}" if names else f"a {what}"


def _list_lacks(reason: Reason) -> str:
    where = f"of {reason.total} node{'' if reason.total == 1 else 's'}"
    counted = zip(reason.lacks, reason.counts, strict=True)
    return ", ".join(f"{what} ({count} {where})" if count >= 0 else what for what, count in counted)


def _say_how_pods_failed(reason: Reason) -> str:
    """Name pods, and say how they ended: "node 1 (pod NAME) was ended by SIGKILL"."""
    pods, cause = _name_some(reason.pods, "pod"), reason.causes[0]
    who = _name_some(reason.nodes, "node") if reason.nodes else pods
    if reason.nodes and len(reason.pods) == 1:
        who += f" ({pods})"
    if cause.code is Code.EXITED and cause.exit_code is not None:
        return f"{who} {describe_exit_code(cause.exit_code, plural=len(reason.pods) > 1)}"
    return f"{who}: {word(cause)}"


def format_clock(at_s: float | None) -> str:
    """Return the time of day here, with the date if it was more than half a day ago."""
    if at_s is None:
        return "?"
    try:
        at = datetime.fromtimestamp(at_s, timezone.utc).astimezone()
    except (OSError, OverflowError, ValueError):
        return "?"
    is_recent = abs(time.time() - at.timestamp()) < _HALF_DAY_S
    return f"{at:%H:%M}" if is_recent else f"{at:%Y-%m-%d %H:%M}"


_RULES: Final[Mapping[str, Callable[[Reason], str]]] = {
    "causes": lambda reason: word_all(reason.causes),
    "lacks": _list_lacks,
    "how_pods_failed": _say_how_pods_failed,
    "slurm_reason": lambda reason: explain_reason(reason.word, reason.job),
    "slurm_end": lambda reason: ENDS[reason.word],
}
"""Names in templates that are no facts, or need more than one."""
_STYLES: Final[Mapping[str, Callable[[Any], str]]] = {
    "end": lambda code: "vanished" if code is None else describe_exit_code(code),
    "meaning": lambda code: _MEANINGS.get(code, "this exit code is not retried"),
    "class": name_class,
    "date": lambda at_s: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)),
    "utc": lambda at_s: time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s)),
    "duration": lambda duration_s: format_duration(duration_s, 0),
    "exit code": lambda codes: ", ".join(f"exit code {code}" for code in codes),
    ";": "; ".join,
}
"""What may follow a colon in a template."""
