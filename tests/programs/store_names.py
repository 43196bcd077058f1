"""Serve as the machine's name server, have the store's process serve one client, and print which names it asked for.

Run it in a mount namespace whose /etc/resolv.conf names the server at NAME_SERVER.
"""

import os
import select
import socket
import struct
import subprocess
import sys
import threading

from muster.agent.runtime.ports import bind_wildcard
from muster.agent.workers import program

NAME_SERVER = "127.77.0.1"
VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
PING = struct.pack("=BI", 13, 7)


def answer(server: socket.socket, asked: list[bytes]) -> None:
    """Answer each query: there is no such name."""
    while True:
        query, client = server.recvfrom(512)
        asked.append(query)
        server.sendto(query[:2] + b"\x81\x83" + query[4:], client)


def main() -> None:
    asked: list[bytes] = []
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((NAME_SERVER, 53))
    threading.Thread(target=answer, args=(server, asked), daemon=True).start()
    if sys.argv[1:] == ["look-up"]:  # what the test relies on: a look-up comes here
        socket.getnameinfo(("::ffff:127.0.0.1", 1), 0)
    else:
        ask_store()
    os.write(1, b"asked for %d names\n" % len(asked))


def ask_store() -> None:
    ours, theirs = socket.socketpair()
    listener = bind_wildcard(0)
    listener.listen()
    words = [program.find_entry_path(), program.WORKER_FLAG, program.STORE, str(theirs.fileno())]
    store = subprocess.Popen([sys.executable, *words], pass_fds=[theirs.fileno()])
    socket.send_fds(ours, [(1).to_bytes(4, "big")], [listener.fileno()])
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as client:
        client.sendall(VALIDATE + PING)
        assert select.select([client], (), (), 120)[0], "the store does not answer"
        assert client.recv(4, socket.MSG_WAITALL) == PING[1:]
    ours.close()
    store.wait()


if __name__ == "__main__":
    main()
