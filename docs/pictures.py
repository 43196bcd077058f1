"""Makes the pictures of a terminal in `static/` from jobs that it runs: a recovery, a hang, and `muster top`.

    python docs/pictures.py [FOLDER [NAME]]

What a picture shows is what the commands print; paths of this machine are shortened, and a row of dots says where lines
are left out.
"""

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI as DARK
from rich.terminal_theme import TerminalTheme
from rich.text import Text

WIDTH = 106
MARGIN = 16
LIGHT = TerminalTheme(
    (250, 250, 250),
    (40, 40, 40),
    [
        *((40, 40, 40), (180, 30, 30), (20, 120, 50), (140, 100, 0)),
        *((30, 80, 170), (130, 50, 140), (0, 110, 120), (90, 90, 90)),
    ],
)
SVG = """<svg viewBox="0 0 {terminal_width} {terminal_height}" role="img" xmlns="http://www.w3.org/2000/svg">
<title>TITLE</title>
<style>
.ground {{ fill: LIGHT }}
.{unique_id}-matrix {{
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
}}
{styles}
@media (prefers-color-scheme: dark) {{
.ground {{ fill: DARK }}
STYLES
}}
</style>
<defs>{lines}</defs>
<rect class="ground" width="100%" height="100%" rx="8" />
<g class="{unique_id}-matrix">{backgrounds}{matrix}</g>
</svg>
"""

HANGS = """\
import queue
import threading

import torch
import torch.distributed as dist

batches = queue.Queue(maxsize=8)


def load():
    for n in range(100 if dist.get_rank() == 1 else 1000):  # rank 1 has less data
        batches.put(torch.full((4,), float(n)))


dist.init_process_group("gloo")
threading.Thread(target=load, daemon=True).start()
for step in range(1000):
    batch = batches.get()
    dist.all_reduce(batch)
"""
TRAINS = """\
import os
import time

import torch
import torch.distributed as dist

from muster import worker

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first = 60 if attempt else 1  # what a checkpoint would say
for step in range(first, 501):
    time.sleep(0.09 if rank == 3 else 0.05)
    if rank == 5 and step == 80 and not attempt:
        raise ValueError("loss is not finite at step 80")
    loss = torch.tensor([4 / step ** 0.4 + 0.05])
    dist.all_reduce(loss)
    worker.step(step, total=500, loss=loss.item() / dist.get_world_size())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item() / dist.get_world_size():.3f}", flush=True)
"""


RECOVERS = """\
import os
import time

import torch
import torch.distributed as dist

from muster import snapshots, worker

dist.init_process_group("gloo")
rank, model = dist.get_rank(), torch.zeros(4)
open(f"rank{rank}.pid", "w").write(str(os.getpid()))
start = snapshots.load(into={"model": model})
for step in range(start.step + 1 if start else 0, 200):
    time.sleep(0.05)
    dist.all_reduce(model)
    worker.step(step, total=200)
    snapshots.save(step, {"model": model}, replicated=True)
    if rank == 0 and step % 25 == 0:
        print(f"step {step}", flush=True)
"""


def show_recovery(folder: Path) -> list[str]:
    """Show a job of which one rank is killed twice: it goes on, and then ends with a report."""
    (folder / "train.py").write_text(RECOVERS)
    line = "muster-agent --standalone --nproc-per-node 4 --max-restarts 1 train.py"

    def kill() -> None:
        path = folder / "rank2.pid"
        for _ in range(2):
            while not path.exists():
                time.sleep(0.1)
            time.sleep(3)
            os.kill(int(path.read_text()), signal.SIGKILL)
            path.unlink()

    threading.Thread(target=kill, daemon=True).start()
    left_out = r"\[muster\] (step|restarting)|.*\[rank\d\]:"  # redrawn progress, and what the other ranks' torch says
    told = [each for each in run_on_terminal(line.split(), folder) if not re.match(left_out, each)]
    report = next(n for n, each in enumerate(told) if "JOB FAILED" in each) - 1
    rest = next(n for n, each in enumerate(told) if each.startswith("Ended because of it"))
    return [f"$ {line}", *told[:report], "...", *told[report:rest], "...", *told[-3:]]


def show_hang(folder: Path) -> list[str]:
    """Show the report of a job in which one rank waits for data."""
    (folder / "train.py").write_text(HANGS)
    line = "muster run -s local_cwd dist.ddp -j 1x2 --hang_timeout 10 --script train.py"
    told = run_on_terminal(line.split(), folder)
    report = told[next(n for n, each in enumerate(told) if "JOB FAILED" in each) - 1 :]
    other = next(n for n, each in enumerate(report) if each.startswith("  rank 0:"))
    guilty = next(n for n, each in enumerate(report) if each.startswith("  rank 1:"))
    return [f"$ {line}", "...", *report[:other], "...", *report[guilty:]]


def show_top(folder: Path) -> list[str]:
    """Show a job of two nodes that was restarted once."""
    (folder / "train.py").write_text(TRAINS)
    line = "muster run -s local_cwd dist.ddp -j 2x4 --max_retries 3 --script train.py"
    with subprocess.Popen(find(line.split()), cwd=folder, stdout=subprocess.PIPE, text=True) as job:
        try:
            handle = (job.stdout.readline() if job.stdout else "").strip()
            for _ in range(60):
                time.sleep(1)
                told = run_on_terminal(["muster", "top", "--once", handle], folder)
                if any("attempt 1," in each for each in told) and any(
                    re.search(r"step [2-4]\d\d of", each) for each in told
                ):
                    return [f"$ muster top {handle}", *told]
            raise SystemExit(f"the job did not get far: {told}")
        finally:
            job.send_signal(signal.SIGINT)
            job.communicate()


def find(words: Sequence[str]) -> list[str]:
    """Find a command of this environment."""
    return [str(Path(sys.executable).with_name(words[0])), *words[1:]]


def run_on_terminal(words: Sequence[str], folder: Path) -> list[str]:
    """Return what a command prints on a terminal, line by line, with its colours."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 50, WIDTH, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    for name in ("COLORTERM", "NO_COLOR", "COLUMNS", "LINES"):
        env.pop(name, None)
    told = b""
    with subprocess.Popen(find(words), cwd=folder, stdin=its, stdout=its, stderr=its, env=env):
        os.close(its)
        while True:
            try:
                data = os.read(own, 1 << 16)
            except OSError:  # how a terminal says that nobody writes to it any more
                break
            if not data:
                break
            told += data
    os.close(own)
    return shorten(told.decode(errors="replace"), folder).splitlines()


def shorten(text: str, folder: Path) -> str:
    """Leave out paths of this machine, and what moves the cursor."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    places = {str(folder): ".", sys.prefix: "~/.venv", sys.base_prefix: "/usr", state: "~/.local/state"}
    for long, short in places.items():
        text = text.replace(long, short)
    text = re.sub(r"\x1b\[(?![\d;]*m)[?\d;]*[A-Za-z]", "", text)  # all but colours
    return text.replace("\r\n", "\n")


def draw(lines: Sequence[str], title: str) -> str:
    """Draw lines with colours as an SVG, which has the colours of the reader's page."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="standard")
    for line in lines:
        console.print(Text.from_ansi(line))

    def export(theme: TerminalTheme, form: str) -> str:
        return console.export_svg(theme=theme, code_format=form, unique_id="muster", clear=False)

    parts = {"TITLE": title, "STYLES": export(DARK, "{styles}")}
    parts |= {name: theme.background_color.hex for name, theme in (("LIGHT", LIGHT), ("DARK", DARK))}
    return add_margin(re.sub("|".join(parts), lambda found: parts[found[0]], export(LIGHT, SVG)))


def add_margin(svg: str) -> str:
    """Put a margin around the lines, which rich draws up to the edges, and cuts the last one."""
    width, height = (float(number) for number in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    box = f'viewBox="-{MARGIN} -{MARGIN} {width + 2 * MARGIN:.0f} {height + 2 * MARGIN:.0f}"'
    ground = f'<rect class="ground" x="-{MARGIN}" y="-{MARGIN}" '
    return re.sub(r'viewBox="[^"]*"', box, svg, count=1).replace('<rect class="ground" ', ground)


def main(folder: Path, wanted: str = "") -> None:
    """Write the pictures, or the wanted one; print what they show."""
    pictures = {
        "recovery": (show_recovery, "A rank is killed: the job goes on at the next step. Killed again: the report"),
        "hang": (show_hang, "The report of a hang: rank 1 did not enter all_reduce #101, and where it waits"),
        "top": (show_top, "muster top: progress, restarts and their cost, nodes, and step and last line of each rank"),
    }
    for name, (show, title) in pictures.items():
        if wanted not in ("", name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            lines = show(Path(scratch))
        (folder / f"{name}.svg").write_text(draw(lines, title))
        print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "static", *sys.argv[2:])
