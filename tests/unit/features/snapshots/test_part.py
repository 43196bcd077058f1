"""When a worker gets memory that outlives it, and when no node needs any."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.node_bench import Bench, open_bench

from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.snapshot_file import find_files, open_files
from muster.agent.features.snapshots.flags import SnapshotSettings
from muster.agent.rendezvous.protocol.handshake import Codec
from muster.agent.rendezvous.transport.stream import TcpStream

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which only Linux has")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Returns what `look` finds some seconds after `use`, in a round whose workers run."""

    def run_round(use: Callable[[Bench], None], look: Callable[[Bench], Any], **config: Any) -> Any:
        found = []

        def end() -> None:
            found.append(look(bench))
            for rank in (0, 1):
                bench.end_worker(rank, 0)

        with open_bench(monkeypatch, tmp_path, **config) as bench:
            bench.on("join", None, bench.form)
            bench.on("started", 1, lambda: [use(bench), bench.at(3.0, end)])
            bench.on("succeeded", 1, lambda: bench.end_job(succeeded=True))
            assert bench.run() == 0
        return found[0]

    return run_round


def get_page(bench: Bench) -> Any:
    return bench.supervisor._workers.page


def want(bench: Bench) -> None:
    get_page(bench)._words[Layout.MEMORY_WANTED] = 1


def open_as_worker(bench: Bench) -> Any:
    where = find_files(get_page(bench).build_env(1))
    return None if where is None else open_files(where)


def send_stream(bench: Bench) -> None:
    asked, ours = socket.socketpair()
    asked.close()
    stream = TcpStream(ours, Codec(None, is_server=True, write=lambda _: None))
    bench.supervisor._workers.parts.take_stream("snapshots", stream)


def test_a_worker_that_wants_memory_gets_it(run: Callable[..., Any]) -> None:
    files = run(want, open_as_worker)
    assert (files.local_rank, files.ranks) == (1, 2)


def test_it_does_so_also_where_another_node_has_sent_its_copy_before(run: Callable[..., Any]) -> None:
    assert run(lambda bench: [send_stream(bench), want(bench)], open_as_worker) is not None


def test_without_a_limit_that_allows_any_it_is_told_so(run: Callable[..., Any]) -> None:
    assert run(want, open_as_worker, features={"snapshots": SnapshotSettings(limit_bytes=0)}) is None


def test_without_a_worker_that_wants_any_there_is_none(run: Callable[..., Any]) -> None:
    assert run(lambda _: None, lambda bench: bench.supervisor._workers.parts._parts.get("snapshots")) is None
