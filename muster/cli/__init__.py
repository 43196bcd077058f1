"""Commands for people, `python -m muster COMMAND`. They know the adapters' public operations and nothing of the agent.

`commands` parses the command line; `prune` removes what jobs that have ended left behind, `leftovers` finds it.
"""
