"""When to take which method, and what the studies of this repository found.

Verdicts are read from the committed reports and claims of benchmarks/studies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from adapterhub.methods import METHODS
from reference._tables import table

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"
REFERENCE = "glue"  # the reference study
BY_ROWS = ("low-data", REFERENCE, "miniature-causal", "miniature-seq2seq")
AGAINST_LORA = (REFERENCE, "miniature-causal", "miniature-seq2seq")
_TITLES = {"miniature-causal": "a decoder", "miniature-seq2seq": "an encoder-decoder"}


@dataclass(frozen=True)
class Group:
    """Methods that are taken for one reason, and how the claims on them begin in claims.md."""

    when: str
    text: str
    methods: tuple[str, ...]
    claims: tuple[str, ...] = ()


_NAMED = (
    Group(
        "Not sure, or a language model",
        "A low-rank update of the projections. It is merged into the weights and costs nothing "
        "afterwards, other programs load it, and it trains on backbones in 4 bits: "
        "[instruct](../tutorials/instruct.md).",
        ("lora", "rslora", "lora-plus", "dora", "pissa"),
        ("LoRA is easier to train", "A method trained by adapterhub is as good"),
    ),
    Group(
        "Quality first",
        "A small network at each sublayer, with several times the parameters of LoRA. It is not "
        "merged, so it is computed in every forward pass.",
        ("pfeiffer", "houlsby", "parallel", "scaled-parallel", "mam", "unipelt"),
        (
            "MAM beats", "Adapters at feed-forward", "Parallel adapters beat",
            "Scaled parallel adapters beat",
        ),
    ),
    Group(
        "The smallest file",
        "An adapter for each user or customer: about a hundred kilobytes or less on a small "
        "encoder.",
        ("ia3", "norms", "bitfit", "compacter"),
        ("Few trained parameters overfit less",),
    ),
    Group(
        "Nothing inside may change",
        "Vectors in front of the input, or of the keys and values of each attention; the layers "
        "compute as before.",
        ("prefix", "prompt", "p-tuning"),
        ("Prefix tuning with 0.1 %", "Above all with little data"),
    ),
    Group(
        "A few tokens only",
        "Edits of the states at the ends of the prompt, which cost nothing while text is written; "
        "and a LoRA that applies from its invocation on, so that several share the cache of the "
        "text in front of it.",
        ("loreft", "noreft", "direft", "alora"),
    ),
    Group(
        "A baseline in seconds",
        "The frozen backbone as it is: what every other method has to beat.",
        ("head", "scalar-mix"),
    ),
    Group(
        "Several tasks at once",
        "One adapter for each task, trained on its own, then mixed. Without a mix: "
        "[one adapter for several tasks](../guides/multi-task.md), "
        "[from a related task](../guides/transfer.md).",
        ("adapterfusion",),
        ("An adapter per task on a frozen backbone", "Fine-tuning one task after another"),
    ),
    Group(
        "The backbone's own weights",
        "Much data, another language or domain, and a file of the size of what trains.",
        ("full", "freeze", "unfreeze", "staged", "chosen"),
        ("Gradual unfreezing beats",),
    ),
)  # fmt: skip
_OTHERS = tuple(METHODS.keys() - {name for group in _NAMED for name in group.methods})
GROUPS = (
    *_NAMED,
    Group(
        "To compare, or to bring a checkpoint",
        "Other changes of a projection: its weight in another form than a low-rank product, or a "
        "rotation of its input or output. With a tuned learning rate, none has been shown to beat "
        "LoRA in general; try them on your own data with [bench](../guides/bench.md).",
        tuple(sorted(_OTHERS)),
    ),
)


def groups(paths: dict[str, str]) -> dict[str, list[str]]:
    """Return the paths of methods' pages below the headings, for the navigation."""
    return {group.when: [paths[name] for name in group.methods] for group in GROUPS}


def claims(group: Group) -> str:
    """Return what claims.md says on the claims of a group, as a list."""
    text = (STUDIES / "claims.md").read_text(encoding="utf-8")
    found = re.findall(r"^## (.+)\n\n\*\*(.+)\*\*: (.+)$", text, re.MULTILINE)
    lines = []
    for start in group.claims:
        ((claim, answer, counts),) = (one for one in found if one[0].startswith(start))
        lines.append(f"- {claim} [{answer}](../studies/claims.md): {counts}\n")
    return "".join(lines)


class Taken(NamedTuple):
    """What a study recommends for a data set: `ia3: accuracy 81.8 (...), 14,594 ...`."""

    study: str
    task: str
    rows: int
    method: str
    why: str


def taken(study: str) -> Iterator[Taken]:
    """Yield what a study's report recommends, for each of its tasks."""
    report = (STUDIES / study / "report.md").read_text(encoding="utf-8")
    found = re.findall(r"^## (.+): ([\d,]+) training rows.*\n\nTake (.+?): (.+)\.$", report, re.M)
    for task, rows, method, why in found:
        yield Taken(study, task, int(rows.replace(",", "")), method, why)


def taken_table() -> str:
    """Return what the studies recommend, by task, from few rows to many."""
    rows = [found for study in BY_ROWS for found in taken(study)]
    order = {task: number for number, task in enumerate(dict.fromkeys(row.task for row in rows))}
    return table(
        ("data", "training rows", "take", "why"),
        [
            (
                f"[{_TITLES.get(row.study, row.task)}](../studies/{row.study}.md)",
                f"{row.rows:,}", f"**{row.method}**", row.why,
            )
            for row in sorted(rows, key=lambda row: (order[row.task], row.rows))
        ],
    )  # fmt: skip


def verdict(method: str) -> str:
    """Return how a method did against LoRA in the studies, in a few words."""
    if method == "lora":
        return "the baseline"
    taken_for = [
        _TITLES.get(study, found.task)
        for study in AGAINST_LORA
        for found in taken(study)
        if found.method.partition("(")[0] == method
    ]
    words: dict[str, list[str]] = {}
    for study in AGAINST_LORA:
        for task, word in _against_lora(study, method):
            words.setdefault(word, []).append(_TITLES.get(study, task))
    tied = len(words.pop("tied", []))
    parts = [f"{word} on {', '.join(tasks)}" for word, tasks in sorted(words.items())]
    parts += [f"tied on {tied}"] if tied else []
    parts += [f"taken for {', '.join(taken_for)}"] if taken_for else []
    return "; ".join(parts) or "not studied"


def _against_lora(study: str, method: str) -> Iterator[tuple[str, str]]:
    """Yield each task of a study with `better`, `tied` or `worse`."""
    report = (STUDIES / study / "report.md").read_text(encoding="utf-8")
    row = re.compile(rf"^\| {re.escape(method)}(?:\(.*?\))? \|.+, (\w+) \(p .+$", re.MULTILINE)
    for task, section in re.findall(r"^## (\S+): (.+?)(?=^## |\Z)", report, re.M | re.DOTALL):
        yield from ((task, word) for word in row.findall(section))
