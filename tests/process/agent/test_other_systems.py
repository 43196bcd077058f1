"""The agent where the system lacks what only Linux has."""

import os
import socket
import sys
from pathlib import Path

from harness import Tree

LAUNCHER = """
import os, socket, sys
for module, names in ((socket, ("SOCK_NONBLOCK", "SOCK_CLOEXEC")), (os, ("pipe2", "pidfd_open", "waitid"))):
    for name in names:
        delattr(module, name)
from muster.agent.__main__ import main
sys.exit(main())
"""


def test_two_nodes_work_without_linuxs_own_names(tmp_path: Path) -> None:
    """As on macOS: a job of two nodes, with a restart and files."""
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job", "--start", "cold"]
    flags += ["--max-restarts", "1", "--tee", "3", "--log-dir", str(tmp_path / "logs")]
    command = [sys.executable, "-c", LAUNCHER, *flags]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    with (
        Tree([*command, "--node-rank", "0", "program.py"], cwd=tmp_path, env=env) as first,
        Tree([*command, "--node-rank", "1", "program.py"], cwd=tmp_path, env=env) as second,
    ):
        outcomes = first.wait(), second.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].explain() + outcomes[1].explain()
    assert "rank 0 of 2" in outcomes[0].stdout
    assert "rank 1 of 2" in outcomes[1].stdout
