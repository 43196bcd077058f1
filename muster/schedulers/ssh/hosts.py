"""Reads the hosts from a hostfile of DeepSpeed, Open MPI or MPICH, or from a script. Standard library only."""

import os
import re
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Final

from muster._shared.contract import print_line

_DISCOVERY_LIMIT_S: Final = 30.0
_PAUSE_S: Final = 1.0
"""Between two runs of a discovery script. As Horovod."""
_COUNT: Final = r"[0-9]{1,5}"
_NAME: Final = r"\[[0-9A-Za-z:.%]+\]|[^\s:,@\[\]]+"
_WORD: Final = re.compile(rf"(?P<name>(?:[^\s@,:]+@)?(?:{_NAME}))(?::(?P<slots>{_COUNT}))?")
_KEYS: Final = ("slots", "max_slots", "max-slots")


class HostError(ValueError):
    """What names the hosts is wrong. It is one line."""


@dataclass(frozen=True)
class Host:
    """A host as the user names it."""

    name: str
    """For `ssh`: an alias of its configuration, a network name or an address, with `USER@` before it if given."""
    slots: int | None = None
    """The most processes of one node. None: not said."""


def parse_host(word: str, where: str) -> Host:
    """Parse `HOST`, `USER@HOST` or `HOST:N`. An IPv6 address is in brackets.

    Raises:
        HostError: it is none of these.
    """
    found = _WORD.fullmatch(word)
    if found is None or word.startswith("-"):
        raise HostError(f"{where}: {word!r} is not HOST, USER@HOST or HOST:N")
    slots = found["slots"]
    if slots == "0":
        raise HostError(f"{where}: {word!r} has no slots")
    return Host(re.sub(r"\[(.*)\]$", r"\1", found["name"]), None if slots is None else int(slots))


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Parse a hostfile, in any of the forms that people have.

    `HOST slots=N` (DeepSpeed, Open MPI), `HOST:N` (MPICH, Intel MPI, Horovod), `HOST` alone. `#` begins a comment.

    Raises:
        HostError: a line is none of these. The message names it.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        word, *rest = line.partition("#")[0].split() or [""]
        if not word:
            continue
        where = f"{path}, line {number}"
        host = parse_host(word, where)
        values = dict(each.partition("=")[::2] for each in rest)
        wrong = next(
            (name for name, value in values.items() if name not in _KEYS or not re.fullmatch(_COUNT, value)), None
        )
        if wrong is not None:
            raise HostError(f"{where}: {wrong!r} is not slots=N or max_slots=N, which may follow a host")
        slots = values.get("slots") or values.get("max_slots") or values.get("max-slots")
        hosts.append(Host(host.name, host.slots if slots is None else int(slots)))
    return hosts


def run_discovery(script: str) -> list[Host]:
    """Run a discovery script and parse what it prints.

    Raises:
        HostError: it cannot be run, fails, takes over 30 s, or prints something else.
    """
    try:
        done = subprocess.run(
            [os.path.abspath(os.path.expanduser(script))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DISCOVERY_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HostError(f"discover={script!r} does not end in {_DISCOVERY_LIMIT_S:g} s") from None
    except OSError as error:
        raise HostError(f"discover={script!r}: {error.strerror}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise HostError(f"discover={script!r} ended with {done.returncode}" + (f": {lines[-1]}" if lines else ""))
    return parse_hostfile(done.stdout, f"output of {script}")


class Discovery:
    """Tells the supervisor's loop when the hosts have changed. A thread runs the discovery script again and again.

    Args:
        script: absolute path of the program.
        processes: of each node. Hosts with fewer slots do not count.
    """

    def __init__(self, script: str, processes: int) -> None:
        self._script, self._processes = script, processes
        self.wake_fd, self._wake_write = os.pipe()
        """It can be read when there is something to take."""
        self._found: list[str] = []
        threading.Thread(target=self._run, daemon=True).start()

    def take(self) -> list[str]:
        """Return the names of all hosts that there are, in the script's order."""
        os.read(self.wake_fd, 4096)
        return self._found

    def _run(self) -> None:
        latest: list[str] | None = None
        trouble = ""
        while True:
            time.sleep(_PAUSE_S)
            try:
                hosts = run_discovery(self._script)
            except HostError as error:  # a failed script tells nothing
                if str(error) != trouble:
                    trouble = str(error)
                    print_line(f"muster: {trouble}")
                continue
            trouble = ""
            fits = [host.name for host in hosts if host.slots is None or host.slots >= self._processes]
            found = list(dict.fromkeys(fits))
            if found != latest:
                latest = self._found = found
                os.write(self._wake_write, b"x")
