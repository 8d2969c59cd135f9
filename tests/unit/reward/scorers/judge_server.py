"""A real HTTP server on the loopback that plays an OpenAI-compatible endpoint, or another, by a script."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclasses.dataclass(frozen=True)
class Reply:
    """What the server does with one request."""

    content: str | None = None
    status: int = 200
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    delay: float = 0.0
    reset: bool = False
    drip: float | None = None
    length: int | None = None

    @property
    def encoded(self) -> bytes:
        if self.body is not None:
            return self.body
        return json.dumps({"choices": [{"message": {"content": self.content}, "finish_reason": "stop"}]}).encode()


@dataclasses.dataclass
class Server:
    """Its URL, and what it was asked."""

    url: str
    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    headers: list[dict[str, str]] = dataclasses.field(default_factory=list)
    now: int = 0
    most_at_once: int = 0


def last_message(body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


@contextlib.contextmanager
def serving(
    script: Callable[[str, int], Reply],
    *,
    parsed: Callable[[bytes], dict[str, Any]] = json.loads,
    message_of: Callable[[dict[str, Any]], str] = last_message,
    page: bytes = b"",
) -> Iterator[Server]:
    """`script` takes the message and how often it was asked before; a GET of any path gets `page`."""
    lock, seen, stop = threading.Lock(), dict[str, int](), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = parsed(self.rfile.read(int(self.headers["Content-Length"])))
            message = message_of(body)
            with lock:
                before = seen[message] = seen.get(message, -1) + 1
                server.requests.append({"path": self.path, **body})
                server.headers.append(dict(self.headers))
                server.now += 1
                server.most_at_once = max(server.most_at_once, server.now)
            self._send(script(message, before))

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def _send(self, reply: Reply) -> None:
            stop.wait(reply.delay)
            with lock:
                server.now -= 1
            if reply.reset:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
                self.close_connection = True
                return
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has given up
                self.send_response(reply.status)
                for name, value in reply.headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.encoded) if reply.length is None else reply.length))
                self.end_headers()
                for byte in [reply.encoded] if reply.drip is None else [bytes([b]) for b in reply.encoded]:
                    self.wfile.write(byte)
                    self.wfile.flush()
                    stop.wait(reply.drip or 0.0)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is written."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{listener.server_port}/v1")
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        listener.shutdown()
        listener.server_close()
        thread.join(10)
