"""Commands for people, `muster COMMAND`. They know the adapters' public operations and nothing of the agent.

`commands` parses the command line; `operations` has what is asked of running jobs as functions, `handles` finds the
job that a person means, `adapters` its scheduler, `answers` prints what became of it; `prune` removes what jobs that
have ended left behind, `leftovers` finds it; `completion` is for shells.
"""
