"""The workers of one node: what they are, how they are started, and how they end.

`spec` describes a worker, `environment` builds its environment variables, `pool` holds the live workers and stops them.
`memory` reads what the kernel counts about their memory. `cold` starts each from scratch. The package `warm` forks them
from a template, and its `starter` also starts the store of a round. `program` runs the user's program inside a worker.
`image` forks workers from the program that started the job. `entry` is the file that the interpreter runs to start
`program`. `status_page` is the
shared memory in which workers report their steps. The workers' side is `muster.worker`. `run_names` has the names by
which traces recognise a run after a restart. The package `hooks` is what workers add to torch. With the
folder `torch_backend`, which is not a package, torch installs these hooks in the Python programs that `--no-python`
commands start. `stall_watch` detects that a template or a store stands still.

Not here: when workers are stopped, and their grace period (`node.worker_decisions`).

From outside, import `spec`, `environment`, `pool`, `memory`, `cold`, `image`, `status_page` and `run_names`. From
`warm`, import what its own docstring names. The agent's `__main__` imports `program`. `muster.elastic.fork` imports
`program` and `stall_watch`, because its program is itself the template and the workers.
"""
