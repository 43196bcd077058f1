"""Scheduler adapters: they run the replicas of an AppDef here, on hosts behind ssh, on Docker, Kubernetes or Slurm.

    adapter/      the seam: what an adapter is made of, for those below and for others'
    local/        replicas are processes of this machine
    docker/       replicas are containers of one engine
    kubernetes/   replicas are pods
    slurm/        replicas are tasks of one job, one per node
    ssh/          replicas run on hosts that the user reaches by ssh
    held/         replicas are nodes that `muster hold` keeps
    node_program/ one program on nodes: for `muster exec` and `muster shell`, ssh, and runs on holds elsewhere
    processes/    replicas that are processes, for local/ and for adapters that start programs
    supervision/  the process that owns the replicas of local_cwd and Docker; `app_folder`: an app's state on disk
    workspace/    packs the user's folder, without credentials and what `.torchxignore` names
    runner/       what we adapt of TorchX; parses `-cfg`
    wording/      why an app is in its state: codes and facts, and the one place that puts them into words

`bundle` packs the agent (`bundle_start` travels in it and unpacks it once per node). `agent_command` recognises and
rewrites the agent's command. `naming` makes every name. `grace` decides how long a stop may take. `gpus` lists this
machine's GPUs and divides them. `role_variables` lets roles find each other. `secret_variables` decides what is masked.
`failure_report` reads what agents say about a failure. `lines` and `timestamps` read output and its times. `interrupts`
keeps a Ctrl-C from being lost. `errors` holds the errors that the TorchX command line prints as one line.

This module imports nothing: supervisor processes load single modules of this package and must start fast.
"""
