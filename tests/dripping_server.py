"""A server that never ends its answer, for tests of what is waited for."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager


@contextmanager
def drips():
    """A server that sends a byte from time to time, and never all of its answer."""
    over = threading.Event()

    def answer(line):
        with line:
            line.recv(65536)
            line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not over.wait(0.05):
                line.sendall(b" ")

    def accept():
        while True:
            try:
                line, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(line,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            over.set()
