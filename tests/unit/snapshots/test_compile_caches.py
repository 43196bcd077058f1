"""Compile caches between two nodes: what is sent, what is refused, and where files go."""

import os
import threading
import time

import pytest
from unit.snapshots.test_copies import open_streams

from muster.agent.rendezvous.protocol.framing import ProtocolError
from muster.agent.snapshots import compile_caches
from muster.agent.snapshots.compile_caches import fetch, find_folders, list_files, read_files, serve
from muster.agent.snapshots.transfer import TransferError


def fill(folder, path, content=b"x", age_s=60.0):
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    os.utime(file, (time.time() - age_s,) * 2)
    return file


def env_of(folder):
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


@pytest.fixture
def nodes(tmp_path):
    """The folders of a node that has caches, and of one that has none."""
    has, lacks = tmp_path / "has", tmp_path / "lacks"
    has.mkdir()
    lacks.mkdir()
    (has / "inductor").mkdir(mode=0o700)
    (has / "triton").mkdir(mode=0o700)
    return has, lacks


def exchange(has, lacks, serving=serve):
    """What the node that lacks files says."""
    mine, theirs = open_streams()
    refused = []

    def answer():
        try:
            serving(theirs, theirs.receive(), env_of(has))
        except (OSError, TransferError, ProtocolError) as error:
            refused.append(error)
        finally:
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    line = fetch(mine, "10.0.0.2", env_of(lacks))
    thread.join()
    return line, refused


def read_tree(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_node_gets_what_it_lacks_and_nothing_of_its_own_is_replaced(nodes):
    has, lacks = nodes
    big = os.urandom(200_000)
    fill(has / "inductor", "ab/cab.so", big).chmod(0o755)
    fill(has / "inductor", "fxgraph/xy/fxy/1", b"graph")
    fill(has / "triton", "K/kernel.cubin", b"code")
    fill(lacks / "inductor", "fxgraph/xy/fxy/1", b"mine")
    line, _ = exchange(has, lacks)
    assert line == "got 2 files (0.2 MB) of compile caches from 10.0.0.2"
    assert read_tree(lacks) == {
        "inductor/ab/cab.so": big,
        "inductor/fxgraph/xy/fxy/1": b"mine",
        "triton/K/kernel.cubin": b"code",
    }
    assert (lacks / "inductor/ab/cab.so").stat().st_mode & 0o777 == 0o700
    assert (lacks / "triton/K/kernel.cubin").stat().st_mode & 0o777 == 0o600
    assert exchange(has, lacks)[0] == "", "it lacks nothing now, as nodes that share a folder"


def test_what_may_not_be_whole_or_is_no_file_of_this_user_is_not_sent(nodes, tmp_path):
    has, _ = nodes
    fill(has / "inductor", "being-linked.so", age_s=0.0)
    fill(has / "inductor", ".1.2.tmp")
    fill(has / "inductor", "locks/a.lock")
    fill(has / "inductor", "empty", b"")
    fill(tmp_path / "elsewhere", "secret")
    (has / "inductor/link").symlink_to(tmp_path / "elsewhere/secret")
    (has / "inductor/folder").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(has / "inductor/pipe")
    fill(has / "inductor", "good")
    assert [each.path for each in list_files(find_folders(env_of(has)))] == ["good"]


def test_the_newest_files_are_sent_up_to_the_limit(nodes, monkeypatch):
    has, lacks = nodes
    monkeypatch.setattr(compile_caches, "LIMIT_BYTES", 1000)
    for number in range(5):
        fill(has / "inductor", f"file-{number}", bytes(400), age_s=100.0 - number)
    assert exchange(has, lacks)[0].startswith("got 2 files")
    assert set(read_tree(lacks)) == {"inductor/file-4", "inductor/file-3"}


@pytest.mark.parametrize("side", ["has", "lacks"])
@pytest.mark.parametrize("trouble", ["writable", "link"])
def test_a_folder_that_another_user_can_write_to_is_neither_read_nor_written(nodes, tmp_path, side, trouble):
    has, lacks = nodes
    fill(has / "inductor", "good")
    folder = tmp_path / side / "inductor"
    folder.mkdir(exist_ok=True)
    if trouble == "writable":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "real")
        folder.symlink_to(tmp_path / "real")
    assert exchange(has, lacks)[0] == ""
    assert read_tree(lacks) == {}


def test_a_link_in_the_cache_is_not_followed(nodes, tmp_path):
    has, lacks = nodes
    fill(has / "inductor", "sub/file")
    (tmp_path / "elsewhere").mkdir()
    (lacks / "inductor").mkdir(mode=0o700)
    (lacks / "inductor/sub").symlink_to(tmp_path / "elsewhere")
    assert exchange(has, lacks)[0] == ""
    assert read_tree(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/x", "a//b", "", ".", "a/./b", "a\nb", "a\0b", "é", "a" * 1024]
)
def test_hostile_paths_are_refused(path):
    with pytest.raises(TransferError, match="leaves"):
        read_files({"files": [["inductor", path, 1, False]]})


@pytest.mark.parametrize(
    "files",
    [
        None,
        [["other", "a", 1, False]],
        [["inductor", "a", -1, False]],
        [["inductor", "a", 1]],
        [["inductor", "a", 1, 0]],
        "abc",
        [["inductor", "a", compile_caches.LIMIT_BYTES + 1, False]],
        [["inductor", "a", 1, False]] * 10_001,
    ],
)
def test_lists_that_no_node_sends_are_refused(files):
    with pytest.raises(TransferError):
        read_files({"files": files})


def test_a_node_that_sends_other_bytes_than_it_says_leaves_no_file(nodes):
    has, lacks = nodes

    def lie(stream, _message, _env):
        stream.send({"files": [["inductor", "a/b", 4, False]]})
        assert stream.receive() == {"want": [0]}
        stream.send({"digest": "00" * 16, "same": False})
        stream.send_raw(memoryview(b"evil"))

    assert exchange(has, lacks, lie)[0] == ""
    assert read_tree(lacks) == {}


def test_a_file_that_changes_while_it_is_sent_is_not_kept(nodes, monkeypatch):
    has, lacks = nodes
    file = fill(has / "inductor", "a")
    send = compile_caches.send_extents

    def send_and_touch(*words, **more):
        send(*words, **more)
        file.write_bytes(b"y")

    monkeypatch.setattr(compile_caches, "send_extents", send_and_touch)
    assert exchange(has, lacks)[0] == ""
    assert read_tree(lacks) == {}


def test_a_node_of_another_kind_gets_nothing(nodes):
    has, lacks = nodes
    fill(has / "inductor", "good")
    line, refused = exchange(has, lacks, lambda stream, message, env: serve(stream, {**message, "machine": "x"}, env))
    assert line == ""
    assert "other processors" in str(refused[0])


def test_the_folders_are_those_that_torch_and_triton_use():
    mine = {"TMPDIR": "/scratch", "USER": "a/b", "HOME": "/home/ada"}
    assert find_folders(mine) == {"inductor": "/scratch/torchinductor_a_b", "triton": "/home/ada/.triton/cache"}
    assert find_folders({**mine, "TRITON_HOME": "/t"})["triton"] == "/t/.triton/cache"
    named = {"TORCHINDUCTOR_CACHE_DIR": "/i", "TRITON_CACHE_DIR": "/k"}
    assert find_folders({**mine, **named}) == {"inductor": "/i", "triton": "/k"}
