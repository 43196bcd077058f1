"""The agent's flags that parameters of a component set as they are, and what is checked of them before a submission.

All that components know of a feature is its rows here, and its parameters in `dist`, where TorchX reads them.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster._shared.contract import (
    LISTEN_ADDRESS,
    SNAPSHOT_MEMORY,
    parse_listen_address,
    parse_seconds,
    parse_snapshot_memory,
)
from muster._shared.policy import PolicyError, parse_policy
from muster.components.errors import ComponentError


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag, and the parameter that sets it."""

    name: str
    """The parameter's. The flag has dashes instead of underscores."""
    default: object = None
    """The value with which the flag is not given: the agent's default. False: the flag is a switch."""
    check: Callable[[Any, Mapping[str, Any]], str] = lambda _value, _arguments: ""
    """Return what is wrong with a value, given all arguments of the component. "": nothing."""
    is_needed: Callable[[Mapping[str, Any]], bool] = lambda _arguments: True
    """Whether the other arguments leave the flag an effect."""
    is_one_word: bool = False
    """Whether name and value are one word, because the value may begin with a dash."""
    feature: str = ""
    """The feature of the agent that it belongs to, for `--help-all`."""


def _build_choice(*choices: str | int) -> Callable[[Any, Mapping[str, Any]], str]:
    def check(value: Any, _arguments: Mapping[str, Any]) -> str:
        return "" if value in choices else f"{value!r} is not one of {', '.join(map(str, choices))}"

    return check


def _check_hang_timeout(value: Any, _arguments: Mapping[str, Any]) -> str:
    is_number = parse_seconds(str(value)) is not None
    return "" if is_number else f"{value} is neither auto nor a number of seconds, 0 or more; 0 means never"


def _check_hang_action(value: Any, arguments: Mapping[str, Any]) -> str:
    timeout = str(arguments["hang_timeout"])
    if timeout != "auto" and parse_seconds(timeout) == 0:
        return f"{value} has no effect with --hang_timeout 0, which means never"
    return _build_choice("report", "restart", "stop")(value, arguments)


def _check_snapshot_memory(value: Any, _arguments: Mapping[str, Any]) -> str:
    return f"{value!r}: must be {SNAPSHOT_MEMORY}" if parse_snapshot_memory(str(value)) is None else ""


def _check_spare_workers(value: Any, _arguments: Mapping[str, Any]) -> str:
    return "" if 0 <= value <= 1024 else f"{value} is not 0 to 1024"


def _check_notify(value: Any, _arguments: Mapping[str, Any]) -> str:
    """Check the command's words. Only the nodes know whether the program exists."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        return f"{value!r}: {str(error).lower()}"
    return "" if words else "is empty; give a command, or leave it out"


def _check_metrics_port(value: Any, _arguments: Mapping[str, Any]) -> str:
    """Check the address as text. Only the nodes know whether the port is free there."""
    return f"{value!r} is not {LISTEN_ADDRESS}" if parse_listen_address(str(value)) is None else ""


def _check_policy(value: Any, _arguments: Mapping[str, Any]) -> str:
    """Check the rules as the agent does, so that a wrong one needs no submission."""
    try:
        parse_policy(value)
    except PolicyError as error:
        return str(error)
    return ""


FLAGS: Final = (
    Flag(name="start", check=_build_choice("auto", "warm", "cold")),
    Flag(name="preload"),
    Flag(name="hang_timeout", default="auto", check=_check_hang_timeout),
    Flag(name="hang_action", check=_check_hang_action),
    Flag(name="collapse_lines", default="auto", check=_build_choice("auto", "on", "off")),
    Flag(name="preflight", default="quick", check=_build_choice("quick", "full", "off"), feature="preflight"),
    Flag(name="snapshot_memory", check=_check_snapshot_memory, feature="snapshots"),
    Flag(name="snapshot_copies", check=_build_choice(0, 1), feature="snapshots"),
    Flag(name="spare_workers", default=0, check=_check_spare_workers, feature="in_place"),
    Flag(
        name="devices",
        default=0,
        is_needed=lambda arguments: arguments.get("preflight", "off") != "off",
        feature="preflight",
    ),
    Flag(name="notify", check=_check_notify, is_one_word=True, feature="notify"),
    Flag(name="metrics_port", check=_check_metrics_port, feature="export"),
    Flag(name="tracker_run", default=False, feature="trackers"),
    Flag(name="trainer_callback", default=False, feature="trainer"),
    Flag(name="rank_order", check=_build_choice("node", "segment")),
    Flag(name="on", check=_check_policy, is_one_word=True),
)
"""In the order of the command."""


def build_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the words of all flags that the arguments of a component set.

    Args:
        arguments: by the names of the parameters, and `devices`, the number of GPUs of a node.

    Raises:
        ComponentError: an argument is wrong.
    """
    words: list[str] = []
    for flag in FLAGS:
        value = arguments[flag.name]
        if value == flag.default or not flag.is_needed(arguments):
            continue
        problem = flag.check(value, arguments)
        if problem:
            raise ComponentError(f"--{flag.name} {problem}")
        name = f"--{flag.name.replace('_', '-')}"
        if flag.default is False:
            words += [name]
        elif flag.is_one_word:
            words += [f"{name}={value}"]
        else:
            words += [name, str(value)]
    return words
