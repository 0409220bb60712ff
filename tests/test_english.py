"""Stilted phrases in docstrings, messages, help texts and pages, counted by room."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Hits per 1,000 words. Ceilings only fall.
MOST = 2.5
OF_A_FILE = 17.0  # in a file with more than a handful of hits
HANDFUL = 6
STILTED = {
    "that of, those of: name the noun": r"\b(that|those) of\b",
    "is no: is not a": r"\b(is|are|was|were) no\b(?! longer)",
    "has not the: lacks": r"\b(has|have) not (the|a)\b",
    "is none: does not exist": r"\b(is|are) none\b",
    "anew, beside: again, next to": r"\b(anew|thereof|wherein|besides?)\b",
    "nobody, whom: name the component": r"\b(nobody|somebody|whoever|whom)\b",
    "in place of: instead of": r"\bin place of\b",
    "by which: split the sentence": r"\b(by|of|from|in|at|with|on) which\b",
    "is told, is said: name who reports": r"\b(is|are|was) (said|told)\b",
    "what it is: name it": r"\bwhat (is|are|has|was|it|they|a|an|the|one|another|others?)\b",
    "a title without a noun": r"^(What|Which|How|Where|Whose|Who) .*[^?]$",
    "of its own: separate": r"\bof its own\b",
    "programs do not ask or know": r"\b(asks?|asked|says?|knows?) (for|that|of|whether|what)\b",
}
PATTERNS = [re.compile(each, re.IGNORECASE | re.MULTILINE) for each in STILTED.values()]
_NOT_PROSE = re.compile(r"```.*?```|<!--.*?-->|`[^`\n]*`", re.DOTALL)


def texts(path: Path) -> list[str]:
    """Return the prose of a page, or the docstrings and messages of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [_NOT_PROSE.sub(" ", text)]
    strings = (n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant))
    return [s for s in strings if isinstance(s, str) and len(s.split()) > 3]


@pytest.fixture(scope="module")
def counted() -> dict[Path, tuple[int, int]]:
    """Return the words and the hits of each file."""
    modules, pages = (ROOT / "adapterhub").rglob("*.py"), (ROOT / "docs").rglob("*.md")
    found = {}
    for path in sorted([*modules, *pages, ROOT / "README.md"]):
        prose = texts(path)
        hits = sum(len(p.findall(text)) for p in PATTERNS for text in prose)
        found[path.relative_to(ROOT)] = sum(len(text.split()) for text in prose), hits
    return found


def test_no_room_is_stilted(counted: dict[Path, tuple[int, int]]) -> None:
    words: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    for path, (n, found) in counted.items():
        room = path.parts[1] if path.parts[0] == "adapterhub" else path.parts[0]
        words[room] += n
        hits[room] += found
    rates = {room: round(1000 * hits[room] / n, 1) for room, n in words.items() if n > 800}
    assert len(rates) > 20, "every room is counted"
    assert {r: rate for r, rate in rates.items() if rate > MOST} == {}


def test_no_file_is_stilted(counted: dict[Path, tuple[int, int]]) -> None:
    rates = {p: 1000 * n / max(1, w) for p, (w, n) in counted.items() if n > HANDFUL}
    loud = {str(p): round(rate, 1) for p, rate in rates.items() if rate > OF_A_FILE}
    assert not loud, f"rewrite in plain English: {list(STILTED)}"


@pytest.mark.parametrize(
    ("stilted", "plain"),
    [
        ("What has not the role", "The token lacks the role."),
        ("nobody to ask: stdin is no terminal", "cannot confirm: not running in a terminal"),
        ("the loss beside that of the backbone", "the loss next to the backbone's loss"),
    ],
)
def test_the_patterns_find_what_they_should(stilted: str, plain: str) -> None:
    assert [any(p.search(text) for p in PATTERNS) for text in (stilted, plain)] == [True, False]
