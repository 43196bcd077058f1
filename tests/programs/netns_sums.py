"""Adds ones over all ranks and says the sum, again and again, until the file `stop` appears in a folder.

    netns_sums.py gloo|plain FOLDER

`gloo` is torch's all-reduce. `plain` does the same through rank 0 with the standard library alone, for tests that are
about membership: no import of torch. Every worker holds a lock for as long as its process lives, whatever it is doing,
and looks at the others' when it starts: two groups at one time are written to the file `overlaps`.

If there is a file `fault-RANK-ATTEMPT`, that rank exits with 77 in that attempt after a few sums; if it is not empty,
it calls `muster.worker.leave_node` with the text.
"""

import fcntl
import os
import socket
import struct
import sys
import time
from pathlib import Path

PAUSE_S = 0.05
PAIR = struct.Struct("<qq")
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GROUP = f"{os.environ['MASTER_ADDR']}-{os.environ['MASTER_PORT']}"


def claim(folder: Path) -> int:
    """Lock our mark, then look for living workers of any other group: of two that start at once, one sees the other."""
    own = os.open(folder / f"{GROUP}.{RANK}.{os.getpid()}.mark", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(own, fcntl.LOCK_EX)
    for mark in folder.glob("*.mark"):
        if mark.name.startswith(f"{GROUP}."):
            continue
        other = os.open(mark, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may be asking too
        except BlockingIOError:
            with (folder / "overlaps").open("a") as found:
                found.write(f"{mark.name} lives as rank {RANK} of {GROUP} starts\n")
        os.close(other)
    return own


class Gloo:
    """torch's process group."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        dist.init_process_group("gloo")

    def add(self, one: int, stop: int) -> tuple[int, int]:
        pair = self.torch.tensor([one, stop])
        self.dist.all_reduce(pair)
        return int(pair[0]), int(pair[1])

    def close(self) -> None:
        self.dist.barrier()
        self.dist.destroy_process_group()


class Plain:
    """A star around rank 0, at MASTER_ADDR:MASTER_PORT."""

    def __init__(self) -> None:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.peers: list[socket.socket] = []
        if RANK == 0:
            # As TCPStore does: SO_REUSEADDR, all addresses of both families where there are two.
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            with socket.create_server(
                ("", place[1]), family=family, dualstack_ipv6=family is socket.AF_INET6
            ) as server:
                self.peers = [server.accept()[0] for _ in range(SIZE - 1)]
            return
        while not self.peers:
            try:
                self.peers = [socket.create_connection(place)]
            except ConnectionRefusedError:
                time.sleep(0.01)

    def add(self, one: int, stop: int) -> tuple[int, int]:
        if RANK > 0:
            self.peers[0].sendall(PAIR.pack(one, stop))
            return receive(self.peers[0])
        pairs = [(one, stop), *map(receive, self.peers)]
        total = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        for peer in self.peers:
            peer.sendall(PAIR.pack(*total))
        return total

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def receive(peer: socket.socket) -> tuple[int, int]:
    data = b""
    while len(data) < PAIR.size:
        chunk = peer.recv(PAIR.size - len(data))
        if not chunk:
            raise ConnectionError("Connection closed by peer")
        data += chunk
    return PAIR.unpack(data)


def fail(text: str) -> None:
    """See above."""
    if not text:
        sys.exit(77)
    from muster import worker

    worker.leave_node(text)


def main() -> None:
    folder = Path(sys.argv[2])
    claim(folder)
    group = Gloo() if sys.argv[1] == "gloo" else Plain()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    stops = count = 0
    while not stops:
        count += 1
        fault = folder / f"fault-{RANK}-{attempt}"
        if count > 3 and fault.exists():
            fail(fault.read_text())
        total, stops = group.add(1, int((folder / "stop").exists()))
        print(f"sum {total} of {SIZE} rank {RANK} attempt {attempt}", flush=True)
        time.sleep(PAUSE_S)
    group.close()


main()
