"""Starts a job when it is imported, as a worker imports it."""

from muster.elastic import launch


def double(number):
    return 2 * number


launch(double, (1,), nproc=2)
