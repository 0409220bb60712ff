"""Read raw text of any size from disk in pieces, with only a few in memory at a time.

A document is a paragraph or a line of plain text, or a row of JSON lines or Parquet. A long one is
read in several pieces. Opening a stream reads the file once, to check its encoding, to count the
pieces and to compute the sha256 that identifies derived data. Its tokens are kept in a file of the
user's cache that is read as an array.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from adapterhub.config.user_folders import KeyedFiles, user_folder
from adapterhub.data.examples import Example, Streamed
from adapterhub.data.options import DataOptions
from adapterhub.data.parquet import opened_parquet
from adapterhub.errors import DataError, OutputError, read_problem
from adapterhub.status import counting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = NDArray[np.uint32]

PIECE = 1 << 14  # characters
_TOKENS_FORMAT = 1
_MOST_TOKENS = 200 << 30  # bytes of all token files
_TEXTS_AT_ONCE = 256
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.1, 1000  # of the documents
_SUFFIXES = {".txt": "text", "": "text", ".jsonl": "jsonl", ".ndjson": "jsonl",
             ".parquet": "parquet"}  # fmt: skip


@dataclass(frozen=True)
class StreamedText(Example):
    """A piece of a document; `ends` is true for the last piece."""

    ends: bool = True


@dataclass(frozen=True)
class Draw:
    """A random choice of `count` out of `total` documents, or with `rest` all the others."""

    count: int
    total: int
    seed: int
    rest: bool = False

    def select(self, texts: Iterator[StreamedText]) -> Iterator[StreamedText]:
        """Yield the texts of the chosen documents, in order.

        By selection sampling: Knuth, volume 2, 3.4.2, S.
        """
        chance, needed, left = random.Random(self.seed), self.count, self.total
        starts = taken = True
        for text in texts:
            if starts:
                taken = chance.random() * left < needed
                needed, left = needed - taken, left - 1
            starts = text.ends
            if taken != self.rest:
                yield text

    def __len__(self) -> int:
        return self.total - self.count if self.rest else self.count


@dataclass(frozen=True)
class TextStream(Sequence[StreamedText], Streamed):
    """The texts of a file. Iterating reads the file; indexing reads it up to the index.

    Attributes:
        source: the file.
        options: its encoding, its text column, and the separator of documents.
        total: the number of texts: documents, or pieces of long ones.
        documents: the number of documents.
        content: the sha256 of the texts in the file.
        draws: the successive random choices of documents.
    """

    source: str
    options: DataOptions
    total: int
    documents: int
    content: str
    draws: tuple[Draw, ...] = ()

    @property
    def sha256(self) -> str:
        """The sha256 of the content and the choices."""
        record = [self.content, *([d.count, d.total, d.seed, d.rest] for d in self.draws)]
        return hashlib.sha256(json.dumps(record).encode()).hexdigest()

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[StreamedText]:
        texts = _texts(self.source, self.options)
        for draw in self.draws:
            texts = draw.select(texts)
        return texts

    def __getitem__(self, index: int | slice) -> Any:
        chosen = range(len(self))[index]
        if isinstance(chosen, int):
            return next(itertools.islice(self, chosen, None))
        return list(itertools.islice(self, chosen.start, chosen.stop, chosen.step))

    def drawn(self, count: int, seed: int, *, rest: bool = False) -> TextStream:
        """Return the texts of a random choice of `count` documents, or with `rest` all the others.

        The file is read again to count them, if it has documents of several pieces.
        """
        draw = Draw(count, self.documents, seed, rest)
        chosen = replace(self, total=len(draw), documents=len(draw), draws=(*self.draws, draw))
        if self.total == self.documents:
            return chosen
        return replace(chosen, total=sum(1 for _ in chosen))

    def held_out(self, seed: int) -> tuple[TextStream, TextStream]:
        """Split off a tenth of the documents, at most 1,000, for evaluation.

        Raises:
            DataError: there is only one document.
        """
        if self.documents < 2:
            raise DataError(
                f"{self.source} has one document, from which none can be held out",
                hint="data.documents=lines, --eval FILE, or --eval none",
            )
        count = min(max(round(self.documents * _HELD_OUT_SHARE), 1), _MOST_HELD_OUT)
        return self.drawn(count, seed, rest=True), self.drawn(count, seed)


def open_stream(source: str, options: DataOptions) -> TextStream:
    """Open raw text, JSON lines or Parquet, optionally gzipped, after reading all of it once.

    Raises:
        DataError: the file is missing, empty, of another format, or cannot be decoded.
    """
    digest, total, documents, starts = hashlib.sha256(), 0, 0, True
    for text in _texts(source, options):
        data = text.text.encode()
        digest.update(b"%d %d\n" % (len(data), text.ends) + data)
        total += 1
        documents, starts = documents + starts, text.ends
    if total == 0:
        raise DataError(f"{source} is empty")
    return TextStream(source, options, total, documents, digest.hexdigest())


def stored_tokens(
    texts: TextStream, key: Any, tokenize: Callable[[Sequence[StreamedText]], Tokens]
) -> Tokens:
    """Return the tokens of a stream, from the cache if possible.

    `key` holds everything else that the tokens depend on, as JSON; `tokenize` gets a few texts at a
    time.

    Raises:
        DataError: the stream has changed, or has no tokens.
        OutputError: the cache cannot be written.
    """
    import numpy as np

    def write(file: BinaryIO) -> None:
        seen, source = 0, iter(texts)
        with counting(len(texts), "tokenizing") as done:
            while group := list(itertools.islice(source, _TEXTS_AT_ONCE)):
                file.write(tokenize(group).tobytes())
                seen += len(group)
                done(len(group))
        if seen != len(texts):
            raise DataError(
                f"{texts.source} has changed while it was read",
                offenders=[f"{len(texts)} texts before, {seen} now"],
            )

    files = KeyedFiles(user_folder("cache") / "tokens", _TOKENS_FORMAT, _MOST_TOKENS)
    try:
        path = files.make([texts.sha256, key], write)
    except OSError as error:
        raise OutputError(
            f"{files.folder} cannot be written: {error.strerror or error}",
            expected="room for four bytes per token of the text",
            hint="XDG_CACHE_HOME=FOLDER on another disk",
        ) from error
    if path.stat().st_size == 0:
        raise DataError(f"{texts.source} contains no tokens")
    return np.memmap(path, dtype=np.uint32, mode="r")


def _texts(source: str, options: DataOptions) -> Iterator[StreamedText]:
    """Yield the texts of a file.

    Raises:
        DataError: the file cannot be read or decoded.
    """
    kind = _format(source, options)
    try:
        if kind == "parquet":
            documents = _parquet_rows(source, options.text_column)
        else:
            documents = _file_documents(source, options, kind)
        yield from _pieces(documents)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not {error.encoding.upper()}: {error.reason} at byte {error.start}",
            hint="data.encoding=NAME, such as cp1252, latin-1 or utf-16",
        ) from error
    except (OSError, EOFError) as error:
        problem = read_problem(Path(source), error) if isinstance(error, OSError) else error
        raise DataError(f"{problem}") from error


def _format(source: str, options: DataOptions) -> str:
    if options.format in ("text", "jsonl", "parquet"):
        return options.format
    suffix = Path(source.lower().removesuffix(".gz")).suffix
    if options.format != "auto" or suffix not in _SUFFIXES:
        raise DataError(
            f"{source} cannot be streamed",
            expected=f"a file that ends in {', '.join(filter(None, _SUFFIXES))}",
            hint="data.format=text, or data.stream=false to read it into memory",
        )
    return _SUFFIXES[suffix]


def _file_documents(source: str, options: DataOptions, kind: str) -> Iterator[tuple[str, bool]]:
    encoding = options.encoding or "utf-8-sig"
    opened = gzip.open if source.lower().endswith(".gz") else open
    with opened(source, "rt", encoding=encoding, newline="\n") as file:
        if kind == "jsonl":
            yield from _json_rows(source, file, options.text_column)
        elif options.documents == "lines":
            yield from _lines(file)
        else:
            yield from _paragraphs(file)


def _lines(file: IO[str]) -> Iterator[tuple[str, bool]]:
    """Yield parts of lines, and whether a line ends with them."""
    while part := file.readline(PIECE):
        yield part, part.endswith("\n")
    yield "", True


def _paragraphs(file: IO[str]) -> Iterator[tuple[str, bool]]:
    """Yield parts of paragraphs, which end at a blank line."""
    starts = True
    while part := file.readline(PIECE):
        yield part, starts and not part.strip()
        starts = part.endswith("\n")
    yield "", True


def _json_rows(source: str, file: IO[str], column: str) -> Iterator[tuple[str, bool]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{source}, line {number} is not JSON: {error}") from error
        yield _text_of(row, column, f"{source}, line {number}"), True


def _parquet_rows(source: str, column: str) -> Iterator[tuple[str, bool]]:
    with opened_parquet(source) as file:
        columns = [column] if column in file.schema_arrow.names else []
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _text_of(row, column, f"{source}, row {number}"), True


def _text_of(row: object, column: str, place: str) -> str:
    value = row.get(column) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise DataError(
            f"{place} has no text in the column {column!r}", hint="--text COLUMN (data.text)"
        )
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise DataError(f"{place} contains a lone surrogate, which is not valid Unicode")
    return value


def _pieces(documents: Iterator[tuple[str, bool]]) -> Iterator[StreamedText]:
    """Join parts into pieces of about `PIECE` characters; a document ends with its last one."""
    parts: list[str] = []
    size = 0
    waiting: str | None = None  # a whole piece, which may be the document's last
    for part, ends in documents:
        for start in range(0, len(part), PIECE):
            parts.append(part[start : start + PIECE])
            size += len(parts[-1])
            if size >= PIECE:
                if waiting is not None:
                    yield StreamedText(waiting, ends=False)
                waiting, parts, size = "".join(parts), [], 0
        if ends:
            rest = "".join(parts).rstrip()
            if waiting is not None and (kept := waiting if rest else waiting.rstrip()):
                yield StreamedText(kept, ends=not rest)
            if rest:
                yield StreamedText(rest, ends=True)
            waiting, parts, size = None, [], 0
