import sys

from muster.elastic import launch


def count(number):
    return 2 * number + 1


def start_without_cloudpickle():
    sys.modules["cloudpickle"] = None
    print(dict(launch(count, (3,))), flush=True)
