"""From `torchx run` to the first line of the script, on two hosts by ssh beside two nodes by local_cwd.

    python benchmarks/ssh_start.py [--count N]

The hosts are sshd servers of this machine, which does the work of both ends: a handshake takes CPU time of the client
and of the server. What ssh takes more is the median of the differences within each pair.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import _launching
from _sampling import SampleFailed, Samples, build_parser, sample_in_turn, show
from start import MARK

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from sshd_world import SshWorld, find_reason

LIMIT_S = 60.0
GOAL_S = 0.9


def measure(scheduler: tuple[str, ...], folder: Path) -> float:
    """Return the seconds from the start of the command line's process to the first line of the first worker."""
    marks, code = folder / "marks", folder / "code"
    marks.unlink(missing_ok=True)
    code.mkdir(exist_ok=True)
    (code / "main.py").write_text(MARK)
    argv = [str(Path(sys.executable).with_name("torchx")), "run", "--wait", *scheduler, "--workspace", f"file://{code}"]
    argv += ["dist.ddp", "-j", "2x1", "--env", f"MARKS={marks}", "--script", "main.py"]
    env = _launching.clean_env(XDG_STATE_HOME=str(folder / "state"), TMPDIR=str(folder))
    with (folder / "errors").open("w") as errors:
        began_s = time.monotonic()
        process = subprocess.Popen(
            argv, cwd=code, env=env, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
    try:
        code_of = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise SampleFailed from None
    finally:
        _launching.stop(process)
    found = _launching.read_marks(marks)
    if code_of != 0 or len(found) != 2:
        print((folder / "errors").read_text()[-2000:], file=sys.stderr)
        raise SampleFailed
    return min(float(mark["t"]) for mark in found) - began_s


def main() -> None:
    count = build_parser(__doc__).parse_args().count
    reason = find_reason()
    if reason is not None:
        sys.exit(reason)
    with _launching.scratch() as folder:
        world = SshWorld(folder / "hosts", hosts=2)
        try:
            runs = folder / "runs"
            runs.mkdir()
            cfg = f"hosts=a,b,detach=false,ssh={world.ssh},python={sys.executable},folder={runs}"
            samplers = {
                "ssh": partial(measure, ("-s", "ssh", "-cfg", cfg), folder),
                "local_cwd": partial(measure, ("-s", "local_cwd"), folder),
            }
            found = sample_in_turn(count, samplers)
        finally:
            world.close()
    show("torchx run to the script's first line, 2 nodes", found)
    pairs = zip(found["ssh"].values, found["local_cwd"].values, strict=False)
    more = Samples(values=[a - b for a, b in pairs], loads=found["ssh"].loads)
    show("what ssh takes more, in pairs", {"ssh": more}, limit=GOAL_S)


if __name__ == "__main__":
    main()
