"""A learner and its actors: reinforcement learning as two roles of one app, each a job of its own.

    python examples/several_roles/actor_critic.py
    python examples/several_roles/actor_critic.py --scheduler kubernetes --image registry.example/torch:2.13 \
        --meet /shared/meeting

Actors walk in a corridor with the policy that they were sent last, and send what they saw. The learner has the policy
and the critic, a value for each place; it learns from each episode and answers with the new policy.
"""

import sys
from multiprocessing.connection import wait
from pathlib import Path

import meeting
import torch

PLACES, START, LONGEST = 7, 3, 40
EPISODES, ACTORS, RATE, DISCOUNT = 200, 2, 0.5, 0.95


def learn(folder: Path) -> None:
    """Improve policy and critic with each episode that comes from an actor."""
    policy = torch.zeros(PLACES, 2, requires_grad=True)
    critic = torch.zeros(PLACES, requires_grad=True)
    rewards = []
    with meeting.listen(folder) as listener:
        actors = [listener.accept() for _ in range(ACTORS)]
        for actor in actors:
            actor.send(policy.tolist())
        while actors:
            for actor in wait(actors):
                places, moves, reward = actor.recv()
                rewards.append(reward)
                returns = torch.tensor([reward * DISCOUNT**left for left in range(len(places) - 1, -1, -1)])
                advantage = returns - critic[places]
                chosen = policy[places].log_softmax(dim=1)[range(len(moves)), moves]
                loss = -(chosen * advantage.detach()).mean() + advantage.square().mean()
                step(loss, policy, critic)
                is_over = len(rewards) >= EPISODES
                actor.send(None if is_over else policy.tolist())
                if is_over:
                    actors.remove(actor)
    print(f"the way out was found in {sum(rewards[-50:])} of the last 50 episodes", flush=True)


def step(loss: torch.Tensor, *parameters: torch.Tensor) -> None:
    """Do one step of gradient descent."""
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= RATE * gradient


def act(folder: Path) -> None:
    """Walk until the learner has seen enough."""
    with meeting.connect(folder) as learner:
        while (policy := learner.recv()) is not None:
            learner.send(walk(torch.tensor(policy).softmax(dim=1)))


def walk(chances: torch.Tensor) -> tuple[list[int], list[int], int]:
    """Walk one episode; return the places, the moves (0: left, 1: right), and 1 if the right end was reached."""
    place, places, moves = START, [], []
    while 0 < place < PLACES - 1 and len(places) < LONGEST:
        move = int(torch.multinomial(chances[place], 1))
        places.append(place)
        moves.append(move)
        place += 1 if move else -1
    return places, moves, int(place == PLACES - 1)


if __name__ == "__main__":
    if meeting.has_role():
        {"learner": learn, "actor": act}[sys.argv[1]](Path(sys.argv[2]))
    else:
        import app  # the image of the nodes need not have torchx

        script = "examples/several_roles/actor_critic.py"
        sys.exit(app.submit(app.parse_options(__doc__), "rl", script, {"learner": "1x1", "actor": f"{ACTORS}x1"}))
