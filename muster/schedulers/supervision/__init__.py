"""One small supervisor process per app: owns the replicas, outlives the command line where asked, keeps state on disk.

    gang.py     plans, states, events, actions: the words
    policy.py   what to do when a replica ends or someone cancels: pure
    driver.py   what a supervisor needs of the thing that runs replicas (processes here, containers for Docker)
    state.py    the files of an app's folder
    process.py  the supervisor process: one mailbox, one loop, the only place that acts
    client.py   what commands do: submit, look, ask for a stop, start a dead supervisor again
    inotify.py  being told of changed files

Standard library only, and nothing here imports torchx: a supervisor starts in tens of milliseconds.
"""
