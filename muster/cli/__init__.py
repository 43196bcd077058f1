"""Commands for people, `muster COMMAND`. They know the adapters' public operations and nothing of the agent.

The package `commands` has the table of the commands, and for each group of them a module with their arguments. What
follows does their work. `run_command` submits a job, `log_command` prints what jobs have written, `streaming` as it
comes, and `overview` says how they are doing. `operations` has the requests to running jobs as functions, and `answers`
prints what became of them. `handles` finds the job that a person means, and `adapters` creates schedulers. `prune`
removes what jobs that have ended left behind. The package `doctor` looks at this machine, and `rehearse` runs a job
through faults. `exec_command` and `shell_command` run a command or a terminal on the nodes of a job, `top` shows jobs
while they run, and `history` tells what has happened to one. `rerun_command` runs the last line of a folder again, and
`workspace_watch` says which files have changed. `hold_command` keeps agents with torch imported for runs to come.
"""
