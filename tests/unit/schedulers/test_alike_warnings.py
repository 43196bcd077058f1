"""Warnings that the nodes of a job write alike are printed once by a console that has the lines of all nodes."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.schedulers.runner.shown.alike_warnings import AlikeWarnings

HEADER = "/x/torch/a.py:368: UserWarning: no NumPy\n"
SOURCE = "  cpu = template()\n"


def name_rows(node: int, rows: list[str], local: int = 0) -> list[str]:
    """The rows as one rank of a node writes them."""
    return [f"[main{local}|n{node}.r{4 * node + local}]:{row}" for row in rows]


def print_all(*replicas: list[str]) -> list[list[str]]:
    """What is printed of each replica, one after the other."""
    warnings = AlikeWarnings()
    return [list(warnings.leave_out(lines)) for lines in replicas]


def test_the_first_replica_prints_it() -> None:
    rows = ["loads\n", HEADER, SOURCE, "step 1\n"]
    first, second = print_all(name_rows(0, rows), name_rows(1, rows))
    assert first == name_rows(0, rows)
    assert second == name_rows(1, ["loads\n", "step 1\n"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["step 1\n"], [HEADER, SOURCE]),  # one only
        ([HEADER, SOURCE], [HEADER.replace("no", "old"), SOURCE]),
        ([HEADER, SOURCE], [HEADER, "  another line\n"]),
        ([HEADER, SOURCE], [HEADER, "step 1\n"]),
        ([HEADER, "step 1\n", "  step 2\n"], [HEADER, "step 1\n", "  step 3\n"]),
        ([HEADER, "more\n", SOURCE], [HEADER, SOURCE]),
        ([SOURCE], [SOURCE]),
        ([HEADER, SOURCE], ["a.py:x: UserWarning: no NumPy\n", SOURCE]),
        ([HEADER], [HEADER, "step 1"]),  # what belongs to it cannot be known before the first replica's next line
    ],
)
def test_what_differs_is_printed(first: list[str], second: list[str]) -> None:
    assert print_all(name_rows(0, first), name_rows(1, second)) == [name_rows(0, first), name_rows(1, second)]


@pytest.mark.parametrize(
    "rows",
    [
        [HEADER, SOURCE],
        [HEADER, "more\n", "and more\n", SOURCE],
        [HEADER, HEADER.replace("no", "old"), SOURCE],
    ],
)
def test_warnings_of_one_and_of_several_rows(rows: list[str]) -> None:
    assert print_all(name_rows(0, rows), name_rows(1, rows), name_rows(2, rows)) == [name_rows(0, rows), [], []]


def test_each_attempt_prints_it_again() -> None:
    """The replica that writes it most often prints it as often."""
    once, twice = [HEADER, SOURCE], [HEADER, SOURCE, "starts again\n", HEADER, SOURCE]
    first, second, third = print_all(name_rows(0, once), name_rows(1, twice), name_rows(2, twice))
    assert (first, second) == (name_rows(0, once), name_rows(1, twice[2:]))
    assert third == name_rows(2, ["starts again\n"])


def test_lines_of_other_ranks_and_of_the_agent_stand_between() -> None:
    ranks = [name_rows(1, [HEADER, SOURCE]), ["[muster] a line\n"], name_rows(1, ["step 1\n", "  x\n"], local=1)]
    second = [ranks[0][0], *ranks[2], *ranks[1], ranks[0][1]]
    assert print_all(name_rows(0, [HEADER, SOURCE]), second)[1] == [*ranks[2], *ranks[1]]


def test_two_replicas_that_print_at_the_same_time() -> None:
    """The second is ahead: it holds back what may be the warning until its rank writes the next line."""
    warnings = AlikeWarnings()
    first = iter(warnings.leave_out(name_rows(0, [HEADER, SOURCE])))
    assert next(first) == name_rows(0, [HEADER])[0]
    late: Iterator[str] = warnings.leave_out(name_rows(1, [HEADER, SOURCE, "step 1\n"]))
    others: list[str] = []

    def follow() -> Iterator[str]:
        yield from name_rows(2, [HEADER, SOURCE])
        others.extend(first)  # now the first replica goes on
        yield from name_rows(2, ["step 1\n"])

    assert list(warnings.leave_out(follow())) == name_rows(2, ["step 1\n"])
    assert others == name_rows(0, [SOURCE])
    assert list(late) == name_rows(1, ["step 1\n"])


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([HEADER, SOURCE, "step 1\n", "  x\n"])), max_size=40))
def test_one_replica_alone_loses_nothing(rows: list[tuple[int, str]]) -> None:
    lines = [line for local, row in rows for line in name_rows(0, [row], local)]
    shown = AlikeWarnings().leave_out(lines)
    assert [next(shown) for _ in lines] == lines, "each at once"


@given(st.lists(st.lists(st.sampled_from([HEADER, SOURCE, "step 1\n", "  x\n"]), max_size=12), min_size=2, max_size=3))
def test_only_what_another_has_printed_is_left_out(replicas: list[list[str]]) -> None:
    """All that any replica wrote is there, and each warning as often as in the replica that has most of it."""
    shown = [row.partition("]:")[2] for rows in print_all(*map(name_rows, range(3), replicas)) for row in rows]
    assert set(shown) == {row for rows in replicas for row in rows}
    assert shown.count(HEADER) >= max(rows.count(HEADER) for rows in replicas)
