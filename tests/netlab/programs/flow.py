"""One end of a flow of bytes. The sender prints when it started, the receiver its bytes and when it had all of them.

One machine has one monotonic clock, so the two times can be compared; a late reader can only make a link look slower.

flow.py tcp|udp receive ADDRESS NUM_BYTES FIFO      listens, then lets the sender go through FIFO
flow.py tcp|udp send    ADDRESS NUM_BYTES FIFO      waits on FIFO, then sends to ADDRESS
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

Address = tuple[str, int]
DATAGRAM = bytes(1000)
TIMEOUT_S = 20.0


def receive_stream(address: Address, num_bytes: int, fifo: Path) -> None:
    with socket.create_server(address) as server:
        server.settimeout(TIMEOUT_S)
        fifo.write_text("listening\n")
        stream, _ = server.accept()
    buffer = bytearray(1 << 18)
    received = 0
    with stream:
        stream.settimeout(TIMEOUT_S)
        while received < num_bytes and (num := stream.recv_into(buffer)):
            received += num
    print(received, time.monotonic())


def send_stream(address: Address, num_bytes: int) -> None:
    with socket.create_connection(address, timeout=TIMEOUT_S) as stream:
        stream.sendall(bytes(num_bytes))


def receive_datagrams(address: Address, num_bytes: int, fifo: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(address)
        datagrams.settimeout(TIMEOUT_S)
        fifo.write_text("listening\n")
        received = 0
        while received < num_bytes:
            received += len(datagrams.recv(2048))
    print(received, time.monotonic())


def send_datagrams(address: Address, num_bytes: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        for _ in range(num_bytes // len(DATAGRAM)):
            datagrams.sendto(DATAGRAM, address)


def main() -> None:
    kind, role, host, port, size, fifo = sys.argv[1:]
    address, num_bytes = (host, int(port)), int(size)
    if role == "receive":
        (receive_stream if kind == "tcp" else receive_datagrams)(address, num_bytes, Path(fifo))
    else:
        Path(fifo).read_text()
        print(time.monotonic(), flush=True)
        (send_stream if kind == "tcp" else send_datagrams)(address, num_bytes)


main()
