"""The parser of one command: options that several commands have, and what their values may be."""

import argparse
from functools import partial
from typing import Any, Final

from muster._shared.contract import parse_digits, parse_seconds
from muster._shared.control import ANSWER_LIMIT_S

_MOST_LIMIT_S: Final = 86400.0

EPILOG: Final = """\
exit code: 0 done; 1 refused, nothing was changed; 2 wrong usage; 3 no such app; 4 the app has ended already;
5 some ranks did not do it in time; 6 no agent answers, or a node was lost
"""
STATES_EPILOG: Final = """\
exit code: 0 succeeded; 1 failed; 7 cancelled; 8 how it ended, or whether it runs, is not known; 10 it runs; 11 it waits
to run; 2 wrong usage; 3 no such app; 6 its scheduler is not reachable
"""
RECORDS_EPILOG: Final = """\
exit code: 0 done; 1 there is nothing to read; 2 wrong usage; 3 no such app; 6 its scheduler is not reachable
"""
_HANDLE: Final = (
    "what torchx run prints (local_cwd://torchx/train-x7k2), the job's name, the beginning of its name, or its Slurm "
    "job id; `last` is the newest job that you submitted on this machine"
)


class CommandParser(argparse.ArgumentParser):
    """The parser of one command, to which the module of the command adds its arguments.

    Each value that is parsed is given to the command's function as the argument with the name of its `dest`.

    Args:
        command: the name of the command.
        line: all words that were given, with that of the command.
        about: what the command does, without a capital and a full stop.
        options: as of `ArgumentParser`.
    """

    def __init__(self, *, command: str, line: tuple[str, ...], about: str, **options: Any) -> None:
        super().__init__(
            description=f"{about}.", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        self.command = command
        self.line = line
        self.names_app = False
        self.about = about

    def list_words(self) -> list[str]:
        """Return the words that may follow the command: options, and values that are one of few."""
        found: list[str] = []
        for action in self._actions:
            found += [word for word in action.option_strings if word.startswith("--")] or list(action.choices or ())
        return found

    def add_handle(self, nargs: str | None = None, default: str | None = None, *, text: str = _HANDLE) -> None:
        """Add the app that is meant. Shells complete names of apps then."""
        self.names_app = True
        self.add_argument("handle", metavar="APP_HANDLE", nargs=nargs, default=default, help=text)

    def add_job(self, default: str | None = "last") -> None:
        """Add the app, or the folder with the logs of a job."""
        self.description = f"{self.description} APP_HANDLE may be a folder with the logs of a job."
        self.add_handle("?", default)

    def add_json(self, text: str = "print the answer as one line of JSON") -> None:
        """Add `--json`. An error is printed as JSON, too."""
        self.add_argument("--json", dest="as_json", action="store_true", help=text)

    def add_request(self) -> None:
        """Let the command call the function of `operations` that has its name, and print the answer.

        Add the app that is meant, and `--json`.
        """
        self.add_handle()
        self.add_json()
        self.set_defaults(run=partial(_request, self.command))

    def add_limit(self) -> None:
        """Add `--limit`."""
        self.add_argument(
            "--limit",
            dest="limit_s",
            type=parse_limit,
            default=ANSWER_LIMIT_S,
            metavar="SECONDS",
            help=f"how long the ranks may take ({ANSWER_LIMIT_S:g})",
        )

    def add_role(self, text: str = "which role, if several run agents") -> None:
        """Add `--role`."""
        self.add_argument("--role", help=text)

    def add_scheduler(self, text: str) -> None:
        """Add the scheduler to which an app is submitted, and its options."""
        self.add_argument("-s", "--scheduler", action=Once, help=text)
        self.add_argument("-cfg", "--scheduler_args", action=Once, help="its options: KEY=VALUE,KEY=VALUE")

    def add_component(self, text: str, *, more: str = "") -> None:
        """Add the component that is run, with its arguments, after which no options of the command are possible.

        Args:
            text: what it may be.
            more: sentences for the description.
        """
        self.description = f"{self.about[0].upper()}{self.about[1:]}.{more}"
        self.add_argument("component", nargs=argparse.REMAINDER, metavar="COMPONENT ...", help=text)


def _request(name: str, *, as_json: bool, **options: Any) -> int:
    from muster.cli import answers, operations

    return answers.print_request(partial(getattr(operations, name), **options), as_json=as_json)


class Once(argparse.Action):
    """An option that may be given once, as with `torchx run`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """See `argparse`."""
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is specified more than once")
        setattr(namespace, self.dest, values)


def parse_count(text: str, what: str = "number") -> int:
    """Return a whole number that is 1 or more."""
    number = parse_digits(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}, 1 or more")
    return number


def parse_index(text: str) -> int:
    """Return a whole number that is 0 or more."""
    number = parse_digits(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more")
    return number


def parse_limit(text: str) -> float:
    """Return how many seconds something may take."""
    limit_s = parse_seconds(text)
    if limit_s is None or not 1.0 <= limit_s <= _MOST_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to {_MOST_LIMIT_S:g}")
    return limit_s
