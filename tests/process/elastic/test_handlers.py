"""Rendezvous handlers that the caller made: torch's, and a class of the caller's own."""

from pathlib import Path

import pytest
from harness import Outcome, find_free_port
from launchers import run_api

# On a loaded machine importing torch takes a minute, and every job here does so.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


def run_scenario(scenario: str, folder: Path) -> Outcome:
    return run_api("handlers.py", scenario, str(find_free_port()), folder=folder, timeout_s=500)


def test_its_calls_run_in_the_caller(tmp_path: Path) -> None:
    outcome = run_scenario("own", tmp_path)
    assert outcome.stdout.splitlines() == [
        "asked in True True",
        "{0: ([0, 2, 0, 0, 0], 0), 1: ([1, 2, 0, 1, 1], 0)}",
    ], outcome.explain()


@pytest.mark.long
def test_two_nodes_with_torchs_handler(tmp_path: Path) -> None:
    outcome = run_scenario("nodes", tmp_path)
    ranks = [(rank, ([rank, 4, rank // 2, rank % 2, rank], 0)) for rank in range(4)]
    assert outcome.stdout == f"{ranks}\n", outcome.explain()
