"""Keeps workers whose script lets them take part in several rounds, and spares that have done their setup.

    flags       --spare-workers
    node        the part: connects to workers that can stay, asks them to leave a round, starts them in the next one
    links       connections to such processes
    spares      starts spares

The worker's half is `muster.in_place`, which describes the whole.
"""
