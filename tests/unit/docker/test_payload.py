"""What is copied into containers: streamed, owned by the image's user, gone at the app's end."""

import io
import tarfile
import tracemalloc

import pytest
from docker_samples import build_app, build_container

from muster.schedulers.docker.container_body import DOCKERFILE, stream_context, stream_with_owner
from muster.schedulers.docker.running_apps.creation import (
    PackedWorkspaces,
    Payload,
    build_payload,
    read_payload,
    remove_payload,
)
from muster.schedulers.supervision.client import _put_file

LONG = "d" * 120 + "/" + "é" * 90


@pytest.fixture
def packed(tmp_path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / LONG).parent.mkdir()
    for name, content in (("a", b"x" * 513), ("empty", b""), ("deep/b", b"\0" * 512), (LONG, b"long")):
        (source / name).write_bytes(content)
    (source / "link").symlink_to("deep/b")
    workspaces = PackedWorkspaces()
    key = workspaces.pack(str(source), tmp_path)
    yield workspaces.files[key]
    workspaces.remove()


def read_tar(pieces):
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
        return {e.name: (e, archive.extractfile(e).read() if e.isreg() else None) for e in archive}


def test_entries_belong_to_the_images_user(packed):
    entries = read_tar(stream_with_owner(packed, (1000, 1001)))
    assert {(entry.uid, entry.gid, entry.uname, entry.gname) for entry, _ in entries.values()} == {(1000, 1001, "", "")}
    contents = {name: content for name, (_, content) in entries.items()}
    assert contents == {
        "a": b"x" * 513, "empty": b"", "deep": None, "deep/b": b"\0" * 512,
        "d" * 120: None, LONG: b"long", "link": None,
    }  # fmt: skip
    assert entries["link"][0].linkname == "deep/b"


def test_a_context_gets_a_dockerfile_if_it_has_none(tmp_path, packed):
    entries = read_tar(stream_context(packed, (1000, 1001)))
    assert entries[DOCKERFILE][1] == b"ARG IMAGE\nFROM $IMAGE\nCOPY --chown=1000:1001 . .\n"
    own = tmp_path / "own"
    own.mkdir()
    (own / DOCKERFILE).write_text("FROM mine")
    workspaces = PackedWorkspaces()
    key = workspaces.pack(str(own), tmp_path)
    assert {
        name: content for name, (_, content) in read_tar(stream_context(workspaces.files[key], (0, 0))).items()
    } == {DOCKERFILE: b"FROM mine"}
    workspaces.remove()


def test_a_large_workspace_is_streamed(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "weights", "wb") as file:
        file.truncate(64 << 20)
    workspaces = PackedWorkspaces()
    tracemalloc.start()
    key = workspaces.pack(str(source), tmp_path)
    assert workspaces.files[key].stat().st_size > 64 << 20, "not compressed: to a local engine that is lost time"
    sent_bytes = sum(len(piece) for piece in stream_with_owner(workspaces.files[key], (0, 0)))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sent_bytes > 64 << 20
    assert peak_bytes < 16 << 20
    workspaces.remove()


def test_a_payload_is_kept_beside_the_state_and_removed_with_the_app(tmp_path, packed):
    app = build_app(build_container(workspace="w.tar.gz"), build_container())
    made = build_payload(Payload(agent=b"zip", workspaces={"w.tar.gz": packed}))
    assert set(made) == {"muster-agent.zip", "w.tar.gz"}
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "muster-agent.zip").write_bytes(b"zip")
    _put_file(folder / "w.tar.gz", packed)
    assert read_payload(folder, app) == Payload(agent=b"zip", workspaces={"w.tar.gz": folder / "w.tar.gz"})
    remove_payload(folder, app)
    remove_payload(folder, app)
    assert list(folder.iterdir()) == []
    assert read_payload(folder, app).agent == b""  # a supervisor that was killed just then


def test_packed_workspaces_have_no_name_until_they_are_linked(tmp_path):
    """What a killed command has packed needs no removal, and a large workspace is not copied for its app."""
    source, home = tmp_path / "source", tmp_path / "home"
    source.mkdir()
    home.mkdir()
    workspaces = PackedWorkspaces()
    keys = {workspaces.pack(str(source), home) for _ in range(2)}
    assert len(keys) == len(workspaces.files) == 1
    assert list(home.iterdir()) == []
    (file,) = workspaces.files.values()
    _put_file(home / "linked", file)
    assert file.stat().st_ino == (home / "linked").stat().st_ino
    del workspaces
    assert not file.exists()
    assert (home / "linked").stat().st_size > 0
