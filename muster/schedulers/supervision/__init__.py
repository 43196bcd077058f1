"""One small supervisor process per app: owns the replicas, outlives the command line where asked, keeps state on disk.

`decisions` is pure: `state`, `events` and `actions` are what it works on. `supervisor` is the process that acts,
`driver` what it needs of the thing that runs replicas (processes here, containers for Docker). `app_folder` holds the
files of one app, `registry` finds apps again, `client` is what commands do: submit, look, ask for a stop, start a dead
supervisor again; `file_watch` tells of changed files.

Standard library only, and nothing here imports torchx: a supervisor starts in tens of milliseconds.
"""
