"""The options of `-cfg` for ssh, and the hosts that they name."""

import os
import posixpath
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster._shared.foreign_files import read_whole
from muster.schedulers import adapter
from muster.schedulers.ssh.hosts import Host, HostError, parse_host, parse_hostfile, run_discovery


def _parse_command(name: str, value: Any) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(value))
    except ValueError as error:
        raise adapter.OptionError(f"{name}={value!r} is not a command: {error}", name) from error
    if not words:
        raise adapter.OptionError(f"{name}={value!r} names no program", name)
    return words


def _parse_folder(name: str, value: str) -> str:
    if not posixpath.isabs(value) or "\0" in value:
        raise adapter.OptionError(f"{name}={value!r} is not an absolute path", name)
    return posixpath.normpath(value)


def _parse_limit(name: str, value: Any) -> float:
    seconds = adapter.parse_seconds(name, value)
    if seconds < _LEAST_LOST_S:
        raise adapter.OptionError(f"{name}={value:g} is below the minimum of {_LEAST_LOST_S} seconds", name)
    return seconds


_LEAST_LOST_S = 5


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """The caller's options, checked."""

    hosts: tuple[str, ...] = adapter.option(
        list[str],
        "hosts as ssh knows them, one per node: a,b:8,user@c (:8 allows at most 8 processes)",
        parse=adapter.parse_words,
        absent=(),
    )
    hostfile: str | None = adapter.option(
        str, "file that names the hosts, one per line, as for DeepSpeed, Open MPI or MPICH"
    )
    discover: str | None = adapter.option(
        str,
        "program that prints the hosts, HOST or HOST:N per line, as for Horovod; it runs once a second for an "
        "elastic job",
    )
    spares: int = adapter.option(
        int, "number of additional hosts that are checked and replace lost ones", default=0, parse=adapter.parse_count
    )
    rank0: str | None = adapter.option(
        str, "address at which all other hosts reach the first one; default: muster finds it by trying"
    )
    ssh: tuple[str, ...] = adapter.option(str, "the ssh program, with arguments", default="ssh", parse=_parse_command)
    python: str = adapter.option(str, "Python 3.10 or newer on the hosts", default="python3")
    folder: str = adapter.option(
        str,
        "folder on the hosts for the run folders",
        default="/var/tmp",  # noqa: S108
        parse=_parse_folder,
    )
    lost_s: float = adapter.option(
        float, "seconds without a connection after which a replica ends", default=60.0, parse=_parse_limit
    )
    stays: bool = adapter.option(bool, "replicas go on without a connection, for any length of time", default=False)
    log_dir: str | None = adapter.option(str, "folder here for logs and state (default: ~/.local/state/muster)")
    env: Mapping[str, str] = adapter.ENV.as_field()
    detach: bool = adapter.DETACH.as_field()
    grace_s: float | None = adapter.GRACE_S.as_field()


def find_hosts(options: SshOptions) -> list[Host]:
    """Return the hosts that the options name, in order, each once.

    Raises:
        OptionError: not exactly one option names them.
        SchedulerError: they cannot be read, there are none, or one is named twice.
    """
    sources = [name for name in ("hosts", "hostfile", "discover") if getattr(options, name)]
    if len(sources) != 1:
        what = " and ".join(sources) or "none of them is given"
        raise adapter.OptionError(
            f"name the hosts by one of -cfg hosts=A,B, hostfile=PATH, discover=SCRIPT: {what}", "hosts"
        )
    try:
        hosts = _read_hosts(options)
    except HostError as error:
        raise adapter.SchedulerError(str(error)) from error
    names = [host.name for host in hosts]
    if not names:
        raise adapter.OptionError(f"{sources[0]} names no host", sources[0])
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        line = f"{sources[0]} names {twice!r} twice: a host runs one node, of up to N processes with HOST:N"
        raise adapter.OptionError(line, sources[0])
    return hosts


def _read_hosts(options: SshOptions) -> list[Host]:
    if options.hostfile:
        path = os.path.expanduser(options.hostfile)
        try:
            return parse_hostfile(read_whole(path).decode(), path)
        except (OSError, ValueError) as error:
            raise adapter.OptionError(
                f"hostfile={path!r}: {getattr(error, 'strerror', None) or error}", "hostfile"
            ) from error
    if options.discover:
        return run_discovery(options.discover)
    return [parse_host(word, "hosts") for word in options.hosts]
