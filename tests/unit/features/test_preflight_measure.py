"""What `--preflight full` says of the rates that were measured."""

import re

import pytest

from muster._shared.preflight import BANDWIDTH
from muster.agent.features.preflight import measure


def say(capsys: pytest.CaptureFixture[str], over_all: float, *results: tuple[float, float]) -> list[str]:
    rows = [[f"host-{node}", str(inner * 1e9), str(outer * 1e9)] for node, (inner, outer) in enumerate(results)]
    measure._print("nccl", 8 * len(rows), over_all * 1e9, rows)
    return capsys.readouterr().err.splitlines()


def test_a_slow_node_is_named_with_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    lines = say(capsys, 90.0, (400.0, 45.0), (410.0, 46.0), (120.0, 45.0))
    assert all(line.startswith("muster: preflight: ") for line in lines)
    assert [re.findall(r"\d+ ranks|node \d|host-\d|\d+ GB/s", line) for line in lines] == [
        ["24 ranks", "90 GB/s"],
        ["node 0", "400 GB/s", "node 1", "410 GB/s", "node 2", "120 GB/s"],
        ["node 2", "host-2", "120 GB/s", "400 GB/s"],
        ["node 0", "45 GB/s", "node 1", "46 GB/s", "node 2", "45 GB/s"],
    ]
    assert lines[2].endswith(measure._ADVICE)


def test_the_advice_is_that_of_the_table() -> None:
    assert BANDWIDTH.advice == measure._ADVICE


def test_many_nodes_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    lines = say(capsys, 90.0, *[(400.0 + node, 45.0) for node in range(20)], (400.0, 5.0))
    assert re.findall(r"(\d+) GB/s", lines[1]) == ["400", "419", "409"], "least, most, median"
    assert [line for line in lines if "20 (host-20): 5 GB/s between" in line]


def test_one_rank_alone_has_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert say(capsys, 0.0, (0.0, 0.0)) == []


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8])
def test_every_node_measures_with_a_neighbour_and_both_of_a_pair_agree(nodes: int) -> None:
    calls: dict[int, list[tuple[str, int]]] = {}

    def measure_node(node: int) -> float:
        def run(name: str, place: int, size: int) -> float:
            assert size == 2
            calls.setdefault(node, []).append((name, place))
            return 1.0

        return measure._measure_pairs(run, node, nodes)

    assert all(measure_node(node) == 1.0 for node in range(nodes))
    places: dict[str, list[int]] = {}
    for own in calls.values():
        for name, place in own:
            places.setdefault(name, []).append(place)
    assert all(sorted(each) == [0, 1] for each in places.values())
