r"""The readings of a text that may hide a secret: escapes, encodings, invisible characters.

One level of each: `\u0068f_...`, `%68f_...`, `&#104;f_...`, base64 and hexadecimal of a token, wide
letters, and letters with invisible characters between them.
"""

from __future__ import annotations

import base64
import html
import json
import re
import unicodedata
from collections.abc import Iterator
from urllib.parse import unquote

_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\(/)|\\(\\)")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}")
_HEXADECIMAL = re.compile(r"(?:[0-9a-fA-F]{2}){16,}")
_LEAST_DECODED = 8  # bytes; shorter ones are text by chance
_MOST_DECODED = 100_000  # characters of one word; real keys have a few thousand


def readings(text: str) -> Iterator[str]:
    """Yield a text as it is, and as it reads without each kind of disguise."""
    yield text
    plain = _plain(text)
    for decoded in (plain, _unescaped(plain), unquote(plain), html.unescape(plain)):
        if decoded != text:
            yield _plain(decoded)
    yield from _decoded_words(plain)


def json_texts(data: bytes) -> Iterator[tuple[str, str, str]]:
    """Yield (path, key, text) for each text in a JSON document; none if it is not JSON."""
    try:
        tree = json.loads(data, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return
    queue: list[tuple[str, str, object]] = [("", "", tree)]
    while queue:
        path, key, value = queue.pop()
        if isinstance(value, _Pairs):
            for name, item in value:
                below = f"{path}.{name}" if path else name
                yield f"{path}, a key" if path else "a key", "", name
                queue.append((below, name, item))
        elif isinstance(value, list):
            queue += [(f"{path}.{i}", key, item) for i, item in enumerate(value)]
        elif isinstance(value, str):
            yield path, key, value


class _Pairs(list[tuple[str, object]]):
    """The members of a JSON object, duplicates included."""


def _plain(text: str) -> str:
    """Return compatible letters in their plain form, without invisible characters."""
    if text.isascii():
        return text
    normal = unicodedata.normalize("NFKC", text)
    return "".join(c for c in normal if unicodedata.category(c) not in ("Cf", "Mn", "Me"))


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda m: m[3] or m[4] or chr(int(m[1] or m[2], 16)), text)


def _decoded_words(text: str) -> Iterator[str]:
    for match in _BASE64.finditer(text):
        word = match.group().rstrip("=")[:_MOST_DECODED].translate(str.maketrans("-_", "+/"))
        yield from _text_of(_from_base64(word))
    for match in _HEXADECIMAL.finditer(text):
        yield from _text_of(bytes.fromhex(match.group()[:_MOST_DECODED]))


def _from_base64(word: str) -> bytes:
    """Decode a word of base64; a length that cannot be is cut."""
    whole = word[: -1 if len(word) % 4 == 1 else None]
    return base64.b64decode(whole + "=" * (-len(whole) % 4))


def _text_of(data: bytes) -> Iterator[str]:
    """Yield the bytes as text if they are printable ASCII, as secrets are."""
    stripped = data.strip(b"\0\r\n\t ")
    if len(stripped) >= _LEAST_DECODED and re.fullmatch(rb"[\t\r\n\x20-\x7e]+", stripped):
        yield stripped.decode("ascii")
