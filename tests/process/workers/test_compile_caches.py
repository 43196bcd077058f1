"""A node that takes over gets what the others have compiled, where nodes have caches of their own."""

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import Outcome, Tree, find_free_port, run_tree

COMPILES = Path(__file__).parents[2] / "programs" / "inductor_cache.py"
WAITS = """
import os, pathlib, time
here = pathlib.Path(os.environ["MUSTER_TEST_FOLDER"])
(here / f"began-{os.environ['RANK']}").touch()
while not (here / "go").exists():
    time.sleep(0.02)
"""


def build_env(folder: Path, caches: str) -> dict[str, str]:
    """Of a node whose caches are below this folder."""
    return {
        **os.environ,
        "MUSTER_TOKEN": "0123456789abcdef" * 3,
        "MUSTER_TEST_FOLDER": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / caches / "inductor"),
        "TRITON_CACHE_DIR": str(folder / caches / "triton"),
    }


def age(folder: Path) -> None:
    """Files that were written a moment ago may not be whole, and are not sent."""
    for each in folder.rglob("*"):
        os.utime(each, (time.time() - 60,) * 2)


def wait_for(*paths: Path) -> None:
    deadline_s = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline_s, paths
        time.sleep(0.02)


def lose_and_replace(tree: Tree) -> None:
    for pid in tree.descendants():
        with contextlib.suppress(ProcessLookupError):
            tree.send(signal.SIGKILL, pid)
    tree.wait()


def run_two_nodes(folder: Path, script: Path, fill: "contextlib.AbstractContextManager[None]") -> list[Outcome]:
    """Two nodes of which the second is lost; what comes in its place has empty caches of its own."""
    port = find_free_port()

    def start(index: int, caches: str) -> Tree:
        agent = [sys.executable, "-m", "muster.agent", "--nnodes", "2", "--node-rank", str(index)]
        agent += [
            "--max-restarts",
            "0",
            "--rdzv-backend",
            "muster",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            str(script),
        ]
        return Tree(agent, env=build_env(folder, caches), cwd=folder)

    with contextlib.ExitStack() as stack:
        trees = [stack.enter_context(start(index, f"node-{index}")) for index in range(2)]
        wait_for(folder / "began-0", folder / "began-1")
        with fill:
            lose_and_replace(trees[1])
            (folder / "began-1").unlink()
            trees[1] = stack.enter_context(start(1, "new"))
            wait_for(folder / "began-1")
        return [tree.wait(timeout_s=120) for tree in trees]


def test_a_node_that_takes_over_gets_the_files_of_another_nodes_caches(tmp_path: Path) -> None:
    file = tmp_path / "node-0" / "inductor" / "ab" / "cab.py"
    file.parent.mkdir(parents=True, mode=0o755)
    file.write_text("compiled")
    age(tmp_path / "node-0")
    (tmp_path / "waits.py").write_text(WAITS)

    @contextlib.contextmanager
    def fill():
        yield
        wait_for(tmp_path / "new" / "inductor" / "ab" / "cab.py")
        (tmp_path / "go").touch()

    outcomes = run_two_nodes(tmp_path, tmp_path / "waits.py", fill())
    explained = "\n".join(outcome.explain() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], explained
    assert (tmp_path / "new/inductor/ab/cab.py").read_text() == "compiled"
    assert "got 1 file (0.0 MB) of compile caches from 127.0.0.1" in outcomes[1].stderr, explained
    assert not (tmp_path / "node-1" / "inductor").exists(), "nothing is sent when a job begins"


@pytest.mark.long
@pytest.mark.timeout(600)  # the compiler takes 20 s of CPU time
def test_what_one_node_has_compiled_is_a_hit_on_the_node_that_takes_over(tmp_path: Path) -> None:
    """The program's exit code is 3 where the cache did not have it."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler here")
    first = run_tree([sys.executable, str(COMPILES)], env=build_env(tmp_path, "node-0"), cwd=tmp_path, timeout_s=300)
    assert first.exit_code == 3, first.explain()
    age(tmp_path / "node-0")
    script = tmp_path / "compiles.py"
    script.write_text(f"{WAITS}\nimport runpy\nrunpy.run_path({str(COMPILES)!r}, run_name='__main__')")

    @contextlib.contextmanager
    def fill():
        (tmp_path / "go").unlink(missing_ok=True)
        yield
        (tmp_path / "go").touch()

    outcomes = run_two_nodes(tmp_path, script, fill())
    explained = "\n".join(outcome.explain() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], explained
    told = [re.findall(r"hits (\d+) misses (\d+)", outcome.stdout) for outcome in outcomes]
    assert told == [[("1", "0")], [("1", "0")]], explained
