"""Parses the values of the options that go to the engine as they are: ports, tmpfs, logs, security, names. Pure."""

import ipaddress
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster.schedulers.docker.spec import AGENT_DIR, STATE_DIR
from muster.schedulers.errors import OptionError

_SIZE = re.compile(r"(\d+)([kmgt]?)b?", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_PORT = re.compile(
    r"(?:(?:(?P<address>[\d.]+|\[[\da-f:]+\]):)?(?P<host>\d+):)?"
    r"(?P<port>\d+|[a-z_][\w-]*)(?:/(?P<protocol>tcp|udp|sctp))?",
    re.ASCII | re.IGNORECASE,
)
_TMPFS = re.compile(r"(?P<path>/[^:]*)(?::(?P<size>[^:]*))?", re.ASCII)
_USER = re.compile(r"[\w][\w.-]*(?::[\w][\w.-]*)?", re.ASCII)
_DRIVER = re.compile(r"[\w][\w./:-]*", re.ASCII)
_HOST_NAME = re.compile(r"[\w]([\w.-]*\w)?", re.ASCII)
LAST_PORT: Final = 65535
_LOCALHOST: Final = "127.0.0.1"
_RESERVED: Final = "io.muster."

CAPABILITIES: Final = frozenset(
    {"ALL", "AUDIT_CONTROL", "AUDIT_READ", "AUDIT_WRITE", "BLOCK_SUSPEND", "BPF"}
    | {"CHECKPOINT_RESTORE", "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID"}
    | {"IPC_LOCK", "IPC_OWNER", "KILL", "LEASE", "LINUX_IMMUTABLE", "MAC_ADMIN"}
    | {"MAC_OVERRIDE", "MKNOD", "NET_ADMIN", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_RAW"}
    | {"PERFMON", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYSLOG"}
    | {"SYS_ADMIN", "SYS_BOOT", "SYS_CHROOT", "SYS_MODULE", "SYS_NICE", "SYS_PACCT"}
    | {"SYS_PTRACE", "SYS_RAWIO", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "WAKE_ALARM"}
)
"""The capabilities of Linux, without `CAP_`. See capabilities(7)."""


@dataclass(frozen=True, kw_only=True)
class PublishedPort:
    """A port of containers that is reachable on the engine's host."""

    text: str
    """As it was given."""
    port: str
    """A number, or a name in the `port_map` of roles."""
    protocol: str
    address: str
    """The address of the host."""
    host_port: int | None
    """The port of the first container that publishes it. The next containers have the next numbers.

    None: the engine picks them.
    """

    def overlaps(self, containers: int, other: "PublishedPort", other_containers: int) -> bool:
        """Return whether two entries need the same port of the host.

        `0.0.0.0` and `::` are all addresses of their family.
        """
        if self.host_port is None or other.host_port is None or self.protocol != other.protocol:
            return False
        own, its = ipaddress.ip_address(self.address), ipaddress.ip_address(other.address)
        if own.version != its.version or not (own == its or own.is_unspecified or its.is_unspecified):
            return False
        return self.host_port < other.host_port + other_containers and other.host_port < self.host_port + containers

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
        ports.append(
            PublishedPort(text=text, port=match["port"], protocol=protocol, address=address, host_port=host_port)
        )
    return tuple(ports)


def parse_log_driver(name: str, value: str) -> str:
    """Accept the name of a driver or a plug-in. The engine says which it has."""
    if _DRIVER.fullmatch(value) is None:
        raise OptionError(
            f"{name}={value!r} is not the name of a log driver such as json-file, local or journald", name
        )
    return value


def parse_labels(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """Accept labels of the user's."""
    for label in given:
        if not label.strip():
            raise OptionError(f"{name}: {label!r} is not a name", name)
        if label.startswith(_RESERVED):
            raise OptionError(f"{name}: {label!r} begins with {_RESERVED}, as muster's own do", name)
    return dict(given)


def parse_security_opts(name: str, given: Any) -> tuple[str, ...]:
    """Accept what the engine understands by itself: a seccomp profile in a file would have to be read here."""
    opts = []
    for text in given:
        word, _, value = text.replace("=", ":", 1).partition(":")
        allowed = {
            "no-new-privileges": value in ("", "true", "false"),
            "seccomp": value in ("unconfined", "builtin"),
            "apparmor": bool(value),
            "label": bool(value),
        }
        if not allowed.get(word, False):
            forms = "no-new-privileges, seccomp:unconfined, seccomp:builtin, apparmor:PROFILE or label:LABEL"
            raise OptionError(f"{name}: {text!r} is not one of {forms}", name)
        opts.append(f"{word}={value}" if value else word)
    return tuple(opts)


def parse_capabilities(name: str, given: Any) -> tuple[str, ...]:
    """Accept names of capabilities, with or without `CAP_`."""
    names = []
    for text in given:
        capability = text.upper().removeprefix("CAP_")
        if capability not in CAPABILITIES:
            raise OptionError(f"{name}: {text!r} is not a capability of Linux such as SYS_PTRACE or IPC_LOCK", name)
        names.append(capability)
    return tuple(dict.fromkeys(names))


def parse_user(name: str, value: str) -> str:
    """Accept USER or USER:GROUP, names or numbers."""
    if _USER.fullmatch(value) is None:
        raise OptionError(f"{name}={value!r} is not USER or USER:GROUP, such as 1000:1000 or nobody", name)
    return value


def parse_addresses(name: str, given: Any) -> tuple[str, ...]:
    """Accept IP addresses."""
    for text in given:
        _check_address(name, text, text)
    return tuple(given)


def parse_extra_hosts(name: str, given: Any) -> tuple[str, ...]:
    """Accept `NAME:ADDRESS`."""
    for text in given:
        host, _, address = text.partition(":")
        if _HOST_NAME.fullmatch(host) is None or not address:
            raise OptionError(f"{name}: {text!r} is not NAME:ADDRESS, such as data.example:10.0.0.7", name)
        if address != "host-gateway":
            _check_address(name, text, address, "an IP address or host-gateway")
    return tuple(given)


def _check_address(name: str, text: str, address: str, expected: str = "an IP address") -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError as error:
        where = f"{text!r}: {address!r}" if address != text else repr(text)
        raise OptionError(f"{name}: {where} is not {expected}", name) from error
