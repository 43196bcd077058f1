"""The grammar of `--on`: what it accepts, which rule decides, and one line about everything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster._shared.causes import CLASSES, GAVE_UP
from muster._shared.policy import Happened, PolicyError, Rule, find_rule, parse_policy
from muster.components import dist
from muster.components.errors import ComponentError

EXAMPLE = "exit 77: elsewhere; ImportError: stop; oom: stop; exit 33,34: restart free; hang: restart"


def decide(policy: str, **happened) -> str | None:
    """The verdict of the rule that matches, with what follows it."""
    rule = find_rule(parse_policy(policy), Happened(**{"cause": "crash", **happened}))
    return None if rule is None else rule.text.partition(": ")[2]


@pytest.mark.parametrize(
    ("happened", "verdict"),
    [
        ({"exit_code": 77}, "elsewhere"),
        ({"exit_code": 33}, "restart free"),
        ({"exit_code": 34}, "restart free"),
        ({"exit_code": 1}, None),
        ({"cause": "host-oom"}, "stop"),
        ({"cause": "device-oom", "exit_code": 33}, "stop"),
        ({"cause": "hang"}, "restart"),
        ({"exception": "ImportError"}, "stop"),
        ({"exception": "ModuleNotFoundError"}, "stop"),
        ({"exception": "my.ImportError"}, "stop"),
        ({"exception": "MyImportError"}, None),
    ],
)
def test_the_first_rule_that_matches_decides(happened: dict, verdict: str | None) -> None:
    assert decide(EXAMPLE, **happened) == verdict


@pytest.mark.parametrize(
    ("policy", "happened", "verdict"),
    [
        ("any: stop", {}, "stop"),
        ("unknown: restart 2; any: stop", {"cause": "unknown"}, "restart 2"),
        ("signal SEGV: elsewhere", {"signal": "SIGSEGV"}, "elsewhere"),
        ("signal sigkill,exit 9: restart free", {"exit_code": 9}, "restart free"),
        ("exit 3, 4, ValueError: stop", {"exit_code": 4}, "stop"),
        ("exit 3, 4, ValueError: stop", {"exception": "ValueError"}, "stop"),
        ("torch.OutOfMemoryError: stop", {"exception": "torch.OutOfMemoryError"}, "stop"),
        ("torch.OutOfMemoryError: stop", {"exception": "other.OutOfMemoryError"}, None),
        ("OutOfMemoryError: elsewhere 1", {"exception": "torch.OutOfMemoryError"}, "elsewhere 1"),
        ("OSError: stop", {"exception": "ConnectionResetError"}, "stop"),
        ("Exception: stop", {"exception": "torch.OutOfMemoryError"}, None),
        ("repeat: stop", {"is_repeat": True}, "stop"),
        ("repeat: stop", {}, None),
        ("any: restart;", {}, "restart"),
        ("", {}, None),
    ],
)
def test_conditions(policy: str, happened: dict, verdict: str | None) -> None:
    assert decide(policy, **happened) == verdict


@pytest.mark.parametrize("name", [each for each in CLASSES if each != GAVE_UP])
def test_every_class_is_a_condition(name: str) -> None:
    assert decide(f"{name}: stop", cause=name) == "stop"
    other = next(each for each in CLASSES if each != name)
    assert decide(f"{name}: stop", cause=other) is None


def test_no_rule_is_about_a_rank_that_gives_up() -> None:
    """The job stops then, whatever the rules are."""
    with pytest.raises(PolicyError, match=r"'gave-up' .* one of"):
        parse_policy("gave-up: restart")


def test_a_number_and_free_use_none_of_the_restarts() -> None:
    first, second, third = parse_policy("any: restart 3; any: elsewhere free; any: restart")
    assert (first.most, first.is_free, second.most, second.is_free) == (3, True, None, True)
    assert (third.most, third.is_free) == (None, False)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("stop", "'stop': must be CONDITION: VERDICT, as in 'exit 77: elsewhere'"),
        (" ; ", "'': must be CONDITION: VERDICT"),
        ("; any: stop", "'': must be CONDITION: VERDICT, as in 'exit 77: elsewhere'"),
        ("exit 0: stop", "'exit 0: stop': an exit code must be 1 to 255, not '0'"),
        ("exit 256: stop", "'exit 256: stop': an exit code must be 1 to 255, not '256'"),
        ("exit: stop", "'exit: stop': an exit code must be 1 to 255, not ''"),
        ("exit 3,400: stop", "'exit 3,400: stop': an exit code must be 1 to 255, not '400'"),
        ("signal NO: stop", "'signal NO: stop': 'NO' is not a signal; write signal SEGV, or signal KILL"),
        ("any: restart 0", "'any: restart 0': the number must be 1 to 1000, not 0"),
        ("any: stop 3", "after the first two a number or free may follow, not 'stop 3'"),
        ("any: restart -1", "after the first two a number or free may follow, not 'restart -1'"),
        ("any: restart 3 free", "after the first two a number or free may follow, not 'restart 3 free'"),
        ("any: retry", "must be restart, elsewhere or stop"),
        ("any:", "must be restart, elsewhere or stop"),
        ("oomm: stop", "'oomm' must be one of: exit N, signal NAME, an exception, repeat, any, oom, usage, data,"),
        ("OOM!: stop", "'OOM!' must be one of: exit N"),
        (",any: stop", "'' must be one of: exit N"),
        ("33: stop", "'33' must be one of: exit N"),
        ("any: stop;" * 65, "must have at most 64 rules"),
        ("x" * 2001, "must have at most 2000 characters, not 2001"),
    ],
)
def test_one_line_names_the_rule_and_what_is_allowed(text: str, line: str) -> None:
    with pytest.raises(PolicyError) as raised:
        parse_policy(text)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.text(alphabet="exit signal any:;,0123456789restop free\nSIGKILL\0é²", max_size=60))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    try:
        rules = parse_policy(text)
    except PolicyError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
    else:
        assert all(isinstance(rule, Rule) and rule.conditions for rule in rules)


@pytest.mark.parametrize("component", [dist.ddp, dist.torchrun, dist.spmd])
def test_components_check_the_rules_and_pass_them_on(component) -> None:
    app = component(script="main.py", on=EXAMPLE)
    assert f"--on={EXAMPLE}" in app.roles[0].args
    with pytest.raises(ComponentError, match=r"--on 'any: retry': .* elsewhere or stop"):
        component(script="main.py", on="any: retry")
