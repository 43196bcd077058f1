"""What can happen to a job, each fault with what it does and undoes, what it needs, what must hold afterwards.

`fault` declares what a fault is and what it finds in a job. The modules `ranks`, `nodes` and `places` have the faults
of a rank, of a node, and of what is around them. `catalogue` lists all of them. A fault knows nothing of the command
line or of a scheduler, so that tests cause the same ones in agents that they have started themselves.
"""
