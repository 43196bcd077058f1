"""The -j grammar: everything it accepts round-trips, everything else is refused in one line with a valid example."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torchx.specs.finder import ComponentValidationException

from muster.components.topology import COUNTED_PROCESSES, Bare, Host, Topology, parse_topology

DIGITS = set("0123456789")
COUNTS = st.integers(min_value=1, max_value=16384)
NUMBERS = st.builds(lambda zeros, number: "0" * zeros + str(number), st.integers(0, 2), st.integers(0, 40))
PROCESSES = st.one_of(NUMBERS, st.sampled_from(COUNTED_PROCESSES))
HOSTS = st.one_of(st.none(), st.builds(Host, label=st.just("-h some.host"), gpus=st.integers(-1, 16)))
FULLWIDTH_TWO = "\uff12"
WRONG_WORDS = ("X", "-", "+", " ", "\n", "_", "²", "٣", FULLWIDTH_TWO)
NEAR_MISSES = st.lists(
    st.one_of(NUMBERS, st.sampled_from((":", "x", *COUNTED_PROCESSES, *WRONG_WORDS))), max_size=6
).map("".join)

SMALL = st.integers(0, 4)  # so that the limits themselves occur
ANYTHING = st.one_of(
    st.text(), NEAR_MISSES, st.builds("{}x{}".format, SMALL, SMALL), st.builds("{}:{}x{}".format, SMALL, SMALL, SMALL)
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    low, high = sorted((draw(COUNTS), draw(COUNTS)))
    processes = draw(st.one_of(COUNTS.map(str), st.sampled_from(COUNTED_PROCESSES)))
    return Topology(min_nodes=low, max_nodes=high, processes=processes)


def is_right(j: str) -> bool:
    """The grammar once more, by hand: [[MIN:]N x] M with 1 <= MIN <= N, and N and M up to 16384."""
    nodes, x, processes = j.rpartition("x")
    low, colon, high = nodes.rpartition(":")
    if not x:
        high = "1"
    if not colon:
        low = high
    if processes in COUNTED_PROCESSES:
        processes = "1"
    if any(not part or set(part) - DIGITS for part in (low, high, processes)):
        return False
    return 1 <= int(low) <= int(high) <= 16384 and 1 <= int(processes) <= 16384


@given(topologies())
def test_what_is_accepted_round_trips(topology: Topology) -> None:
    assert parse_topology(str(topology)) == topology


@given(j=ANYTHING, bare=st.sampled_from(Bare), host=HOSTS)
@example(j="4:2x8", bare=Bare.PROCESSES, host=None)
@example(j="2x4\n", bare=Bare.PROCESSES, host=None)
@example(j="0", bare=Bare.NODES, host=None)
@example(j="0x8", bare=Bare.NODES, host=Host(label="-h gpu.small", gpus=1))
@example(j="1" * 5000, bare=Bare.PROCESSES, host=None)
def test_everything_else_is_refused_in_one_line_with_an_example_that_is_accepted(j, bare, host) -> None:
    refusal: ValueError | None = None
    try:
        topology = parse_topology(j, bare=bare, host=host)
    except ValueError as error:
        refusal = error
    if refusal is None:
        assert is_right(j)
        assert topology == parse_topology(str(topology), bare=bare, host=host)
        return
    assert isinstance(refusal, ComponentValidationException)
    line = str(refusal)
    assert len(line.splitlines()) == 1
    assert line.isascii()
    right = re.search(r"; for example: -j (\S+)$", line)
    parse_topology(right[1], bare=bare, host=host)


@given(ANYTHING)
def test_without_a_host_exactly_the_grammar_is_accepted(j: str) -> None:
    if is_right(j):
        parse_topology(j)
    else:
        with pytest.raises(ValueError):
            parse_topology(j)


@pytest.mark.parametrize(
    ("j", "min_nodes", "max_nodes", "processes"),
    [
        ("4", 1, 1, "4"),
        ("gpu", 1, 1, "gpu"),
        ("2x4", 2, 2, "4"),
        ("1:4x8", 1, 4, "8"),
        ("3:3x1", 3, 3, "1"),
        ("02x008", 2, 2, "8"),
        ("2xauto", 2, 2, "auto"),
        ("1:2xcpu", 1, 2, "cpu"),
    ],
)
def test_reads(j: str, min_nodes: int, max_nodes: int, processes: str) -> None:
    assert parse_topology(j) == Topology(min_nodes=min_nodes, max_nodes=max_nodes, processes=processes)


@pytest.mark.parametrize(
    ("j", "shown", "problem"),
    [
        ("4:2x8", "'4:2x8'", "minimum of 4 nodes, more than the 2"),
        ("2x0", "'2x0'", "0 processes"),
        ("0x4", "'0x4'", "0 nodes"),
        ("0:2x4", "'0:2x4'", "minimum of 0 nodes"),
        ("2x4\n", r"'2x4\n'", "plain digits"),
        (f"{FULLWIDTH_TWO}x4", r"'\uff12x4'", "plain digits"),
        ("-1x2", "'-1x2'", "plain digits"),
        (" 2x4", "' 2x4'", "plain digits"),
        ("2X4", "'2X4'", "plain digits"),
        ("2:4", "'2:4'", "plain digits"),
        ("65536x1", "'65536x1'", "above 16384"),
        ("1x65536", "'1x65536'", "above 16384"),
        ("", "''", "plain digits"),
    ],
)
def test_says_what_is_wrong(j: str, shown: str, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_topology(j)
    line = str(caught.value)
    assert line.startswith(f"-j {shown} ")
    assert problem in line
    assert line.endswith("; for example: -j 2x4")


def test_a_value_that_is_not_a_string_is_named() -> None:
    with pytest.raises(ValueError, match=r"^-j 4 .*: -j 2x4$"):
        parse_topology(4)  # type: ignore[arg-type]


def test_a_bare_number_of_nodes_takes_processes_from_the_host() -> None:
    host = Host(label="-h aws_p4d.24xlarge", gpus=8)
    assert parse_topology("2", bare=Bare.NODES, host=host) == Topology(min_nodes=2, max_nodes=2, processes="8")


CPU_HOST = Host(label="-h cpu.small", gpus=0)


@pytest.mark.parametrize(
    ("j", "bare", "host", "facts"),
    [
        ("2", Bare.NODES, CPU_HOST, ["-h cpu.small", "no GPUs"]),
        ("2", Bare.NODES, None, ["without -h"]),
        ("2x9", Bare.PROCESSES, Host(label="-h big", gpus=8), ["9 processes", "8 GPUs", "-h big"]),
        ("2xgpu", Bare.PROCESSES, CPU_HOST, ["-h cpu.small", "no GPUs"]),
    ],
)
def test_a_host_without_as_many_gpus_is_named(j: str, bare: Bare, host: Host | None, facts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_topology(j, bare=bare, host=host)
    assert [fact for fact in facts if fact not in str(caught.value)] == []
    assert str(caught.value).endswith("-j 2x4")


@pytest.mark.parametrize("host", [CPU_HOST, Host(label="-h NULL", gpus=-1)])
def test_a_host_without_gpus_accepts_any_number_of_processes(host: Host) -> None:
    assert parse_topology("2x9", host=host).processes == "9"
