"""A hub between network namespaces that hands each Ethernet frame on only some time after it came.

    python slow_hub.py DELAY_MS NAMESPACE=ADDRESS/BITS ...

Puts a TAP device `eth0` with its address into every namespace, prints "ready", and runs until it is killed; the devices
go with it. For kernels without netem. Needs root and /dev/net/tun.
"""

import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
MOST_BYTES = 65536


def main() -> None:
    delay_s = int(sys.argv[1]) / 1000
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    ports = []
    for word in sys.argv[2:]:
        space, _, address = word.partition("=")
        ports.append(open_port(space))
        for command in (["addr", "add", address, "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run(["ip", "-n", space, *command], check=True)
    enter(own)
    print("ready", flush=True)
    carry(ports, delay_s)


def open_port(space: str) -> int:
    """The device's descriptor: what its namespace sends can be read, what is written its namespace receives."""
    handle = os.open(f"/run/netns/{space}", os.O_RDONLY)
    enter(handle)
    os.close(handle)
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    return port


def enter(handle: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def carry(ports: list[int], delay_s: float) -> None:
    """Every frame goes to every other port: the devices themselves drop what is not for them."""
    selector = selectors.DefaultSelector()
    for port in ports:
        selector.register(port, selectors.EVENT_READ)
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(wait_s):
            under_way.append((time.monotonic() + delay_s, key.fd, os.read(key.fd, MOST_BYTES)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, came_from, frame = under_way.popleft()
            for port in ports:
                if port != came_from:
                    os.write(port, frame)


if __name__ == "__main__":
    main()
