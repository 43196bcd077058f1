"""`torchx`, with a Ctrl-C while the first response of the engine ends of those that a given function of ours asks for.

Usage: FUNCTION, then torchx's words. The interpreter drops what the signal handler raises there.
"""

import signal
import sys

import urllib3
from torchx.cli.main import main

function = sys.argv.pop(1)
find_closed = urllib3.HTTPResponse.closed.fget
sent = []


def closed(response):
    """`io.IOBase` asks for it when the object ends, and clears any exception."""
    frame, names = sys._getframe(1), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    if function in names and not sent:
        sent.append(function)
        signal.raise_signal(signal.SIGINT)
    return find_closed(response)


urllib3.HTTPResponse.closed = property(closed)
main(sys.argv[1:])
