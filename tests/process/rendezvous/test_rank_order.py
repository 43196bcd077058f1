"""Ranks by NVLink domain."""

import contextlib
import os
import re
import sys

from harness import Tree, find_free_port

SCRIPT = "echo in ${MUSTER_SEGMENT:-none} group $GROUP_RANK rank $RANK"


def test_nodes_of_one_domain_are_adjacent_and_one_that_tells_none_says_so() -> None:
    endpoint = f"127.0.0.1:{find_free_port()}"
    agent = [sys.executable, "-m", "muster.agent", "--nnodes", "4", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    agent += ["--rdzv-endpoint", endpoint, "--rdzv-id", "order", "--rank-order", "segment", "--preflight", "off"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    with contextlib.ExitStack() as stack:
        trees = [
            stack.enter_context(
                Tree(
                    [*agent, "--node-rank", str(node), "--no-python", "sh", "-c", SCRIPT],
                    env={**env, **({"MUSTER_SEGMENT": segment} if segment else {})},
                )
            )
            for node, segment in enumerate(["a", "b", "", "a"])
        ]
        outcomes = [tree.wait() for tree in trees]
    assert [each.exit_code for each in outcomes] == [0] * 4, outcomes[0].explain()
    found = sorted(line for each in outcomes for line in re.findall(r"in \w+ group \d rank \d", each.stdout))
    assert found == [
        *(f"in a group {rank // 2} rank {rank}" for rank in range(4)),
        *(f"in b group 2 rank {rank}" for rank in (4, 5)),
        *(f"in none group 3 rank {rank}" for rank in (6, 7)),
    ]
    told = ["nothing names this node's NVLink domain" in each.stderr for each in outcomes]
    if not os.path.exists("/dev/nvidiactl"):
        assert told == [False, False, True, False]
