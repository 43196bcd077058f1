"""The options of `-cfg` for Docker, and how their values are parsed: ports, tmpfs, labels, addresses.

Capabilities, security options and extra hosts are not checked here: the engine does it, before anything is created.
"""

import ipaddress
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster.schedulers.docker.spec import AGENT_DIR, DEFAULT_ULIMITS, STATE_DIR
from muster.schedulers.errors import OptionError
from muster.schedulers.runner.option_records import (
    DETACH,
    ENV,
    GRACE_S,
    QUIET,
    build_choice_parser,
    build_pattern_parser,
    option,
    parse_words,
)

_SIZE = re.compile(r"(\d+)([kmgt]?)b?", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_PORT = re.compile(
    r"(?:(?:(?P<address>[\d.]+|\[[\da-f:]+\]):)?(?P<host>\d+):)?"
    r"(?P<port>\d+|[a-z_][\w-]*)(?:/(?P<protocol>tcp|udp|sctp))?",
    re.ASCII | re.IGNORECASE,
)
_TMPFS = re.compile(r"(?P<path>/[^:]*)(?::(?P<size>[^:]*))?", re.ASCII)
LAST_PORT: Final = 65535
_LOCALHOST: Final = "127.0.0.1"
_RESERVED: Final = "io.muster."


@dataclass(frozen=True, kw_only=True)
class PublishedPort:
    """A port of containers that is reachable on the engine's host."""

    port: str
    """A number, or a name in the `port_map` of roles."""
    protocol: str
    address: str
    """The address of the host."""
    host_port: int | None
    """The port of the first container that publishes it. The next containers have the next numbers.

    None: the engine picks them.
    """

    def find_number(self, port_map: Mapping[str, int]) -> int | None:
        """Return its number in containers of a role with this `port_map`. None: they do not publish it."""
        return int(self.port) if self.port.isdigit() else port_map.get(self.port)

    def to_engine(self, number: int, offset: int) -> tuple[str, list[dict[str, str]]]:
        """Return the entry of `PortBindings` for one container.

        Args:
            number: of the port in the container.
            offset: how many containers before this one publish it.
        """
        host_port = "" if self.host_port is None else str(self.host_port + offset)
        return f"{number}/{self.protocol}", [{"HostIp": self.address, "HostPort": host_port}]


def parse_size(name: str, value: str) -> int:
    """Return the bytes of `8g`, `512m` or `1073741824`."""
    match = _SIZE.fullmatch(value)
    size = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if size <= 0:
        raise OptionError(f"{name}={value!r} is not a size above zero such as 8g, 512m or 1073741824", name)
    return size


def parse_tmpfs(name: str, given: Any) -> dict[str, str]:
    """Return the path -> the mount's options."""
    mounts: dict[str, str] = {}
    for text in given:
        match = _TMPFS.fullmatch(text)
        path = posixpath.normpath("/" + match["path"].lstrip("/")) if match else "/"
        if match is None or path == "/" or match["size"] == "":
            raise OptionError(f"{name}: {text!r} is not PATH or PATH:SIZE, such as /scratch:8g", name)
        if any(posixpath.commonpath([path, used]) in (path, used) for used in (AGENT_DIR, STATE_DIR)):
            raise OptionError(f"{name}: {text!r} would hide muster's own files in {AGENT_DIR} or {STATE_DIR}", name)
        # Compiled extensions and kernels load from there.
        size = f",size={parse_size(name, match['size'])}" if match["size"] else ""
        mounts[path] = f"exec{size}"
    return mounts


def parse_ports(name: str, given: Any) -> tuple[PublishedPort, ...]:
    """Accept `[[ADDRESS:]HOST_PORT:]PORT[/PROTOCOL]`."""
    ports = []
    for text in given:
        match = _PORT.fullmatch(text)
        numbers = [int(match[k]) for k in ("host", "port") if match[k] and match[k].isdigit()] if match else []
        if match is None or not all(1 <= number <= LAST_PORT for number in numbers):
            form = f"PORT, HOST_PORT:PORT or ADDRESS:HOST_PORT:PORT with ports from 1 to {LAST_PORT}"
            raise OptionError(f"{name}: {text!r} is not {form}, such as 6006:6006 or 0.0.0.0:8000:80/tcp", name)
        address = (match["address"] or _LOCALHOST).strip("[]")
        _check_address(name, text, address)
        host_port = int(match["host"]) if match["host"] else None
        protocol = (match["protocol"] or "tcp").lower()
        ports.append(PublishedPort(port=match["port"], protocol=protocol, address=address, host_port=host_port))
    return tuple(ports)


def parse_labels(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """Accept labels of the user's."""
    for label in given:
        if not label.strip():
            raise OptionError(f"{name}: {label!r} is not a name", name)
        if label.startswith(_RESERVED):
            raise OptionError(f"{name}: {label!r} begins with {_RESERVED}, as muster's own do", name)
    return dict(given)


def parse_addresses(name: str, given: Any) -> tuple[str, ...]:
    """Accept IP addresses."""
    for text in given:
        _check_address(name, text, text)
    return tuple(given)


def _check_address(name: str, text: str, address: str) -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError as error:
        where = f"{text!r}: {address!r}" if address != text else repr(text)
        raise OptionError(f"{name}: {where} is not an IP address", name) from error


_ULIMIT = re.compile(r"([a-z]+):(-1|\d+)(?::(-1|\d+))?", re.ASCII)
_CACHE_NAME = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9_.-]{0,63})?", re.ASCII)
_USER = re.compile(r"[\w][\w.-]*(?::[\w][\w.-]*)?", re.ASCII)
_LOG_DRIVER = re.compile(r"[\w][\w./:-]*", re.ASCII)


def _parse_network(name: str, value: str) -> str | None:
    if value == "none" or value.startswith("container:"):
        raise OptionError(f"{name}={value!r} cannot connect replicas; name an existing network or host", name)
    return value or None


def _parse_ulimits(name: str, given: Any) -> dict[str, tuple[int, int]]:
    limits = dict(DEFAULT_ULIMITS)
    for text in given:
        match = _ULIMIT.fullmatch(text)
        if match is None:
            raise OptionError(f"{name}: {text!r} is not NAME:SOFT or NAME:SOFT:HARD, such as nofile:65536", name)
        limits[match[1]] = (int(match[2]), int(match[3] or match[2]))
    return limits


@dataclass(frozen=True, kw_only=True)
class DockerOptions:
    """The caller's options, checked."""

    copy_env: tuple[str, ...] = option(
        list[str], "glob patterns of environment variables to copy, e.g. FOO_*", parse=parse_words, absent=()
    )
    env: Mapping[str, str] = ENV.as_field()
    privileged: bool = option(bool, "run the containers with elevated permissions", default=False)
    read_only: bool = option(bool, "mount the containers' root read-only", default=False)
    image_repo: str | None = option(
        str, "build the workspace into an image and tag it IMAGE_REPO:APP-ROLE", parse=lambda _, value: value or None
    )
    quiet: bool = QUIET.as_field()
    network: str | None = option(
        str, "existing network to join, or `host` (default: a new one per app)", parse=_parse_network
    )
    shm_size_bytes: int | None = option(
        str, "size of /dev/shm, e.g. 8g (default: the memory limit, else 16g)", name="shm_size", parse=parse_size
    )
    ipc: str | None = option(
        str,
        "IPC mode: private, shareable, host or none (default: the engine's)",
        parse=build_choice_parser("private", "shareable", "host", "none"),
    )
    ulimits: Mapping[str, tuple[int, int]] = option(
        list[str],
        "NAME:SOFT[:HARD];... in addition to "
        f"{';'.join(f'{name}:{soft}' for name, (soft, _) in DEFAULT_ULIMITS.items())}; -1 is unlimited",
        parse=_parse_ulimits,
        absent=DEFAULT_ULIMITS,
    )
    tmpfs: Mapping[str, str] = option(
        list[str], "PATH[:SIZE];... in memory, e.g. /scratch:8g", parse=parse_tmpfs, absent={}
    )
    compile_cache: str = option(
        str,
        "NAME of a volume of this user for the caches of TorchInductor, Triton and CUDA, which then outlive the "
        "containers; "
        "`muster prune` removes it (default: they end with the container)",
        parse=build_pattern_parser(_CACHE_NAME, "a name of up to 64 letters, digits, '_', '.' and '-'"),
        absent="",
    )
    publish: tuple[PublishedPort, ...] = option(
        list[str],
        "ports of the containers to publish on the host: [[ADDRESS:]HOST_PORT:]PORT[/udp];... PORT is a number or "
        "a name of the role's port_map. The default ADDRESS is 127.0.0.1. Several replicas get HOST_PORT, "
        "HOST_PORT+1, ... Without HOST_PORT the engine picks one",
        parse=parse_ports,
        absent=(),
    )
    user: str = option(
        str,
        "USER[:GROUP], names or numbers (default: the image's)",
        parse=build_pattern_parser(_USER, "USER or USER:GROUP, such as 1000:1000 or nobody"),
        absent="",
    )
    labels: Mapping[str, str] = option(
        dict[str, str], "labels of the containers, NAME:value;...", parse=parse_labels, absent={}
    )
    log_driver: str = option(
        str,
        "the containers' log driver (default: the engine's); with the driver `none`, `torchx log` shows nothing",
        parse=build_pattern_parser(_LOG_DRIVER, "the name of a log driver such as json-file, local or journald"),
        absent="",
    )
    log_opts: Mapping[str, str] = option(
        dict[str, str],
        "options of the log driver, e.g. max-size:100m;max-file:3; `torchx log` shows only what the driver keeps",
        parse=lambda _, value: dict(value),
        absent={},
    )
    security_opt: tuple[str, ...] = option(
        list[str],
        "no-new-privileges, seccomp:unconfined, apparmor:PROFILE, label:LABEL;...",
        parse=parse_words,
        absent=(),
    )
    cap_add: tuple[str, ...] = option(
        list[str], "capabilities to add, e.g. SYS_PTRACE;IPC_LOCK", parse=parse_words, absent=()
    )
    dns: tuple[str, ...] = option(list[str], "addresses of name servers", parse=parse_addresses, absent=())
    extra_hosts: tuple[str, ...] = option(
        list[str], "NAME:ADDRESS;... for /etc/hosts; host-gateway is the host", parse=parse_words, absent=()
    )
    pull: str = option(
        str,
        "when to pull images: missing, always or never",
        default="missing",
        parse=build_choice_parser("missing", "always", "never"),
    )
    grace_s: float | None = GRACE_S.as_field()
    agent: str = option(
        str,
        "bundled: copy the agent into containers; image: use the image's",
        default="bundled",
        parse=build_choice_parser("bundled", "image"),
    )
    keep: str = option(
        str,
        "which apps keep their containers after their end, for logs, until `muster delete`: all, failed or none",
        default="all",
        parse=build_choice_parser("all", "failed", "none"),
    )
    detach: bool = DETACH.as_field()
