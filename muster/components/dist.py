"""dist.ddp, dist.spmd, dist.torchrun: TorchX's distributed components, run by muster's agent.

They have every parameter of both TorchX lines, with its name and default, so that a command line or a pipeline need not
change. `start`, `preload`, `hang_timeout` and all after them are added. The three differ only in their defaults and in
the meaning of one number in `-j`. Parameters that people use come first: `help_text` has their names.

TorchX lists every function of this module as a component, and parses the source of each. It cannot read `X | None`
(0.7) or `typing.Optional[...]` (nightly). So there are only components here, `Optional[...]` is a bare name, and
annotations are not imported from the future. The helpers that components of others import from TorchX's module are
partials here, not functions.
"""

from functools import partial
from typing import List, Optional

import torchx
from torchx import specs

from muster.components import application, resources, topology
from muster.components.environment import EnvArgument

get_role_name = partial(application.get_role_name)
parse_nnodes = partial(topology.parse_nnodes)


def ddp(
    *script_args: str,
    script: Optional[str] = None,
    m: Optional[str] = None,
    j: str = "1x2",
    h: Optional[str] = None,
    gpu: int = 0,
    cpu: int = resources.DEFAULT_CPUS,
    memMB: int = resources.DEFAULT_MEMORY_MB,  # noqa: N803 (TorchX's name)
    name: str = "/",
    image: str = torchx.IMAGE,
    env: EnvArgument = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    env_file: Optional[str] = None,
    metadata: EnvArgument = None,
    rdzv_port: int = 29500,
    rdzv_backend: str = "c10d",
    rdzv_conf: Optional[str] = None,
    debug: bool = False,
    tee: int = 3,
    start: str = "auto",
    preload: str = "auto",
    hang_timeout: str = "auto",
    hang_action: Optional[str] = None,
    collapse_lines: str = "auto",
    notify: Optional[str] = None,
    metrics_port: Optional[str] = None,
    tracker_run: bool = False,
    trainer_callback: bool = False,
    preflight: str = "quick",
    snapshot_memory: Optional[str] = None,
    snapshot_copies: Optional[int] = None,
    spare_workers: int = 0,
    rank_order: Optional[str] = None,
    on: Optional[str] = None,
) -> specs.AppDef:
    """Run a distributed PyTorch job (DDP, FSDP, ...): NODES x PROCESSES copies of one program.

    Usage: torchx run dist.ddp -j 2x4 --script main.py -- --lr 0.1

    Args:
        script_args: arguments of the script or module
        script: path of the script, relative to the workspace
        m: dotted name of the module to run, as in python -m
        j: [[MIN:]NODESx]PROCESSES; PROCESSES per node is a number, gpu, cpu or auto; one number means processes
        h: a named resource of the node (e.g. -h aws_p4d.24xlarge, with 8 GPUs); takes precedence over cpu, gpu, memMB
        gpu: number of GPUs per node (e.g. --gpu 8 -j 2x8: 2 nodes, 8 GPUs and 8 processes each)
        cpu: number of CPUs per node; default: one for each process, at least 2 (0 means 2)
        memMB: memory per node in MB, which is also the limit; if neither this nor -h is given, there is no limit, and
            the shown default has no effect
        name: {experiment}/{run}, {experiment}/, /{run} or {run}; the run defaults to the script's or module's name
        image: container image of the nodes (e.g. docker)
        env: environment variables of the job (e.g. HF_TOKEN,ENV1=v1,ENV2=v2); a NAME without a value gets that of your
            environment; such names come first
        mounts: mounts into the nodes' containers, each begins with type=bind, volume or device (e.g.
            type=bind,src=/data,dst=/data,readonly or type=volume,src=claim,dst=/checkpoints)
        max_retries: how many worker failures the job survives (its workers restart in place), and how many lost nodes
        env_file: file of environment variables, in the format of docker's --env-file: lines NAME=VALUE or NAME; neither
            ps nor a dry run shows the values
        metadata: metadata for the scheduler (e.g. KEY1=v1,KEY2=v2,KEY3=v3)
        rdzv_port: rendezvous port on node 0; with c10d a scheduler that picks a free port ignores it
        rdzv_backend: rendezvous backend; c10d means muster's own, others are torch's
        rdzv_conf: rendezvous settings in seconds (e.g. join_timeout=600,last_call_timeout=30)
        debug: set TorchX's four debug variables for CUDA, NCCL and torch
        tee: streams that go to console and file; 0: none, 1: stdout, 2: stderr, 3: both
        start: how workers start; warm: fork a process that has imported torch, cold: new processes, auto: warm if safe
        preload: modules that the warm process imports, separated by commas; auto: torch if the program imports it
        hang_timeout: seconds without a collective or a step after which the job counts as hung; auto: learned from the
            job, at least 60; 0: never
        hang_action: what happens when the job hangs: report, restart or stop; the default is report if hang_timeout is
            auto, else restart
        collapse_lines: whether a line that several ranks write is printed once; auto: on a terminal with 8 ranks or
            more; on: on each node, for all readers; off: never
        notify: command that one node runs when the job has failed, hangs, is preempted, has ended or was stopped; it
            reads the report
        metrics_port: [ADDRESS:]PORT at which each node's agent serves metrics to Prometheus; 0: a free port, which
            status.json names; the default address is 127.0.0.1, and on Kubernetes all addresses of the pod
        tracker_run: all attempts of the job are one run in Weights & Biases and Comet, and have the job's id as a tag
            in MLflow
        trainer_callback: the Trainer of transformers gets MusterCallback, although the script does not name it
        preflight: what to check before the workers start; quick: each machine, and what differs between nodes; full:
            also an all-reduce; off: nothing
        snapshot_memory: the most memory that muster.snapshots may take on each node, such as 64G or a percentage of the
            free memory, written with the percent sign; 0: no snapshots; the default is 40 percent
        snapshot_copies: how many other nodes keep a copy of a node's snapshots, 0 or 1; the default is 1
        spare_workers: how many processes of each node have done their setup and take a lost rank's place at once
        rank_order: node, the default: ranks follow the node index; segment: nodes of one NVLink domain get adjacent
            ranks
        on: rules for what follows from a failure (e.g. "exit 77: elsewhere; ImportError: stop"); muster-agent
            --help-all lists the conditions and verdicts
    """
    return application.build_application(
        locals(),
        resources.ResourceRequest(cpu=cpu, gpu=gpu, memory_mb=memMB, h=h),
        topology.Bare.PROCESSES,
    )


def torchrun(
    *script_args: str,
    script: Optional[str] = None,
    m: Optional[str] = None,
    j: str = "1x2",
    h: Optional[str] = None,
    gpu: int = 0,
    cpu: int = resources.DEFAULT_CPUS,
    memMB: int = resources.DEFAULT_MEMORY_MB,  # noqa: N803 (TorchX's name)
    name: str = "/",
    image: str = torchx.IMAGE,
    env: EnvArgument = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    env_file: Optional[str] = None,
    metadata: EnvArgument = None,
    rdzv_port: int = 29500,
    rdzv_backend: str = "c10d",
    rdzv_conf: Optional[str] = None,
    debug: bool = False,
    tee: int = 3,
    start: str = "auto",
    preload: str = "auto",
    hang_timeout: str = "auto",
    hang_action: Optional[str] = None,
    collapse_lines: str = "auto",
    notify: Optional[str] = None,
    metrics_port: Optional[str] = None,
    tracker_run: bool = False,
    trainer_callback: bool = False,
    preflight: str = "quick",
    snapshot_memory: Optional[str] = None,
    snapshot_copies: Optional[int] = None,
    spare_workers: int = 0,
    rank_order: Optional[str] = None,
    on: Optional[str] = None,
) -> specs.AppDef:
    """Run a distributed PyTorch job (DDP, FSDP, ...), by the name that TorchX's nightly line recommends.

    Usage: torchx run dist.torchrun -j 2x4 --script main.py -- --lr 0.1

    The same as dist.ddp, except that one number in -j means nodes if a host is named with -h.

    Args:
        script_args: arguments of the script or module
        script: path of the script, relative to the workspace
        m: dotted name of the module to run, as in python -m
        j: [[MIN:]NODESx]PROCESSES; PROCESSES per node is a number, gpu, cpu or auto; one number means processes; if -h
            names a host, it means nodes, each with one process per GPU
        h: a named resource of the node (e.g. -h aws_p4d.24xlarge, with 8 GPUs); takes precedence over cpu, gpu, memMB
        gpu: number of GPUs per node (e.g. --gpu 8 -j 2x8: 2 nodes, 8 GPUs and 8 processes each)
        cpu: number of CPUs per node; default: one for each process, at least 2 (0 means 2)
        memMB: memory per node in MB, which is also the limit; if neither this nor -h is given, there is no limit, and
            the shown default has no effect
        name: {experiment}/{run}, {experiment}/, /{run} or {run}; the run defaults to the script's or module's name
        image: container image of the nodes (e.g. docker)
        env: environment variables of the job (e.g. HF_TOKEN,ENV1=v1,ENV2=v2); a NAME without a value gets that of your
            environment; such names come first
        mounts: mounts into the nodes' containers, each begins with type=bind, volume or device (e.g.
            type=bind,src=/data,dst=/data,readonly or type=volume,src=claim,dst=/checkpoints)
        max_retries: how many worker failures the job survives (its workers restart in place), and how many lost nodes
        env_file: file of environment variables, in the format of docker's --env-file: lines NAME=VALUE or NAME; neither
            ps nor a dry run shows the values
        metadata: metadata for the scheduler (e.g. KEY1=v1,KEY2=v2,KEY3=v3)
        rdzv_port: rendezvous port on node 0; with c10d a scheduler that picks a free port ignores it
        rdzv_backend: rendezvous backend; c10d means muster's own, others are torch's
        rdzv_conf: rendezvous settings in seconds (e.g. join_timeout=600,last_call_timeout=30)
        debug: set TorchX's four debug variables for CUDA, NCCL and torch
        tee: streams that go to console and file; 0: none, 1: stdout, 2: stderr, 3: both
        start: how workers start; warm: fork a process that has imported torch, cold: new processes, auto: warm if safe
        preload: modules that the warm process imports, separated by commas; auto: torch if the program imports it
        hang_timeout: seconds without a collective or a step after which the job counts as hung; auto: learned from the
            job, at least 60; 0: never
        hang_action: what happens when the job hangs: report, restart or stop; the default is report if hang_timeout is
            auto, else restart
        collapse_lines: whether a line that several ranks write is printed once; auto: on a terminal with 8 ranks or
            more; on: on each node, for all readers; off: never
        notify: command that one node runs when the job has failed, hangs, is preempted, has ended or was stopped; it
            reads the report
        metrics_port: [ADDRESS:]PORT at which each node's agent serves metrics to Prometheus; 0: a free port, which
            status.json names; the default address is 127.0.0.1, and on Kubernetes all addresses of the pod
        tracker_run: all attempts of the job are one run in Weights & Biases and Comet, and have the job's id as a tag
            in MLflow
        trainer_callback: the Trainer of transformers gets MusterCallback, although the script does not name it
        preflight: what to check before the workers start; quick: each machine, and what differs between nodes; full:
            also an all-reduce; off: nothing
        snapshot_memory: the most memory that muster.snapshots may take on each node, such as 64G or a percentage of the
            free memory, written with the percent sign; 0: no snapshots; the default is 40 percent
        snapshot_copies: how many other nodes keep a copy of a node's snapshots, 0 or 1; the default is 1
        spare_workers: how many processes of each node have done their setup and take a lost rank's place at once
        rank_order: node, the default: ranks follow the node index; segment: nodes of one NVLink domain get adjacent
            ranks
        on: rules for what follows from a failure (e.g. "exit 77: elsewhere; ImportError: stop"); muster-agent
            --help-all lists the conditions and verdicts
    """
    return application.build_application(
        locals(),
        resources.ResourceRequest(cpu=cpu, gpu=gpu, memory_mb=memMB, h=h),
        topology.Bare.NODES if h else topology.Bare.PROCESSES,
    )


def spmd(
    *args: str,
    script: Optional[str] = None,
    m: Optional[str] = None,
    j: str = "1x1",
    h: str = resources.DEFAULT_HOST,
    name: str = "/",
    image: str = torchx.IMAGE,
    env: EnvArgument = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    env_file: Optional[str] = None,
    metadata: EnvArgument = None,
    debug: bool = False,
    start: str = "auto",
    preload: str = "auto",
    hang_timeout: str = "auto",
    hang_action: Optional[str] = None,
    collapse_lines: str = "auto",
    notify: Optional[str] = None,
    metrics_port: Optional[str] = None,
    tracker_run: bool = False,
    trainer_callback: bool = False,
    preflight: str = "quick",
    snapshot_memory: Optional[str] = None,
    snapshot_copies: Optional[int] = None,
    spare_workers: int = 0,
    rank_order: Optional[str] = None,
    on: Optional[str] = None,
) -> specs.AppDef:
    """Run a distributed PyTorch job on named hosts: NODES x PROCESSES copies of one program.

    Usage: torchx run dist.spmd -j 2 -h aws_p4d.24xlarge --script main.py -- --lr 0.1

    The example has 8 GPUs on each host, so that -j 2 is the same as -j 2x8.

    Args:
        args: arguments of the script or module
        script: path of the script, relative to the workspace
        m: dotted name of the module to run, as in python -m
        j: [[MIN:]NODESx]PROCESSES; PROCESSES per node is a number, gpu, cpu or auto; one number means nodes, each with
            one process per GPU of the host
        h: the named resource of a node (e.g. aws_p4d.24xlarge); the default has one GPU
        name: {experiment}/{run}, {experiment}/, /{run} or {run}; the run defaults to the script's or module's name
        image: container image of the nodes (e.g. docker)
        env: environment variables of the job (e.g. HF_TOKEN,ENV1=v1,ENV2=v2); a NAME without a value gets that of your
            environment; such names come first
        mounts: mounts into the nodes' containers, each begins with type=bind, volume or device (e.g.
            type=bind,src=/data,dst=/data,readonly or type=volume,src=claim,dst=/checkpoints)
        max_retries: how many worker failures the job survives (its workers restart in place), and how many lost nodes
        env_file: file of environment variables, in the format of docker's --env-file: lines NAME=VALUE or NAME; neither
            ps nor a dry run shows the values
        metadata: metadata for the scheduler (e.g. KEY1=v1,KEY2=v2,KEY3=v3)
        debug: set TorchX's four debug variables for CUDA, NCCL and torch
        start: how workers start; warm: fork a process that has imported torch, cold: new processes, auto: warm if safe
        preload: modules that the warm process imports, separated by commas; auto: torch if the program imports it
        hang_timeout: seconds without a collective or a step after which the job counts as hung; auto: learned from the
            job, at least 60; 0: never
        hang_action: what happens when the job hangs: report, restart or stop; the default is report if hang_timeout is
            auto, else restart
        collapse_lines: whether a line that several ranks write is printed once; auto: on a terminal with 8 ranks or
            more; on: on each node, for all readers; off: never
        notify: command that one node runs when the job has failed, hangs, is preempted, has ended or was stopped; it
            reads the report
        metrics_port: [ADDRESS:]PORT at which each node's agent serves metrics to Prometheus; 0: a free port, which
            status.json names; the default address is 127.0.0.1, and on Kubernetes all addresses of the pod
        tracker_run: all attempts of the job are one run in Weights & Biases and Comet, and have the job's id as a tag
            in MLflow
        trainer_callback: the Trainer of transformers gets MusterCallback, although the script does not name it
        preflight: what to check before the workers start; quick: each machine, and what differs between nodes; full:
            also an all-reduce; off: nothing
        snapshot_memory: the most memory that muster.snapshots may take on each node, such as 64G or a percentage of the
            free memory, written with the percent sign; 0: no snapshots; the default is 40 percent
        snapshot_copies: how many other nodes keep a copy of a node's snapshots, 0 or 1; the default is 1
        spare_workers: how many processes of each node have done their setup and take a lost rank's place at once
        rank_order: node, the default: ranks follow the node index; segment: nodes of one NVLink domain get adjacent
            ranks
        on: rules for what follows from a failure (e.g. "exit 77: elsewhere; ImportError: stop"); muster-agent
            --help-all lists the conditions and verdicts
    """
    return application.build_application(
        {**locals(), "script_args": args},
        resources.ResourceRequest(h=h, default_h=resources.DEFAULT_HOST),
        topology.Bare.NODES,
    )
