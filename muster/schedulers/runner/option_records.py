"""Declares every `-cfg` option once, as a field of an adapter's frozen record of options.

    @dataclass(frozen=True, kw_only=True)
    class LocalOptions:
        log_dir: str | None = option(str, "folder for logs and state")
        grace_s: float | None = GRACE_S.as_field()

`declare_options` declares them to TorchX, and `parse_options` turns a `-cfg` into the record, once per submission.
Options that mean the same for several adapters are declared here, at the end.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from muster.schedulers.errors import OptionError
from muster.schedulers.runner.option_parsing import StrictOpts

Parser = Callable[[str, Any], Any]
"""(the option's name, a value of its type) -> the value in the record.

Raises:
    OptionError: with the option, its value and what is allowed.
"""

_Options = TypeVar("_Options")
_METADATA: Final = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of `-cfg`."""

    type: Any
    """str, int, float, bool, list[str] or dict[str, str]."""
    help: str
    default: Any = None
    """As TorchX shows it: before `parse`. None: the option is not given."""
    parse: Parser | None = None
    """Checks a value and converts it. It is not called if the option is not given."""
    absent: Any = None
    """The value in the record when the option is not given."""
    name: str = ""
    """The option's name where the field has another, for instance one with a unit."""

    def as_field(self) -> Any:
        """Return the field of a record of options."""
        return dataclasses.field(default_factory=self._make_default, metadata={_METADATA: self})

    def convert(self, name: str, value: Any) -> Any:
        """Return the value in the record.

        Raises:
            OptionError: see `Parser`.
        """
        if value is None:
            return self.absent
        return value if self.parse is None else self.parse(name, value)

    def _make_default(self) -> Any:
        return self.convert(self.name, self.default)


def option(type_: Any, help: str, **more: Any) -> Any:  # noqa: A002  # TorchX's name
    """Declare an option as a field of a record. See `Option`."""
    return Option(type=type_, help=help, **more).as_field()


def list_options(record: type[Any]) -> dict[str, Option]:
    """Return the options of a record by the name of their field."""
    return {field.name: field.metadata[_METADATA] for field in dataclasses.fields(record)}


def declare_options(opts: StrictOpts, record: type[Any], defaults: Mapping[str, Any] | None = None) -> None:
    """Declare the options that `torchx runopts` lists.

    Args:
        opts: gets the options.
        record: the adapter's record of options.
        defaults: option -> its default where one record serves two schedulers.
    """
    for field, each in list_options(record).items():
        name = each.name or field
        default = each.default if defaults is None else defaults.get(name, each.default)
        opts.add(name, type_=each.type, default=default, help=each.help)


def parse_options(record: type[_Options], opts: StrictOpts, cfg: Mapping[str, Any]) -> _Options:
    """Parse and check the options of one submission.

    Args:
        record: the adapter's record of options.
        opts: with the options of that record declared.
        cfg: as TorchX passes it, resolved or not. None means "not given".

    Raises:
        OptionError: one line with the option, its value and what is allowed.
    """
    given = opts.resolve(cfg)
    options = {field: (each.name or field, each) for field, each in list_options(record).items()}
    return record(**{field: each.convert(name, given[name]) for field, (name, each) in options.items()})


# -- parsers ----------------------------------------------------------------------------------------------------------


def build_choice_parser(*allowed: str) -> Parser:
    """Accept one of a few words."""

    def parse(name: str, value: Any) -> str:
        if value not in allowed:
            raise OptionError(f"{name}={value!r} is not one of {', '.join(allowed)}", name)
        return str(value)

    return parse


def build_pattern_parser(pattern: re.Pattern[str], expected: str) -> Parser:
    """Accept text of one form.

    Args:
        pattern: matches the whole text.
        expected: completes "X is not ...".
    """

    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            raise OptionError(f"{name}={value!r} is not {expected}", name)
        return value

    return parse


def parse_count(name: str, value: Any) -> int:
    """Accept a whole number that is not negative."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise OptionError(f"{name}={value} is not a whole number from 0 to {2**31 - 1}", name)
    return value


def parse_positive(name: str, value: Any) -> int:
    """Accept a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise OptionError(f"{name}={value} is not a whole number from 1 to {2**31 - 1}", name)
    return value


def parse_seconds(name: str, value: Any) -> float:
    """Accept a number of seconds, up to a day."""
    if not 0 <= value <= _DAY_S:
        raise OptionError(f"{name}={value:g} is not a number of seconds from 0 to {_DAY_S}", name)
    return float(value)


def parse_words(name: str, value: Any) -> tuple[str, ...]:  # noqa: ARG001  # a `Parser`
    """Accept a list of words."""
    return (value,) if isinstance(value, str) else tuple(value)


# -- options of several adapters --------------------------------------------------------------------------------------

_DAY_S: Final = 86400

GRACE_S: Final = Option(
    type=float,
    help="seconds between the polite signal and the kill; default: the agent's --shutdown-timeout + 15",
    parse=parse_seconds,
)
ENV: Final = Option(
    type=dict[str, str],
    help="environment variables of all replicas, NAME:value;...; a role's own override them",
    parse=lambda _, value: dict(value),
    absent={},
)
DETACH: Final = Option(type=bool, help="keep the app running after the end of the command that started it")
QUIET: Final = Option(type=bool, default=False, help="print no progress while images are pulled or built")
DRYRUN: Final = Option(
    type=str,
    default="summary",
    help="what a dry run prints of the agent and the workspace: summary (name, size, digest) or full",
    parse=build_choice_parser("summary", "full"),
)
