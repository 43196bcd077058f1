"""What muster sees of this machine itself: the findings of the preflight's table, and what they were read from."""

import os
import platform
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from muster import __version__
from muster._shared import preflight
from muster._shared.contract import Env, describe_end
from muster._shared.preflight import SITE_LIMITS_S, Finding, Level, read_site_check, read_versions
from muster._shared.processes import count_usable_cores, find_nvml
from muster._shared.records import replace
from muster._shared.reports import format_size
from muster.schedulers.supervision.machine import read_line

_CREDENTIALS: Final = re.compile(r"//[^/@\s]*@")
_QUERY: Final = re.compile(r"(//[^\s?]+)\?[^\s)'\"]*")
"""The query of an address. A token may be in it."""


class Verdict(Enum):
    """What it means for jobs on this machine."""

    OK = "ok"
    ABSENT = "absent"
    """It is not here, and only some jobs need it."""
    WARNING = "warning"
    ERROR = "error"
    """No job that needs it can run."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One line for people. `facts` are for a bug report, and hold no secret."""

    name: str
    verdict: Verdict
    text: str
    advice: str = ""
    """The next step."""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return JSON types."""
        return {**vars(self), "verdict": self.verdict.value}


def hide_credentials(text: str) -> str:
    """Remove user, password and query from addresses."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("//", text))


_NET: Final = Path("/sys/class/net")
_FABRIC: Final = Path("/sys/class/infiniband")
_PREFIXES: Final = ("CUDA_", "GLOO_", "MUSTER_", "NCCL_", "NVIDIA_", "OMP_", "PET_", "TORCH", "SLURM_")


def look_at_machine(
    environ: Mapping[str, str], *, nproc: int | None, devices: int | None, log_dir: str | None
) -> Iterator[Observation]:
    """Look at this machine.

    Args:
        environ: the environment.
        nproc: how many workers a job has here. None: one for each GPU, at least one.
        devices: how many GPUs there must be. None: that is not known.
        log_dir: where the job writes. None: into the folder for temporary files.
    """
    visible = preflight.parse_visible(environ.get("CUDA_VISIBLE_DEVICES"))
    folders = {"the log folder": log_dir} if log_dir else {"the temporary folder": environ.get("TMPDIR") or "/tmp"}  # noqa: S108
    machine = _shorten_commands(preflight.read_machine(folders, nvml=find_nvml(environ)))
    found = preflight.find_devices(machine, preflight.Need(nproc=1, visible=visible))
    need = preflight.Need(nproc=nproc or max(1, len(found)), devices=devices, visible=visible)
    findings = (*preflight.find_problems(machine, need), *_find_site_problems(environ))
    yield _describe_versions()
    yield _describe_devices(machine, findings)
    yield _describe_limits(machine, findings)
    yield _describe_folders(machine, findings)
    yield _describe_interfaces()
    yield _describe_site(environ, findings)
    names = sorted(name for name in environ if name.startswith(_PREFIXES))
    text = ", ".join(names) or "none that jobs read"
    yield Observation(name="variables", verdict=Verdict.OK, text=text, facts={"names": names})


def _shorten_commands(machine: preflight.Machine) -> preflight.Machine:
    """Keep the program alone of processes that hold a device: the words after it may hold a secret."""
    if machine.devices is None:
        return machine
    answering = tuple(
        replace(each, holders=tuple(replace(held, command=held.command.split(" ")[0]) for held in each.holders))
        for each in machine.devices.answering
    )
    return replace(machine, devices=replace(machine.devices, answering=answering))


def _judge(
    name: str, findings: tuple[Finding, ...], *checks: str, seen: str = "", instead: str = "", facts: Mapping[str, Any]
) -> Observation:
    """Return the worst verdict of these checks, with what was found and what to do.

    Args:
        name: of the observation.
        findings: of all checks.
        checks: those that count.
        seen: what is said before what was found.
        instead: what is said if nothing was found.
        facts: for a bug report. The findings are added.
    """
    own = [finding for finding in findings if finding.check in checks]
    levels = {finding.level for finding in own}
    shown = [
        {"check": each.check, "level": each.level.value, "text": replace(each, advice="").describe()} for each in own
    ]
    return Observation(
        name=name,
        verdict=Verdict.ERROR if Level.ERROR in levels else Verdict.WARNING if own else Verdict.OK,
        text="; ".join(filter(None, [seen, *(each["text"] for each in shown)])) or instead,
        advice="; ".join(dict.fromkeys(finding.advice for finding in own if finding.advice)),
        facts={**facts, "findings": shown},
    )


def _describe_versions() -> Observation:
    versions = dict(read_versions())
    facts = {"muster": __version__, **versions, "system": platform.platform(), "executable": sys.executable}
    if "torch" not in versions:
        advice = "install torch into the environment that jobs run in: pip install torch"
        text = f"muster {__version__}, Python {versions['Python']}; there is no torch for this interpreter"
        return Observation(name="torch", verdict=Verdict.WARNING, text=text, advice=advice, facts=facts)
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Observation(name="torch", verdict=Verdict.OK, text=f"muster {__version__}, {named}", facts=facts)


def _describe_devices(machine: preflight.Machine, findings: tuple[Finding, ...]) -> Observation:
    devices = machine.devices
    if devices is None and os.path.exists("/dev/kfd"):
        text = "AMD's driver is loaded: jobs use its GPUs, which the preflight does not check"
        return Observation(name="devices", verdict=Verdict.OK, text=text)
    if any(finding.check == "driver" for finding in findings):
        return _judge("devices", findings, "driver", facts={})
    if devices is None:
        text = "no NVIDIA driver is loaded here: jobs use the CPU and gloo"
        return Observation(name="devices", verdict=Verdict.ABSENT, text=text)
    sizes = [format_size(device.total_bytes) for device in devices.answering]
    count = "1 GPU" if len(sizes) == 1 else f"{len(sizes)} GPUs"
    seen = f"{count} ({', '.join(dict.fromkeys(sizes))}), driver {devices.driver}"
    facts = {
        "driver": devices.driver,
        "silent": devices.silent,
        "devices": [
            {
                "index": device.index,
                "total_bytes": device.total_bytes,
                "used_bytes": device.used_bytes,
                "holders": [{"pid": held.pid, "user": held.user, "program": held.command} for held in device.holders],
            }
            for device in devices.answering
        ],
    }
    return _judge("devices", findings, "devices", "shared-devices", "device-memory", seen=seen, facts=facts)


def _describe_limits(machine: preflight.Machine, findings: tuple[Finding, ...]) -> Observation:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _FABRIC.is_dir() and any(_FABRIC.iterdir()) and locked != resource.RLIM_INFINITY:
        found = f"{format_size(locked)} of memory may be locked, and RDMA needs more"
        findings += (Finding(check="locked", level=Level.WARNING, found=found, advice="raise `ulimit -l`"),)
    cores = count_usable_cores()
    free = "?" if machine.shared_bytes is None else format_size(machine.shared_bytes)
    seen = f"{cores} cores, /dev/shm {free} free, {machine.descriptors or 'unlimited'} open files"
    facts = {
        "cores": cores,
        "shared_bytes": machine.shared_bytes,
        "descriptors": machine.descriptors,
        "processes": machine.processes,
        "locked_bytes": None if locked == resource.RLIM_INFINITY else locked,
    }
    checks = ("shared-memory", "descriptors", "processes", "locked")
    return _judge("limits", findings, *checks, seen=seen, facts=facts)


def _describe_folders(machine: preflight.Machine, findings: tuple[Finding, ...]) -> Observation:
    seen = ", ".join(
        f"{each.label} {each.path}: {'?' if each.free_bytes is None else format_size(each.free_bytes)} free"
        for each in machine.folders
    )
    facts = {"folders": [vars(each) for each in machine.folders]}
    return _judge("folders", findings, "folders", instead=seen, facts=facts)


def _describe_interfaces() -> Observation:
    """Describe interfaces that are up and no loopback: by these other nodes reach this one."""
    found = []
    for _, name in socket.if_nameindex():
        # links that are down have no speed
        state, speed = read_line(_NET / name / "operstate"), read_line(_NET / name / "speed")
        found.append({"name": name, "state": state or "?", "mbit": int(speed) if speed.isdecimal() else None})
    fabric = sorted(path.name for path in _FABRIC.iterdir()) if _FABRIC.is_dir() else []
    ready = [each for each in found if each["name"] != "lo" and each["state"] in ("up", "unknown")]
    rates = [f"{each['name']}{_format_rate(each['mbit'])}" for each in ready]
    text = ", ".join(rates) + (f"; RDMA: {', '.join(fabric)}" if fabric else "")
    facts = {"interfaces": found, "rdma": fabric}
    if not ready:
        advice = "jobs of several machines need one; with several, name it in NCCL_SOCKET_IFNAME and --local-addr"
        text = "no interface but loopback is up"
        return Observation(name="interfaces", verdict=Verdict.WARNING, text=text, advice=advice, facts=facts)
    return Observation(name="interfaces", verdict=Verdict.OK, text=text, facts=facts)


def _format_rate(mbit: object) -> str:
    return f" ({mbit / 1000:g} Gbit/s)" if isinstance(mbit, int) and mbit > 0 else ""


def _describe_site(environ: Mapping[str, str], findings: tuple[Finding, ...]) -> Observation:
    folder = environ.get(Env.PREFLIGHT_DIR) or preflight.SITE_FOLDER
    paths = preflight.find_site_checks(folder)
    names = [os.path.basename(path) for path in paths]
    site = _judge("site checks", findings, "site", instead=", ".join(names), facts={"names": names})
    if not paths and site.verdict is Verdict.OK:
        text = f"there are no checks of this site in {folder}"
        return Observation(name="site checks", verdict=Verdict.ABSENT, text=text)
    return site


def _find_site_problems(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Run the checks one after the other, because no job waits for them."""
    env = {**environ, Env.PREFLIGHT: "quick", "LOCAL_WORLD_SIZE": "1"}
    folder = environ.get(Env.PREFLIGHT_DIR)
    paths = preflight.find_site_checks(folder)
    yield from preflight.find_unused_folder(folder, paths)
    for path in paths:
        name = os.path.basename(path)
        try:
            done = subprocess.run(
                [path],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SITE_LIMITS_S["quick"],
                check=False,
            )
        except subprocess.TimeoutExpired:
            trouble = f"{path} has not ended within {SITE_LIMITS_S['quick']:g} s: killed"
            yield from read_site_check(name, (), trouble, is_killed=True)
        except OSError as error:
            yield from read_site_check(name, (), f"{path} cannot be started: {error.strerror}")
        else:
            lines = done.stdout.decode("utf-8", "replace").splitlines()
            trouble = f"{path} {describe_end(done.returncode)}" if done.returncode else ""
            yield from read_site_check(name, lines, trouble)
