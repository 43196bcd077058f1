"""Log lines and progress bars on one terminal."""

import io
import threading
from pathlib import Path

from terminal import render

from muster.elastic import DEFAULT_ROLE, IS_WINDOWS
from muster.elastic.tail import Screen, TailLog, tail_logfile


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tail(texts: list[list[str]], folder: Path) -> list[list[str]]:
    """Append texts to files in turns; what the terminal shows after each turn, and at the end."""
    terminal, screen = Terminal(), Screen()
    files = {rank: str(folder / str(rank)) for rank in range(len(texts[0]))}
    tailer = TailLog("t", files, terminal, screen=screen)
    seen = []
    for turn in texts:
        for rank, text in enumerate(turn):
            with open(files[rank], "a") as file:
                file.write(text)
        for each in tailer._tails:
            each.read()
        seen.append(render(terminal.getvalue()))
    for each in tailer._tails:
        each.close()
    return [*seen, render(terminal.getvalue())]


def test_every_file_has_a_row_for_its_bar_below_the_lines(tmp_path: Path) -> None:
    assert tail(
        [
            ["one\n 10%|#", "\r 20%|##"],
            ["\r 30%|###", "\ra line\n\r 40%|####"],
            ["\r100%|##########\nthe end\n", "\r100%|####"],
        ],
        tmp_path,
    ) == [
        ["[t0]:one", "[t1]: 20%|##"],
        ["[t0]:one", "[t1]:a line", "[t1]: 40%|####", "[t0]: 30%|###"],
        ["[t0]:one", "[t1]:a line", "[t0]:100%|##########", "[t0]:the end", "[t1]:100%|####"],
        ["[t0]:one", "[t1]:a line", "[t0]:100%|##########", "[t0]:the end", "[t1]:100%|####", ""],
    ]


def test_two_streams_to_one_terminal_share_the_rows(tmp_path: Path) -> None:
    terminal, screen = Terminal(), Screen()
    logs = [TailLog("t", {0: str(tmp_path / name)}, terminal, screen=screen) for name in ("stdout", "stderr")]
    (tmp_path / "stderr").write_text("\r 50%|##")
    (tmp_path / "stdout").write_text("a line\n")
    for log in reversed(logs):
        log._tails[0].read()
    assert render(terminal.getvalue()) == ["[t0]:a line", "[t0]: 50%|##"]


def test_a_bar_of_hours_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "0"
    log = TailLog("t", {0: str(file)}, Terminal())
    for step in range(1000):
        with file.open("a") as stream:
            stream.write(f"\r{step:3}|{'#' * 60}")
        log._tails[0].read()
    assert len(log._tails[0]._rest) < 200


def test_without_a_terminal_only_the_last_state_is_printed(tmp_path: Path) -> None:
    plain = io.StringIO()
    (tmp_path / "0").write_text("\r 10%\r 20%\r100%\nend")
    log = TailLog("t", {0: str(tmp_path / "0")}, plain).start()
    log.stop()
    assert (log.stopped(), plain.getvalue()) == (True, "[t0]:100%\n[t0]:end\n")


def test_a_filter_applies_to_bars_too(tmp_path: Path) -> None:
    terminal = Terminal()
    (tmp_path / "0").write_text("keep\ndrop\n\rdrop 10%")
    TailLog("t", {0: str(tmp_path / "0")}, terminal, log_line_filter=lambda line: "keep" in line).start().stop()
    assert terminal.getvalue() == "[t0]:keep\n"


def test_a_program_with_a_bar_of_its_own_clears_it_first(tmp_path: Path) -> None:
    plain = io.StringIO()
    (tmp_path / "0").write_text("a line\n")
    events = {"trigger_clear": threading.Event(), "cleared": threading.Event()}
    seen: list[str] = []

    def own_the_bar() -> None:
        assert events["trigger_clear"].wait(60)
        seen.append(plain.getvalue())
        events["cleared"].set()

    owner = threading.Thread(target=own_the_bar)
    owner.start()
    TailLog("t", {0: str(tmp_path / "0")}, plain, 0.1, events).start().stop()
    owner.join()
    assert (seen, plain.getvalue(), events["trigger_clear"].is_set()) == ([""], "[t0]:a line\n", False)


def test_tail_logfile_has_both_orders_of_arguments(tmp_path: Path) -> None:
    file, finished, lock = tmp_path / "0", threading.Event(), threading.Lock()
    file.write_text("keep\ndrop\n")
    finished.set()
    cleared = threading.Event()
    cleared.set()

    class Locked(io.StringIO):
        def write(self, text: str) -> int:
            assert lock.locked()
            return super().write(text)

    torchs, ices = io.StringIO(), Locked()
    tail_logfile("[0]:", str(file), torchs, finished, 0.1, lambda line: "keep" in line)
    events = {"trigger_clear": threading.Event(), "cleared": cleared}
    tail_logfile("", str(file), ices, finished, 0.1, lock, events)
    assert (torchs.getvalue(), ices.getvalue()) == ("[0]:keep\n", "keep\ndrop\n")
    tail_logfile(
        header="", file=str(file), dst=ices, finished=finished, interval_sec=0.1, lock=lock, progbar_events=events
    )
    assert ices.getvalue() == "keep\ndrop\n" * 2


def test_constants_of_torch() -> None:
    assert (IS_WINDOWS, DEFAULT_ROLE) == (False, "default")
