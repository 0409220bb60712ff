"""The page of a sweep: a table of all model types, and why methods are refused or fail.

The page has all that a sweep has found, so that it can be read again and updated for some types.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SIGNS = {"works": "✓", "refused": "-", "refused in use": "(-)", "fails": "✗"}
WORDS = {"wrong": "fails", "error": "fails", "ok": "works"}
PEFT = ("peft", "peft all-linear")
OTHERS = ("refused", "refused in use", "fails")
LISTED = 60  # types that a line names


class Cell(NamedTuple):
    """What was found of a method on a type: a key of SIGNS, and why."""

    word: str
    reason: str = ""


@dataclass
class Findings:
    """All that a sweep has found.

    Attributes:
        version: that of transformers.
        minutes: what the sweep of all types took.
        columns: methods, and what peft attaches.
        rows: the cells of each type, by column.
    """

    version: str
    minutes: int
    columns: tuple[str, ...]
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)

    def update(self, found: Findings) -> None:
        """Replace what was found of some types; what peft attached stays, unless it is new."""
        for model_type, row in found.rows.items():
            self.rows[model_type] = self.rows.get(model_type, {}) | row

    def counts(self) -> list[tuple[str, ...]]:
        """Count the types on which each method works, is refused, or fails."""
        rows = []
        for column in self.columns:
            words = Counter(row[column].word for row in self.rows.values() if column in row)
            share = f"{words['works'] / words.total():.1%}"
            rows.append((column, str(words["works"]), share, *(str(words[w]) for w in OTHERS)))
        return rows

    def reasons(self) -> dict[tuple[str, str, str], list[str]]:
        """Return the types of each (method, word, reason); the most frequent ones first."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for model_type, row in sorted(self.rows.items()):
            for column, cell in row.items():
                if cell.reason:
                    found.setdefault((column, cell.word, cell.reason), []).append(model_type)
        order = {column: number for number, column in enumerate(self.columns)}
        return dict(sorted(found.items(), key=lambda each: (order[each[0][0]], -len(each[1]))))


def findings(
    results: Iterable[Mapping[str, Any]], version: str, seconds: float, methods: Iterable[str]
) -> Findings:
    """Sum up the results of a sweep; types that were not built are left out.

    Args:
        results: those of `sweep_cells`, by type.
        version: that of transformers.
        seconds: what the sweep took.
        methods: the methods.
    """
    built = [result for result in results if "class" in result]
    columns = (*methods, *PEFT) if any("peft" in result for result in built) else tuple(methods)
    found = Findings(version, round(seconds / 60), columns)
    for result in built:
        row = {m: cell_of(text) for m, text in result["cells"].items()}
        if attached := result.get("peft"):
            texts = (attached.get(None, attached.get("null")), attached["all-linear"])
            row |= {
                n: Cell("works" if t == "ok" else "fails") for n, t in zip(PEFT, texts, strict=True)
            }
        found.rows[result["type"]] = row
    return found


def cell_of(text: str) -> Cell:
    """Return the cell of a result, `WORD: REASON`, with a reason that is the same for all types."""
    word, _, reason = text.partition(": ")
    word = word.partition(",")[0]
    reason = re.sub(r"^\S+ does not fit an? \S+ backbone: ", "", reason)
    reason = re.sub(r"this \S+ backbone", "this backbone", reason)
    return Cell(
        WORDS.get(word, word), " ".join(re.sub(r"[|*]", " ", reason).split())[:110].rstrip(" :,")
    )


def page(found: Findings) -> str:
    """Write the page."""
    head = ["model type", *found.columns]
    rows = (
        [name, *(SIGNS[row[c].word] if c in row else "" for c in found.columns)]
        for name, row in sorted(found.rows.items())
    )
    return "\n".join(
        [
            "# Architectures",
            "",
            f"Written by `make sweep` with transformers {found.version}, in {found.minutes} "
            "minutes: every model type that can be built",
            "from the defaults of its configuration, tiny and with random weights, in the first "
            "class that people adapt. ✓ works:",
            "attached, it starts as it should, each module placed where the pass goes gets "
            "gradients and changes the outputs, a step with a cache equals one",
            "without, it is saved and loaded, and detaching gives the backbone's outputs to the "
            "bit (where nothing is known that",
            "the model runs on, it is attached and detached only). - is refused with an error "
            "that says why and which methods",
            "fit: `head` where the class has none, `bitfit` where there are no biases, `prefix` "
            "where no attention computes",
            "softmax(q kᵀ) v by transformers' attention interface or torch's products, `prompt` "
            "where no stack of tokens was found; (-) is",
            "refused when the model runs; ✗ fails. Of",
            "peft, ✓ says that LoRA was attached, with peft's targets for the type or with "
            "`all-linear`; nothing was run.",
            "",
            f"{len(found.rows)} types were built:",
            "",
            *_table(["", "works", "share", *OTHERS], found.counts()),
            "",
            "## Why",
            "",
            *map(_reason_line, found.reasons().items()),
            "",
            "## All types",
            "",
            *_table(head, rows),
            "",
        ]
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _reason_line(entry: tuple[tuple[str, str, str], list[str]]) -> str:
    (column, word, reason), types = entry
    names = f": {', '.join(types)}" if len(types) <= LISTED else ""
    return f"- {column} {word}, {len(types)} type{'s' * (len(types) > 1)}, *{reason}*{names}"


def read(text: str) -> Findings:
    """Read the page that `page` has written.

    Raises:
        ValueError: it is another page.
    """
    begun = re.search(r"with transformers (\S+), in (\d+) minutes", text)
    tables = re.findall(r"^\| (.*) \|$", text.partition("## All types")[2], re.MULTILINE)
    if begun is None or not tables:
        raise ValueError("this is no page of a sweep: write it by a sweep of all types")
    head, _, *rows = (line.split(" | ") for line in tables)
    found = Findings(begun[1], int(begun[2]), tuple(head[1:]))
    words = {sign: word for word, sign in SIGNS.items()}
    listed, others = _reasons(text)
    for name, *signs in rows:
        row = {
            c: words[sign.strip()]
            for c, sign in zip(found.columns, signs, strict=True)
            if sign.strip()
        }
        found.rows[name] = {
            c: Cell(word, listed.get((c, word, name), others.get((c, word), "")))
            for c, word in row.items()
        }
    return found


def _reasons(
    text: str,
) -> tuple[dict[tuple[str, str, str], str], dict[tuple[str, str], str]]:
    """Read reasons by method, word and type; and those of lines that name no types."""
    line = re.compile(r"^- (\S+) ([a-z ]+), \d+ types?, \*(.*?)\*(?:: (.*))?$", re.MULTILINE)
    listed, others = {}, {}
    for column, word, reason, names in line.findall(text):
        if names:
            listed |= {(column, word, name): reason for name in names.split(", ")}
        else:
            others[column, word] = reason
    return listed, others
