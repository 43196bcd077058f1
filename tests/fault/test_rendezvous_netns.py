"""Real agents, each in a network namespace of its own: nodes end, come back and join a running job.

Every node adds ones over the world, with gloo or, where only membership matters, without torch. A job has recovered
when the survivors print the sum of the new world size, and succeeded when all of them exit 0. See `netns_world`.
"""

import pytest
from netns_world import World

pytestmark = [pytest.mark.netns, pytest.mark.torch, pytest.mark.timeout(240), pytest.mark.soak]


def test_loss_of_node_0_of_three(world: World) -> None:
    first, *others = world.start(3, "2:3")
    first.kill_agent()
    world.wait_for_sizes([3, 2], *others)
    world.finish(*others)


@pytest.mark.long
def test_from_one_to_four_to_two_to_three(world: World) -> None:
    (first,) = world.start(1, "1:4")
    second, third, fourth = (world.launch(index, "1:4") for index in (1, 2, 3))
    world.wait_for_sizes([4], first, second, third, fourth)
    third.kill_agent()
    fourth.kill_agent()
    world.wait_for_sizes([2], first, second)
    fifth = world.launch(2, "1:4")
    world.wait_for_sizes([3], first, second, fifth)
    world.finish(first, second, fifth)
