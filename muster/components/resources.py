"""What a node needs: TorchX's Resource, and whether its memory was asked for or is only TorchX's default."""

from dataclasses import dataclass
from typing import Any, Final

from torchx import specs

from muster._contract import RoleKey
from muster.components.errors import ComponentError
from muster.components.topology import Host, Topology

_MB_PER_PROCESS: Final = 1024


class DefaultMemory(int):
    """A number of MB nobody asked for.

    Equal to and shown as the plain number, so that signatures and help texts read like TorchX's; recognised by its
    type, so that `memMB=1024` in a caller's hand is obeyed.
    """


DEFAULT_MEMORY_MB: Final = DefaultMemory(1024)
"""TorchX's default. As a limit it kills 8 workers with a tiny Adam step."""


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """A component's arguments about resources."""

    cpu: int = 2
    gpu: int = 0
    memory_mb: int = DEFAULT_MEMORY_MB
    h: str | None = None
    """A named resource; beats the three others."""

    def find_host(self) -> Host | None:
        """What -j is checked against; None when the caller named neither a host nor GPUs.

        Raises:
            ComponentError: a host TorchX does not know.
        """
        if self.h:
            return Host(label=f"-h {self.h}", gpus=int(self.resource().gpu))
        if self.gpu > 0:
            return Host(label=f"--gpu {self.gpu}", gpus=self.gpu)
        return None

    def resource(self) -> Any:
        """The `torchx.specs.Resource`.

        Raises:
            ComponentError: a negative number, or a host TorchX does not know.
        """
        if self.h:
            return _find_host(self.h)
        for flag, value, least in (("cpu", self.cpu, 0), ("gpu", self.gpu, 0), ("memMB", self.memory_mb, 1)):
            if value < least:
                raise ComponentError(f"--{flag} {value} is too small; at least {least}")
        return specs.resource(cpu=self.cpu, gpu=self.gpu, memMB=int(self.memory_mb))

    def role_metadata(self, topology: Topology) -> dict[str, str]:
        """The role's metadata for the adapters, see `_contract.RoleKey`."""
        if self.h or not isinstance(self.memory_mb, DefaultMemory):
            return {}
        return {RoleKey.MEMORY_REQUEST_MB: str(_MB_PER_PROCESS * self._count_processes(topology))}

    def _count_processes(self, topology: Topology) -> int:
        """Processes per node as the request says it: the node itself, where `gpu` or `cpu` is counted, is not known."""
        if topology.processes.isdecimal():
            return int(topology.processes)
        if topology.processes != "cpu" and self.gpu > 0:
            return self.gpu
        return max(self.cpu, 1)


def _find_host(h: str) -> Any:
    try:
        return specs.resource(h=h)
    except KeyError as error:
        # TorchX's message lists every resource it knows or the one most alike
        raise ComponentError(f"-h {h!r} is no named resource: {' '.join(str(error.args[0]).split())}") from error
