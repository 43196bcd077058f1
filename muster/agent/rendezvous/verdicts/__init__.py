"""What follows from a failure, and what is kept of earlier failures. Pure.

    deciding   a restart here or elsewhere, or the end of the job
    restarts   what is kept of earlier failures, as a part of the recovery record

Not here: which nodes are at fault (`rendezvous.faulty_nodes`), and when a failure ends a round
(`rendezvous.consensus.failures`).

From outside, import any module.
"""
