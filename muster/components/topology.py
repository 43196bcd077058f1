"""The -j grammar: `[[MIN:]N x] M`, how many nodes and how many processes on each of them.

    4        one number: processes (ddp, torchrun) or nodes (spmd, torchrun with -h)
    2x4      2 nodes, 4 processes each
    1:4x8    1 to 4 nodes, 8 processes each
    2xgpu    2 nodes, as many processes as the node has GPUs; also `cpu` and `auto` (GPUs if any, else CPUs)

It is strict, because a job may wait for hours in a queue before a wrong number fails. TorchX accepts `4:2x8`, `2x0`,
`0:2x4`, a trailing newline and non-ASCII digits.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from muster._shared.contract import SIZE_LIMIT
from muster.components.errors import ComponentError

COUNTED_PROCESSES: Final = ("gpu", "cpu", "auto")
"""Values of M besides numbers. The agent counts on the node."""

_GRAMMAR: Final = re.compile(r"(?:(?:([0-9]+):)?([0-9]+)x)?([0-9]+|gpu|cpu|auto)")
_SHOWN_CHARACTERS: Final = 60
_DIGITS_LIMIT: Final = 100  # int() allows it


class Bare(Enum):
    """What one number in -j means."""

    PROCESSES = "processes"
    NODES = "nodes"


@dataclass(frozen=True, kw_only=True)
class Host:
    """What -j needs to know about the machine a node runs on."""

    label: str
    """As the caller named it: `-h aws_p4d.24xlarge` or `--gpu 4`."""
    gpus: int
    """The number of GPUs. 0 or less: none, or not known."""
    advice: str = ""
    """Text that follows the message that -j asks for too many processes."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Nodes and processes of a job. `str()` returns the -j form that parses to an equal value."""

    min_nodes: int
    max_nodes: int
    processes: str
    """The processes per node: a positive decimal number without leading zeros, or one of `COUNTED_PROCESSES`."""

    @property
    def nnodes(self) -> str:
        """The value of the agent's --nnodes: `N` or `MIN:MAX`."""
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"

    def __str__(self) -> str:
        return f"{self.nnodes}x{self.processes}"


def parse_topology(j: str, *, bare: Bare = Bare.PROCESSES, host: Host | None = None) -> Topology:
    """Parse a -j value.

    Args:
        j: the value, see the module's docstring.
        bare: what one number means. `NODES` needs a host with GPUs: one process runs for each GPU.
        host: limits the processes to one for each of its GPUs.

    Raises:
        ComponentError: one line with the value, what is wrong with it and one valid example.
    """
    try:
        low, high, processes = _match(j)
        if high is None and bare is Bare.NODES and processes.isdecimal():
            high, processes = processes, _count_gpus(host)
        max_nodes = int(high or "1")
        min_nodes = int(low) if low is not None else max_nodes
        if processes.isdecimal():
            processes = str(int(processes))
        _check_counts(min_nodes, max_nodes, processes)
        _check_gpus(processes, host)
    except _RefusedError as refused:
        raise ComponentError(f"-j {_show(j)} {refused}; for example: -j {_build_example(host)}") from None
    return Topology(min_nodes=min_nodes, max_nodes=max_nodes, processes=processes)


def parse_nnodes(j: str) -> tuple[int, int, int, str]:
    """Do as TorchX's function of the same name, which components of others call.

    Returns:
        The least and the greatest number of nodes, the processes on each node, and "MIN:MAX" as in `j`.

    Raises:
        ComponentError: `j` is wrong, or names no number of processes.
    """
    topology = parse_topology(j)
    if not topology.processes.isdecimal():
        raise ComponentError(f"-j {_show(j)} has no number of processes; for example: -j 2x4")
    return topology.min_nodes, topology.max_nodes, int(topology.processes), j.rpartition("x")[0] or "1"


class _RefusedError(Exception):
    """What is wrong."""


def _match(j: str) -> tuple[str | None, str | None, str]:
    if not isinstance(j, str):
        raise _RefusedError("must be a string")
    match = _GRAMMAR.fullmatch(j)
    if match is None:
        raise _RefusedError("is not [[MIN:]NODESx]PROCESSES with plain digits, or gpu, cpu or auto as PROCESSES")
    low, high, processes = match.groups()
    numbers = [number for number in (low, high, processes) if number and number not in COUNTED_PROCESSES]
    if any(len(number) > _DIGITS_LIMIT or int(number) > SIZE_LIMIT for number in numbers):
        raise _RefusedError(f"has a number above {SIZE_LIMIT}")
    return low, high, processes


def _check_counts(min_nodes: int, max_nodes: int, processes: str) -> None:
    if processes == "0":
        raise _RefusedError("asks for 0 processes on each node; at least 1 is needed")
    if max_nodes < 1:
        raise _RefusedError("asks for 0 nodes; at least 1 is needed")
    if min_nodes < 1:
        raise _RefusedError("has a minimum of 0 nodes; at least 1 is needed")
    if min_nodes > max_nodes:
        raise _RefusedError(f"has a minimum of {min_nodes} nodes, more than the {max_nodes} it asks for")


def _count_gpus(host: Host | None) -> str:
    if host is None or host.gpus < 1:
        where = "without -h there are no GPUs" if host is None else f"{host.label} has no GPUs"
        raise _RefusedError(f"gives only nodes, and {where} to count processes by")
    return str(host.gpus)


def _check_gpus(processes: str, host: Host | None) -> None:
    if host is None:
        return
    if processes == "gpu" and host.gpus == 0:
        raise _RefusedError(f"asks for one process per GPU, and {host.label} has no GPUs")
    if host.gpus > 0 and processes.isdecimal() and int(processes) > host.gpus:
        count = f"{host.gpus} GPU{'s' if host.gpus > 1 else ''}"
        more = f"more than the {count} of {host.label}{host.advice}"
        raise _RefusedError(f"asks for {processes} processes on each node, {more}")


def _build_example(host: Host | None) -> str:
    """Return a value that is valid on the host."""
    return f"2x{4 if host is None or host.gpus < 1 else min(4, host.gpus)}"


def _show(j: object) -> str:
    shown = ascii(j)  # shows look-alike digits, unlike repr
    if len(shown) <= _SHOWN_CHARACTERS:
        return shown
    return f"{shown[:_SHOWN_CHARACTERS]}... ({len(shown)} characters)"
