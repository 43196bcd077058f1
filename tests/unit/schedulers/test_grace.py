"""The adapters' limit is longer than the agent's, wherever the agent's comes from."""

import pytest
from torchx.specs import Resource, Role

from muster._shared.contract import DEFAULT_DRAIN_LIMIT_S
from muster.schedulers.errors import SchedulerError
from muster.schedulers.grace import (
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    DRAIN_MARGIN_S,
    build_drain_env,
    decide_app_grace_s,
    decide_grace_s,
)

TINY = Resource(cpu=1, gpu=0, memMB=1)


def agent(*flags, **env):
    return Role(
        "t", image="i", entrypoint="python3", args=["-m", "muster.agent", *flags, "x.py"], env=env, resource=TINY
    )


def plain():
    return Role("p", image="i", entrypoint="sleep", args=["1"], resource=TINY)


@pytest.mark.parametrize(
    ("role", "env", "grace_s"),
    [
        (agent(), {}, 45),
        (agent("--shutdown-timeout", "100"), {}, 115),
        (agent("--shutdown_timeout=100"), {"PET_SHUTDOWN_TIMEOUT": "7"}, 115),
        (agent(), {"PET_SHUTDOWN_TIMEOUT": "60"}, 75),
        (agent(PET_SHUTDOWN_TIMEOUT="50"), {"PET_SHUTDOWN_TIMEOUT": "60"}, 65),
        (agent(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5"), {}, 20),
        (agent(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5", PET_SHUTDOWN_TIMEOUT="6"), {}, 21),
        (agent("--shutdown-timeout", "nonsense"), {}, 45),  # the agent refuses it
        (plain(), {"PET_SHUTDOWN_TIMEOUT": "60"}, 30),
    ],
)
def test_the_limit_is_the_agents_and_a_margin(role, env, grace_s):
    assert decide_grace_s(role, None, env) == grace_s


def test_an_app_gets_the_longest_limit_of_its_roles():
    assert decide_app_grace_s([plain(), agent("--shutdown-timeout", "40"), agent()], None) == 55


def test_a_limit_that_the_agent_cannot_keep_is_refused():
    assert decide_grace_s(agent(), 31) == 31
    assert decide_grace_s(plain(), 0) == 0
    with pytest.raises(
        SchedulerError,
        match=r"grace_s=30 .* --shutdown-timeout.* 30 s .*--env PET_SHUTDOWN_TIMEOUT=SECONDS$",
    ):
        decide_grace_s(agent(), 30)
    with pytest.raises(SchedulerError, match=r"stops its workers$"):
        decide_grace_s(agent("--shutdown-timeout", "40"), 30)
    with pytest.raises(SchedulerError, match="60 s in role"):
        decide_grace_s(agent(), 45, {"PET_SHUTDOWN_TIMEOUT": "60"})


@pytest.mark.parametrize(
    ("given_s", "args", "env"),
    [
        (None, (), {}),
        (120.0, (), {"MUSTER_DRAIN_LIMIT_S": "85"}),
        (120.0, ("--shutdown-timeout", "100"), {"MUSTER_DRAIN_LIMIT_S": "15"}),
        (31.0, (), {"MUSTER_DRAIN_LIMIT_S": "0"}),
    ],
)
def test_an_agent_is_told_how_long_a_drain_may_take(given_s, args, env):
    assert build_drain_env(agent(*args), given_s) == env


def test_the_default_grace_period_leaves_what_the_agent_takes_by_default():
    left_s = decide_grace_s(agent(), None) - DEFAULT_SHUTDOWN_TIMEOUT_S - DRAIN_MARGIN_S
    assert left_s == DEFAULT_DRAIN_LIMIT_S
