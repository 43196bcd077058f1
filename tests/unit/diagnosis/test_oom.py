"""Evidence of the OOM killer in both versions of cgroups, on a copy of the files."""

from pathlib import Path

import pytest

from muster.agent.diagnosis.failures import OomWatch, find_limit
from muster.agent.workers.memory import MemoryWatch, find_memory_cgroup


class Machine:
    """A proc file system and a memory cgroup below `tmp_path`."""

    def __init__(self, root: Path, version: int, *, inside: str = "/pod/job", mount_root: str = "/") -> None:
        self.version = version
        self.proc = root / "proc"
        self.mount = root / "cgroup"
        shown = inside.removeprefix(mount_root.rstrip("/"))
        self.own = self.mount / shown.strip("/")
        (self.proc / "self").mkdir(parents=True)
        self.own.mkdir(parents=True)
        if version == 2:
            (self.proc / "self/cgroup").write_text(f"0::{inside}\n")
            kind = "cgroup2 cgroup2 rw"
        else:
            (self.proc / "self/cgroup").write_text(f"9:name=systemd:/\n4:cpu,memory:{inside}\n0::/\n")
            kind = "cgroup cgroup rw,cpu,memory"
        (self.proc / "self/mountinfo").write_text(
            f"22 1 0:20 / /proc rw - proc proc rw\n30 1 0:32 {mount_root} {self.mount} rw shared:9 - {kind}\n"
        )
        self.set_kills(own=0, machine=0)

    def set_kills(self, *, own: int | None, machine: int, hits: int = 0) -> None:
        (self.proc / "vmstat").write_text(f"pgfault 7\noom_kill {machine}\n")
        kills = "" if own is None else f"oom_kill {own}\n"
        if self.version == 2:
            (self.own / "memory.events").write_text(f"low 0\nmax {hits}\noom 0\n{kills}")
        else:
            (self.own / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\n{kills}")
            (self.own / "memory.failcnt").write_text(f"{hits}\n")

    def set_limit(self, folder: Path, limit: str, peak: int) -> None:
        names = ("memory.max", "memory.peak")
        if self.version == 1:
            names = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{peak}\n")


@pytest.fixture(params=[1, 2])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path, request.param)


def test_a_counted_kill_is_certain_and_names_limit_and_peak(machine: Machine) -> None:
    machine.set_limit(machine.own, "max" if machine.version == 2 else "9223372036854771712", 7)
    machine.set_limit(machine.own.parent, "4096", 4000)
    watch = OomWatch(MemoryWatch(str(machine.proc)))
    assert watch.check() is None
    machine.set_kills(own=1, machine=1)
    evidence = watch.check()
    assert (evidence.certain, evidence.limit_bytes, evidence.peak_bytes) == (True, 4096, 4000)
    assert evidence.source == str(machine.own / ("memory.events" if machine.version == 2 else "memory.oom_control"))


def test_the_lowest_of_several_limits_counts(machine: Machine) -> None:
    machine.set_limit(machine.own, "8192", 7)
    machine.set_limit(machine.own.parent, "4096", 4000)
    cgroup = find_memory_cgroup(str(machine.proc))
    assert cgroup is not None
    assert find_limit(cgroup) == (4096, str(machine.own.parent))


def test_kills_before_the_round_do_not_count(machine: Machine) -> None:
    memory = MemoryWatch(str(machine.proc))
    watch = OomWatch(memory)
    machine.set_kills(own=3, machine=3)
    memory.reset()
    assert watch.check() is None


def test_a_kill_elsewhere_on_the_machine_is_a_guess(machine: Machine) -> None:
    watch = OomWatch(MemoryWatch(str(machine.proc)))
    machine.set_kills(own=0, machine=1)
    evidence = watch.check()
    assert not evidence.certain
    assert evidence.source == str(machine.proc / "vmstat")


def test_an_old_kernel_that_counts_only_hits_of_the_limit_gives_a_guess(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    machine.set_kills(own=None, machine=0)
    watch = OomWatch(MemoryWatch(str(machine.proc)))
    machine.set_kills(own=None, machine=0, hits=5)
    evidence = watch.check()
    assert not evidence.certain
    assert evidence.source.endswith("memory.failcnt")


def test_only_a_kernel_that_counts_kills_rules_one_out(machine: Machine) -> None:
    assert OomWatch(MemoryWatch(str(machine.proc))).counts_kills
    machine.set_kills(own=None, machine=0)
    assert not OomWatch(MemoryWatch(str(machine.proc))).counts_kills
    assert not OomWatch(MemoryWatch(str(machine.proc / "nowhere"))).counts_kills


def test_hits_of_the_limit_alone_are_not_evidence_where_kills_are_counted(machine: Machine) -> None:
    watch = OomWatch(MemoryWatch(str(machine.proc)))
    machine.set_kills(own=0, machine=0, hits=5)
    assert watch.check() is None


def test_a_container_that_sees_only_its_part_of_the_tree(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, inside="/docker/abc", mount_root="/docker/abc")
    cgroup = find_memory_cgroup(str(machine.proc))
    assert cgroup.folders == (str(machine.mount),)
    assert find_limit(cgroup) is None


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    memory = MemoryWatch(str(tmp_path / "proc"))
    memory.reset()
    watch = OomWatch(memory)
    assert watch.check() is None
