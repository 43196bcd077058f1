"""`start_method="fork"`: the program that starts a job is the template of its workers.

    tree       forks guard, agent and image       call      what each worker calls
    image      forks the workers, as the agent asks        worker    a fork becomes a worker, and ends
    hazards    what forbids a fork, thread pools           descriptors  which of the program's a worker keeps

The other side is `agent.adopted` (guard and agent) and `agent.workers.image`. From outside, import `prepare_call` of
`hazards` and `fork_tree` of `tree`, and only for a job that forks.
"""
