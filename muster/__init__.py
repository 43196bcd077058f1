"""muster: start, supervise and heal distributed PyTorch jobs, as a plug-in for TorchX.

    components/   what `torchx run dist.ddp ...` and pipelines turn into an AppDef
    schedulers/   how an AppDef becomes running replicas: local_cwd, ssh, Docker, Kubernetes, Slurm, held nodes
    agent/        the process that starts and supervises the workers of one node
    worker        what a training script imports: step, should_stop, should_checkpoint, saved, breakpoint
    snapshots/    what a training script imports to keep its state in memory
    data          what a training script imports to train each sample once
    integrations/ what a training script imports for its trainer: callbacks of Hugging Face and Lightning
    testing/      the tests that every adapter must pass
    elastic/      the Python API: functions and commands as workers, started from a program
    cli/          `python -m muster COMMAND` (`__main__`)
    run           torchrun's module: what programs call of torch.distributed.run
    launch        torch.distributed.launch's: `run`, and `--local-rank` for scripts
    _shared/      what these have in common: contract, records and their codec, processes, control, guard

Components and schedulers never import the agent: they know its command. Nothing but `run` imports `elastic`, nothing
but `launch` imports `run`.
"""

__version__ = "0.1.0"
