"""Files and messages of another format: each reader refuses them in a line that names it and both numbers."""

import base64
import contextlib
import json
import os
import zlib
from pathlib import Path

import pytest
from doubles.job_records import Agent
from torchx.specs import AppDef, AppState

from muster._shared.contract import FORMAT, FormatError, check_format
from muster.agent.rendezvous.protocol.framing import build_frame
from muster.agent.rendezvous.protocol.handshake import Codec
from muster.cli.history.sources import parse_files
from muster.schedulers.failure_report import RecordReader, parse_report
from muster.schedulers.kubernetes.manifests.bundles import decode_app
from muster.schedulers.local import create_detached_scheduler
from muster.schedulers.runner.app_codec import dump_app, load_app
from muster.schedulers.slurm import client as slurm_client
from muster.schedulers.slurm import create_scheduler as create_slurm_scheduler
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

pytestmark = pytest.mark.torchx

NEXT = FORMAT + 1
REFUSED = f"is of another version of muster: it has format {NEXT}, and format {FORMAT} is needed"


def read_app_file(name: str, folder: Path) -> str:
    app = AppFolder(folder)
    app.state_dir.mkdir()
    (app.state_dir / name).write_text(json.dumps({"format": NEXT}))
    return refuse(app.read_spec if name == "spec.json" else app.read_record)


def refuse(read) -> str:
    with pytest.raises(Exception, match="another version") as caught:
        read()
    return str(caught.value)


def read_annotation(_: Path) -> str:
    text = base64.b64encode(zlib.compress(json.dumps({"format": NEXT}).encode())).decode()
    job = {"kind": "Job", "metadata": {"name": "a-w", "annotations": {"muster.torchx/appdef": text}}}
    return refuse(lambda: decode_app(job))


def read_records(_: Path) -> str:
    agent = Agent(index=0, name="a", clock_s=0.0)
    agent.write(0.0, "notice", text="one")
    line = json.dumps({**agent.lines[0], "format": NEXT}).encode()
    return refuse(lambda: parse_files(iter([("run/events.jsonl", agent.print_lines() + line)])))


def read_status(_: Path) -> str:
    return RecordReader(lambda _names: (b"", json.dumps({"format": NEXT, "step": 5}).encode())).job.trouble[0].text


def read_report(_: Path) -> str:
    report = parse_report(json.dumps({"format": NEXT, "failures": []}))
    return "" if report is None else report.reason


def read_hello(_: Path) -> str:
    server = Codec(None, is_server=True, write=bytearray().extend)
    hello = json.dumps({"hello": NEXT, "auth": False}).encode()
    return refuse(lambda: list(server.receive(build_frame(hello))))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda folder: read_app_file("spec.json", folder), "{folder}/.muster/spec.json"),
        (lambda folder: read_app_file("state.json", folder), "{folder}/.muster/state.json"),
        (lambda _: refuse(lambda: load_app({**dump_app(AppDef("a")), "format": NEXT})), "the description of the app"),
        (read_annotation, "Job a-w: the description of the app"),
        (read_records, "run/events.jsonl"),
        (read_status, "the agents' status"),
        (read_report, "the agents' report"),
        (read_hello, "the node that joins"),
    ],
    ids=["spec", "state", "description", "annotation", "events", "status", "report", "hello"],
)
def test_another_format_is_refused_in_a_line(read, name: str, tmp_path: Path) -> None:
    assert read(tmp_path) == f"{name.format(folder=tmp_path)} {REFUSED}"


@pytest.mark.parametrize("name", ["detached", "slurm"])
def test_an_app_of_another_format_hides_no_other(name: str, tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(
        slurm_client, "list_jobs", lambda _name, _ids: [slurm_client.QueueEntry(job_id="7", state="RUNNING")]
    )
    registry = AppRegistry(find_state_dir(os.environ), name)
    for app_id in ("ours", "theirs"):
        details = {"shared": True, "replicas": {}}
        folder = AppFolder(tmp_path / app_id)
        folder.create(
            AppSpec(
                app_id=app_id,
                scheduler=name,
                folder=str(folder.path),
                driver="",
                roles=(),
                grace_s=1.0,
                details=details,
            )
        )
        registry.add(app_id, folder.path)
    folder.spec_file.write_text(json.dumps({"format": NEXT}))
    scheduler = {"detached": create_detached_scheduler, "slurm": create_slurm_scheduler}[name]("test")
    with contextlib.closing(scheduler):
        found = {app.app_id: app.state for app in scheduler.list()}
        assert found.pop("theirs") is AppState.UNKNOWN
        assert found == {"ours": AppState.RUNNING if name == "slurm" else AppState.SUBMITTED}
        assert [*scheduler.find_leftovers()] == []
    assert f"theirs: {folder.spec_file} {REFUSED}" in caplog.text


@pytest.mark.parametrize(
    ("found", "told"),
    [(None, "no format number"), ("1", "format 1,"), (True, "format True"), (1.0, "format 1.0"), ("x" * 99, "x" * 20)],
)
def test_what_is_no_number_is_none_of_ours(found: object, told: str) -> None:
    with pytest.raises(FormatError, match=rf"^f is .* {told}.* needed$"):
        check_format(found, "f")
    check_format(FORMAT, "f")
