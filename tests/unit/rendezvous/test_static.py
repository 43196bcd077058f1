"""`static` with several nodes: muster's own protocol, at an endpoint that the workers' store uses while they run."""

from types import SimpleNamespace

import pytest
from doubles.rendezvous_world import Process, World

from muster.agent.rendezvous.interface import JobEnded, RendezvousFailed

PORT = 29400


class StaticWorld(World):
    """Three nodes that join where the workers of node 0 listen."""

    def boot(self, index: int, **changes: object) -> Process:
        fixed = {"backend": "static", "master_addr": f"n0.as-node-{index}-says", "master_port": PORT}
        return super().boot(index, **{**fixed, **changes})

    def start_all(self) -> list[Process]:
        job = [self.boot(index) for index in (2, 0, 1)]
        self.run_until(5.0)
        assert [process.numbers for process in job] == [[1]] * 3
        return sorted(job, key=lambda process: process.config.node_index or 0)


@pytest.fixture
def world() -> StaticWorld:
    return StaticWorld(3, nodes=3, min_nodes=3, max_restarts=1, work_s=40.0)


def is_listening(world: World) -> bool:
    return PORT in world.machines[0].ports


def expect_success(world: World, *processes: Process) -> None:
    world.run_until(300.0)
    assert all(isinstance(process.outcome, JobEnded) and process.outcome.succeeded for process in processes)


def test_each_node_has_the_rank_and_address_it_was_given(world: StaticWorld) -> None:
    job = world.start_all()
    rounds = [process.round for process in job]
    assert [(r.group_rank, r.master_addr, r.master_port) for r in rounds if r is not None] == [
        (index, f"n0.as-node-{index}-says", PORT) for index in range(3)
    ]
    expect_success(world, *job)
    assert [process.numbers for process in job] == [[1]] * 3


def test_the_endpoint_is_free_while_workers_run(world: StaticWorld) -> None:
    job = [world.boot(0), world.boot(1)]
    world.run_until(5.0)
    assert is_listening(world)
    job.append(world.boot(2))
    world.run_until(10.0, lambda: all(process.numbers for process in job))
    assert not is_listening(world)
    job[1].fail_worker()
    world.run_until(20.0, lambda: is_listening(world))  # every worker has ended, or node 0's have
    assert not job[0].workers_alive
    world.run_until(20.0, lambda: all(process.numbers == [1, 2] for process in job))
    assert not is_listening(world)
    expect_success(world, *job)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("end", [Process.crash, lambda process: process.world.vanish(process.machine)])
def test_a_node_that_comes_back_completes_the_job(world, index, end) -> None:
    job = world.start_all()
    end(job[index])
    world.run_until(30.0)
    others = [process for process in job if process is not job[index]]
    assert [process.outcome for process in others] == [None, None]
    assert not any(process.workers_alive for process in others)
    job[index] = world.boot(index)
    expect_success(world, *job)
    assert [process.numbers[-1] for process in job] == [2] * 3


def test_a_node_that_does_not_come_back_is_no_success(world: StaticWorld) -> None:
    job = world.start_all()
    job[2].crash()
    world.run_until(300.0)
    assert all(isinstance(process.outcome, RendezvousFailed) for process in job[:2])


def test_an_endpoint_in_use_is_waited_for(world: StaticWorld) -> None:
    machine = world.machines[0]
    taken = SimpleNamespace(process=SimpleNamespace(is_alive=False))  # refuses every connection
    machine.ports[PORT] = taken  # type: ignore[assignment]
    job = [world.boot(index) for index in range(3)]
    world.run_until(3.0)
    assert machine.ports[PORT] is taken
    assert all(process.outcome is None for process in job)
    del machine.ports[PORT]
    expect_success(world, *job)
