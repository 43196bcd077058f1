"""The agent's own flags as adapters parse them: the same words as the agent itself, and none of the program's."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muster._shared.contract import AGENT_SHORT_SWITCHES, AGENT_SWITCHES
from muster.agent.cli.command_line import find_flag, parse_command_line
from muster.agent.cli.flag_table import list_flags
from muster.agent.errors import UsageError
from muster.schedulers.agent_command import assign_run_ids, find_agent_flag, find_program, list_agent_flags

COMMAND = ["-m", "muster.agent"]

VALUES = st.sampled_from(["5", "-5", "-1.5", "a", "-", "", "a b", "-a b", "x=y", "0:3,1:1", "--", "main.py", "-m"])


def _spell(flag: str, cut: int, underscores: bool) -> str:
    name = flag[: max(1, len(flag) - cut)]
    return "--" + (name.replace("-", "_") if underscores else name)


LONG = st.builds(
    _spell,
    st.sampled_from([flag.name for flag in list_flags()] + ["shutdown-timeout", "rdzv-id"] * 4),
    st.sampled_from([0, 0, 0, 0, 1, 2, 5]),
    st.booleans(),
)
SHORT = st.sampled_from(["-m", "-r", "-t", "-r3", "-t=3", "-mr3", "-mr", "-mm", "-rm", "-r="])
WORDS = st.one_of(
    LONG.map(lambda flag: [flag]),
    st.tuples(LONG, VALUES).map(list),
    st.tuples(LONG, VALUES).map(lambda pair: [f"{pair[0]}={pair[1]}"]),
    SHORT.map(lambda flag: [flag]),
    VALUES.map(lambda value: [value]),
)
LINES = st.lists(WORDS, max_size=8).map(lambda parts: [word for part in parts for word in part])


@given(LINES)
@example(["--standalone", "--shutdown-timeout", "5", "main.py", "--shutdown-timeout", "600"])
@example(["--rdzv-id", "a", "--", "main.py", "--", "--rdzv-id", "b"])
@example(["--t", "5", "--rdzv-id", "5"])
@example(["-mr", "3", "--shutdown_t=7", "pkg.main", "--shutdown-timeout=9"])
def test_adapters_read_the_line_as_the_agent_does(words: list[str]) -> None:
    try:
        line = parse_command_line(words)
    except UsageError:
        return
    args = [*COMMAND, *words]
    flags = list_agent_flags(args)
    assert find_agent_flag(args, "shutdown-timeout") == line.texts.get("shutdown_timeout")
    assert find_agent_flag(args, "rdzv-id") == line.texts.get("rdzv_id")
    program = args[flags[-1].end if flags else len(COMMAND) :]
    program = program[1:] if program[:1] == ["--"] else program
    if program[1:2] == ["--"]:
        del program[1]
    assert program == ([] if line.script is None else [line.script, *line.script_args])


@pytest.mark.parametrize("name", [flag.name for flag in list_flags()])
def test_adapters_know_from_each_beginning_of_a_flag_whether_a_value_follows(name: str) -> None:
    for length in range(1, len(name) + 1):
        try:
            flag = find_flag(f"--{name[:length]}")
        except UsageError:  # it is ambiguous
            continue
        flags = list_agent_flags([*COMMAND, f"--{name[:length]}", "value"])
        assert [each.value for each in flags] == ["" if flag.is_switch else "value"], name[:length]


def test_the_contract_names_the_agents_switches() -> None:
    for flag in list_flags():
        assert flag.is_switch == (flag.name in AGENT_SWITCHES), flag.name
    assert {flag.short for flag in list_flags() if flag.is_switch and flag.short} == set(AGENT_SHORT_SWITCHES)
    # `AgentFlag.matches` accepts a prefix of a name
    for name in ("shutdown-timeout", "rdzv-id"):
        assert [flag.name for flag in list_flags() if name.startswith(flag.name)] == [name]


def agents(name: str, *flags: str, env: dict[str, str] | None = None) -> SimpleNamespace:
    return SimpleNamespace(name=name, entrypoint="python3", args=[*COMMAND, *flags, "main.py"], env=env or {})


def shell(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, entrypoint="sh", args=["-c", "true"], env={})


def run_ids(*roles: SimpleNamespace) -> dict[str, str | None]:
    """The run id that each role's agents will use."""
    before = [list(role.args) for role in roles]
    args = assign_run_ids(roles, {role.name: f"l-{role.name}" for role in roles}, app_id="APP")
    assert [role.args for role in roles] == before, "the caller's roles are not changed"
    return {role.name: parse_command_line(args[role.name][2:]).texts.get("rdzv_id") for role in roles}


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([agents("a", "--rdzv-id", "APP")], {"a": "APP"}),
        ([agents("a", "--rdzv-id", "APP"), agents("b", "--rdzv-id", "APP")], {"a": "APP-l-a", "b": "APP-l-b"}),
        ([agents("a", "--rdzv_id=x"), agents("b", "--rdzv-i", "x")], {"a": "x-l-a", "b": "x-l-b"}),
        ([agents("a", "--rdzv-id", "x"), agents("b", "--rdzv-id", "y")], {"a": "x", "b": "y"}),
        ([agents("a"), agents("b")], {"a": "APP-l-a", "b": "APP-l-b"}),
        ([agents("a"), agents("b", env={"PET_RDZV_ID": "y"})], {"a": None, "b": None}),
        ([agents(name, env={"PET_RDZV_ID": "y"}) for name in "ab"], {"a": "y-l-a", "b": "y-l-b"}),
        ([agents(name, "--tee", "3", "--rdzv-id=1", "--rdzv-id", "2") for name in "ab"], {"a": "2-l-a", "b": "2-l-b"}),
        ([agents("a"), shell("b")], {"a": None, "b": None}),
    ],
)
def test_agent_roles_that_would_share_a_run_id_get_one_each(
    roles: list[SimpleNamespace], expected: dict[str, str | None]
) -> None:
    assert run_ids(*roles) == expected


def test_arguments_of_the_program_are_not_changed() -> None:
    roles = [agents(name, "--rdzv-id", "x") for name in "ab"]
    for role in roles:
        role.args += ["--rdzv-id", "the program's"]
    args = assign_run_ids(roles, {"a": "a", "b": "b"}, app_id="APP")
    assert args["a"] == [*COMMAND, "--rdzv-id", "x-a", "main.py", "--rdzv-id", "the program's"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--nnodes", "2", "main.py", "-m", "x"], ("script", "main.py")),
        (["main.py"], ("script", "main.py")),
        (["--nnodes", "2", "-m", "pack.main", "--no-python"], ("module", "pack.main")),
        (["--module", "pack.main"], ("module", "pack.main")),
        (["--tee", "3", "--", "main.py"], ("script", "main.py")),
        (["--no-python", "true"], None),
        (["--nnodes", "2"], None),
    ],
)
def test_the_program_of_an_agent_role(args, expected) -> None:
    assert find_program(["-m", "muster.agent", *args]) == expected
