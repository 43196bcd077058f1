"""Parses the options of `-cfg` for Docker, once and strictly, into one frozen record."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from muster.schedulers.errors import OptionError
from muster.schedulers.runner.options import StrictOpts

PULL_CHOICES: Final = ("missing", "always", "never")
AGENT_CHOICES: Final = ("bundled", "image")
KEEP_CHOICES: Final = ("all", "failed", "none")
DEFAULT_GRACE_S: Final = 30.0
DEFAULT_ULIMITS: Final = ("memlock:-1", "stack:67108864", "nofile:1048576")
"""For RDMA, deep stacks and DataLoaders with many files; the engine's own defaults are too low for all three."""

_SIZE = re.compile(r"(\d+)([kmgt]?)b?", re.ASCII | re.IGNORECASE)
_ULIMIT = re.compile(r"([a-z]+):(-1|\d+)(?::(-1|\d+))?", re.ASCII)
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class Ulimit:
    """One resource limit; -1 is unlimited."""

    name: str
    soft: int
    hard: int

    def to_engine(self) -> dict[str, Any]:
        """In the engine's form."""
        return {"Name": self.name, "Soft": self.soft, "Hard": self.hard}


@dataclass(frozen=True, kw_only=True)
class DockerOptions:
    """The caller's options; `add_options` describes each of them."""

    copy_env: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    privileged: bool = False
    read_only: bool = False
    image_repo: str | None = None
    quiet: bool = False
    network: str | None = None
    shm_size_bytes: int | None = None
    ipc: str | None = None
    ulimits: tuple[Ulimit, ...] = ()
    """The given limits, and the defaults for all others."""
    given_ulimits: tuple[Ulimit, ...] = ()
    pull: str = "missing"
    grace_s: float = DEFAULT_GRACE_S
    agent: str = "bundled"
    keep: str = "all"


def add_options(opts: StrictOpts) -> None:
    """Declare the adapter's options."""
    add = opts.add
    add("copy_env", type_=list[str], default=None, help="glob patterns of environment variables to copy, e.g. FOO_*")
    add("env", type_=dict[str, str], default=None, help="environment variables NAME:value,...; they override copy_env")
    add("privileged", type_=bool, default=False, help="run the containers with elevated permissions")
    add("read_only", type_=bool, default=False, help="mount the containers' root read-only")
    add("image_repo", type_=str, default=None, help="build the workspace into an image and tag it IMAGE_REPO:APP-ROLE")
    add("quiet", type_=bool, default=False, help="print no progress while images are pulled or built")
    add("network", type_=str, default=None, help="existing network to join, or `host` (default: a new one per app)")
    add("shm_size", type_=str, default=None, help="size of /dev/shm, e.g. 8g (default: the memory limit, else 16g)")
    add("ipc", type_=str, default=None, help="IPC mode: private, shareable, host or none (default: the engine's)")
    add(
        "ulimits",
        type_=list[str],
        default=None,
        help=f"NAME:SOFT[:HARD];... in addition to {';'.join(DEFAULT_ULIMITS)}; -1 is unlimited",
    )
    add("pull", type_=str, default="missing", help="when to pull images: missing, always or never")
    add("grace_s", type_=float, default=DEFAULT_GRACE_S, help="seconds between the polite signal and the kill")
    add("agent", type_=str, default="bundled", help="bundled: copy the agent into containers; image: use the image's")
    add(
        "keep",
        type_=str,
        default="all",
        help="which apps keep their containers, for logs, from their end until `torchx delete`: all, failed or none",
    )


def parse_options(cfg: Mapping[str, Any]) -> DockerOptions:
    """Parse a `-cfg` that `StrictOpts.resolve` has checked.

    Raises:
        OptionError: one line that names the option, its value and what is allowed.
    """
    known = {"copy_env", "env", "privileged", "read_only", "image_repo", "quiet", "network", "shm_size", "ipc"}
    known |= {"ulimits", "pull", "grace_s", "agent", "keep"}
    unknown = sorted(set(cfg) - known)
    if unknown:
        raise OptionError(
            f"unknown option {unknown[0]!r}; the Docker adapter has {', '.join(sorted(known))}", unknown[0]
        )
    return DockerOptions(
        copy_env=tuple(cfg.get("copy_env") or ()),
        env=dict(cfg.get("env") or {}),
        privileged=bool(cfg.get("privileged")),
        read_only=bool(cfg.get("read_only")),
        image_repo=cfg.get("image_repo") or None,
        quiet=bool(cfg.get("quiet")),
        network=_parse_network(cfg.get("network")),
        shm_size_bytes=_parse_size("shm_size", cfg.get("shm_size")),
        ipc=_parse_ipc(cfg.get("ipc")),
        ulimits=_parse_ulimits((*DEFAULT_ULIMITS, *(cfg.get("ulimits") or ()))),
        given_ulimits=_parse_ulimits(tuple(cfg.get("ulimits") or ())),
        pull=_parse_choice("pull", cfg.get("pull"), PULL_CHOICES),
        grace_s=_parse_grace(cfg.get("grace_s")),
        agent=_parse_choice("agent", cfg.get("agent"), AGENT_CHOICES),
        keep=_parse_choice("keep", cfg.get("keep"), KEEP_CHOICES),
    )


def _parse_choice(name: str, value: str | None, choices: tuple[str, ...]) -> str:
    if value in (None, ""):
        return choices[0]
    if value not in choices:
        raise OptionError(f"{name}={value!r} is not one of {', '.join(choices)}", name)
    return value


def _parse_network(value: str | None) -> str | None:
    if not value:
        return None
    if value == "none" or value.startswith("container:"):
        raise OptionError(f"network={value!r} cannot connect replicas; name an existing network or host", "network")
    return value


def _parse_ipc(value: str | None) -> str | None:
    if not value:
        return None
    if value not in ("private", "shareable", "host", "none"):
        raise OptionError(f"ipc={value!r} is not one of private, shareable, host, none", "ipc")
    return value


def _parse_size(name: str, value: str | int | None) -> int | None:
    if value in (None, ""):
        return None
    match = _SIZE.fullmatch(str(value))
    size = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if size <= 0:
        raise OptionError(f"{name}={value!r} is not a size above zero such as 8g, 512m or 1073741824", name)
    return size


def _parse_grace(value: float | None) -> float:
    grace_s = DEFAULT_GRACE_S if value is None else float(value)
    if not 0 <= grace_s <= 86400:
        raise OptionError(f"grace_s={value!r} is not a number of seconds from 0 to 86400", "grace_s")
    return grace_s


def _parse_ulimits(given: tuple[str, ...]) -> tuple[Ulimit, ...]:
    limits: dict[str, Ulimit] = {}
    for text in given:
        match = _ULIMIT.fullmatch(text)
        if match is None:
            raise OptionError(f"ulimits: {text!r} is not NAME:SOFT or NAME:SOFT:HARD, such as nofile:65536", "ulimits")
        soft = int(match[2])
        limits[match[1]] = Ulimit(name=match[1], soft=soft, hard=int(match[3]) if match[3] else soft)
    return tuple(limits.values())
