"""Warm workers: forked in milliseconds from a template process that has imported the program's modules.

In the agent, `starter` starts workers from templates, and the store of a round (`start_store`). `template_handle`
controls one template process, and `store_handle` one round's store.

In the template, `template` is the process. `preload` and `import_sites` choose what it imports and how. `forking` forks
the workers and defines the messages, and `fork_safety` checks whether the template may be forked. On a held node
templates are forks themselves (`agent.hold`), and `hold.thread_counts` adopts other numbers of threads.

In a forked worker, `forked_worker` makes it equal to a cold worker. `late_changes` detects what the program changes too
late for that. `early_end` ends the worker without tearing down what the template had imported. `store` is what the
store's process runs, which is another fork.

`workers.program` imports `template` and `store` by their names.

From outside, import `starter.TemplateStarter` and `template_handle`. `muster.elastic.fork`, whose program is the
template itself, imports `forking` and `forked_worker`, and `agent.hold` imports `fork_safety`, `forked_worker`
and `preload`.
"""
