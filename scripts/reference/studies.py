"""The pages of the committed studies: benchmarks/studies/NAME.yaml and what NAME/ has of it.

A study has a page as soon as its report is committed (`adapterhub report benchmarks/studies/NAME`);
the checks of claims, as soon as claims.md is (`benchmarks/studies/claims.py ... --markdown`).
"""

from __future__ import annotations

import atexit
import logging
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).parents[2]
STUDIES = _ROOT / "benchmarks" / "studies"
REPORT = "report"  # .md and .html, as `adapterhub report` writes them
CLAIMS = "claims.md"
_log = logging.getLogger("mkdocs.hooks.studies")
_TITLES = {
    "glue": "Methods on tasks of GLUE",
    "low-data": "Little data",
    "he2022": "Where adapters are placed",
    "miniature-seq2seq": "An encoder-decoder in miniature",
    "miniature-causal": "A decoder in miniature",
    "transfer": "From one task to the next",
    "transfer-stsb": "From one task to STS-B",
    "domain": "The text of the domain first",
    "recent": "Recent methods beside the peers",
    "recent-eva": "LoRA that starts from the data",
}
_CONSTANT = "(?:majority class|mean|most frequent labels)"
_UNDECIDED = re.compile(
    "No trained method was shown to be better"
    f"|It was not shown to be better than {_CONSTANT}"
    f"|Cannot tell yet whether (?:bag of words|{_CONSTANT}) is enough"
)
_LIKE_WORDS = "It was not shown to be better than bag of words"
_NOTHING_LEARNED = """\
**Undecided.** On these tasks no method was shown to beat the baselines with these steps and rows,
so the scores do not compare methods:"""
_CLAIMS_INTRO = """\
# Textbook claims

What is often said of these methods, checked on the records of the studies. Each check has its
value with a 95 % interval of that check alone; the p-value is corrected for all checks of the claim
(Holm). A claim holds if all of its checks hold, and does not hold if one shows the opposite; what
cannot be told with these rows and seeds is said to be so. Where more than a quarter of the methods
are unsteady, as on STS-B, where some seeds learned nothing, the spread over seeds is taken from all
of them, and every interval of the task is wide. These are small studies of one backbone: another
backbone, longer training or more rows may give other answers.

"""


def pages() -> dict[str, str]:
    """Return the overview, the page of each study that has a report, and that of the claims."""
    found = {"studies/index.md": _overview()}
    if (STUDIES / CLAIMS).is_file():
        found["studies/claims.md"] = _CLAIMS_INTRO + (STUDIES / CLAIMS).read_text(encoding="utf-8")
    return found | {f"studies/{name}.md": _study(name) for name in _reported()}


def assets() -> dict[str, Path]:
    """Make the interactive report of each study from its records: a file that fetches nothing."""
    return {f"studies/{_charts(name)}": _drawn(name) for name in _reported() if _has_records(name)}


def _has_records(name: str) -> bool:
    return (STUDIES / name / "records").is_dir()


def _drawn(name: str) -> Path:
    """Make the report of a study in a folder of its own, and return the page."""
    _log.info("drawing the charts of %s", name)
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(STUDIES / name, folder / name)
    command = [sys.executable, "-m", "adapterhub", "report", name]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / name / f"{REPORT}.html"


def _recipes() -> list[str]:
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def _reported() -> list[str]:
    return [name for name in _recipes() if (STUDIES / name / f"{REPORT}.md").is_file()]


def _overview() -> str:
    lines = [
        "# Studies",
        "",
        "What `adapterhub bench` found with this repository's recipes: each page has the tables, a "
        "recommendation, and what was left out to make the study affordable. "
        "[How to read them](../guides/bench.md#recommendation).",
        "",
    ]
    if (STUDIES / CLAIMS).is_file():
        lines += ["- [Textbook claims](claims.md), checked on these studies"]
    for name in _recipes():
        title = f"[{_title(name)}]({name}.md)" if name in _reported() else _title(name)
        lines.append(f"- {title}: {_comment(name)[0]}")
    return "\n".join([*lines, ""])


def _study(name: str) -> str:
    """Return the page of a study: its recipe's comment, its tables, its recipe."""
    recipe = (STUDIES / f"{name}.yaml").read_text(encoding="utf-8")
    report = (STUDIES / name / f"{REPORT}.md").read_text(encoding="utf-8")
    _, _, tables = report.partition("\n")  # the first line is its title
    page = f"[The same as a page with charts]({_charts(name)}){{ target=_blank }}\n"
    return "\n".join(
        [
            f"# {_title(name)}",
            "",
            "\n\n".join(_comment(name)),
            "",
            page if _has_records(name) else "",
            _decided_first(tables).strip(),
            "",
            "## Recipe",
            "",
            "```yaml",
            recipe.strip(),
            "```",
            "",
        ]
    )


def _decided_first(tables: str) -> str:
    """Name the metric of each column of the overview, and move undecided tasks to a second table.

    A task is undecided if its section of the report states that training was not shown to help, or
    that a baseline may be enough.
    """
    head, *sections = re.split(r"^## ", tables, flags=re.MULTILINE)
    if not sections or not sections[0].startswith("All tasks\n"):
        return tables
    tasks = {part.partition(":")[0]: part for part in sections[1:]}
    for part in sections[1:]:  # a study may have several sizes of a task
        if size := re.match(r"(.+?): ([\d,]+) training rows", part):
            tasks[f"{size[1]}, {size[2]} rows"] = part
    rows = [line.strip("|").split("|") for line in sections[0].splitlines() if line[:1] == "|"]
    names = [cell.strip() for cell in rows[0]]
    rows[0] = [
        f" {name}, {_metric(tasks[name])} " if name in tasks else f" {name} " for name in names
    ]
    undecided = [n for n, name in enumerate(names) if _UNDECIDED.search(tasks.get(name, ""))]
    decided = [n for n in range(1, len(names)) if n not in undecided]
    parts = [_columns(rows, decided)] if decided else []
    if like := [names[n] for n in decided if _LIKE_WORDS in tasks.get(names[n], "")]:
        parts += [
            f"On {' and '.join(like)}, the recommended method was not shown to be better than the "
            "bag of words, a linear model of words and word pairs (TF-IDF)."
        ]
    if undecided:
        parts += [_NOTHING_LEARNED, _columns(rows, undecided)]
    overview = "All tasks\n\n" + "\n\n".join(parts) + "\n\n"
    return "## ".join([head, overview, *sections[1:]])


def _metric(section: str) -> str:
    """Return the metric in the head of the table of a task."""
    return re.search(r"^\| method \| ([^|]+) \|", section, re.MULTILINE)[1]  # type: ignore[index]


def _columns(rows: list[list[str]], columns: list[int]) -> str:
    """Return some columns of a table, without the rows that are empty there."""
    kept = [row for row in rows if any(row[n].strip() for n in columns)]
    return "\n".join("|" + "|".join([row[0], *(row[n] for n in columns)]) + "|" for row in kept)


def _charts(name: str) -> str:
    """Return the file name of the interactive report, which is not that of the page."""
    return f"{name}-charts.html"


def _title(name: str) -> str:
    return _TITLES.get(name, name)


def _comment(name: str) -> list[str]:
    """Return the paragraphs of the comment that a recipe begins with; commands as code."""
    text = (STUDIES / f"{name}.yaml").read_text(encoding="utf-8")
    lines = re.match(r"(?:#.*\n)*", text)[0].splitlines()  # type: ignore[index]
    bare = "\n".join(line[2:].rstrip() for line in lines)
    return [_paragraph(part) for part in re.split(r"\n\n+", bare.strip("\n"))]


def _paragraph(text: str) -> str:
    """Join the lines of a paragraph, and fence what is indented."""
    if not text.startswith("    "):
        return " ".join(text.split())
    return "\n".join(["```text", *(line[4:] for line in text.splitlines()), "```"])
