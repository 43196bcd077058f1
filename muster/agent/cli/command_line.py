"""Parses the command line: which flags were given, with the PET_* variables as defaults.

The grammar is argparse's as torchrun uses it. Flags come up to the first other word, which is the script, and
everything after it belongs to the script. argparse itself is not used, for three reasons. Its rule for abbreviations
changed between Python 3.11 and 3.13: `--start_m` and `--start-m` name one flag, but 3.11 finds two spellings for
`--star` and fails. Our flags must never make an abbreviation of torchrun's ambiguous. And argparse's errors print a
page of usage before the line that matters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from muster._shared import contract
from muster._shared.records import record
from muster.agent.cli.flag_table import FLAGS, Flag, list_flags
from muster.agent.errors import UsageError
from muster.agent.features import FLAG_OWNERS, load_module
from muster.agent.workers.spec import Program

T = TypeVar("T")

ON: Final = "1"
COUNT_LIMIT: Final = 2**31 - 1
_BY_NAME: Final = {flag.name: flag for flag in FLAGS}
_BY_SHORT: Final = {flag.short: flag for flag in FLAGS if flag.short}


@record
class CommandLine:
    """The command line, split into flags, script and the script's arguments."""

    texts: Mapping[str, str]
    """The text by dest, or `ON` for a switch; only flags of the command line."""
    script: str | None
    """The script; None if there was none."""
    script_args: tuple[str, ...]
    wants_help: bool = False
    wants_help_all: bool = False
    wants_version: bool = False


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Split a command line (without the program's name).

    Raises:
        UsageError: an unknown or ambiguous flag, a missing value, or a value that a switch cannot have.
    """
    texts: dict[str, str] = {}
    remaining = list(argv)
    while remaining and _is_flag(remaining[0]):
        word = remaining.pop(0)
        if word == "--":
            break
        if word in ("-h", "--help"):
            return CommandLine(texts=texts, script=None, script_args=(), wants_help=True)
        if word in ("--help-all", "--help_all"):
            return CommandLine(texts=texts, script=None, script_args=(), wants_help_all=True)
        if word == "--version":
            return CommandLine(texts=texts, script=None, script_args=(), wants_version=True)
        if word.startswith("--"):
            _parse_long(word, remaining, texts)
        else:
            _parse_short(word, remaining, texts)
    if not remaining:
        return CommandLine(texts=texts, script=None, script_args=())
    script, args = remaining[0], remaining[1:]
    if args[:1] == ["--"]:
        del args[0]  # like torchrun
    return CommandLine(texts=texts, script=script, script_args=tuple(args))


def _is_flag(word: str) -> bool:
    """Return whether a word is a flag by argparse's rule: `-`, numbers and words with a space are values."""
    if len(word) < 2 or word[0] != "-" or " " in word.partition("=")[0]:
        return False
    return not word[1:].replace(".", "", 1).isdecimal()


def _parse_long(word: str, remaining: list[str], texts: dict[str, str]) -> None:
    spelling, equals, value = word.partition("=")
    flag = find_flag(spelling)
    if not flag.is_switch:
        value = value if equals else _pop_value(flag, remaining)
        is_added = flag.repeats and flag.dest in texts
        texts[flag.dest] = f"{texts[flag.dest]}; {value}" if is_added else value
    elif equals:
        raise UsageError(f"--{flag.name} takes no value, got {value!r}")
    else:
        texts[flag.dest] = ON


def _parse_short(word: str, remaining: list[str], texts: dict[str, str]) -> None:
    """Parse `-m`, `-r 3`, `-r3`, `-r=3`, `-mr3`."""
    rest = word[1:]
    while rest:
        flag = _BY_SHORT.get(rest[0])
        if flag is None:
            raise UsageError(f"unknown flag -{rest[0]} in {word!r}; the short flags are {_list_short()}, -h")
        rest = rest[1:]
        if flag.is_switch:
            texts[flag.dest] = ON
            continue
        texts[flag.dest] = rest.removeprefix("=") if rest else _pop_value(flag, remaining)
        return


def _pop_value(flag: Flag, remaining: list[str]) -> str:
    if not remaining or _is_flag(remaining[0]):
        got = (
            f", got the flag {remaining[0]!r} (write --{flag.name}={remaining[0]} if that is the value)"
            if remaining
            else ""
        )
        raise UsageError(f"--{flag.name} needs a value ({flag.metavar}){got}")
    return remaining.pop(0)


def find_flag(spelling: str) -> Flag:
    """Find the flag for `--name`, `--na_me` or an unambiguous prefix of it.

    torchrun's flags take precedence, so our flags never make a prefix ambiguous that torchrun understands. Those of
    all its versions come before newer ones, so a prefix that one version understands keeps its meaning.

    Raises:
        UsageError: no flag matches, or several do.
    """
    name = spelling.removeprefix("--").replace("_", "-")
    exact = _find_exact(name)
    if exact is not None:
        return exact
    matches = [flag for flag in list_flags() if flag.name.startswith(name)]
    torchruns = [flag for flag in matches if not flag.ours]
    for found in ([flag for flag in torchruns if not flag.since], torchruns, matches):
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"{spelling} is ambiguous: {', '.join('--' + flag.name for flag in found)}")
    raise UsageError(f"unknown flag {spelling}{_suggest(name)}; --help-all lists them all")


def _find_exact(name: str) -> Flag | None:
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name not in FLAG_OWNERS:
        return None
    flags: tuple[Flag, ...] = load_module(FLAG_OWNERS[name], "flags").FLAGS
    return next(flag for flag in flags if flag.name == name)


def get_flag(name: str) -> Flag:
    """Return the flag of a name."""
    flag = _find_exact(name)
    if flag is None:
        raise KeyError(name)
    return flag


def _suggest(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, [*_BY_NAME, *FLAG_OWNERS], n=1)
    return f" (did you mean --{close[0]}?)" if close else ""


def _list_short() -> str:
    return ", ".join("-" + short for short in _BY_SHORT)


class FlagValues:
    """The values of flags, from the command line or the PET_* variables. Every error names the value's origin."""

    def __init__(self, texts: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self._texts = texts
        self._environ = environ

    def origin(self, name: str) -> str:
        """Name where the value comes from: `--max-restarts`, or the variable `PET_MAX_RESTARTS`."""
        flag = get_flag(name)
        return "--" + name if flag.dest in self._texts or not self.is_given(name) else flag.variable

    def is_given(self, name: str) -> bool:
        """Return whether the command line or a variable sets it."""
        flag = get_flag(name)
        return flag.dest in self._texts or (flag.has_variable and bool(self._environ.get(flag.variable)))

    def is_on_command_line(self, name: str) -> bool:
        """Return whether the command line sets it."""
        return name.replace("-", "_") in self._texts

    def text(self, name: str) -> str | None:
        """Return the unparsed value; None when there is none."""
        flag = get_flag(name)
        value = self._texts.get(flag.dest)
        if value is None and flag.has_variable:
            value = self._environ.get(flag.variable) or None
        if value is not None and not flag.is_free and (contract.has_controls(value) or not is_utf8(value)):
            raise UsageError(f"{self.origin(name)} {value!r}: must be UTF-8 text without control characters")
        return value

    def _parse(self, name: str, parse: Callable[[str], T | None], allowed: str) -> T | None:
        value = self.text(name)
        found = None if value is None else parse(value)
        if value is not None and found is None:
            raise self.build_error(name, allowed)
        return found

    def switch(self, name: str) -> bool:
        """Return whether the switch is on, by the flag or by a variable that is a number other than 0."""
        return bool(self._parse(name, contract.parse_digits, "0 or 1"))

    def integer(self, name: str, *, maximum: int | None = None) -> int | None:
        """Return a whole number from 0 on; None when there is none."""
        allowed = "a whole number, at least 0" + ("" if maximum is None else f" and at most {maximum}")
        limit = COUNT_LIMIT if maximum is None else maximum
        return self._parse(name, lambda text: contract.parse_digits(text, limit), allowed)

    def seconds(self, name: str, *, zero: bool) -> float | None:
        """Return a finite number of seconds; None when there is none."""
        return self._parse(name, lambda text: parse_seconds(text, zero=zero), describe_seconds(zero=zero))

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        """Return one of `allowed`; None when there is none."""
        return self._parse(name, lambda text: text if text in allowed else None, "one of " + ", ".join(allowed))

    def build_error(self, name: str, allowed: str) -> UsageError:
        """Build the error for a value that is not allowed."""
        return UsageError(f"{self.origin(name)} {self.text(name)!r}: must be {allowed}")


def is_utf8(text: str) -> bool:
    """Return whether a text has no bytes that are no UTF-8."""
    return text.isascii() or not any("\ud800" <= each <= "\udfff" for each in text)


@record
class Invocation:
    """What the flags of a feature are read from."""

    values: FlagValues
    environ: Mapping[str, str]
    """The agent's."""
    program: Program
    run_id: str
    """The job's."""


def parse_seconds(text: str, *, zero: bool) -> float | None:
    """Return a number of seconds, from 0 on (`zero`) or above it; None if the text is no such number."""
    number = contract.parse_seconds(text)
    return number if number or zero else None


def read_variable(
    environ: Mapping[str, str], name: str, default: T, parse: Callable[[str], T | None], allowed: str
) -> T:
    """Read a variable that is no flag; `default` if it is not set, or empty.

    Raises:
        UsageError: `parse` returns None for it.
    """
    text = environ.get(name)
    found = parse(text) if text else default
    if found is None:
        raise UsageError(f"{name} {text!r}: must be {allowed}")
    return found


def describe_seconds(*, zero: bool) -> str:
    """Describe what `parse_seconds` accepts, for an error."""
    least = "a number of seconds, 0 or more" if zero else "a number of seconds above 0"
    return f"{least}, at most {contract.SECONDS_LIMIT:g}"
