"""Policies of roles: what is refused, how roles find each other, and how one waits for another."""

import socket

import pytest

from muster._shared.contract import Env
from muster._shared.role_policy import (
    MOST_HOSTS,
    PolicedRole,
    PolicyError,
    RolePolicy,
    build_role_variables,
    check_policies,
    dump_policy,
    parse_policy,
)
from muster._shared.role_start import wait_for_role
from muster.schedulers.role_variables import build_role_env
from muster.schedulers.supervision.state import SupervisedRole


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ("never", "role 'a': its policy must be a dictionary, not 'never'"),
        ({"kritical": True}, "role 'a': a policy has no 'kritical'; it has: critical, ends_with, after, restart, "),
        ({"critical": 1}, "role 'a': critical must be True or False, not 1"),
        ({"restart": "sometimes"}, "role 'a': restart must be one of never, on-failure, always, not 'sometimes'"),
        (
            {"max_restarts": 0},
            "role 'a': max_restarts must be a whole number of at least 1, or None for no limit, not 0",
        ),
        ({"backoff_s": 0}, "role 'a': backoff_s must be a number of seconds above 0, not 0"),
        ({"grace_s": True}, "role 'a': grace_s must be a number of seconds above 0, not True"),
        ({"after": 3}, "role 'a': after must be the name of a role, not 3"),
    ],
)
def test_a_wrong_policy_is_refused_in_one_line(data, line):
    with pytest.raises(PolicyError) as raised:
        parse_policy("a", data)
    assert str(raised.value).startswith(line)


def test_a_policy_is_kept_without_what_is_as_usual():
    kept = {"critical": False, "restart": "always", "max_restarts": 3}
    assert dump_policy(parse_policy("a", kept)) == kept
    assert dump_policy(parse_policy("a", {**kept, "after": "", "grace_s": None})) == kept


def make_role(name, *, max_retries=0, restarts_role=False, is_observable=True, **policy):
    return PolicedRole(
        name=name,
        policy=parse_policy(name, policy),
        max_retries=max_retries,
        restarts_role=restarts_role,
        is_observable=is_observable,
    )


@pytest.mark.parametrize(
    ("roles", "line"),
    [
        ([make_role("a", after="c"), make_role("b")], "role 'a': after='c' is none of the app's other roles: b"),
        ([make_role("a", ends_with="a")], "role 'a': ends_with='a' is none of the app's other roles: none"),
        (
            [make_role("a", after="b"), make_role("b", is_observable=False)],
            (
                "role 'a': after='b': nobody can see when that role is ready, because it has no port_map and does not "
                "run muster's agent"
            ),
        ),
        (
            [make_role("a", restart="on-failure", max_retries=3)],
            (
                "role 'a': max_retries=3 and restart='on-failure' contradict: give one of them (max_restarts limits "
                "the restarts)"
            ),
        ),
        (
            [make_role("a", restart="on-failure", restarts_role=True)],
            (
                "role 'a': retry_policy=ROLE and restart='on-failure' contradict: the policy has each replica started "
                "again alone"
            ),
        ),
        ([make_role("a", max_restarts=3)], "role 'a': max_restarts=3 needs restart='on-failure'"),
        (
            [make_role("a", restart="always")],
            "role 'a': restart='always' never ends: give ends_with, the role that it serves, or critical=False",
        ),
        (
            [make_role("a-1", ends_with="a_1"), make_role("a_1")],
            "role 'a-1': another role would have the same variables MUSTER_ROLE_A_1_HOSTS, ...",
        ),
        ([make_role("a", critical=False)], "no role is critical; at least one must be, of: a"),
        ([make_role("a", after="b"), make_role("b", after="a")], "roles wait for each other: a after b after a"),
    ],
)
def test_policies_that_contradict_are_refused_in_one_line(roles, line):
    with pytest.raises(PolicyError) as raised:
        check_policies(roles)
    assert str(raised.value) == line


def test_roles_find_each_other():
    roles = [
        SupervisedRole(name="learner-1", replicas=2, runs_agent=True),
        SupervisedRole(name="actor", replicas=1, runs_agent=False, ports={"http": 80}),
        SupervisedRole(name="judge", replicas=1, runs_agent=False, policy=RolePolicy(after="learner-1")),
        SupervisedRole(name="late", replicas=1, runs_agent=False, policy=RolePolicy(after="actor")),
    ]
    hosts = {"learner-1": ["l0", "l1"], "actor": ["a"], "judge": ["j"], "late": ["x"]}
    env = build_role_env(roles, "app", "judge", hosts)
    learner = build_role_env(roles, "app", "learner-1", hosts)
    assert env == {
        "MUSTER_ROLE_LEARNER_1_HOSTS": "l0,l1",
        "MUSTER_ROLE_ACTOR_HOSTS": "a",
        "MUSTER_ROLE_ACTOR_PORT_HTTP": "80",
        "MUSTER_ROLE_LATE_HOSTS": "x",
        Env.AFTER: f"learner-1 {learner[Env.READY_PORT]}",
    }
    assert build_role_env(roles, "app", "late", hosts)[Env.AFTER] == "actor 80"
    assert build_role_env(roles[:1], "app", "learner-1", hosts) == {}, "alone"


def test_the_variables_of_many_hosts_stay_short():
    hosts = build_role_variables("a", ["h" * 63] * 20_000, {})["MUSTER_ROLE_A_HOSTS"]
    assert hosts.count(",") == MOST_HOSTS - 1
    assert len(hosts) < 128 << 10


class Clock:
    """Time that passes only in pauses."""

    def __init__(self, then=lambda _: None):
        self.now_s, self._then = 0.0, then

    def pause(self, delay_s):
        self.now_s += delay_s
        self._then(self.now_s)


def wait(env, lines, clock):
    wait_for_role(env, lines.append, now_s=lambda: clock.now_s, pause=clock.pause)


def test_a_role_starts_once_the_other_accepts_connections_and_says_what_it_waits_for():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        lines, ready = [], []

        def listen(now_s):
            if now_s >= 7.0 and not ready:
                assert len(lines) == 1, "said after 5 s, once"
                ready.append(now_s)
                server.listen()

        clock = Clock(listen)
        wait({Env.AFTER: f"actor {port}", "MUSTER_ROLE_ACTOR_HOSTS": "127.0.0.1,other"}, lines, clock)
    assert ready
    assert clock.now_s < 8.0
    assert f"waits for role actor: 127.0.0.1:{port}" in lines[0]


def test_a_role_that_has_moved_is_found_by_the_file(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hosts = tmp_path / "roles.json"
        hosts.write_text('{"actor": ["127.0.0.1"]}')
        env = {Env.AFTER: f"actor {server.getsockname()[1]}", "MUSTER_ROLE_ACTOR_HOSTS": "no-such-host.invalid"}
        wait({**env, Env.ROLES_FILE: str(hosts)}, [], Clock())


def test_a_role_that_waits_for_none_starts_at_once():
    wait_for_role({}, pytest.fail)
