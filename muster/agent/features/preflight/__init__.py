"""`--preflight`: checks before the workers start, of this machine and of what nodes must have in common.

    node          the part: looks while the agent starts, holds the workers back for a moment, reports what it has read
    leader        the half at the leader, pure: how the nodes differ
    messages      what a node reports
    flags         what is checked
    node_facts    reads what other nodes compare
    reachability  tries whether this node can connect to MASTER_ADDR
    site          runs the executables that a site has added
    measure       the all-reduce of `--preflight full`, in each worker before its program starts

Not here: the table of checks (`_shared.preflight`), and what follows from a failed check (`rendezvous.verdicts`).
"""
