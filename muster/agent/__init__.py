"""The elastic agent: one process per node that starts, supervises and restarts its workers. Standard library only.

    __main__    `python -m muster.agent`: the guard, and the agent below it
    entry       the same as a file that adapters start
    driven      the same for a Python program that starts or forks the agent, reads its records and ends it
    control_socket  what such an agent sends to that program
    launch      from a command line to a running agent: builds its parts, and maps errors to lines and codes
    config      the configuration, one frozen object          errors     the error tree
    round       one agreed membership, as one node needs it    workspace_unpacking  the code that came with the job
    checkpoint_file  the job's last checkpoint, for its next incarnation    ask     `muster-agent ask`, in a worker

    cli/        command line to configuration               logs/       workers' output
    runtime/    loop, clock, signals, event log             diagnosis/  why a worker or the job failed
    node/       what one node does about each event         placement/  CPUs and GPUs of workers
    workers/    starting and stopping workers               rendezvous/ agreement among the nodes
    hold/       a held node between runs                features/   what is optional, a folder each
    control/    people's requests to a running job: stop, checkpoint, pause, stacks
    telemetry/  what people see of it

Adapters and components never import the agent. They know the command `python -m muster.agent` and
`muster._shared.contract`.
"""
