"""Tables of named columns: from text files, JSON, Parquet, CoNLL columns, folders or the Hub.

A malformed line raises an error with its line number; rows are not dropped, and fields not shifted.
In data to predict on (split PREDICT), a blank line is also a row if rows are lines, otherwise a
note.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapterhub.config.user_folders import is_file, is_folder, is_there
from adapterhub.data.delimited import (
    DecodedText,
    encoding_notes,
    file_bytes,
    file_text,
    find_delimiter,
    read_delimited,
    split_lines,
)
from adapterhub.data.delimited import read_text as read_text
from adapterhub.data.media_formats import MEDIA_SUFFIXES
from adapterhub.data.options import PREDICT, DataOptions
from adapterhub.data.parquet import ExpansionError, open_parquet, plain_values
from adapterhub.data.row_stream import reading_hub
from adapterhub.data.spreadsheet import read_sheet
from adapterhub.data.table import (
    Table,
    blank_note,
    columns_of_objects,
    inner_cell,
    names_of_classes,
)
from adapterhub.data.table import first_few as first_few
from adapterhub.errors import DataError, nearest

_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "any text",
    ".conll": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".conllu": "conllu",
    ".xlsx": "excel",
    ".xlsm": "excel",
}
_SHEETS = (".xls", ".xlsb", ".ods", ".numbers")
_BINARY = {b"PK\x03\x04": "a zip archive", b"\xd0\xcf\x11\xe0": "an Office file",
           b"%PDF": "a PDF file", b"\x80\x04": "a pickle", b"ARROW1": "an Arrow file",
           b"SQLite": "a database"}  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
BIO_TAG = re.compile(r"O|[BIESLU]-\S+")
# The tables in use, so that a source is not read again after its columns were inspected.
_open_tables: weakref.WeakValueDictionary[object, Table] = weakref.WeakValueDictionary()
METADATA = ("metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.parquet")


def read_table(source: str, options: DataOptions, split: str) -> Table:
    """Read the table in a file or Hub dataset.

    `split` is "train", "eval", PREDICT or the name of a Hub split.

    Raises:
        DataError: the source is missing, empty or malformed.
    """
    if "://" in source:
        raise DataError(
            f"{source!r} is a URL, which is not loaded into memory",
            expected="a file, or a dataset id on the Hub",
            hint=f"curl -LO {source}, and give the file"
            if source.startswith("http")
            else "data.stream=true",
        )
    key = _key(source, options, split)
    table = _open_tables.get(key)
    if table is None:
        table = _read_format(_format_of(source, options), source, options, split)
        if not table.lines:
            raise DataError(f"{source} has columns but no rows")
        _open_tables[key] = table
    return table


def is_data_name(name: str) -> bool:
    """Return whether a name has the suffix of a data file."""
    return Path(name.lower().removesuffix(".gz")).suffix in _SUFFIXES


def _key(source: str, options: DataOptions, split: str) -> object:
    """Return the cache key of `read_table`: the current state of the file, and how it is read.

    Of a folder, it is the state of the table that describes it, or its own.
    """
    path = Path(metadata_file(source) or source)
    stat = path.stat() if is_there(path) else None
    file = (stat.st_mtime_ns, stat.st_size) if stat else None
    return source, file, split, replace(options, train=None, eval=None, rows=None, labels=None)


def keep_table(table: Table, source: str, options: DataOptions, split: str) -> None:
    """Make `read_table` also return a table for these options while it is in use.

    The options have the same format, but other columns.
    """
    _open_tables[_key(source, options, split)] = table


def has_split(source: str, options: DataOptions, split: str) -> bool:
    """Return whether a dataset on the Hub can be loaded with a split."""
    try:
        _read_hub(source, options.subset, split)
    except DataError:
        return False
    return True


def is_on_hub(source: str, options: DataOptions) -> bool:
    """Return whether a source is a dataset with splits: on the Hub, or saved in a folder."""
    return _format_of(source, options) == "hub"


def _read_format(name: str, source: str, options: DataOptions, split: str) -> Table:
    if name == "hub":
        splits = {
            "train": options.train_split,
            **dict.fromkeys(("eval", PREDICT), options.eval_split),
        }
        return _read_hub(source, options.subset, splits.get(split, split))
    if name == "parquet":
        return _read_parquet(source)
    if name == "folder":
        described = metadata_file(source)
        if described is not None:
            return _read_format(_format_of(described, options), described, options, split)
        return read_folder(source)
    if name == "excel":
        return _read_excel(source, options, split)
    decoded = file_text(source, options.encoding)
    name = _text_format(decoded.text, options) if name == "any text" else name
    if name in ("csv", "tsv", "text table"):
        kind = name.removesuffix(" table")
        return read_delimited(source, kind, decoded, options, split)
    if name == "text":
        table = _read_plain(source, decoded.text, blank=split == PREDICT)
    else:
        readers = {"jsonl": read_json, "conll": _read_conll, "conllu": _read_conllu}
        table = readers[name](source, decoded.text)
    form = ", ".join(filter(None, (table.form, _encoding(decoded))))
    notes = table.notes if split == PREDICT else ()
    return replace(table, form=form, notes=(*encoding_notes(decoded), *notes))


def _read_excel(source: str, options: DataOptions, split: str) -> Table:
    file_bytes(source)  # unreadable files get the usual error
    sheet = read_sheet(source)
    form = replace(options, delimiter=",", quoted=True)
    table = read_delimited(source, "csv", DecodedText(sheet.text, "UTF-8"), form, split)
    return replace(table, form=sheet.described, unit="row")


def _encoding(decoded: DecodedText) -> str:
    return "" if decoded.encoding == "UTF-8" else decoded.encoding


def _format_of(source: str, options: DataOptions) -> str:
    if options.format != "auto":
        return options.format
    if is_folder(source):
        return "hub" if _is_saved(source) else "folder"
    path = Path(source.lower().removesuffix(".gz"))
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    if not is_there(source):
        # Not a valid Hub id, so it is a missing file: reading it raises the right error.
        if path.suffix and nearest(source, (each.name for each in Path().glob("*.*"))):
            return "csv"
        return "hub" if _HUB_ID.fullmatch(source) and path.suffix not in _SHEETS else "csv"
    if path.suffix in _SHEETS:
        raise DataError(
            f"{source} is a spreadsheet, which cannot be read",
            expected=f"a file that ends in {', '.join(_SUFFIXES)}",
            hint="in the spreadsheet, save the sheet as CSV (UTF-8), and give that file",
        )
    return _sniffed_format(source)


def _sniffed_format(source: str) -> str:
    """Detect the format of a file without a usual suffix from its first bytes."""
    data = file_bytes(source)[:16]
    if data.startswith(b"PAR1"):
        return "parquet"
    kind = next((kind for start, kind in _BINARY.items() if data.startswith(start)), None)
    if kind is not None:
        raise DataError(
            f"{source} is {kind}, which cannot be read",
            expected=f"text or Parquet: a name ending in {', '.join(_SUFFIXES)}",
            hint=f"unzip {source}, and give a file in it" if data.startswith(b"PK") else "",
        )
    return "any text"


def _text_format(text: str, options: DataOptions) -> str:
    """Detect the format of a text from its content: JSON, CoNLL, a table or plain lines."""
    if text.lstrip()[:1] in ("{", "[") and re.match(r'\s*(\{\s*"|\[\s*\{)', text):
        return "jsonl"
    if options.delimiter is not None:
        return "text table"
    lines = [line.split() for line in split_lines(text[:100_000])[:500] if line.strip()]
    tagged = sum(len(fields) > 1 and bool(BIO_TAG.fullmatch(fields[-1])) for fields in lines)
    if tagged > 0.9 * len(lines) and "\n\n" in text.replace("\r", "").replace("\t\n", "\n"):
        return "conll"
    return "text" if find_delimiter(text, None) is None else "text table"


def read_parallel(source: str, target: str, encoding: str | None = None) -> Table:
    """Read two plain-text files, UTF-8 by default, line by line as columns `text` and `target`.

    Raises:
        DataError: the files differ in their number of lines.
    """
    texts, targets = (
        split_lines(read_text(name, encoding).removesuffix("\n")) for name in (source, target)
    )
    if len(texts) != len(targets):
        raise DataError(
            f"{source} and {target} are not parallel",
            offenders=[f"{source}: {len(texts)} lines", f"{target}: {len(targets)} lines"],
            expected="one target per line, in the order of the source",
        )
    columns = {"text": texts, "target": targets}
    return Table(source, "line", tuple(columns), range(1, len(texts) + 1), columns.__getitem__)


def _read_plain(source: str, text: str, *, blank: bool) -> Table:
    lines = enumerate(split_lines(text.removesuffix("\n")), start=1)
    texts = {number: line for number, line in lines if blank or line.strip()}
    values = list(texts.values())
    return Table(
        source,
        "line",
        ("text",),
        list(texts),
        lambda name: values,
        form="one text a line",
        header=False,
    )


def _read_conll(source: str, text: str) -> Table:
    """Read one sentence per row; the first column is also named `text`, the last `label`."""
    sentences = _conll_sentences(text)
    if not sentences:
        raise DataError(f"{source} has no sentences")
    width = len(sentences[0][0][1])
    ragged = [
        f"line {line}: {len(fields)} fields"
        for sentence in sentences
        for line, fields in sentence
        if len(fields) < width or any(fields[width:])
    ]
    if ragged:
        raise DataError(
            f"{source} has rows with the wrong number of fields",
            offenders=first_few(ragged),
            expected=f"{width} fields in each line",
        )
    indices = {str(i): i for i in range(width)} | {"text": 0}
    if width > 1:
        indices["label"] = width - 1

    def column(name: str) -> list[object]:
        return [[fields[indices[name]] for _, fields in sentence] for sentence in sentences]

    starts = [sentence[0][0] for sentence in sentences]
    return Table(source, "sentence at line", tuple(indices), starts, column, form="CoNLL columns")


_CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_WORD = re.compile(r"\d+")  # 3-4 spans words, and 3.1 is an empty node


def _read_conllu(source: str, text: str) -> Table:
    """Read one sentence of CoNLL-U per row; `form` is also named `text`, and `upos` `label`.

    Comments, multiword tokens and empty nodes are left out.
    """
    lines = (
        line if not line.strip() or _WORD.fullmatch(line.partition("\t")[0]) else "#"
        for line in text.split("\n")
    )
    words = _conll_sentences("\n".join(lines))
    sentences = [kept for s in words if (kept := [word for word in s if word[1] != ["#"]])]
    if not sentences:
        raise DataError(f"{source} has no sentences", expected="lines of ten fields between tabs")
    if ragged := [
        f"line {line}: {len(fields)} fields"
        for sentence in sentences
        for line, fields in sentence
        if len(fields) != len(_CONLLU)
    ]:
        raise DataError(
            f"{source} has rows with the wrong number of fields",
            offenders=first_few(ragged),
            expected=f"{len(_CONLLU)} fields between tabs: {', '.join(_CONLLU)}",
        )
    indices = {name: i for i, name in enumerate(_CONLLU)} | {"text": 1, "label": 3}

    def column(name: str) -> list[object]:
        return [[fields[indices[name]] for _, fields in sentence] for sentence in sentences]

    starts = [sentence[0][0] for sentence in sentences]
    return Table(source, "sentence at line", tuple(indices), starts, column, form="CoNLL-U")


def _conll_sentences(text: str) -> list[list[tuple[int, list[str]]]]:
    """Split CoNLL text into sentences of (line number, fields) tokens."""
    sentences: list[list[tuple[int, list[str]]]] = [[]]
    for number, line in enumerate(text.split("\n"), start=1):
        fields = line.split("\t") if "\t" in line.strip() else line.split()
        if not line.strip() or fields[0] == "-DOCSTART-":
            sentences.append([])
        else:
            sentences[-1].append((number, [field.strip() for field in fields]))
    return [sentence for sentence in sentences if sentence]


def _read_parquet(source: str) -> Table:
    import pyarrow

    data = file_bytes(source)
    try:
        columns = open_parquet(data)
        names, lines = columns.names, range(1, columns.rows + 1)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"{source} is not a Parquet file: {error}") from error

    def column(name: str) -> list[object]:
        try:
            return columns.values(name)
        except ExpansionError as error:
            raise DataError(
                f"{source}, column {name!r}: {error}",
                expected="values that fit into memory",
                hint="data.stream=true reads a file in pieces",
            ) from error
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            raise DataError(f"{source}: cannot read column {name!r}: {error}") from error

    return Table(source, "row", names, lines, column, costly=True)


def _is_saved(source: str) -> bool:
    """Return whether a folder was written by `save_to_disk` of the library datasets."""
    return any(is_file(Path(source) / name) for name in ("state.json", "dataset_dict.json"))


def _load_saved(source: str, split: str) -> Any:
    """Load a saved dataset, or one of its splits.

    Raises:
        DataError: the dataset lacks the split, or is damaged.
    """
    import datasets

    try:
        saved = datasets.load_from_disk(source)
    except Exception as error:  # the library passes on any error of its parsers
        raise DataError(f"{source} cannot be read as a saved data set: {error}") from error
    splits = saved if isinstance(saved, dict) else {"train": saved}
    if split not in splits:
        raise DataError(
            f"{source} has no split {split!r}",
            expected=f"one of {', '.join(splits)}",
            hint="data.train_split=NAME, data.eval_split=NAME",
        )
    return splits[split]


def _read_hub(name: str, subset: str | None, split: str) -> Table:
    import datasets

    if _is_saved(name):
        data = _load_saved(name, split)
    else:
        with reading_hub(name, split, "loaded as a Hub dataset"):
            data = datasets.load_dataset(name, subset, split=split)
    lines = range(1, data.num_rows + 1)
    names = tuple(data.column_names)
    return Table(name, "row", names, lines, lambda n: _hub_column(data, n), costly=True)


def _hub_column(data: Any, name: str) -> list[object]:
    # In Arrow, images and audio are stored as bytes, which tasks decode.
    rows = data.select_columns([name]).with_format("arrow")[:]
    return names_of_classes(data.features[name], plain_values(rows.column(0)))


def metadata_file(source: str) -> str | None:
    """Return the table that describes the files of a folder, or None.

    Its name follows the library datasets.
    """
    paths = (Path(source) / name for name in METADATA)
    return next((str(path) for path in paths if is_file(path)), None)


def read_folder(source: str) -> Table:
    """Read the names of the image and audio files in a folder, each with its subfolder.

    The class of a file is the name of its first folder below `source`. Links are followed. Hidden
    files are skipped, and other files are counted.

    Raises:
        DataError: there are no image or audio files.
    """
    root = Path(source)
    paths = [path.relative_to(root) for path in _files(root, {root.resolve()})]
    names = [path for path in paths if path.suffix.lower() in MEDIA_SUFFIXES]
    if not names and all(p.suffix.lower() == ".txt" and len(p.parts) > 1 for p in paths) and paths:
        return _text_folder(source, paths)
    captions = {name.with_suffix(".txt") for name in names}  # and may be read by a task
    others = len({*paths} - {*names} - captions)
    if not names:
        raise DataError(
            f"the folder {source} has no images and no audio",
            expected=f"files that end in .txt, {', '.join(MEDIA_SUFFIXES)}, in one folder for each "
            "class; images with captions in the folder itself",
        )
    columns: dict[str, list[object]] = {
        "file": [name.as_posix() for name in names],
        "label": [name.parts[0] if len(name.parts) > 1 else None for name in names],
    }
    classes = len({label for label in columns["label"] if label is not None})
    skipped = (f"{others:,} other files are left out",) * bool(others)
    return Table(
        source,
        "file",
        tuple(columns),
        range(1, len(names) + 1),
        columns.__getitem__,
        form=f"{classes:,} folders",
        header=False,
        notes=skipped,
    )


def _text_folder(source: str, names: list[Path]) -> Table:
    """Return the texts of a folder of classes with one file per text."""
    columns: dict[str, list[object]] = {
        "text": [read_text(str(Path(source) / name)) for name in names],
        "label": [name.parts[0] for name in names],
    }
    form = f"{len(set(columns['label'])):,} folders of texts"
    places = [name.as_posix() for name in names]
    return Table(source, "file", tuple(columns), places, columns.__getitem__, form=form)


def _files(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files below a folder, sorted by name; folders reached twice count once."""
    for path in sorted(folder.iterdir(), key=lambda each: each.name):
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            yield path
        elif (real := path.resolve()) not in seen:
            yield from _files(path, seen | {real})


_LISTS = ("data", "rows", "examples", "train", "items", "records")
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_EXPECTED = 'one object per line, such as {"text": "good", "label": "1"}, or a list of objects'


def read_json(source: str, text: str) -> Table:
    """Read JSON lines, or a table as one JSON value; blank lines are reported in a note.

    Raises:
        DataError: the text has neither form.
    """
    start = text.lstrip()[:1]
    first, _, rest = text.strip().partition("\n")
    lines = start == "{" and (source.lower().endswith(_LINES) or (rest and _is_json(first)))
    if start in ("[", "{") and not lines:
        try:
            table = _table_of(source, json.loads(text))
        except (ValueError, RecursionError) as error:
            if not _is_json(first):
                raise DataError(f"{source} is not JSON: {error}", expected=_EXPECTED) from None
            table = None
        if table is not None:
            return table
    return _read_lines(source, text)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _table_of(source: str, whole: Any) -> Table | None:
    """Build the table of a list of objects, of {"data": [...]} or of an object of columns."""
    rows = whole if isinstance(whole, list) else _inner_list(whole)
    if rows == []:
        raise DataError(f"{source} has no rows", expected=_EXPECTED)
    if rows is not None:
        wrong = [
            f"item {number}: {type(row).__name__}, not an object"
            for number, row in enumerate(rows, start=1)
            if not isinstance(row, dict)
        ]
        if wrong and len(wrong) < len(rows):
            raise DataError(
                f"{source} is not a list of objects", offenders=first_few(wrong), expected=_EXPECTED
            )
        if not wrong:
            return table_of_objects(source, "item", dict(enumerate(rows, start=1)))
        return None
    lengths = {len(v) if isinstance(v, list | dict) else -1 for v in whole.values()}
    if len(lengths) != 1 or lengths <= {-1, 0}:
        return None
    # pandas writes each column as {"0": ..., "1": ...}.
    columns = {k: list(v.values()) if isinstance(v, dict) else v for k, v in whole.items()}
    (length,) = lengths
    return Table(source, "row", tuple(columns), range(1, length + 1), columns.__getitem__,
                 form="JSON columns")  # fmt: skip


def _inner_list(whole: Mapping[str, Any]) -> list[Any] | None:
    """Return the only list of objects among the values of an object with a usual name."""
    lists = {
        key: value
        for key, value in whole.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    if len(lists) != 1:
        return None
    ((key, value),) = lists.items()
    return value if key.lower() in _LISTS or len(whole) == 1 else None


def table_of_objects(
    source: str, unit: str, rows: Mapping[int, Mapping[str, Any]], form: str = ""
) -> Table:
    """Return objects by their numbers as the rows of a table."""
    columns, inner = columns_of_objects(rows.values())
    return Table(
        source,
        unit,
        (*columns, *inner),
        list(rows),
        lambda name: [inner_cell(row, inner.get(name, (name,))) for row in rows.values()],
        form=form or "a JSON list",
        inner=tuple(inner),
    )


def _read_lines(source: str, text: str) -> Table:
    rows: dict[int, dict[str, Any]] = {}
    problems, blank = [], []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        if not line.strip():
            blank.append(number)
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
        else:
            if isinstance(row, dict):
                rows[number] = row
            else:
                problems.append(f"line {number}: {type(row).__name__}, not an object")
    if problems:
        raise DataError(
            f"{source} is not JSON lines", offenders=first_few(problems), expected=_EXPECTED
        )
    table = table_of_objects(source, "line", rows, "JSON lines")
    return replace(table, notes=blank_note(blank))
