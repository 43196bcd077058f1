"""Checks before the workers start that only some nodes need. The checks of all nodes are in `agent.launch`.

    facts  the facts of this node that other nodes compare
    site   the executables that a site has added
    reach  whether this node can connect to MASTER_ADDR

From outside, import any module, when it is needed.

Not here: the table of checks (`_shared.preflight`), what follows from a finding (`node.decisions`), how nodes differ
(`rendezvous.comparison`), and the all-reduce of `--preflight full` (`workers.hooks.measure`).
"""
