"""muster: start, supervise and heal distributed PyTorch jobs, as a plug-in for TorchX.

    components/   what `torchx run dist.ddp ...` and pipelines turn into an AppDef
    schedulers/   how an AppDef becomes running replicas: local_cwd, Docker, Kubernetes
    agent/        the process that starts and supervises the workers of one node
    worker        what a training script imports: step, should_stop, should_checkpoint, saved, breakpoint
    elastic/      the Python API: functions and commands as workers, started from a program
    cli/          `python -m muster COMMAND` (`__main__`)
    run           torchrun's module: what programs call of torch.distributed.run
    launch/       torch.distributed.launch's: `run`, and `--local-rank` for scripts
    _guard        the agent's parent: kills what is left when the agent ends, and fences when the lease expires
    _contract     what components, schedulers, agent and workers must agree on: variables, exit codes, file names, the
                  layout of the status page
    _control      what people ask of a running job, and the answers: the side of commands and adapters
    _processes    process trees, cores, and the system calls that Python lacks
    _debugger     pdb in one worker, at the terminal of its node's agent
    _programs     whether the program of a job exists
    _suspension   stops a whole job for a while (Ctrl-Z), and continues it
    _progress_bars  the live rows at the bottom of a terminal

Components and schedulers never import the agent: they know its command. Nothing but `run` imports `elastic`, nothing
but `launch` imports `run`.
"""

__version__ = "0.1.0"
