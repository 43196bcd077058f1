"""Sees to it that what TorchX ends with a traceback for in `.torchxconfig` is one line."""

import configparser
from typing import Any

from torchx.runner import config
from torchx.specs.api import runopts

from muster._shared.control import CommandExit, ControlError
from muster._shared.foreign_files import read_whole


def check_files() -> list[configparser.ConfigParser]:
    """Refuse files that TorchX cannot read. Return what is in the others.

    Raises:
        ControlError: names the file, and what is wrong with it.
    """
    try:
        return [_parse(path) for path in config.find_configs()]
    except OSError as error:  # $TORCHXCONFIG
        raise ControlError(str(error), CommandExit.REFUSED) from error


def _parse(path: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as TorchX does
    try:
        text = read_whole(path).decode()
        parser.read_string(text, source=path)
        for section in parser.sections():
            parser.items(section)  # substitutes %(name)s
    except (OSError, ValueError, RecursionError, configparser.Error) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ControlError(f"{path} cannot be read: {why}", CommandExit.REFUSED) from error
    if "\0" in text:
        raise ControlError(f"{path} cannot be read: it has a NUL character", CommandExit.REFUSED)
    return parser


def apply_section(opts: runopts, scheduler: str, cfg: dict[str, Any]) -> None:
    """Add the options of a scheduler that `cfg` lacks.

    Args:
        opts: the scheduler's, strict.
        scheduler: its name.
        cfg: the options so far.

    Raises:
        ControlError: a file cannot be read.
        InvalidRunConfigException: a value is of another type than its option.
    """
    parsers = check_files()
    try:
        config.apply(scheduler=scheduler, cfg=cfg)
    except (LookupError, ValueError):  # TorchX does not say of which
        for parser in parsers:
            opts.resolve(dict(parser.items(scheduler)) if parser.has_section(scheduler) else {}, ignore_unknown=True)
        raise
