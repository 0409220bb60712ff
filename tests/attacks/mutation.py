"""Random mutations of bytes and of JSON trees."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from typing import Any

from forge import Tree

TOKENS = [
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[31m", b"\xe2\x80\xae", b"\r", b"\n",
    b"\t", b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b"(", b")", b":", b",", b"#", b"- ", b"&a ",
    b"*a", b"!!python/object/apply:os.system", b"<<: ", b"NaN", b"Infinity", b"1e999", b"-0",
    b"true", b"null", b"9" * 400, b"18446744073709551616", b"\\ud800", b"\\U0011ffff", b"\\x",
    b"../", b"/etc/passwd", b"__class__", b"[" * 200, b"{" * 200, b"\x80\x04K\x01.", b"PK\x03\x04",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**53, 10**12, 2**63 - 1, 2**63, -(2**63),
    0.0, -1.5, 1e-300, 1e308, "", "a", "*", "**", "..", "../x", "/etc/passwd", "~", "C:\\x", "\0",
    "\x1b[31m", "\u202e", "\u2028", "é", "😀", "a" * 300, "0..9999999", "top 99", "__class__",
    "lora", "F32", "F16", "BOOL", "U8", "os.system", [], {}, [[]], [0], [-1], ["*"], {"a": 1},
    {"*": 10**9}, {"__class__": {}}, [10**12], [2**32, 2**32], [1] * 40, list(range(50)),
]  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Apply one to four random changes to bytes."""
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randint(0, len(data)), rng.choice([1, 1, 2, 4, 8, 16, 64, 256])
        cut = data[at : at + length]
        data = rng.choice(
            [
                lambda at=at, d=data: d[:at] + bytes([rng.randrange(256)]) + d[at + 1 :],
                lambda at=at, d=data: d[:at] + rng.choice(TOKENS) + d[at:],
                lambda at=at, d=data: d[:at] + rng.choice(TOKENS) + d[at + 1 :],
                lambda at=at, d=data, n=length: d[:at] + d[at + n :],
                lambda at=at, d=data: d[:at],
                lambda at=at, d=data, c=cut: d[:at] + c * rng.choice([2, 3, 50]) + d[at:],
                lambda d=data, c=cut: (lambda to: d[:to] + c + d[to:])(rng.randint(0, len(d))),
                lambda d=data: re.sub(
                    rb"\d+", lambda m: str(rng.choice(NUMBERS)).encode(), d, count=1
                ),
            ]
        )()
    return data


NUMBERS = [value for value in VALUES if type(value) is int]


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each node of a JSON tree as (container, key)."""
    pairs = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for key, value in pairs:
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from nodes(value)


def mutate_tree(rng: random.Random, tree: Tree, under: str | None = None) -> Tree:
    """Apply one to four random changes to the values and keys of a JSON tree."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 4)):
        root = tree.get(under) if under else tree
        candidates = list(nodes(root)) if isinstance(root, (dict, list)) else []
        if not candidates:
            tree[under or "x"] = copy.deepcopy(rng.choice(VALUES))
            continue
        holder, key = rng.choice(candidates)
        kind = rng.randrange(6)
        if kind < 3:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 3:
            other, name = rng.choice(candidates)
            if isinstance(other, list) or name in other:
                holder[key] = copy.deepcopy(other[name]) if not isinstance(other, list) else 0
        elif kind == 4 and isinstance(holder, dict):
            name = rng.choice([v for v in VALUES if isinstance(v, str)])
            holder[name] = holder.pop(key)
        else:
            del holder[key]
    return tree
