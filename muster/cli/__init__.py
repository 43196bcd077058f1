"""Commands for people, `muster COMMAND`. They know the adapters' public operations and nothing of the agent.

`commands` parses the command line. `run_command` submits a job, the package `output` prints what jobs have written,
`overview` says how they are doing. `operations` has what is asked of running jobs as functions, `answers` prints what
became of it. `handles` finds the job that a person means, `adapters` its scheduler. `prune` removes what jobs that have
ended left behind, and `leftovers` finds it. The package `doctor` looks at this machine, and `rehearse` runs a job
through faults. `inside` runs a command or a terminal on the nodes of a job, `rerun` the last line of a folder, and
`completion` is for shells. `hold_command` keeps agents with torch imported for runs to come, `default_hold_command` for
everyday jobs.
"""
