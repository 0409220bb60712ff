"""Send HTTP requests to a server on this machine, and note when each was answered.

    python benchmarks/http_load.py URL < requests.jsonl

Each line of the input is the body of a POST. A **closed loop** (`--clients`) has that many
connections, of which each asks again when it is answered. An **open loop** (`--rate`) starts
requests at random moments of a Poisson process, whatever has been answered, so that a queue in the
server is seen: the latency counts from the moment at which the request was due.

It is bounded: at most `--connections` requests are open, and one that finds none free is counted as
late, from the moment that it was due. Only loopback addresses are asked. It is one process with one
thread, and takes some 0.1 ms of the processor for a request, so more than some thousand requests
per second measure this program and not the server.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answers:
    """What a server answered, in the order of the answers.

    Attributes:
        numbers: which request it was, from 0.
        statuses: of HTTP; 0: the connection broke.
        seconds: that it took.
        bodies: if they are kept.
        wall: the seconds until all had been answered.
        first_error: of a connection.
    """

    numbers: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    wall: float = 0.0
    first_error: str = ""

    def summary(self) -> dict[str, Any]:
        """Return rates and latencies; those of answers with status 200, unless named otherwise."""
        good = sorted(s for s, code in zip(self.seconds, self.statuses, strict=True) if code == 200)
        refused = sorted(s for s, n in zip(self.seconds, self.statuses, strict=True) if n == 429)
        counts = {str(code): self.statuses.count(code) for code in sorted(set(self.statuses))}
        return {
            "requests": len(self.statuses),
            "statuses": counts,
            "seconds": round(self.wall, 3),
            "per second": round(len(good) / self.wall, 1) if self.wall else 0.0,
            **{f"p{q} ms": _quantile(good, q) for q in (50, 90, 99)},
            **({"p99 ms of a 429": _quantile(refused, 99)} if refused else {}),
            **({"first error": self.first_error} if self.first_error else {}),
        }


def _quantile(ordered: Sequence[float], percent: int) -> float:
    if not ordered:
        return 0.0
    return round(1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 2)


class Connection:
    """A connection that is kept open, with one request at a time."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body."""
        if self.streams is None:
            self.streams = await asyncio.open_connection(self.host, self.port)
        reader, writer = self.streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        body = await reader.readexactly(int(length or 0))
        if b"connection: close" in head:
            self.close()
        return int(head.split(b" ", 2)[1]), body

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


class Load:
    """Requests to one path of a server on this machine.

    Args:
        url: the path that is asked, on a loopback address.
        bodies: the bodies of the requests, JSON.
        token: a bearer token.
        keep: whether the bodies of the answers are kept.
    """

    def __init__(
        self, url: str, bodies: Sequence[str], token: str | None = None, *, keep: bool = False
    ) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
            raise SystemExit(f"{host} is not this machine: only loopback addresses are asked")
        self.host, self.port, self.keep = host, parts.port or 80, keep
        self.requests = [self._request(parts.path or "/", body, token) for body in bodies]
        self.answers = Answers()

    def _request(self, path: str, body: str, token: str | None) -> bytes:
        data = body.encode()
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *([f"Authorization: Bearer {token}"] if token else []),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data

    async def _send(self, connection: Connection, number: int, due: float) -> None:
        status, body = 0, b""
        try:
            status, body = await connection.ask(self.requests[number])
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            connection.close()
            self.answers.first_error = self.answers.first_error or repr(error)
        self.answers.numbers.append(number)
        self.answers.statuses.append(status)
        self.answers.seconds.append(time.perf_counter() - due)
        if self.keep:
            self.answers.bodies.append(body)

    async def closed(self, clients: int) -> Answers:
        """Ask with so many clients, each of which waits for its answer."""
        left = deque(range(len(self.requests)))

        async def client() -> None:
            connection = Connection(self.host, self.port)
            while left:
                await self._send(connection, left.popleft(), time.perf_counter())
            connection.close()

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        self.answers.wall = time.perf_counter() - start
        return self.answers

    async def open(self, rate: float, connections: int, seed: int = 0) -> Answers:
        """Ask at the moments of a Poisson process, with so many requests per second."""
        drawn = random.Random(seed)
        free: asyncio.Queue[Connection] = asyncio.Queue()
        opened = [Connection(self.host, self.port) for _ in range(connections)]
        for connection in opened:
            free.put_nowait(connection)

        async def one(number: int, due: float) -> None:
            connection = await free.get()
            await self._send(connection, number, due)
            free.put_nowait(connection)

        start = due = time.perf_counter()
        running = []
        for number in range(len(self.requests)):
            due += drawn.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.append(asyncio.create_task(one(number, due)))
        await asyncio.gather(*running)
        self.answers.wall = time.perf_counter() - start
        for connection in opened:
            connection.close()
        return self.answers


def main() -> None:
    """Ask, and print a summary as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=32, help="of a closed loop")
    parser.add_argument("--rate", type=float, help="requests per second of an open loop")
    parser.add_argument("--connections", type=int, default=256, help="of an open loop, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--token")
    options = parser.parse_args()
    load = Load(options.url, sys.stdin.read().splitlines(), options.token)
    asked = (
        load.open(options.rate, options.connections, options.seed)
        if options.rate
        else load.closed(options.clients)
    )
    print(json.dumps(asyncio.run(asked).summary()))


if __name__ == "__main__":
    main()
