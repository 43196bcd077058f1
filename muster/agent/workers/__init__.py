"""The workers of one node: what they are, how they are started, and how they end.

`spec` describes a worker, `environment` builds its environment variables, `pool` holds the live workers and stops them.
`memory` reads what the kernel counts about their memory. `cold` starts each from scratch; the package `warm` forks them
from a template; its `starter` also starts the store of a round. `program` runs the user's program inside a worker;
`image` has them forked from the program that started the job. `entry` is the file that the interpreter runs for that.
`function` is the program of a worker that runs a Python function for `muster.elastic`. `status_page` is the shared
memory in which workers report their steps; their side is `muster.worker`. `run_names` has the names of a run that
trackers and traces know after a restart. The package `hooks` is what workers add to torch; the folder `torch_backend`,
no package, has torch install it in what `--no-python` commands start. `stall_watch` notices that a template or a store
stands still.

Not here: when workers are stopped, and their grace period (`node.worker_decisions`).

From outside, import `spec`, `environment`, `pool`, `memory`, `cold`, `image`, `status_page`, `run_names`, and of `warm`
what its own docstring names; the agent's `__main__` imports `program`, and `muster.elastic.fork`, whose program is the
template and the workers itself, imports `program`, `function` and `stall_watch`.
"""
