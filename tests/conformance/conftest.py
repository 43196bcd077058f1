"""The two launchers that every test of this folder runs, and the record of what torchrun cannot do.

Where torchrun passes we pass. Where it fails the test carries `@pytest.mark.fault(number, text)`: the number of the
fault in the compatibility notes, or a short name for one that is not in them. torchrun is then expected to fail, or,
with `recorded=True`, is not run at all, because it would hang for a minute or fails only now and then; the text records
what it did when last measured. MUSTER_MEASURE_TORCHRUN=1 (`make bench`) runs those as well, and is strict: a test that
torchrun passes one day fails. torchrun's half is not the subject of the tests: `make soak` runs it,
once, and its races on a busy machine get two more tries. muster's get none.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import Outcome, reserve_port
from launchers import MUSTER, TORCHRUN, Launcher, make_launcher


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torchrun's half run in `make soak` alone, and again when it fails."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and TORCHRUN in map(str, callspec.params.values()):
            item.add_marker(pytest.mark.flaky(reruns=2))
            item.add_marker(pytest.mark.long)


@pytest.fixture(params=[TORCHRUN, MUSTER])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Launcher:
    mark = request.node.get_closest_marker("fault")
    if mark is not None and request.param == TORCHRUN:
        reason = f"torchrun's fault {mark.args[0]}: {mark.args[1]}"
        if not mark.kwargs.get("recorded"):
            strict = os.environ.get("MUSTER_MEASURE_TORCHRUN") == "1"
            request.applymarker(pytest.mark.xfail(reason=reason, strict=strict))
        elif os.environ.get("MUSTER_MEASURE_TORCHRUN") != "1":
            pytest.skip(f"{reason} (recorded)")
        else:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
    return make_launcher(request.param, tmp_path)


@pytest.fixture
def muster(tmp_path: Path) -> Launcher:
    """muster alone, for what torchrun does not have."""
    return make_launcher(MUSTER, tmp_path)


@pytest.fixture
def free_port() -> Iterator[int]:
    with reserve_port() as port:
        yield port


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Outcome, Path]]:
    """Runs each command line of a module once per launcher, however many tests use it."""
    done: dict[tuple[Any, ...], tuple[Outcome, Path]] = {}

    def run(name: str, flags: Sequence[str], program: Sequence[str], **env: str) -> tuple[Outcome, Path]:
        key = (name, *flags, "|", *program, *sorted(env.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp(name)
            done[key] = (make_launcher(name, folder).run(flags, program, **env), folder)
        return done[key]

    return run
