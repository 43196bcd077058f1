"""The job's environment variables, as the arguments `env` and `env_file` of a component give them.

`env` is a mapping, from Python, or text, from a command line: `NAME=VALUE,...` as TorchX splits it. Before the first
pair may stand names of variables whose values are taken from the caller's environment: `HF_TOKEN,WANDB_API_KEY,LR=0.1`.
Names can stand only there: in `LR=0.1,HF_TOKEN` TorchX has always read the value "0.1,HF_TOKEN".

`env_file` is a file by the rules of `docker run --env-file`: a line is `NAME=VALUE`, or `NAME` for the value of the
caller's environment. Empty lines and those that begin with `#` are skipped. The value is all that follows the first
`=`: quotes, `$`, `#` and spaces are a part of it.
Source: https://docs.docker.com/reference/cli/docker/container/run/#env
Unlike docker, which leaves it out without a word, this refuses a NAME that the caller's environment lacks.

What is taken from a file or from the environment never stands in a command line, where `ps` shows it to all users of
the machine. Its names are in the role's metadata (`RoleKey.SECRET_ENV`): adapters treat all of them as secret.
"""

import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Optional

from torchx.util.types import to_dict

from muster._shared.foreign_files import read_whole
from muster.components.errors import ComponentError

if TYPE_CHECKING:
    EnvArgument = Mapping[str, str] | str | None
else:
    EnvArgument = Optional[str]  # noqa: UP045  # TorchX decodes the annotation: as text, which is parsed here

_SEPARATOR: Final = re.compile(r"[,;]")
_NO_NAME: Final = re.compile(r"[\s\0,;$]")
_PIPE_LIMIT_S: Final = 60.0
_READABLE: Final = stat.S_IRGRP | stat.S_IROTH

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GivenEnv:
    """The variables of a job that its caller gave."""

    values: Mapping[str, str]
    """The variables as TorchX's `Role.env` holds them. Macros in them are substituted, and `$$` stands for `$`."""
    taken: tuple[str, ...]
    """The names of variables that were taken from a file or from the caller's environment, sorted."""


def parse_env(env: "EnvArgument", env_file: str | None, environ: Mapping[str, str]) -> GivenEnv:
    """Parse the two arguments. Where both have a variable, `env` counts.

    Args:
        env: a mapping, or the text of a command line.
        env_file: path of a file.
        environ: the caller's environment.

    Raises:
        ComponentError: one line that names the variable, never a value.
    """
    taken = {} if env_file is None else _read_file(env_file, environ)
    given, names = _parse_text(env) if isinstance(env, str) else (dict(env or {}), [])
    taken |= {name: _find(name, environ, f"--env {name}") for name in names}
    # TorchX substitutes macros; a `$` must survive.
    kept = {name: value.replace("$", "$$") for name, value in taken.items() if name not in given}
    return GivenEnv(values={**kept, **given}, taken=tuple(sorted(kept)))


def _parse_text(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the pairs, and the names without a value."""
    if "=" not in text:
        return {}, _split_names(text) if text.strip() else []
    try:
        pairs = to_dict(text)
    except ValueError as error:
        advice = "a value that is empty or has '=' needs --env_file FILE, or --env NAME from your environment"
        raise ComponentError(f"--env: cannot be read as NAME=VALUE,NAME=VALUE; {advice}") from error
    first = next(iter(pairs))
    *names, last = _split_names(first)
    # The first key holds the names.
    return {last: pairs.pop(first), **pairs}, names


def _split_names(text: str) -> list[str]:
    names = [name.strip() for name in _SEPARATOR.split(text)]
    for name in names:
        _check_name(name, "--env")
    return names


def _check_name(name: str, where: str) -> None:
    if not name or _NO_NAME.search(name):
        problem = f"{name!r} is not the name of a variable" if name else "the name of a variable is missing"
        raise ComponentError(f"{where}: {problem}; allowed are NAME and NAME=VALUE")


def _find(name: str, environ: Mapping[str, str], where: str) -> str:
    value = environ.get(name)
    if value is None:
        raise ComponentError(f"{where}: your environment has no variable {name}; export it, or write {name}=VALUE")
    return value


# -- files ------------------------------------------------------------------------------------------------------------


def _read_file(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    try:
        content = read_whole(os.path.expanduser(path), pipe_limit_s=_PIPE_LIMIT_S)
        _warn_of_readers(path, os.stat(os.path.expanduser(path)))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ComponentError(f"--env_file {path}: {reason}; give a file of lines NAME=VALUE or NAME") from error
    values: dict[str, str] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        name, value = _parse_line(line, environ, f"--env_file {path}, line {number}")
        if name:
            values[name] = value
    return values


def _warn_of_readers(path: str, status: os.stat_result) -> None:
    """Warn if others may read the file.

    This is no error: a team may share a file on purpose, and not all in it need be secret.
    """
    if stat.S_ISREG(status.st_mode) and status.st_mode & _READABLE:
        logger.warning("--env_file %s: other users may read it (mode %o); chmod 600 it", path, status.st_mode & 0o777)


def _parse_line(line: bytes, environ: Mapping[str, str], where: str) -> tuple[str, str]:
    """Return the variable of a line, or ("", "") for a line without one."""
    try:
        text = line.removesuffix(b"\r").decode().lstrip()
    except UnicodeDecodeError as error:
        raise ComponentError(f"{where}: is not UTF-8 text") from error
    if not text or text.startswith("#"):
        return "", ""
    name, sign, value = text.partition("=")
    name = name if sign else name.rstrip()
    _check_line_name(name, sign, where)
    if "\0" in value:
        raise ComponentError(f"{where}: the value of {name} has a NUL character")
    return name, value if sign else _find(name, environ, where)


def _check_line_name(name: str, sign: str, where: str) -> None:
    """Refuse a line without showing it: it may be a part of a secret, such as the second line of a private key."""
    if name and not _NO_NAME.search(name):
        return
    problem = (
        "there is no name before '=', or one with a space, comma or $" if sign else "it is neither NAME=VALUE nor NAME"
    )
    raise ComponentError(f"{where}: {problem}; a value is one line, and quotes have no meaning")
