"""A link to a node of a hold that cannot work for a reason of this machine."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.schedulers.held import link
from muster.schedulers.node_program.frames import LOST, STATE_NAME


def test_a_node_whose_link_finds_no_free_thread_is_lost_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its exit code 1 would mean that it must not be started again."""

    def start(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(link, "_SIGNALS", {})
    monkeypatch.setattr(link.signal, "set_wakeup_fd", lambda *_, **__: None)
    monkeypatch.setattr(link, "load_scheduler", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(link.threading.Thread, "start", start)
    hold = {"scheduler": "local_docker", "session": "s", "handle": "local_docker://s/lab", "app_id": "lab"}
    order = {"hold": hold, "index": 0, "others": [1], "gate": str(tmp_path / "gate"), "replica_dir": str(tmp_path)}
    made = link.HeldLink(order)
    try:
        assert made.run() == LOST
    finally:
        os.close(made._wake)
    [lost] = json.loads((tmp_path / STATE_NAME).read_text())["lost"]
    assert (lost["code"], lost["facts"]["job"]) == ("link_lost", "local_docker://s/lab")
