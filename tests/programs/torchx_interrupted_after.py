"""`torchx`, with a Ctrl-C at the moment in which the first call of a given function has returned.

Usage: MODULE:FUNCTION or MODULE:CLASS.METHOD, then torchx's words.
"""

import functools
import importlib
import signal
import sys

from torchx.cli.main import main

module, _, path = sys.argv.pop(1).partition(":")
*owners, name = path.split(".")
owner = functools.reduce(getattr, owners, importlib.import_module(module))
function = getattr(owner, name)
sent = []


@functools.wraps(function)
def call(*words, **named):
    returned = function(*words, **named)
    if not sent:
        sent.append(name)
        signal.raise_signal(signal.SIGINT)
    return returned


setattr(owner, name, call)
main(sys.argv[1:])
