"""The cable between two hosts on one machine: hands Ethernet frames from one device to the other,
badly where asked.

    python two_hosts_link.py DEVICE DEVICE SETTINGS

SETTINGS is a file with two numbers, looked at ten times a second: milliseconds that a frame takes
on its way, and the percentage of frames that are lost (100 cuts the link). Many kernels, as of
containers and small virtual machines, lack the queueing discipline `netem`, which would do the
same; this needs nothing but packet sockets, and root.

This is for tests on one machine. It uses the standard library alone, so any python3 will do.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import random
import select
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

ETH_P_ALL = 3
PACKET_OUTGOING = 4  # what this process itself has sent, which comes back to a packet socket
FRAME_BYTES = 1 << 16
LOOK_SECONDS = 0.1
SIOCETHTOOL = 0x8946
# linux/ethtool.h
ETHTOOL_STXCSUM = 0x17
ETHTOOL_STSO = 0x1F
ETHTOOL_SGSO = 0x24


def switch_offload_off(name: str) -> None:
    """Let the kernel compute checksums and cut frames itself: no hardware will do it behind this
    device.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO):
            value = (ctypes.c_uint32 * 2)(command, 0)
            with suppress(OSError):  # of a device without it
                fcntl.ioctl(
                    control,
                    SIOCETHTOOL,
                    struct.pack("16sQ16x", name.encode(), ctypes.addressof(value)),
                )


def open_device(name: str) -> socket.socket:
    """A socket for all frames of a device."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    found.bind((name, 0))
    found.setblocking(False)
    return found


def read_settings(path: Path, before: tuple[float, float]) -> tuple[float, float]:
    """(seconds of delay, share that is lost); as before while the file is being written."""
    try:
        delay, lost = path.read_text().split()
        return float(delay) / 1e3, float(lost) / 100
    except (OSError, ValueError):
        return before


def carry(ends: list[socket.socket], path: Path) -> None:
    """Hand frames on, until this process is ended."""
    delay, lost = read_settings(path, (0.0, 0.0))
    looked = time.monotonic()
    number = 0
    travelling: list[
        tuple[float, int, socket.socket, bytes]
    ] = []  # (arrival, order, where to, frame)
    while True:
        now = time.monotonic()
        if now - looked > LOOK_SECONDS:
            (delay, lost), looked = read_settings(path, (delay, lost)), now
        while travelling and travelling[0][0] <= now:
            _, _, end, frame = heapq.heappop(travelling)
            with suppress(OSError):  # the other end is full or down: a cable loses the frame
                end.send(frame)
        rest = (
            LOOK_SECONDS if not travelling else max(0.0, min(LOOK_SECONDS, travelling[0][0] - now))
        )
        for source in select.select(ends, [], [], rest)[0]:
            target = ends[1] if source is ends[0] else ends[0]
            for _ in range(64):
                try:
                    frame, address = source.recvfrom(FRAME_BYTES)
                except OSError:
                    break
                if address[2] != PACKET_OUTGOING and random.random() >= lost:
                    number += 1
                    heapq.heappush(travelling, (time.monotonic() + delay, number, target, frame))


def main() -> None:
    """Carry frames between the two devices that are named on the command line."""
    first, second, settings = sys.argv[1:]
    carry([open_device(first), open_device(second)], Path(settings))


if __name__ == "__main__":
    main()
