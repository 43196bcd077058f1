"""Where snapshots cannot be kept, or not all, one line says so, and the job goes on."""

import re
import sys
from pathlib import Path

import pytest
from harness import Outcome, Tree, run_tree
from memory_cgroup import join, memory_cgroup
from no_system_call import MEMFD_CREATE
from other_user import needs_two_users

TESTS = Path(__file__).parents[2]
PROGRAMS = TESTS / "programs" / "snapshots"
REFUSED = r"muster\.snapshots: .* (\S+ [MG]B) .* 3 states .* (\S+ [MG]B) .* (\S+ [MG]B) .* \(--snapshot-memory\).*"


def build(program: str, *words: str) -> list[str]:
    agent = [sys.executable, "-W", "ignore", "-m", "muster.agent", "--standalone", "--max-restarts", "1"]
    return [*agent, str(PROGRAMS / program), *words]


def list_lines(outcome: Outcome) -> list[str]:
    return [line for line in outcome.stderr.splitlines() if line.startswith("muster.snapshots: ")]


@pytest.mark.torch
def test_a_state_that_a_nearly_full_cgroup_has_no_room_for_is_refused_and_a_smaller_one_kept(tmp_path: Path) -> None:
    """Nothing is killed: 3 x 150 MB would be more than the group's limit."""
    with memory_cgroup(600 << 20) as group:
        outcome = run_tree(join(group, *build("states.py", "150000000", "2000000")), cwd=tmp_path).check()
    assert outcome.stdout == "rank 0 continues 15 right\nrank 0 done\n", outcome.explain()
    refused, continued = list_lines(outcome)
    size, total, allowed = re.fullmatch(REFUSED, refused).groups()  # type: ignore[union-attr]
    assert (size, total) == ("150 MB", "451 MB")
    assert 0 < float(allowed.split()[0]) < 0.4 * 630, outcome.explain()
    assert "from step 15, from" in continued


@pytest.mark.long
@pytest.mark.torch
def test_the_second_job_of_a_machine_gets_what_the_first_has_left(tmp_path: Path) -> None:
    """Alone, each would have room for three states of 90 MB: 0.4 of what is free."""
    with memory_cgroup(1200 << 20) as group:
        with Tree(join(group, *build("states.py", "90000000", "stay")), cwd=tmp_path) as first:
            first.wait_for_line("rank 0 stays")
            second = run_tree(join(group, *build("states.py", "90000000", "2000000")), cwd=tmp_path)
            (tmp_path / "go").touch()
            outcome = first.wait().check()
        assert list_lines(outcome) == [], outcome.explain()
        assert second.exit_code == 0, second.explain()
        refused, continued = list_lines(second)
        assert re.fullmatch(REFUSED, refused), second.explain()
        assert "from step 15, from" in continued


@pytest.mark.skipif(MEMFD_CREATE is None, reason="the number of memfd_create is not known for this machine")
def test_without_memory_files_one_line_says_so_and_the_job_goes_on(tmp_path: Path) -> None:
    """As under a seccomp profile that does not have the system call."""
    refuse = [sys.executable, str(TESTS / "no_system_call.py"), str(MEMFD_CREATE)]
    outcome = run_tree([*refuse, *build("stranger.py", "nothing")], cwd=tmp_path).check()
    assert outcome.stdout == "loaded None, and went on\n", outcome.explain()
    (line,) = [line for line in outcome.stderr.splitlines() if "no status page" in line]
    assert "no status page ([Errno 1] " in line


@pytest.mark.parametrize("how", [pytest.param("user", marks=needs_two_users), "namespace"])
def test_a_worker_that_cannot_open_the_agents_files_says_so_and_goes_on(how: str, tmp_path: Path) -> None:
    outcome = run_tree(build("stranger.py", how), cwd=tmp_path).check()
    if "no user namespaces here" in outcome.stdout:
        pytest.skip("no user namespaces here")
    assert outcome.stdout == "loaded None, and went on\n", outcome.explain()
    (line,) = list_lines(outcome)
    assert re.fullmatch(
        r"muster\.snapshots: .*\(\[Errno 13\] Permission denied.*\): nothing is kept.*",
        line,
    ), outcome.explain()
