"""An optimizer's loop without a line for muster: it waits after 30 steps until the file argv[1] is there."""

import os
import sys
import time

import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    while step == 30 and not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    model(torch.ones(4)).backward()
    optimizer.step()
