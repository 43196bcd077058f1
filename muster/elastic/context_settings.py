"""What callers give to `start_processes` and its contexts: torch's arguments and older ones, and the checks of them.

The arguments of torch before 2.3 and of ice-learn name files where torch's now have a `LogsSpecs`. `GivenFiles` and
`RankFolders` stand for one.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from muster.agent.errors import UsageError


class GivenFiles(NamedTuple):
    """Files that the caller has chosen, by local rank. "" is the process's own stream."""

    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str]
    tee_stderrs: dict[int, str]
    error_files: dict[int, str]

    def reify(self, envs: Mapping[int, dict[str, str]]) -> Any:  # noqa: ARG002  # torch's; the caller has set them
        """Return torch's LogsDest."""
        from torch.distributed.elastic.multiprocessing.api import LogsDest

        return LogsDest(**self._asdict())


class RankFolders(NamedTuple):
    """`<log_dir>/<local_rank>/{stdout.log,stderr.log,error.json}`."""

    log_dir: str
    redirects: Any
    tee: Any

    def reify(self, envs: Mapping[int, dict[str, str]]) -> Any:
        """Make the folders, name the error files in `envs`, and return torch's LogsDest.

        Raises:
            FileNotFoundError: there is no `log_dir`.
            RuntimeError: it is not empty. The text is torch's.
        """
        from torch.distributed.elastic.multiprocessing.api import Std, to_map

        if os.listdir(self.log_dir):
            raise RuntimeError(f"log_dir: {self.log_dir} is not empty, please provide an empty log_dir")
        tees = to_map(self.tee or Std.NONE, len(envs))
        redirects = to_map(self.redirects or Std.NONE, len(envs))
        files = GivenFiles({}, {}, {}, {}, {})
        for local_rank in envs:
            folder = os.path.join(self.log_dir, str(local_rank))
            os.mkdir(folder)
            files.error_files[local_rank] = os.path.join(folder, "error.json")
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = files.error_files[local_rank]
            for std, name, written, printed in (
                (Std.OUT, "stdout.log", files.stdouts, files.tee_stdouts),
                (Std.ERR, "stderr.log", files.stderrs, files.tee_stderrs),
            ):
                path = os.path.join(folder, name)
                is_printed = tees[local_rank] & std == std
                written[local_rank] = path if is_printed or redirects[local_rank] & std == std else ""
                if is_printed:
                    printed[local_rank] = path
        return files.reify(envs)


class FunctionSettings(NamedTuple):
    """torch's arguments of MultiprocessContext after `envs`."""

    start_method: str
    logs_specs: Any
    log_line_prefixes: Mapping[int, str] | None = None
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    progbar_events: Mapping[str, Any] | None = None

    def omit_start_method(self) -> dict[str, Any]:
        """Return the arguments of `PContext`, by name."""
        return {name: value for name, value in self._asdict().items() if name != "start_method"}


class _OlderSettings(NamedTuple):
    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str]
    tee_stderrs: dict[int, str]
    error_files: dict[int, str]
    start_method: str
    progbar_events: Mapping[str, Any] | None = None


def read_settings(rest: Sequence[Any], named: Mapping[str, Any], *, is_command: bool = False) -> FunctionSettings:
    """Read what follows `envs`, by position and by name. For a command it has no start method.

    Raises:
        TypeError: it fits neither signature.
    """
    # The first of the older arguments is a mapping of files.
    is_older = isinstance(rest[0], Mapping) if rest else "stdouts" in named
    kind: Any = _OlderSettings if is_older else FunctionSettings
    at = kind._fields.index("start_method")
    if not is_command:
        found = kind(*rest, **named)
    elif len(rest) < at:
        found = kind(*rest, **named, start_method="spawn")
    else:
        found = kind(*rest[:at], "spawn", *rest[at:], **named)
    if isinstance(found, FunctionSettings):
        return found
    return FunctionSettings(found.start_method, GivenFiles(*found[:5]), progbar_events=found.progbar_events)


def validate_ranks(mapping: Mapping[int, Any], nprocs: int, what: str) -> None:
    """Check that the keys are 0 to n-1.

    Raises:
        RuntimeError: they are not. The text is torch's.
    """
    actual, expected = set(mapping), set(range(nprocs))
    if actual != expected:
        raise RuntimeError(f"{what}, local rank mapping mismatch, expected: {expected}, actual: {actual}")


def check_program(program: str, env: Mapping[str, str]) -> None:
    """Check that a program can be found and executed.

    Raises:
        FileNotFoundError: it cannot be found.
        PermissionError: it may not be executed.
    """
    folders = [""] if os.path.dirname(program) else os.get_exec_path(env)
    found = [path for folder in folders if os.path.exists(path := os.path.join(folder, program))]
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), program)


def refuse_private_overrides(cls: type, names: tuple[str, ...], base: str) -> None:
    """Refuse a subclass that overrides private methods of torch's class: they are not called here.

    Raises:
        UsageError: names them.
    """
    found = [name for name in names if name in cls.__dict__]
    if found:
        raise UsageError(
            f"{cls.__module__}.{cls.__qualname__} overrides {', '.join(found)} of torch's {base}; muster's {base} has "
            "no such methods, because the agent is a process of its own"
        )
