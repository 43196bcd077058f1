"""Ranks by NVLink domain."""

import os
import re

from harness import check_all, start_nodes

SCRIPT = "echo in ${MUSTER_SEGMENT:-none} group $GROUP_RANK rank $RANK"


def test_nodes_of_one_domain_are_adjacent_and_one_that_tells_none_says_so() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    envs = [{**env, **({"MUSTER_SEGMENT": segment} if segment else {})} for segment in ("a", "b", "", "a")]
    flags = ["--nproc-per-node", "2", "--rank-order", "segment", "--preflight", "off"]
    with start_nodes(4, *flags, "--no-python", "sh", "-c", SCRIPT, envs=envs) as trees:
        outcomes = check_all(trees)
    found = sorted(line for each in outcomes for line in re.findall(r"in \w+ group \d rank \d", each.stdout))
    assert found == [
        *(f"in a group {rank // 2} rank {rank}" for rank in range(4)),
        *(f"in b group 2 rank {rank}" for rank in (4, 5)),
        *(f"in none group 3 rank {rank}" for rank in (6, 7)),
    ]
    told = ["nothing names this node's NVLink domain" in each.stderr for each in outcomes]
    if not os.path.exists("/dev/nvidiactl"):
        assert told == [False, False, True, False]
