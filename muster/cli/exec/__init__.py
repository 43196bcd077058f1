"""`muster exec` and `muster shell`: a command or a terminal on the nodes of a running job.

`targets` finds the nodes, `exec_command` runs a command on one or all of them, and `shell_command` opens a terminal on
one. What they have in common with adapters is in `muster.schedulers.node_program`.
"""
