"""What a node looks at before its workers start, as far as not every node needs it. What all do is in `agent.launch`.

    facts  what other nodes are told of this one, to be compared
    site   the executables that a site has added
    reach  whether this node can connect to MASTER_ADDR

From outside, import any module, when it is needed.

Not here: the table of checks (`_shared.preflight`), what follows from a finding (`node.decisions`), how nodes differ
(`rendezvous.comparison`), and the all-reduce of `--preflight full` (`workers.hooks.measure`).
"""
