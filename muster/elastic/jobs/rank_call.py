"""What a worker of `start_processes` calls: the environment, streams and arguments differ by local rank.

It runs in workers, and is pickled by reference. Standard library only.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

muster_frames = True  # see `agent.workers.program`


@dataclass(frozen=True, kw_only=True, repr=False)
class RankCall:
    """Called without arguments in each worker. All mappings are by local rank.

    Messages name it as the function that it calls. It has no `repr` of its own, because that would show secrets of
    `environ`.
    """

    entrypoint: Callable[..., Any] | str
    args: Mapping[int, tuple[Any, ...]]
    envs: Mapping[int, Mapping[str, str]]
    stdouts: Mapping[int, str]
    """"" for the worker's own stream."""
    stderrs: Mapping[int, str]
    environ: Mapping[str, str]
    """What `envs` adds to."""

    def __post_init__(self) -> None:
        own = self.entrypoint
        name = own if isinstance(own, str) else getattr(own, "__qualname__", type(own).__qualname__)
        object.__setattr__(self, "__qualname__", name)

    def __call__(self) -> Any:
        """Become the worker of this rank. A command replaces the process."""
        local_rank = int(os.environ["LOCAL_RANK"])
        env = {**self.environ, **self.envs[local_rank]}
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        for name, value in env.items():
            if os.environ.get(name) != value:  # the program must not seem to set it
                os.environ[name] = value
        _redirect(sys.stdout, 1, self.stdouts[local_rank])
        _redirect(sys.stderr, 2, self.stderrs[local_rank])
        args = self.args[local_rank]
        if isinstance(self.entrypoint, str):
            argv = [self.entrypoint, *map(str, args)]
            try:
                os.execvpe(argv[0], argv, env)  # noqa: S606  # no shell, on purpose
            except OSError as error:
                sys.exit(f"muster: cannot run {argv[0]!r}: {error.strerror}")
        try:
            return self.entrypoint(*args)
        except Exception as error:  # raised again
            _record(error, env.get("TORCHELASTIC_ERROR_FILE"))
            raise


def _redirect(stream: Any, number: int, path: str) -> None:
    if not path:
        return
    stream.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(fd, number)
    os.close(fd)


def _record(error: Exception, path: str | None) -> None:
    """Write the exception in torch's format, unless torch's own `record` has done so."""
    if not path or os.path.exists(path):
        return
    shown = error.__traceback__.tb_next if error.__traceback__ else None  # without our frame
    text = "".join(traceback.format_exception(type(error), error, shown))
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
