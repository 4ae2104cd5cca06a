"""What can go wrong on the wire, as actions for the proxy."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress

from faultkit.proxy import PIECE, Action, Exchange, Message

_ERRORS = {
    "InternalError": "500 Internal Server Error",
    "ServiceUnavailable": "503 Service Unavailable",
    "SlowDown": "503 Slow Down",
    "ExpiredToken": "400 Bad Request",
    "InvalidAccessKeyId": "403 Forbidden",
    "AccessDenied": "403 Forbidden",
    "XAmzContentSHA256Mismatch": "400 Bad Request",
}


def error_body(code: str) -> bytes:
    """Return the XML of an S3 error."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>injected</Message>"
        "<RequestId>1</RequestId></Error>"
    ).encode()


def _reply(status: str, body: bytes) -> Message:
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    return Message(f"HTTP/1.1 {status}", headers, body)


def refuse(code: str) -> Action:
    """Answer with an S3 error instead of asking the server."""

    def action(exchange: Exchange) -> None:
        body = b"" if exchange.request.first.startswith("HEAD") else error_body(code)
        exchange.answer(_reply(_ERRORS[code], body))

    return action


def reset_before(exchange: Exchange) -> None:
    """End the connection before the server hears of the request."""
    exchange.reset()


def reset_mid_upload(exchange: Exchange) -> None:
    """End the connection when some of the body was sent (use with `early`)."""
    with suppress(OSError):
        if exchange.request.header("expect"):
            exchange.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        exchange.client.settimeout(2.0)
        exchange.client.recv(PIECE)
    exchange.reset()


def lose_answer(exchange: Exchange) -> None:
    """Let the server do it, and lose what it says."""
    exchange.ask()
    exchange.reset()


def lose_answer_to_all_later(exchange: Exchange) -> None:
    """Let the server do it and be deaf from then on: nobody can look what became of it."""
    exchange.ask()
    for rule in exchange.proxy.rules:
        rule.times = 0
    from faultkit.proxy import Rule

    exchange.proxy.rules.insert(0, Rule(".", reset_before, times=None, early=True))
    exchange.reset()


def cut_download(keep: float, orderly: bool = False) -> Action:
    """Send a part of the answer's body and end the connection."""

    def action(exchange: Exchange) -> None:
        answer = exchange.ask()
        exchange.client.sendall(answer.head() + answer.body[: int(len(answer.body) * keep)])
        exchange.close() if orderly else exchange.reset()

    return action


def flip_download(exchange: Exchange) -> None:
    """Change one bit of the answer's body."""
    answer = exchange.ask()
    answer.body = _flip(answer.body)
    exchange.answer(answer)


def flip_upload(exchange: Exchange) -> None:
    """Change one bit of the request's body; a signed body is compared, as it is by AWS."""
    request = exchange.request
    changed = Message(request.first, request.headers, _flip(request.body))
    signed = request.header("x-amz-content-sha256")
    if len(signed) == 64 and signed != hashlib.sha256(changed.body).hexdigest():
        refuse("XAmzContentSHA256Mismatch")(exchange)  # neither server of the tests looks
    else:
        exchange.answer(exchange.ask(changed))


def shorten_download(exchange: Exchange) -> None:
    """Send a shorter body under a header that agrees with it."""
    answer = exchange.ask()
    answer.body = answer.body[: len(answer.body) // 2]
    length = str(len(answer.body))
    answer.headers = [
        (key, length if key.lower() == "content-length" else value) for key, value in answer.headers
    ]
    exchange.answer(answer)


def stall(exchange: Exchange) -> None:
    """Say nothing, for as long as the client waits."""
    exchange.proxy.closing.wait()
    exchange.reset()


def stall_download(exchange: Exchange) -> None:
    """Send half of the answer's body, then nothing."""
    answer = exchange.ask()
    exchange.client.sendall(answer.head() + answer.body[: len(answer.body) // 2])
    stall(exchange)


class Late:
    """Holds requests up, and lets the first of them through when it is asked to."""

    def __init__(self) -> None:
        self._held: list[Exchange] = []

    def hold(self, exchange: Exchange) -> None:
        """Keep the request, and end the connection: to its client it is lost."""
        self._held.append(exchange)
        exchange.reset()

    def deliver(self) -> int:
        """Let the first request through; return the status of its answer, which nobody hears."""
        return int(self._held[0].ask().first.split()[1])


def drip(seconds: float) -> Action:
    """Spread the answer's body over some seconds: slow, but alive."""

    def action(exchange: Exchange) -> None:
        answer = exchange.ask()
        exchange.client.sendall(answer.head())
        step = max(1, len(answer.body) // 10)
        for begin in range(0, len(answer.body), step):
            exchange.client.sendall(answer.body[begin : begin + step])
            time.sleep(seconds / 10)

    return action


def ok_with_error(code: str) -> Action:
    """Answer 200 with an error in the body, as S3 does when completing an upload fails late."""

    def action(exchange: Exchange) -> None:
        exchange.answer(_reply("200 OK", error_body(code)))

    return action


def _flip(body: bytes) -> bytes:
    """Change one bit in the middle."""
    data = bytearray(body)
    if data:
        data[len(data) // 2] ^= 0x08
    return bytes(data)
