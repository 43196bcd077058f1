"""`muster rerun`: runs the last line of a folder again. `workspace_watch` says which files have changed.

From outside, import `command`: `record_line` is for each command that starts a job.
"""
