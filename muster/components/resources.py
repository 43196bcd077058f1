"""The resources of a node: TorchX's Resource, and whether the caller set its memory or it is TorchX's default."""

from dataclasses import dataclass
from typing import Any, Final

from torchx import specs

from muster._shared.contract import RoleKey
from muster.components.errors import ComponentError
from muster.components.topology import Host, Topology

_MB_PER_PROCESS: Final = 1024


class DefaultMemory(int):
    """A default number of MB, which the caller did not set.

    It equals and prints as the plain number, so that signatures and help texts read like TorchX's. Its type
    distinguishes it from an explicit `memMB=1024`, which sets a limit.
    """


DEFAULT_MEMORY_MB: Final = DefaultMemory(1024)
"""TorchX's default. As a limit it would kill 8 workers with a tiny Adam step."""


class DefaultCpus(int):
    """A default number of CPUs, which the caller did not set. See `DefaultMemory`."""


DEFAULT_CPUS: Final = DefaultCpus(2)
"""TorchX's default."""


DEFAULT_HOST: Final = "gpu.small"
"""TorchX's default of `-h` in `dist.spmd`: one GPU."""


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """A component's arguments about resources."""

    cpu: int = DEFAULT_CPUS
    gpu: int = 0
    memory_mb: int = DEFAULT_MEMORY_MB
    h: str | None = None
    """A named resource, which overrides the three others."""
    default_h: str | None = None
    """The component's default of `h`."""

    def find_host(self) -> Host | None:
        """Return the host against which -j is checked. Return None if the caller named neither a host nor GPUs.

        Raises:
            ComponentError: TorchX does not know the host.
        """
        if self.h:
            # TorchX copies defaults: a typed one looks the same.
            advice = "; on hosts without GPUs use dist.ddp" if self.h == self.default_h else ""
            label = f"{self.h}, the default of -h" if advice else f"-h {self.h}"
            return Host(label=label, gpus=int(self.build_resource().gpu), advice=advice)
        if self.gpu > 0:
            return Host(label=f"--gpu {self.gpu}", gpus=self.gpu)
        return None

    def build_resource(self) -> Any:
        """Return the `torchx.specs.Resource`.

        Raises:
            ComponentError: a number is too small, or TorchX does not know the host.
        """
        if self.h:
            return _find_host(self.h)
        for flag, value, least in (("cpu", self.cpu, 0), ("gpu", self.gpu, 0), ("memMB", self.memory_mb, 1)):
            if value < least:
                raise ComponentError(f"--{flag} {value} is too small; it must be at least {least}")
        return specs.resource(cpu=int(self.cpu), gpu=self.gpu, memMB=int(self.memory_mb))

    def build_role_metadata(self, topology: Topology) -> dict[str, str]:
        """Return the role's metadata for the adapters, see `_shared.contract.RoleKey`."""
        if self.h:
            return {}
        processes, data = self._count_processes(topology), {}
        if isinstance(self.memory_mb, DefaultMemory):
            data[RoleKey.MEMORY_REQUEST_MB] = str(_MB_PER_PROCESS * processes)
        if isinstance(self.cpu, DefaultCpus) and processes > self.cpu:
            data[RoleKey.CPU_REQUEST] = str(processes)
        return data

    def _count_processes(self, topology: Topology) -> int:
        """Return the processes per node according to the request.

        `gpu` and `cpu` are counted on the node, which is not known.
        """
        if topology.processes.isdecimal():
            return int(topology.processes)
        if topology.processes != "cpu" and self.gpu > 0:
            return self.gpu
        return max(self.cpu, 1)


def _find_host(h: str) -> Any:
    try:
        return specs.resource(h=h)
    except KeyError as error:
        # TorchX's message lists known or similar resources.
        raise ComponentError(f"-h {h!r} is not a named resource: {' '.join(str(error.args[0]).split())}") from error
