"""What follows from a failure, and 10,000 simulated jobs: none is stopped that a later attempt would have finished."""

import random

import pytest
from doubles.samples import make_failure

from muster._shared.records import replace
from muster._shared.reports import FailedCheck, Failure
from muster.agent.rendezvous.restarts import Restarts
from muster.agent.rendezvous.verdicts import Verdict, VerdictRules, decide_verdict, find_signature

HISTORIES = 4_000
RULES = VerdictRules(max_restarts=100, stops_on_repeat=True)
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 12, in load\n    x\nValueError: bad'


class Job:
    """Failures of one job, one after the other."""

    def __init__(self, rules: VerdictRules = RULES) -> None:
        self.rules = rules
        self.restarts = Restarts()
        self.attempt = 0

    def fail(self, root: Failure | None, *, has_stepped: bool = False) -> Verdict:
        verdict = decide_verdict(root, self.restarts, self.attempt, self.rules, has_stepped=has_stepped)
        self.restarts = verdict.restarts
        self.attempt += 1
        return verdict

    def fail_until_the_end(self, root: Failure, most: int = 50) -> tuple[int, str]:
        """How many restarts there were, and why the job ended; "": it has not."""
        for number in range(most):
            verdict = self.fail(root)
            if verdict.final is not None:
                return number, verdict.final.verdict
        return most, ""


def crash(**changes) -> Failure:
    values = {"exit_code": 1, "cause": "crash", "exception": "ValueError: bad", "traceback": TRACEBACK}
    return make_failure(**{**values, **changes})


OUTSIDE = ("network", "device", "preemption", "time-limit", "host-oom")
USAGE = crash(cause="usage", exception="ImportError: x", early=True)


@pytest.mark.parametrize(
    ("root", "restarts", "verdict"),
    [
        (USAGE, 1, "not retried without --on 'usage: restart'"),
        (crash(reports_steps=True), 1, "not retried without --on 'repeat: restart'"),
        (crash(cause="data", reports_steps=True, traceback=None), 1, "not retried without --on 'repeat: restart'"),
        (crash(), 50, ""),  # whether it has done a step is not known
        (crash(reports_steps=True, traceback=None), 50, ""),  # nor is the place
        (crash(reports_steps=True, step=4), 50, ""),
        (crash(cause="unknown", reports_steps=True), 1, "not retried without --on 'repeat: restart'"),
        (crash(cause="device-oom", reports_steps=True), 1, "not retried without --on 'repeat: restart'"),
        # An outage is not the program's fault, though it has come twice at one place before the first step.
        *((crash(cause=each, reports_steps=True), 50, "") for each in OUTSIDE),
        (crash(reports_steps=True, optimizer_steps=4), 50, ""),
        (crash(requested_verdict="stop"), 0, "rank 0 has given up: a restart is not wanted"),
        (make_failure(cause="unknown", exit_code=3, reports_steps=True), 50, ""),
    ],
)
def test_the_defaults_lean_to_a_restart(root: Failure, restarts: int, verdict: str) -> None:
    found = Job().fail_until_the_end(root)
    assert found[0] == restarts
    assert found[1].endswith(verdict)
    assert bool(found[1]) == bool(verdict)


def test_on_a_command_line_a_repeated_cause_uses_up_the_restarts() -> None:
    """`--max-restarts` means there what it means to torchrun."""
    by_hand = VerdictRules(max_restarts=3)
    assert Job(by_hand).fail_until_the_end(crash(reports_steps=True)) == (3, "all 3 restarts are used")
    asked = replace(by_hand, policy="repeat: stop")
    for cause in ("crash", *OUTSIDE):  # who asks for it means all of them
        root = crash(cause=cause, reports_steps=True)
        assert Job(asked).fail_until_the_end(root) == (1, "--on 'repeat: stop'")


def test_a_script_that_was_seen_to_report_steps_is_known_to_report_them() -> None:
    job = Job()
    assert job.fail(crash(step=8)).final is None
    assert job.fail(crash()).final is None  # the attempt before had done steps
    assert job.fail(crash()).final is not None


@pytest.mark.parametrize(
    "between", [crash(step=3), crash(exception="KeyError: 'x'"), crash(traceback=TRACEBACK.replace("12", "13"))]
)
def test_progress_or_another_cause_or_place_begins_anew(between: Failure) -> None:
    job, same = Job(), crash(reports_steps=True)
    assert [job.fail(each).final for each in (same, between, same)] == [None, None, None]


def test_another_position_in_the_data_is_another_place() -> None:
    job = Job()
    first, other = (crash(cause="data", exception=f"ValueError: sample {n}", reports_steps=True) for n in (7, 8))
    assert [job.fail(each).final for each in (first, other, first)] == [None, None, None]
    assert job.fail(first).final is not None


@pytest.mark.parametrize(
    ("policy", "root", "restarts", "verdict"),
    [
        ("ImportError: stop", USAGE, 0, "--on 'ImportError: stop'"),
        ("usage: restart", USAGE, 2, "all 2 restarts are used"),
        ("usage: restart 4", USAGE, 4, "restarted 4 times without progress since (--on 'usage: restart 4')"),
        ("crash: restart 1", crash(), 1, "restarted once without progress since (--on 'crash: restart 1')"),
        ("crash: restart free", crash(), 50, ""),
        ("exit 1: elsewhere 3", crash(), 3, "restarted 3 times without progress since (--on 'exit 1: elsewhere 3')"),
        ("crash: restart 4", crash(step=1), 50, ""),  # each attempt makes progress
        (
            "any: stop",
            crash(requested_verdict="elsewhere"),
            2,
            "all 2 restarts are used",
        ),  # the rank's own word goes first
        ("hang: stop", make_failure(hung=True, cause="hang", reason="x"), 0, "--on 'hang: stop'"),
    ],
)
def test_rules_go_before_the_defaults(policy: str, root: Failure, restarts: int, verdict: str) -> None:
    job = Job(VerdictRules(max_restarts=2, policy=policy, stops_on_repeat=True))
    assert job.fail_until_the_end(root) == (restarts, verdict)


def test_a_rule_that_allows_a_restart_switches_a_hang_s_end_off() -> None:
    hung = make_failure(hung=True, cause="hang", reason="x")
    assert Job(replace(RULES, stops_on_hang=True)).fail(hung).final is not None
    assert Job(replace(RULES, stops_on_hang=True, policy="hang: restart")).fail(hung).final is None


@pytest.mark.parametrize(
    ("root", "policy", "expected"),
    [
        (crash(), "", (False, False)),
        (crash(cause="device"), "", (True, False)),
        (crash(cause="device"), "device: restart", (False, False)),
        (crash(requested_verdict="elsewhere"), "", (True, True)),
        (crash(exit_code=77), "exit 77: elsewhere", (True, True)),
        (
            make_failure(check=FailedCheck(feature="preflight", name="devices"), cause="device", reason="7 answer"),
            "",
            (True, False),
        ),
    ],
)
def test_who_leaves(root: Failure, policy: str, expected: tuple[bool, bool]) -> None:
    verdict = Job(replace(RULES, policy=policy)).fail(root)
    assert (verdict.is_elsewhere, verdict.is_wanted) == expected
    ended = Job(VerdictRules(policy=policy)).fail(root)
    assert ended.final is not None
    assert ended.is_elsewhere == bool(root.check), "a spare in the place of a node with a finding uses no restart"


def test_restarts_of_one_cause_are_counted_until_there_is_progress() -> None:
    job = Job()
    seen = []
    for root in (crash(), crash(), crash(exception="KeyError: 'x'"), crash(), crash(step=1), crash()):
        job.fail(root)
        seen.append(job.restarts.repeats)
    assert seen == [1, 2, 1, 3, 1, 2]


def make_history(rng: random.Random) -> list[tuple[Failure, bool]]:
    """What the attempts of a job fail of, and whether each has really done a step.

    How a job's steps are seen is a matter of its script: it reports them, an optimizer of torch does them, or nothing
    sees them. Of those that are seen, another rank may have done them.
    """
    seen_by = rng.choice(("reports", "optimizer", "nothing"))
    causes = (*OUTSIDE, "crash", "unknown", "device-oom", "data", "usage", "hang")
    history: list[tuple[Failure, bool]] = []
    for _ in range(rng.randint(1, 8)):
        cause = rng.choice(causes)
        fault = crash(
            cause=cause,
            exception=rng.choice(("ValueError: 3", "ValueError: 4", "RuntimeError: x", None)),
            traceback=rng.choice((TRACEBACK, TRACEBACK.replace("12", "13"), None)),
            exit_code=rng.choice((1, 2, 77)),
            signal=rng.choice((None, "SIGKILL", "SIGSEGV")),
        )
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            has_stepped = rng.random() < 0.5
            is_own = rng.random() < 0.7
            failure = replace(
                fault,
                step=7 if has_stepped and is_own and seen_by == "reports" else None,
                optimizer_steps=7 if has_stepped and is_own and seen_by == "optimizer" else None,
                reports_steps=seen_by == "reports" and rng.random() < 0.9,
                early=cause == "usage" and not has_stepped and fault.signal is None,
            )
            history.append((failure, has_stepped))
    return history


def play(seed: int) -> str:
    """Play one job; "" if it was stopped rightly or not at all, else why it was stopped.

    A stop is wrong if a later attempt of the history does a step, but for the two documented rules: the last two
    attempts have failed of the same at the same place, which is the program's, and neither has really done a step.
    """
    rng = random.Random(seed)
    history, job = make_history(rng), Job(VerdictRules(max_restarts=10_000, stops_on_repeat=True))
    is_seen = any(each.reports_steps or each.step or each.optimizer_steps for each, _ in history)
    for number, (root, has_stepped) in enumerate(history):
        verdict = job.fail(root, has_stepped=has_stepped and is_seen and root.step is root.optimizer_steps is None)
        if verdict.final is None:
            continue
        last, had_stepped = history[number - 1] if number else (root, True)
        is_same = find_signature(last) == find_signature(root)
        is_documented = is_same and not had_stepped and not has_stepped and root.cause not in OUTSIDE
        return "" if is_documented or not any(each for _, each in history[number + 1 :]) else verdict.final.verdict
    return ""


def _is_stopped(seed: int) -> bool:
    job = Job(VerdictRules(max_restarts=10_000, stops_on_repeat=True))
    return any(job.fail(root).final is not None for root, _ in make_history(random.Random(seed)))


def test_no_job_is_stopped_that_a_later_attempt_would_have_finished() -> None:
    """But for the two documented rules, see `play`."""
    stopped = sum(1 for seed in range(500) if _is_stopped(seed))
    assert stopped > 25  # the histories are such that the rules apply
    wrong = {seed: why for seed in range(HISTORIES) if (why := play(seed))}
    assert wrong == {}
