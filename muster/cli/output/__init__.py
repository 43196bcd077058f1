"""Prints what a job's nodes and ranks have written.

`log_command` is `muster log`, and `reported` what the job's report knows of a rank. `streaming` prints the lines of
several nodes as they come, for `muster run`, too.
"""
