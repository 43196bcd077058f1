"""The options of `-cfg` for Docker."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.schedulers.docker.option_values import (
    PublishedPort,
    parse_addresses,
    parse_labels,
    parse_ports,
    parse_size,
    parse_tmpfs,
)
from muster.schedulers.docker.spec import DEFAULT_ULIMITS
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
