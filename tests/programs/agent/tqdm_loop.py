"""A bar of tqdm without a line for muster: it waits after 430 of 1000 turns until the file argv[1] is there."""

import os
import sys
import time

import tqdm

for turn in tqdm.tqdm(range(1000), mininterval=0, desc="epoch 0"):
    while turn == 430 and not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
