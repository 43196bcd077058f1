"""Prints what a job's nodes and ranks have written.

`log_command` is `muster log`, `run_folder` reads a job that was started by hand, `rank_logs` finds the files of a rank,
`reported` what the job's report knows of one, and `agent_flags` which ranks an agent's command starts. `streaming`
prints the lines of several nodes as they come, for `muster run`, too.
"""
