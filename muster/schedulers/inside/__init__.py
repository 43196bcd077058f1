"""Commands and terminals inside the nodes of running jobs, for `muster exec` and `muster shell`.

`pipe` is what an adapter opens: the standard input and output of a Python on a node. `program` is what that Python
runs: it finds the node's agent, starts the command with the workers' environment, and ends it when the pipe ends.
`session` talks to it. How an adapter reaches a node is in the adapter. `frames` is what programs on nodes have in
common with the processes here that stand for them, those of `ssh` and `held` too.

From outside, import `pipe`, `session` and `frames`; `program` is read as a text.
"""
