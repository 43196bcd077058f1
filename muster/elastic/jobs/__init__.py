"""One job of the Python API: its agent, and the functions that its workers call. All entry points of `elastic` use it.

    job        one job: wait, output, records              process   one agent under its guard, as a process
    call       pickles a function and its arguments        results   serves workers, keeps what they return
    rank_call  what a worker of `start_processes` calls    exchange  results between the nodes' programs
    errors     what torch has no class for             cell      output in a notebook
    held       the node of a hold instead of a process of its own
    file_timers  torch's file timers, for workers

The worker's side of `call` and `results` is `function`.

The names that torch and ice-learn gave these things are not here but in the modules of `elastic`.
"""
