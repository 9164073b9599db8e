"""Server-sent events over ASGI, with a bound on how long a client may take nothing."""

from __future__ import annotations

import asyncio
import json

from starlette.types import Send

from deployments.api.errors import SlowReader

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": still working\n\n"
LAST_WORD_S = 1.0
"""How long a cut-off slow reader has to take its error event."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def to_json(value: object) -> str:
    """Compact JSON. Characters that some clients take for line ends are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")


def event(value: object) -> bytes:
    """One event that carries `value`."""
    return f"data: {to_json(value)}\n\n".encode()


class SseWriter:
    """Starts the response with its first write; `SlowReader` when the transport takes nothing in time."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self.started = False

    async def write(self, data: bytes, timeout_s: float | None = None) -> None:
        """Send `data`, headers first if they have not been sent."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._body(data, True, timeout_s or self._timeout_s)

    async def close(self) -> None:
        """End the response in good order."""
        await self._body(b"", False, self._timeout_s)

    async def _body(self, data: bytes, more: bool, timeout_s: float) -> None:
        sending = self._send({"type": "http.response.body", "body": data, "more_body": more})
        try:
            async with asyncio.timeout(timeout_s) as bound:
                await sending
        except TimeoutError:
            if not bound.expired():
                raise
            raise SlowReader("the client took no byte") from None
