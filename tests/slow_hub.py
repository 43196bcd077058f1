"""A hub between network namespaces that forwards each Ethernet frame after a delay.

    python slow_hub.py DELAY_MS NAMESPACE=ADDRESS/BITS ...

Puts a TAP device `eth0` with its address into every namespace, prints "ready", and runs until it is killed; its end
removes the devices. For kernels without netem. Needs root and /dev/net/tun.
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
READ_BYTES = 65536


def main() -> None:
    delay_s = int(sys.argv[1]) / 1000
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    ports = []
    for word in sys.argv[2:]:
        space, _, address = word.partition("=")
        ports.append(open_device(space))
        for command in (["addr", "add", address, "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run(["ip", "-n", space, *command], check=True)
    enter_namespace(own)
    print("ready", flush=True)
    forward_frames(ports, delay_s)


def open_device(space: str) -> int:
    """The device's descriptor: reading gets what the namespace sends, writing sends to the namespace."""
    handle = os.open(f"/run/netns/{space}", os.O_RDONLY)
    enter_namespace(handle)
    os.close(handle)
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    return port


def enter_namespace(handle: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def forward_frames(ports: list[int], delay_s: float) -> None:
    """Send every frame to every other port: the devices drop what is not for them."""
    selector = selectors.DefaultSelector()
    for port in ports:
        selector.register(port, selectors.EVENT_READ)
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(wait_s):
            under_way.append((time.monotonic() + delay_s, key.fd, os.read(key.fd, READ_BYTES)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, source, frame = under_way.popleft()
            for port in ports:
                if port != source:
                    os.write(port, frame)


if __name__ == "__main__":
    main()
