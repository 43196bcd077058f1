"""dist.ddp, dist.spmd, dist.torchrun: TorchX's distributed components, run by muster's agent.

They have every parameter of both TorchX lines, with its name and default, so that a command line or a pipeline need not
change. `start`, `preload`, `hang_timeout` and all after them are added. The three differ only in their defaults and in
the meaning of one number in `-j`.

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
    image: str = torchx.IMAGE,
    name: str = "/",
    h: Optional[str] = None,
    cpu: int = resources.DEFAULT_CPUS,
    gpu: int = 0,
    memMB: int = resources.DEFAULT_MEMORY_MB,  # noqa: N803 (TorchX's name)
    j: str = "1x2",
    env: EnvArgument = None,
    env_file: Optional[str] = None,
    metadata: EnvArgument = None,
    max_retries: int = 0,
    rdzv_port: int = 29500,
    rdzv_backend: str = "c10d",
    rdzv_conf: Optional[str] = None,
    mounts: Optional[List[str]] = None,
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
    preflight: str = "quick",
    snapshot_memory: Optional[str] = None,
    snapshot_copies: Optional[int] = None,
    rank_order: Optional[str] = None,
    on: Optional[str] = None,
) -> specs.AppDef:
    """Run a distributed PyTorch job (DDP, FSDP, ...): NODES x PROCESSES copies of one program.

    Usage: torchx run dist.ddp -j 2x4 --script main.py -- --lr 0.1

    Args:
        script_args: arguments of the script or module
        script: path of the script to run, relative to the workspace
        m: dotted name of the module to run, as in python -m
        image: container image of the nodes (e.g. docker)
        name: {experiment}/{run}, {experiment}/, /{run} or {run}; the run defaults to the script's or module's name
        h: a named resource of the node (e.g. -h aws_p4d.24xlarge, with 8 GPUs); takes precedence over cpu, gpu, memMB
        cpu: number of CPUs per node; default: one for each process, at least 2 (0 means 2)
        gpu: number of GPUs per node (e.g. --gpu 8 -j 2x8: 2 nodes, 8 GPUs and 8 processes each)
        memMB: memory per node in MB, which is also the limit; if neither this nor -h is given, there is no limit, and
            the shown default has no effect
        j: [[MIN:]NODESx]PROCESSES; PROCESSES per node is a number, gpu, cpu or auto; one number means processes
        env: environment variables of the job (e.g. HF_TOKEN,ENV1=v1,ENV2=v2); a NAME without a value gets that of your
            environment; such names come first
        env_file: file of environment variables, in the format of docker's --env-file: lines NAME=VALUE or NAME; neither
            ps nor a dry run shows the values
        metadata: metadata for the scheduler (e.g. KEY1=v1,KEY2=v2,KEY3=v3)
        max_retries: how many worker failures the job survives (its workers restart in place), and how many lost nodes
        rdzv_port: rendezvous port on node 0; with c10d a scheduler that picks a free port ignores it
        rdzv_backend: rendezvous backend; c10d means muster's own, others are torch's
        rdzv_conf: rendezvous settings in seconds (e.g. join_timeout=600,last_call_timeout=30)
        mounts: mounts into the nodes' containers, each begins with type=bind, volume or device (e.g.
            type=bind,src=/data,dst=/data,readonly or type=volume,src=claim,dst=/checkpoints)
        debug: set TorchX's four debug environment variables for CUDA, NCCL and torch
        tee: streams that go to console and file; 0: none, 1: stdout, 2: stderr, 3: both
        start: how workers start; warm: fork a process that has imported torch, cold: new processes, auto: warm if safe
        preload: modules that the warm process imports, separated by commas; auto: torch if the program imports it
        hang_timeout: seconds after which the job counts as hung if no rank has entered or completed a collective or
            done a step. For a rank that has done none of these yet, CPU time (at least 1/200 of a core) and output (to
            a file, a pipe or the console) count instead. auto: learned from the job itself, at least 60. 0: never
        hang_action: what happens when the job hangs; report: print which rank keeps the others waiting; restart:
            restart the workers while retries are left; stop: end the job. The default is report if hang_timeout is
            auto, else restart
        collapse_lines: if several ranks write a line within half a second, print it once. Lines may differ in digits,
            hexadecimal numbers and paths. Equal tracebacks are also printed once. auto: torchx run and torchx log do so
            on a terminal with 8 ranks or more; on: each node does so, for all readers; off: all lines are printed. Each
            rank's files have everything
        notify: command that one node runs when the job has failed, hangs, is preempted, has ended or was stopped. The
            command reads the report on its standard input, and has MUSTER_NOTIFY_* variables. No shell interprets it
        metrics_port: [ADDRESS:]PORT at which each node's agent serves /metrics to Prometheus, /healthz, /readyz and
            /status. 0: a free port, which status.json names. The default address is 127.0.0.1, and on Kubernetes all
            addresses of the pod
        tracker_run: all attempts of the job are one run in Weights & Biases and Comet, and have the job's id as a tag
            in MLflow. For this, global rank 0 gets variables of these trackers, unless you have set them. If the script
            begins several runs, they become one
        preflight: what to check before the workers start; quick: check each machine while torch is imported, and
            compare the nodes; full: also run an all-reduce within each node and one over all nodes; off: check nothing
        snapshot_memory: the most memory that muster.snapshots may take on each node: a number of bytes, such as 64G, or
            a percentage of the free memory, written with the percent sign. 0: no snapshots are kept. The default is 40
            percent
        snapshot_copies: how many other nodes keep a copy of a node's snapshots, 0 or 1; the default is 1
        rank_order: node, the default: ranks follow the node index; segment: nodes of one NVLink domain get adjacent
            ranks, and a spare of the lost node's domain replaces it first
        on: what follows from a failure: rules, separated by semicolons, of which the first that matches decides (e.g.
            "exit 77: elsewhere; ImportError: stop; oom: stop; exit 33,34: restart free"); muster-agent --help lists the
            conditions, the verdicts and what follows without a rule
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
    image: str = torchx.IMAGE,
    name: str = "/",
    h: Optional[str] = None,
    cpu: int = resources.DEFAULT_CPUS,
    gpu: int = 0,
    memMB: int = resources.DEFAULT_MEMORY_MB,  # noqa: N803 (TorchX's name)
    j: str = "1x2",
    env: EnvArgument = None,
    env_file: Optional[str] = None,
    metadata: EnvArgument = None,
    max_retries: int = 0,
    rdzv_port: int = 29500,
    rdzv_backend: str = "c10d",
    rdzv_conf: Optional[str] = None,
    mounts: Optional[List[str]] = None,
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
    preflight: str = "quick",
    snapshot_memory: Optional[str] = None,
    snapshot_copies: Optional[int] = None,
    rank_order: Optional[str] = None,
    on: Optional[str] = None,
) -> specs.AppDef:
    """Run a distributed PyTorch job (DDP, FSDP, ...), by the name that TorchX's nightly line recommends.

    Usage: torchx run dist.torchrun -j 2x4 --script main.py -- --lr 0.1

    The same as dist.ddp, except that one number in -j means nodes if a host is named with -h.

    Args:
        script_args: arguments of the script or module
        script: path of the script to run, relative to the workspace
        m: dotted name of the module to run, as in python -m
        image: container image of the nodes (e.g. docker)
        name: {experiment}/{run}, {experiment}/, /{run} or {run}; the run defaults to the script's or module's name
        h: a named resource of the node (e.g. -h aws_p4d.24xlarge, with 8 GPUs); takes precedence over cpu, gpu, memMB
        cpu: number of CPUs per node; default: one for each process, at least 2 (0 means 2)
        gpu: number of GPUs per node (e.g. --gpu 8 -j 2x8: 2 nodes, 8 GPUs and 8 processes each)
        memMB: memory per node in MB, which is also the limit; if neither this nor -h is given, there is no limit, and
            the shown default has no effect
        j: [[MIN:]NODESx]PROCESSES; PROCESSES per node is a number, gpu, cpu or auto; one number means processes; if -h
            names a host, it means nodes, each with one process per GPU
        env: environment variables of the job (e.g. HF_TOKEN,ENV1=v1,ENV2=v2); a NAME without a value gets that of your
            environment; such names come first
        env_file: file of environment variables, in the format of docker's --env-file: lines NAME=VALUE or NAME; neither
            ps nor a dry run shows the values
        metadata: metadata for the scheduler (e.g. KEY1=v1,KEY2=v2,KEY3=v3)
        max_retries: how many worker failures the job survives (its workers restart in place), and how many lost nodes
        rdzv_port: rendezvous port on node 0; with c10d a scheduler that picks a free port ignores it
        rdzv_backend: rendezvous backend; c10d means muster's own, others are torch's
        rdzv_conf: rendezvous settings in seconds (e.g. join_timeout=600,last_call_timeout=30)
        mounts: mounts into the nodes' containers, each begins with type=bind, volume or device (e.g.
            type=bind,src=/data,dst=/data,readonly or type=volume,src=claim,dst=/checkpoints)
        debug: set TorchX's four debug environment variables for CUDA, NCCL and torch
        tee: streams that go to console and file; 0: none, 1: stdout, 2: stderr, 3: both
        start: how workers start; warm: fork a process that has imported torch, cold: new processes, auto: warm if safe
        preload: modules that the warm process imports, separated by commas; auto: torch if the program imports it
        hang_timeout: seconds after which the job counts as hung if no rank has entered or completed a collective or
            done a step. For a rank that has done none of these yet, CPU time (at least 1/200 of a core) and output (to
            a file, a pipe or the console) count instead. auto: learned from the job itself, at least 60. 0: never
        hang_action: what happens when the job hangs; report: print which rank keeps the others waiting; restart:
            restart the workers while retries are left; stop: end the job. The default is report if hang_timeout is
            auto, else restart
        collapse_lines: if several ranks write a line within half a second, print it once. Lines may differ in digits,
            hexadecimal numbers and paths. Equal tracebacks are also printed once. auto: torchx run and torchx log do so
            on a terminal with 8 ranks or more; on: each node does so, for all readers; off: all lines are printed. Each
            rank's files have everything
        notify: command that one node runs when the job has failed, hangs, is preempted, has ended or was stopped. The
            command reads the report on its standard input, and has MUSTER_NOTIFY_* variables. No shell interprets it
        metrics_port: [ADDRESS:]PORT at which each node's agent serves /metrics to Prometheus, /healthz, /readyz and
            /status. 0: a free port, which status.json names. The default address is 127.0.0.1, and on Kubernetes all
            addresses of the pod
        tracker_run: all attempts of the job are one run in Weights & Biases and Comet, and have the job's id as a tag
            in MLflow. For this, global rank 0 gets variables of these trackers, unless you have set them. If the script
            begins several runs, they become one
        preflight: what to check before the workers start; quick: check each machine while torch is imported, and
            compare the nodes; full: also run an all-reduce within each node and one over all nodes; off: check nothing
        snapshot_memory: the most memory that muster.snapshots may take on each node: a number of bytes, such as 64G, or
            a percentage of the free memory, written with the percent sign. 0: no snapshots are kept. The default is 40
            percent
        snapshot_copies: how many other nodes keep a copy of a node's snapshots, 0 or 1; the default is 1
        rank_order: node, the default: ranks follow the node index; segment: nodes of one NVLink domain get adjacent
            ranks, and a spare of the lost node's domain replaces it first
        on: what follows from a failure: rules, separated by semicolons, of which the first that matches decides (e.g.
            "exit 77: elsewhere; ImportError: stop; oom: stop; exit 33,34: restart free"); muster-agent --help lists the
            conditions, the verdicts and what follows without a rule
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
    image: str = torchx.IMAGE,
    name: str = "/",
    h: str = resources.DEFAULT_HOST,
    j: str = "1x1",
    env: EnvArgument = None,
    env_file: Optional[str] = None,
    metadata: EnvArgument = None,
    max_retries: int = 0,
    mounts: Optional[List[str]] = None,
    debug: bool = False,
    start: str = "auto",
    preload: str = "auto",
    hang_timeout: str = "auto",
    hang_action: Optional[str] = None,
    collapse_lines: str = "auto",
    notify: Optional[str] = None,
    metrics_port: Optional[str] = None,
    tracker_run: bool = False,
    preflight: str = "quick",
    snapshot_memory: Optional[str] = None,
    snapshot_copies: Optional[int] = None,
    rank_order: Optional[str] = None,
    on: Optional[str] = None,
) -> specs.AppDef:
    """Run a distributed PyTorch job on named hosts: NODES x PROCESSES copies of one program.

    Usage: torchx run dist.spmd -j 2 -h aws_p4d.24xlarge --script main.py -- --lr 0.1

    The example has 8 GPUs on each host, so that -j 2 is the same as -j 2x8.

    Args:
        args: arguments of the script or module
        script: path of the script to run, relative to the workspace
        m: dotted name of the module to run, as in python -m
        image: container image of the nodes (e.g. docker)
        name: {experiment}/{run}, {experiment}/, /{run} or {run}; the run defaults to the script's or module's name
        h: the named resource of a node (e.g. aws_p4d.24xlarge); the default has one GPU
        j: [[MIN:]NODESx]PROCESSES; PROCESSES per node is a number, gpu, cpu or auto; one number means nodes, each with
            one process per GPU of the host
        env: environment variables of the job (e.g. HF_TOKEN,ENV1=v1,ENV2=v2); a NAME without a value gets that of your
            environment; such names come first
        env_file: file of environment variables, in the format of docker's --env-file: lines NAME=VALUE or NAME; neither
            ps nor a dry run shows the values
        metadata: metadata for the scheduler (e.g. KEY1=v1,KEY2=v2,KEY3=v3)
        max_retries: how many worker failures the job survives (its workers restart in place), and how many lost nodes
        mounts: mounts into the nodes' containers, each begins with type=bind, volume or device (e.g.
            type=bind,src=/data,dst=/data,readonly or type=volume,src=claim,dst=/checkpoints)
        debug: set TorchX's four debug environment variables for CUDA, NCCL and torch
        start: how workers start; warm: fork a process that has imported torch, cold: new processes, auto: warm if safe
        preload: modules that the warm process imports, separated by commas; auto: torch if the program imports it
        hang_timeout: seconds after which the job counts as hung if no rank has entered or completed a collective or
            done a step. For a rank that has done none of these yet, CPU time (at least 1/200 of a core) and output (to
            a file, a pipe or the console) count instead. auto: learned from the job itself, at least 60. 0: never
        hang_action: what happens when the job hangs; report: print which rank keeps the others waiting; restart:
            restart the workers while retries are left; stop: end the job. The default is report if hang_timeout is
            auto, else restart
        collapse_lines: if several ranks write a line within half a second, print it once. Lines may differ in digits,
            hexadecimal numbers and paths. Equal tracebacks are also printed once. auto: torchx run and torchx log do so
            on a terminal with 8 ranks or more; on: each node does so, for all readers; off: all lines are printed. Each
            rank's files have everything
        notify: command that one node runs when the job has failed, hangs, is preempted, has ended or was stopped. The
            command reads the report on its standard input, and has MUSTER_NOTIFY_* variables. No shell interprets it
        metrics_port: [ADDRESS:]PORT at which each node's agent serves /metrics to Prometheus, /healthz, /readyz and
            /status. 0: a free port, which status.json names. The default address is 127.0.0.1, and on Kubernetes all
            addresses of the pod
        tracker_run: all attempts of the job are one run in Weights & Biases and Comet, and have the job's id as a tag
            in MLflow. For this, global rank 0 gets variables of these trackers, unless you have set them. If the script
            begins several runs, they become one
        preflight: what to check before the workers start; quick: check each machine while torch is imported, and
            compare the nodes; full: also run an all-reduce within each node and one over all nodes; off: check nothing
        snapshot_memory: the most memory that muster.snapshots may take on each node: a number of bytes, such as 64G, or
            a percentage of the free memory, written with the percent sign. 0: no snapshots are kept. The default is 40
            percent
        snapshot_copies: how many other nodes keep a copy of a node's snapshots, 0 or 1; the default is 1
        rank_order: node, the default: ranks follow the node index; segment: nodes of one NVLink domain get adjacent
            ranks, and a spare of the lost node's domain replaces it first
        on: what follows from a failure: rules, separated by semicolons, of which the first that matches decides (e.g.
            "exit 77: elsewhere; ImportError: stop; oom: stop; exit 33,34: restart free"); muster-agent --help lists the
            conditions, the verdicts and what follows without a rule
    """
    return application.build_application(
        {**locals(), "script_args": args},
        resources.ResourceRequest(h=h, default_h=resources.DEFAULT_HOST),
        topology.Bare.NODES,
    )
