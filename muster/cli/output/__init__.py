"""Prints what a job's nodes and ranks have written.

`log_command` is `muster log`, `run_folder` reads a job that was started by hand, `rank_logs` finds which rank has
failed and where the files of one are, and `reported` what the job's report knows of one. `streaming` prints the lines
of several nodes as they come, for `muster run`, too.
"""
