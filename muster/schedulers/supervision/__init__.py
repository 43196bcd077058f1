"""One small supervisor process per app: it owns the replicas, keeps state on disk and can outlive the command line.

`decisions` is pure: from `state` and events to the new state and actions. `supervisor` is the process that acts,
`driver` the interface to what runs replicas (processes here, containers for Docker). `app_folder` holds the files of
one app (the state of a job on disk), `machine` says where an app runs, and `registry` finds apps by id. `client` is for
commands: submit, read the state, request a stop, start a dead supervisor again. `agent_requests` asks the agents of a
running app. `file_watch` waits for changed files.

Standard library only, and nothing here imports torchx: a supervisor starts in tens of milliseconds.
"""
