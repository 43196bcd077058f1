"""A held node: between runs an agent with its template waits, and the next run continues as that very agent.

    holder      the process that a replica of a hold runs: it starts waiting agents, and gives one to each run
    waiting     guard and agent before their run; from then on they are those of any job
    start       what such an agent has before its run: a template without a program
    thread_counts  gives that template the numbers of threads that the run's environment names
    facts       what must be alike in both sides, and why one cannot become what the other would be
    client      the process that stands for a node of a run: gives what it was started with to the holder
    original    the process that has imported (what: `workers.warm.preload`), and whose forks waiting agents are
    listening   the loop of a holder, and what is sent to it

Nothing of a run outlives it: each run has its own guard, agent, template and workers. Adapters run `client` as a file.

From outside, import `holder` and `waiting`, which `muster.agent.__main__` starts, and `start.HeldStart`.
`muster.elastic` imports `facts`.
"""
