"""`python -m spawning`: starts a job in a process that multiprocessing spawns, and one of a function that is here."""

import multiprocessing
import sys

from muster.elastic import PickleFault, launch
from spawning.starting import start_without_cloudpickle


def defined_here():
    pass


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=start_without_cloudpickle)
    child.start()
    child.join()
    sys.modules["cloudpickle"] = None
    try:
        launch(defined_here)
    except PickleFault as error:
        print(error)
