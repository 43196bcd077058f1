"""What a holder does when its connections end in an unusual order."""

import socket
from collections import deque
from pathlib import Path
from types import SimpleNamespace

from muster.agent.hold.holder import Holder
from muster.agent.hold.listening import Listener


def test_a_client_that_ends_while_the_guard_of_its_run_ends(tmp_path: Path) -> None:
    control, guard = socket.socketpair()
    client, _other = socket.socketpair()
    holder = object.__new__(Holder)
    facts = {"_connection": client, "_is_cold": False, "_claim": None, "_queue": deque(), "_members": []}
    waiting = SimpleNamespace(control=control, end=control.close)
    vars(holder).update(facts, _loop=Listener(str(tmp_path), holder._handle), _waiting=waiting)
    holder._loop.watch(client, bool)
    holder._lose_client(client)  # the guard has closed its connection already, so nothing watches it any more
    assert (control.fileno(), client.fileno(), holder._connection) == (-1, -1, None)
    guard.close()
    _other.close()
    holder._loop._socket.close()
    holder._loop._selector.close()
