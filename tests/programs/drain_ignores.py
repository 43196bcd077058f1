"""A rank that saves for a while at SIGTERM, and a child of it, as a DataLoader's worker, that says what it is sent.

    drain_ignores.py FOLDER: rank 0 writes `saved` there once its child has lived through the whole save.
"""

import os
import signal
import sys
import time
from multiprocessing import get_context

FOLDER = sys.argv[1]


def load():
    signal.signal(signal.SIGTERM, lambda *_: open(f"{FOLDER}/child", "w").close())
    open(f"{FOLDER}/loads", "w").close()
    while True:
        time.sleep(1)


def save(*_):
    time.sleep(3)  # the agent would have passed a signal on by now
    if child.is_alive() and not os.path.exists(f"{FOLDER}/child"):
        open(f"{FOLDER}/saved", "w").close()
    os._exit(0)


child = get_context("fork").Process(target=load, daemon=True)
child.start()
while not os.path.exists(f"{FOLDER}/loads"):
    time.sleep(0.01)
signal.signal(signal.SIGTERM, save)
sys.stdout.write("trains\n")
sys.stdout.flush()
while True:
    signal.pause()
