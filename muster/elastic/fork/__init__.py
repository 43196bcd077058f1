"""`start_method="fork"`: the program that starts a job is the template of its workers.

    tree       forks guard, agent and image
    image      forks the workers, as the agent asks, without some of the program's descriptors
    worker     a fork becomes a worker, and ends
    hazards    what forbids a fork, thread pools, and the call that workers get

The other side is `agent.driven` (guard and agent) and `agent.workers.image`. From outside, import `prepare_call` of
`hazards` and `fork_tree` of `tree`, and only for a job that forks.
"""
