"""Where streams go, the prefixes of their lines, and the names of the folders."""

import os
import re
import socket
from pathlib import Path

import pytest
from doubles.samples import make_round

from muster.agent.cli.help_text import format_help_all
from muster.agent.config import LogConfig, Std, StdChoice
from muster.agent.logs.files import LogFile, RunFolder, build_log_path
from muster.agent.logs.lines import build_prefix
from muster.agent.logs.routing import DISCARDED, INHERITED, StreamRoute, route_stream


def make_config(**changes: object) -> LogConfig:
    return LogConfig(**{"base_dir": "/logs", **changes})


TEE = StdChoice(default=Std.ALL)
OUT_LOG = "/a/0/stdout.log"


@pytest.mark.parametrize(
    ("config", "attempt_dir", "route"),
    [
        (make_config(), "/a", INHERITED),
        (make_config(redirects=TEE), "/a", StreamRoute(captured=True, path=OUT_LOG)),
        (make_config(tee=TEE), "/a", StreamRoute(captured=True, path=OUT_LOG, to_console=True)),
        (make_config(tee=StdChoice(default=Std.ERR)), "/a", INHERITED),
        (make_config(tee=StdChoice(by_rank={1: Std.ALL})), "/a", INHERITED),
        (
            make_config(tee=StdChoice(by_rank={0: Std.OUT})),
            "/a",
            StreamRoute(captured=True, path=OUT_LOG, to_console=True),
        ),
        (make_config(local_ranks_filter=frozenset({1})), "/a", DISCARDED),
        (make_config(local_ranks_filter=frozenset({1}), tee=TEE), "/a", StreamRoute(captured=True, path=OUT_LOG)),
        (
            make_config(tee=TEE, duplicate_stdout_filters=("x",)),
            "/a",
            StreamRoute(captured=True, path=OUT_LOG, to_console=True, filtered_path="/a/filtered_stdout.log"),
        ),
        (make_config(redirects=TEE, duplicate_stdout_filters=("x",)), "/a", StreamRoute(captured=True, path=OUT_LOG)),
        (make_config(redirects=TEE), None, StreamRoute(captured=True, to_console=True)),
        (make_config(tee=TEE, duplicate_stdout_filters=("x",)), None, StreamRoute(captured=True, to_console=True)),
    ],
)
def test_route_of_stdout_of_rank_0(config: LogConfig, attempt_dir: str | None, route: StreamRoute) -> None:
    assert route_stream(config, Std.OUT, 0, attempt_dir) == route


def test_stderr_of_a_silent_rank_is_kept_for_the_report() -> None:
    config = make_config(local_ranks_filter=frozenset({1}))
    assert route_stream(config, Std.ERR, 0, "/a") == StreamRoute(captured=True)


def test_prefixes() -> None:
    one = make_round()
    two = make_round(group_world_size=2, group_rank=1, rank_offset=4, node_index=7, attempt=2, number=9, world_size=8)
    assert build_prefix(role="trainer", local_rank=1, round=one) == b"[trainer1]:"
    assert build_prefix(role="v2", local_rank=1, round=one) == b"[v2:1]:"  # it was [v21]:
    assert build_prefix(role="", local_rank=1, round=one) == b"[1]:"
    assert build_prefix(role="trainer", local_rank=1, round=two) == b"[trainer1|n1.r5]:"
    template = "<${role_name} ${rank} ${local_rank} ${global_rank} ${node} ${node_index} ${nodes} ${attempt} ${other}>"
    template += "${hostname}"
    filled = f"<t 5 1 5 1 7 2 2 ${{other}}>{socket.gethostname()}"
    assert build_prefix(role="t", local_rank=1, round=two, template=template) == filled.encode()


def test_help_names_the_variables_of_a_prefix_template() -> None:
    about = re.search(r"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE or.*?\n\n", format_help_all(), re.DOTALL)
    names = set(re.findall(r"\$\{\w+\}", about[0]))
    torchruns = {"${role_name}", "${local_rank}", "${rank}", "${hostname}"}
    assert names >= torchruns | {"${node}", "${node_index}", "${nodes}", "${world_size}", "${attempt}", "${round}"}
    filled = build_prefix(role="t", local_rank=1, round=make_round(), template=" ".join(names))
    assert b"$" not in filled


def test_one_node_has_the_plain_layout_and_appends_within_an_attempt(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "job")
    first = folder.open_attempt(make_round(), 2)
    assert first == str(tmp_path / "job/attempt_0")
    Path(build_log_path(first, 1, Std.ERR)).write_text("kept")
    assert folder.open_attempt(make_round(number=2), 2) == first
    assert Path(first, "1/stderr.log").read_text() == "kept"
    assert folder.open_attempt(make_round(number=3, attempt=1), 2) == str(tmp_path / "job/attempt_1")
    folder.close()


def test_agents_that_share_a_folder_never_share_a_file(tmp_path: Path) -> None:
    nodes = [
        RunFolder(str(tmp_path), "job").open_attempt(make_round(group_world_size=2, node_index=index), 1)
        for index in (0, 1)
    ]
    assert nodes == [str(tmp_path / f"job/node_{index}/attempt_0") for index in (0, 1)]


def test_a_second_live_agent_with_the_same_id_gets_another_folder(tmp_path: Path) -> None:
    first, second = RunFolder(str(tmp_path), "job"), RunFolder(str(tmp_path), "job")
    path = first.open_attempt(make_round(), 1)
    other = second.open_attempt(make_round(), 1)
    assert path != other
    assert Path(other).parent.parent == tmp_path / "job"
    first.close()
    second.close()


def list_latest(folder: Path) -> list[str]:
    return [os.readlink(path) for path in folder.iterdir() if path.name == "latest"]


def test_the_newest_attempt_has_a_link_where_a_person_has_named_the_folder(tmp_path: Path) -> None:
    for run_id, attempts in (("one", 2), ("two", 1)):
        folder = RunFolder(str(tmp_path), run_id, links_latest=True)
        for attempt in range(attempts):
            path = Path(folder.open_attempt(make_round(number=attempt + 1, attempt=attempt), 1))
            assert (tmp_path / "latest").resolve() == path
        folder.close()
    assert list_latest(tmp_path) == ["two/attempt_0"]
    assert {path.parent.name for path in tmp_path.glob("*/attempt_*")} == {"one", "two"}, "no run is found twice"
    RunFolder(str(tmp_path), "three").open_attempt(make_round(), 1)
    assert list_latest(tmp_path) == ["two/attempt_0"]


def test_of_several_nodes_the_link_names_the_first(tmp_path: Path) -> None:
    for index in (0, 1):
        there = make_round(group_world_size=2, group_rank=index, node_index=index)
        RunFolder(str(tmp_path), "job", links_latest=True).open_attempt(there, 1)
    assert list_latest(tmp_path) == ["job/node_0/attempt_0"]


def test_a_run_may_be_named_like_the_link(tmp_path: Path) -> None:
    RunFolder(str(tmp_path), "job", links_latest=True).open_attempt(make_round(), 1)
    path = Path(RunFolder(str(tmp_path), "latest", links_latest=True).open_attempt(make_round(), 1))
    assert path == tmp_path / "latest/attempt_0"
    assert not (tmp_path / "latest").is_symlink()
    assert list((tmp_path / "job/attempt_0").iterdir()) == [tmp_path / "job/attempt_0/0"]


def test_files_of_an_earlier_run_are_moved(tmp_path: Path) -> None:
    for text in ("one", "two", "three"):
        folder = RunFolder(str(tmp_path), "job")
        path = Path(folder.open_attempt(make_round(), 1), "0/stdout.log")
        assert not path.exists()
        path.write_text(text)
        folder.close()
    assert (tmp_path / "job/earlier_1/attempt_0/0/stdout.log").read_text() == "one"
    assert (tmp_path / "job/earlier_2/attempt_0/0/stdout.log").read_text() == "two"


def test_the_first_node_moves_an_earlier_report_of_several_nodes(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/report.json").write_text("old")
    folders = [RunFolder(str(tmp_path), "job") for _ in range(2)]
    for index in (1, 0):
        folders[index].open_attempt(make_round(group_world_size=2, group_rank=index, node_index=index), 1)
        assert (tmp_path / "job/report.json").exists() == (index == 1)
    assert (tmp_path / "job/node_0/earlier_1/report.json").read_text() == "old"
    for folder in folders:
        folder.close()


def test_an_agent_that_joins_a_running_job_moves_nothing(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "job")
    log = Path(folder.open_attempt(make_round(), 1), "0/stdout.log")
    log.write_text("old")
    folder.close()
    again = RunFolder(str(tmp_path), "job")
    again.open_attempt(make_round(number=2), 1)
    assert log.read_text() == "old"
    again.close()


def test_an_unused_temporary_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = RunFolder(None, "job")
    path = Path(folder.open_attempt(make_round(), 2))
    (path / "0/stacks.txt").write_text("--- stacks of process 7\n")
    (path.parent / "events.jsonl").write_text("{}")
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_used_temporary_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = RunFolder(None, "job")
    log = Path(folder.open_attempt(make_round(), 2), "0/stdout.log")
    log.write_text("x")
    folder.close()
    assert log.read_text() == "x"


def test_a_full_disk_is_reported_once_and_the_file_is_closed() -> None:
    reported: list[str] = []
    file = LogFile("/dev/full", reported.append)
    assert file.write(b"x") == 0
    assert file.write(b"y") == 0
    assert file.fd is None
    assert reported == ["cannot write /dev/full: No space left on device"]
