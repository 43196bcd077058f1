"""Recognises the command that components write, `python3 -m muster.agent ...`, reads its flags and rewrites it.

Adapters never run it as it is written. With `-m` Python imports from the working directory before the agent can prevent
it, and a `types.py` of the user's there would replace the standard library's.

The agent's own flags end where its program begins: at the first word that is not a flag, or at `--`. All later words
belong to the program, even if they look like flags of the agent.
"""

import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import muster
from muster._shared.contract import (
    AGENT_BUNDLE_NAME,
    AGENT_ENTRY_NAME,
    AGENT_MODULE,
    AGENT_SHORT_SWITCHES,
    AGENT_SWITCHES,
    COLLAPSED_FROM_RANKS,
)
from muster._shared.records import record

AGENT_ENTRY: Final = str(Path(muster.__file__).parent / AGENT_ENTRY_NAME)
"""The agent as a file, for an interpreter of this machine that has muster."""

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_COMMAND_LENGTH = 2  # -m muster.agent
_RUN_ID = "rdzv-id"
_RUN_ID_VARIABLE = "PET_RDZV_ID"
_TEE = "t"
"""torchrun's abbreviation of --tee, which a switch of ours must not take."""

_REPLICA_FLAG: Final = "--replica"

_IMAGE_PROGRAM: Final = (
    "import sys; sys.path[:] = filter(None, sys.path); from muster.agent.__main__ import main; sys.exit(main())"
)
"""For an image that has muster at an unknown place."""


def is_python(word: str) -> bool:
    """Return whether a word of a command is a Python interpreter: its name, or a path of it."""
    return _PYTHON.fullmatch(posixpath.basename(word)) is not None


def is_agent_role(role: Any) -> bool:
    """Return whether a TorchX role runs our agent: some Python, then `-m muster.agent`.

    Other roles keep TorchX's meaning of exit codes and retries.
    """
    return is_python(role.entrypoint) and list(role.args[:_COMMAND_LENGTH]) == ["-m", AGENT_MODULE]


def build_agent_args(args: Sequence[str], bundle_dir: str | None) -> list[str]:
    """Return what follows the interpreter for an agent role.

    Args:
        args: of a role for which `is_agent_role` holds.
        bundle_dir: absolute path of the folder that holds `muster-agent.zip` on the node. None: muster is installed
            there.
    """
    start = ["-c", _IMAGE_PROGRAM] if bundle_dir is None else [posixpath.join(bundle_dir, AGENT_BUNDLE_NAME)]
    return [*start, *args[_COMMAND_LENGTH:]]


def wrap_command(
    command: Sequence[str], policy: Mapping[str, Any], bundle_dir: str | None, count_path: str | None = None
) -> list[str]:
    """Return the command that runs another one as a role's policy says: see `_shared.role_command`.

    Args:
        command: the program and its arguments.
        policy: as in the role's metadata.
        bundle_dir: see `build_agent_args`.
        count_path: of the file that says how often it was restarted. None: it is not.
    """
    start = ["-c", _IMAGE_PROGRAM] if bundle_dir is None else [posixpath.join(bundle_dir, AGENT_BUNDLE_NAME)]
    counts = [] if count_path is None else [count_path]
    return ["python3", *start, _REPLICA_FLAG, json.dumps(policy), *counts, "--", *command]


def unwrap_command(command: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return what `wrap_command` got: the command, and the path of the count, which is "" if there is none."""
    begin = len(build_ask_command(command, ())) if len(command) > 1 else 0
    if list(command[begin : begin + 1]) != [_REPLICA_FLAG] or "--" not in command:
        return command, ""
    end = command.index("--")
    return command[end + 1 :], "".join(command[begin + 2 : end])


def build_ask_command(command: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the command that asks an agent something on its node.

    Args:
        command: what runs the agent there: an interpreter, then a file, `-m MODULE` or `-c PROGRAM`, then flags.
        words: instead of these flags: `ask job stop`.
    """
    return [*command[: 3 if command[1] in ("-c", "-m") else 2], *words]


# -- the agent's own flags --------------------------------------------------------------------------------------------


@record
class AgentFlag:
    """One of the agent's own flags in the arguments of a role: `args[begin:end]`."""

    spelling: str
    """The long name as it was written, or its beginning, with dashes: "rdzv-id". Short flags: "" (none is needed)."""
    value: str
    """"" for a switch."""
    begin: int
    end: int

    def matches(self, name: str) -> bool:
        """Return whether this is the flag of that name. A prefix is enough: the agent refuses one that is ambiguous."""
        return self.spelling != "" and name.startswith(self.spelling)


def list_agent_flags(args: Sequence[str]) -> list[AgentFlag]:
    """Return the agent's own flags, in order.

    Args:
        args: of a role for which `is_agent_role` holds.

    Source: parse_command_line in `muster/agent/cli/command_line.py`. `tests/unit/schedulers/test_agent_command.py`
    compares the two.
    """
    flags: list[AgentFlag] = []
    begin = _COMMAND_LENGTH
    while begin < len(args) and args[begin] != "--" and _is_flag(args[begin]):
        spelling, value = _split_flag(args[begin])
        end = begin + (1 if value is not None else 2)
        if value is None:
            value = args[begin + 1] if begin + 1 < len(args) else ""
        flags.append(AgentFlag(spelling=spelling, value=value, begin=begin, end=end))
        begin = end
    return flags


def find_agent_flag(args: Sequence[str], name: str) -> str | None:
    """Return the value of one of the agent's own flags. The last one counts. None: it is not given.

    Args:
        args: of a role for which `is_agent_role` holds.
        name: long, with dashes in the middle: "shutdown-timeout".
    """
    values = [flag.value for flag in list_agent_flags(args) if flag.matches(name)]
    return values[-1] if values else None


def count_merged_ranks(args: Sequence[str], gpus: int) -> int:
    """Return how many ranks a job has whose lines a terminal shows merged. 0: it shows each.

    Args:
        args: of a role for which `is_agent_role` holds.
        gpus: of each node: what `--nproc-per-node gpu` means.
    """
    choice = find_agent_flag(args, "collapse-lines") or "auto"
    nodes = (find_agent_flag(args, "nnodes") or "1").rpartition(":")[2]
    processes = find_agent_flag(args, "nproc-per-node") or "1"
    ranks = (int(nodes) if nodes.isdecimal() else 1) * (int(processes) if processes.isdecimal() else max(1, gpus))
    return ranks if choice == "on" or (choice == "auto" and ranks >= COLLAPSED_FROM_RANKS) else 0


def find_run_file(command: Sequence[str], log_dir: str, name: str) -> str | None:
    """Return the absolute path of a file of an agent's run, where it runs. None: its command does not say.

    Args:
        command: see `build_ask_command`.
        log_dir: where the flags name no other. "": not known.
        name: one of `LogNames`.
    """
    args = ["-m", AGENT_MODULE, *command[len(build_ask_command(command, ())) :]]
    run_id = find_agent_flag(args, _RUN_ID)
    log_dir = find_agent_flag(args, "log-dir") or log_dir
    if not run_id or not posixpath.isabs(log_dir):
        return None
    return posixpath.join(log_dir, run_id, name)


def find_program(args: Sequence[str]) -> tuple[str, str] | None:
    """Return what an agent role runs: ("script", path) or ("module", name). None: another program, or none.

    Args:
        args: of a role for which `is_agent_role` holds.
    """
    flags = list_agent_flags(args)
    rest = list(args[flags[-1].end if flags else _COMMAND_LENGTH :])
    words = [args[flag.begin] for flag in flags]
    if rest[:1] == ["--"]:
        del rest[0]
    if not rest or any("no-python".startswith(flag.spelling) for flag in flags if len(flag.spelling) > 1):
        return None
    is_module = any(word.startswith("-m") for word in words) or any(
        "module".startswith(flag.spelling) for flag in flags if len(flag.spelling) > 1
    )
    return "module" if is_module else "script", rest[0]


def _set_agent_flag(args: Sequence[str], name: str, value: str) -> list[str]:
    found = [flag for flag in list_agent_flags(args) if flag.matches(name)]
    begin, end = (found[-1].begin, found[-1].end) if found else (_COMMAND_LENGTH, _COMMAND_LENGTH)
    return [*args[:begin], f"--{name}", value, *args[end:]]


def _is_flag(word: str) -> bool:
    """Tell flags by the agent's rule, which is argparse's: `-`, numbers and words with a space are none."""
    if len(word) < 2 or word[0] != "-" or " " in word.partition("=")[0]:
        return False
    return not word[1:].replace(".", "", 1).isdecimal()


def _split_flag(word: str) -> tuple[str, str | None]:
    """Split into (spelling, value). The value is None if it is the next word."""
    if not word.startswith("--"):
        letters = word[1:].lstrip(AGENT_SHORT_SWITCHES)
        return "", "" if not letters else letters[1:] or None
    name, equals, value = word[2:].partition("=")
    spelling = name.replace("_", "-")
    if equals:
        return spelling, value
    is_switch = spelling != _TEE and any(switch.startswith(spelling) for switch in AGENT_SWITCHES)
    return spelling, "" if is_switch else None


# -- several agent roles in one app -----------------------------------------------------------------------------------


def assign_run_ids(roles: Sequence[Any], labels: Mapping[str, str], app_id: str) -> dict[str, list[str]]:
    """Return the arguments of each role, with run ids that differ between agent roles.

    Every agent role of an app is a job of its own, but components give each the app's id as run id, `--rdzv-id`. If
    agent roles have the same run id, this appends each role's label to it. A unique run id stays.

    Args:
        roles: of one app, not changed.
        labels: of each role, by name. All are different.
        app_id: the run id before the label where a role names none. It may be a macro.

    Returns:
        Arguments by the role's name, macros not yet substituted.
    """
    given = {role.name: _find_run_id(role) for role in roles if is_agent_role(role)}
    ids = list(given.values())
    args = {role.name: list(role.args) for role in roles}
    for name, run_id in given.items():
        if ids.count(run_id) > 1:
            args[name] = _set_agent_flag(args[name], _RUN_ID, f"{run_id or app_id}-{labels[name]}")
    return args


def _find_run_id(role: Any) -> str:
    flag = find_agent_flag(role.args, _RUN_ID)
    return str(role.env.get(_RUN_ID_VARIABLE, "")) if flag is None else flag
