"""The line that says what cannot be sent to workers: it names the part and the reason, and shows no value."""

import functools
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import process, resource_tracker
from typing import Any

import pytest

from muster.agent.errors import UsageError
from muster.elastic import PickleFault, launch
from muster.elastic.jobs import job
from muster.elastic.jobs.call import build_payload
from muster.elastic.jobs.rank_call import RankCall

SECRET = "hunter2"


class Holder:
    """Cannot be pickled, and shows what it holds."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Holder(password={SECRET!r})"


def train(*_args: object, **_kwargs: object) -> None:
    """Is never called here."""


def build_rank_call(function: Callable[..., Any], *args: object) -> RankCall:
    variables = {"API_TOKEN": SECRET}
    streams = {0: "", 1: ""}
    return RankCall(
        entrypoint=function,
        args={0: (SECRET,), 1: args},
        envs={0: variables, 1: variables},
        stdouts=streams,
        stderrs=streams,
        environ=variables,
    )


CALLS = {
    "argument 1 of train, a Holder,": (train, (SECRET, Holder()), {}),
    "argument 'model' of train, a Holder,": (train, (), {"key": SECRET, "model": Holder()}),
    "the function partial": (functools.partial(train, Holder(), SECRET), (), {}),
    "argument 0 of train for local rank 1, a Holder,": (build_rank_call(train, Holder()), (), {}),
    "the function partial of ranks": (build_rank_call(functools.partial(train, Holder())), (), {}),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_cannot_be_sent_is_named_without_its_value(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_tracker, "getfd", lambda: -1)  # it would start a process
    monkeypatch.setenv("ANOTHER_TOKEN", SECRET)
    with pytest.raises(PickleFault) as found:
        build_payload(*CALLS[what])
    line = str(found.value)
    assert "pickle '_thread.lock' object" in line
    assert SECRET not in line


def test_workers_do_not_import_a_program_that_python_has_read_from_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python - <<EOF` failed: no such file as <stdin>."""
    monkeypatch.setattr(resource_tracker, "getfd", lambda: -1)  # it would start a process
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    payload = build_payload(train, (), {})
    with os.fdopen(payload.call_fd, "rb") as file:
        file.seek(0)
        assert b"stdin" not in file.read()


def test_a_call_of_ranks_shows_no_environment() -> None:
    call = build_rank_call(train)
    assert (SECRET in repr(call), call.__qualname__) == (False, "train")


def test_a_worker_sets_only_the_variables_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others look as if the program set what torch reads at its import: a line would say so in each job."""
    own = {"LOCAL_RANK": "1", "OPENBLAS_CORETYPE": "Haswell", "KEPT": "1", "GONE": "1", "OTHER": "1"}
    monkeypatch.setattr(os, "environ", type(os.environ)(dict(own), str, str, str, str))
    changed: list[object] = []
    monkeypatch.setattr(os, "putenv", lambda name, value: changed.append((name, value)))
    monkeypatch.setattr(os, "unsetenv", changed.append)
    seen: dict[str, str] = {}
    call = replace(
        build_rank_call(lambda: seen.update(os.environ)),
        envs={1: {"OTHER": "2", "NEW": "1"}},
        environ={"LOCAL_RANK": "1", "OPENBLAS_CORETYPE": "Haswell", "KEPT": "1"},
    )
    call()
    assert seen == {"LOCAL_RANK": "1", "OPENBLAS_CORETYPE": "Haswell", "KEPT": "1", "OTHER": "2", "NEW": "1"}
    assert changed == ["GONE", ("OTHER", "2"), ("NEW", "1")]


def test_a_worker_starts_no_job_while_it_imports_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch with start_method="fork" at the top of the program ran once more in each worker."""
    monkeypatch.setattr(job, "AgentProcess", lambda *_args, **_kwargs: pytest.fail("it was started"))
    monkeypatch.setattr(process.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="starts a job"):
        job.Job(["true"], environ={})


UNSAFE = (
    "all_results=True with nodes=2 needs the variable MUSTER_TOKEN, a secret that is the same on all nodes, because "
    "results of other nodes are unpickled here, which can run any code"
)
PORT = "--rdzv-endpoint '127.0.0.1:99999': the port must be a number from 0 to 65535"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({}, "nodes=2 needs endpoint=, HOST:PORT of the leading node"),
        ({"endpoint": "127.0.0.1:99999"}, PORT),
        ({"endpoint": "127.0.0.1:1", "all_results": True, "env": {}}, UNSAFE),
    ],
    ids=str,
)
def test_values_of_several_nodes_that_cannot_work(more: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        launch(train, nodes=2, **more)
