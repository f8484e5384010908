"""A small real HTTP server that answers, or fails, as it is told to: it dies, stalls, drips, rate-limits, talks nonsense."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["die", "cut", "stall", "drip"]
"""Closes the line without a word, or in the middle of the answer; never answers; sends a byte now and then for ever."""


@dataclass(frozen=True)
class Said:
    """One answer."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass(frozen=True)
class Asked:
    path: str
    body: Any
    headers: dict[str, str]
    at: float


Answer = Callable[[Asked], Said | Fault]


@dataclass
class Served:
    url: str
    asked: list[Asked] = field(default_factory=list)

    def posts(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.body is not None]


@contextmanager
def serving(answer: Answer) -> Iterator[Served]:
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            asked = Asked(self.path, body, dict(self.headers), time.monotonic())
            served.asked.append(asked)
            said = answer(asked)
            if said == "die":
                self.close_connection = True
            elif said == "stall":
                closing.wait(60)
                self.close_connection = True
            elif isinstance(said, Said):
                self._send(said)
            else:
                self._break_off(said)

        def _send(self, said: Said) -> None:
            self.send_response(said.status)
            for name, value in (
                {"Content-Type": "application/json", "Content-Length": str(len(said.content))} | said.headers
            ).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said.content)

        def _break_off(self, how: Literal["cut", "drip"]) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
            while how == "drip" and not closing.wait(0.02):
                try:
                    self.wfile.write(b" ")
                except OSError:  # the other side has had enough
                    return

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # with fewer, connections that come together are refused on a busy machine

        def handle_error(self, *_: object) -> None: ...  # the other side hung up

    http = Server(("127.0.0.1", 0), Handler)
    served = Served(f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=lambda: http.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        closing.set()
        http.shutdown()
        http.server_close()
        thread.join()


def play(*said: Said | Fault) -> Answer:
    """One after the other; the last one again and again."""
    left = list(said)
    return lambda asked: left.pop(0) if len(left) > 1 else left[0]


def chat(
    content: str | None = None,
    calls: Sequence[tuple[str, str]] = (),
    finish: str | None = None,
    usage: dict[str, Any] | None = None,
    **more: Any,
) -> Said:
    """What a chat API answers."""
    tool_calls = [
        {"id": f"id-{name}-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "refusal": None, "tool_calls": tool_calls}
    choice = {"index": 0, "message": message, "finish_reason": finish or ("tool_calls" if calls else "stop")}
    choice |= {key: more.pop(key) for key in ("token_ids",) if key in more}
    counted = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110} if usage is None else usage
    return Said({"id": "x", "object": "chat.completion", "choices": [choice], "usage": counted} | more)


def refusal(status: int, message: str = "no", code: str | None = None, **headers: str) -> Said:
    return Said({"error": {"message": message, "code": code}}, status, {name.replace("_", "-"): v for name, v in headers.items()})
