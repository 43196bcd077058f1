"""A parameter server and its trainers: two roles of one app, each a job of its own.

    python examples/several_roles/parameter_server.py
    python examples/several_roles/parameter_server.py --scheduler kubernetes --image registry.example/torch:2.13 \
        --meet /shared/meeting

The server holds the weights of a linear model; each trainer fetches them, sends a gradient, and goes on without waiting
for the other trainers.
"""

import sys
from multiprocessing.connection import wait
from pathlib import Path

import meeting
import torch

FEATURES, STEPS, TRAINERS, RATE = 4, 200, 2, 0.05


def serve(folder: Path) -> None:
    """Apply gradients in the order in which they come, until every trainer is done."""
    weights = torch.zeros(FEATURES)
    with meeting.listen(folder) as listener:
        trainers = [listener.accept() for _ in range(TRAINERS)]
        for trainer in trainers:
            trainer.send(weights.tolist())
        while trainers:
            for trainer in wait(trainers):
                gradient = trainer.recv()
                if gradient is None:
                    trainers.remove(trainer)
                    continue
                weights -= RATE * torch.tensor(gradient)
                trainer.send(weights.tolist())
    error = float((weights - build_truth()).abs().max())
    print(f"the weights are off by {error:.4f} at most", flush=True)
    if error > 0.1:
        sys.exit("the model has not learned")


def train(folder: Path) -> None:
    """Send gradients of batches that this trainer draws."""
    truth = build_truth()
    with meeting.connect(folder) as server:
        for _ in range(STEPS):
            weights = torch.tensor(server.recv(), requires_grad=True)
            features = torch.randn(32, FEATURES)
            loss = (features @ weights - features @ truth).square().mean()
            loss.backward()
            server.send(weights.grad.tolist())
        server.recv()
        server.send(None)


def build_truth() -> torch.Tensor:
    """Build the weights that training should find."""
    return torch.arange(1.0, FEATURES + 1)


if __name__ == "__main__":
    if meeting.has_role():
        {"server": serve, "trainer": train}[sys.argv[1]](Path(sys.argv[2]))
    else:
        import app  # the image of the nodes need not have torchx

        script = "examples/several_roles/parameter_server.py"
        sys.exit(app.submit(app.parse_options(__doc__), "ps", script, {"server": "1x1", "trainer": f"{TRAINERS}x1"}))
