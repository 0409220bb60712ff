"""Undo parts of real fixes and count what the tests see: the power of `make test`.

    python scripts/mutants.py [--seed 0] [--count 120] [--trees HEAD] [--rooms]

A fix is a commit that changes at most 60 lines of the package. A mutant is one hunk of a fix,
undone in a worktree: it still applies, and it changes the code, not only texts or comments. At
most two mutants are of one fix. They are drawn by the seed from the last 600 commits before the
first tree, among those that can be undone in every tree.

1. Near: the test files that the commit touched, those that mirror the changed file, and the test
   that saw it in the first tree, with the cases of `make test`, up to the first failure.
2. Rooms: what is not seen there meets the tests of its room and the contract with the cases of
   `make test`, then with those of `make test-all`; of the first tree, only with `--rooms`.

Later trees are tried on what the first has seen: has anything been lost?

Results are kept in build/mutants, so that a killed run continues. The counts are written into
docs/testing.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/testing.md"
LINES, COMMITS, OF_A_FIX = 60, 600, 2
SECONDS = {"near": 300, "room": 900, "all": 2400}  # a mutant may wait for ever
STAGES = ("near", "room", "all")


@dataclass(frozen=True)
class Mutant:
    """A hunk of a fix, to be undone."""

    commit: str
    title: str
    file: str
    tests: tuple[str, ...]
    patch: str


def git(*words: str, folder: Path = ROOT, text: str | None = None, check: bool = True) -> str:
    """Run git; return its output."""
    return subprocess.run(
        ["git", "-C", str(folder), *words], input=text, check=check, capture_output=True, text=True
    ).stdout


def undo(mutant: Mutant, tree: Path) -> bool:
    """Undo a hunk in a worktree; return whether the code has changed."""
    file = tree / mutant.file
    if not file.exists():
        return False
    before = file.read_text("utf-8")
    command = ["git", "-C", str(tree), "apply", "-R", "-C2", "-"]
    if subprocess.run(command, input=mutant.patch, text=True, capture_output=True).returncode:
        return False
    try:
        return code(file.read_text("utf-8")) != code(before)
    except SyntaxError:  # half of a change
        return False


def code(source: str) -> str:
    """Return a module's code without the text of messages and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = " "
    return ast.dump(tree)


def hunks(before: str) -> list[Mutant]:
    """List the hunks of the fixes among the last commits before a tree."""
    log = git("log", f"-{COMMITS}", "--no-merges", "--format=@%h %s", "--numstat", before, "--",
              "adapterhub", "tests")  # fmt: skip
    mutants = []
    for entry in log.split("\n@"):
        head, *lines = entry.removeprefix("@").splitlines()
        changed = [line.split("\t") for line in lines if line and not line.startswith("-")]
        package = [row for row in changed if re.match(r"adapterhub/.*\.py$", row[2])]
        if not 0 < sum(int(row[0]) + int(row[1]) for row in package) <= LINES:
            continue
        commit, _, title = head.partition(" ")
        tests = tuple(row[2] for row in changed if re.match(r"tests/.*/test_\w+\.py$", row[2]))
        patch = git(
            "show", "--format=", "-U2", commit, "--", "adapterhub/**/*.py", "adapterhub/*.py"
        )
        for part in re.split(r"(?m)^(?=diff --git )", patch):
            header, *pieces = re.split(r"(?m)^(?=@@ )", part)
            if (name := re.search(r"(?m)^\+\+\+ b/(.*)$", header)) and "/dev/null" not in header:
                start = f"--- a/{name[1]}\n+++ b/{name[1]}\n"
                mutants += [Mutant(commit, title, name[1], tests, start + each) for each in pieces]
    return mutants


def draw(seed: int, count: int, before: str, trees: Sequence[Path]) -> list[Mutant]:
    """Draw mutants that can be undone in every tree, in the order of the seed."""
    possible: list[Mutant] = []
    drawn: list[Mutant] = []
    for mutant in hunks(before):
        undone = [undo(mutant, tree) for tree in trees]
        for tree in trees:
            git("reset", "--hard", folder=tree)
        possible += [mutant] * all(undone)
    random.Random(seed).shuffle(possible)
    for mutant in possible:
        if sum(each.commit == mutant.commit for each in drawn) < OF_A_FIX:
            drawn.append(mutant)
    return drawn[:count]


def first_failure(tree: Path, places: Sequence[str], stage: str) -> str:
    """Run tests in a worktree; return the first that fails, "" if none does."""
    places = [place for place in dict.fromkeys(places) if (tree / place).exists()]
    if not places:
        return ""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(tree), "ADAPTERHUB_TESTS": "all" if stage == "all" else "",
        "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    command = ["timeout", str(SECONDS[stage]), sys.executable, "-m", "pytest", "-q", "-x",
               "-n", "2", "-p", "no:cacheprovider", "-m", "not apart", *places]  # fmt: skip
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode == 124:
        return "a test that does not end"
    if done.returncode in (0, 5):  # 5: no test was selected
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {done.returncode}"


def near(mutant: Mutant, tree: Path, seen: str) -> list[str]:
    """Return the test files of a mutant: those of its commit, and those that mirror its file.

    The files with the function that saw it in the first tree come first.
    """
    path = Path(*Path(mutant.file).parts[1:])
    mirrors = sorted((tree / "tests" / path.parent).glob(f"test_{path.stem.lstrip('_')}*.py"))
    name = seen.rpartition("::")[2].partition("[")[0]
    defined = name.startswith("test_") and git(
        "grep", "-lw", f"def {name}", "--", "tests", folder=tree, check=False
    )
    files = defined.split() if defined else []
    return [*files, *mutant.tests, *(str(file.relative_to(tree)) for file in mirrors)]


def seen_by(mutant: Mutant, tree: Path, stage: str, seen: str = "") -> str:
    """Undo a mutant and run the tests of a stage; return the first that fails."""
    if not undo(mutant, tree):
        raise SystemExit(f"{mutant.commit} cannot be undone in {tree.name}: remove mutants.json")
    try:
        if stage == "near":
            return first_failure(tree, near(mutant, tree, seen), stage)
        room = str(Path("tests", *Path(mutant.file).parts[1:-1][:1]))
        rooms = ["tests/contract", *([room] if room != "tests" else [])]
        return first_failure(tree, rooms, stage)
    finally:
        git("reset", "--hard", folder=tree)


def summary(mutants: Sequence[Mutant], results: dict[str, list[dict[str, str]]], seed: int) -> str:
    """Return the text of the page: the counts of each tree, and the mutants that differ."""
    fixes = len({mutant.commit for mutant in mutants})
    lines = [
        f"Seed {seed}, {len(mutants)} mutants of {fixes} fixes:", "",
        "| tests of | tried | seen near | seen in its room | seen by `make test-all` | not seen |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for tree, seen in results.items():
        tried = [each for each in seen if each]
        stages = Counter(next((s for s in STAGES if each.get(s)), "none") for each in tried)
        counts = " | ".join(str(stages[stage]) for stage in (*STAGES, "none"))
        lines.append(f"| {tree} | {len(tried)} | {counts} |")
    first, *later = results
    for tree in later:
        pairs = zip(mutants, results[first], results[tree], strict=True)
        lost = [
            each for each, had, now in pairs if any(had.values()) and now and not any(now.values())
        ]
        lines += ["", *(f"Not seen by {tree}: {each.commit} {each.title}." for each in lost)]
    return "\n".join(lines)


def main() -> None:
    """Draw, undo and count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--trees", nargs="+", default=["HEAD"], help="commits, the oldest first")
    parser.add_argument("--rooms", action="store_true", help="run the rooms for all that is left")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutants")
    options = parser.parse_args()
    names = [git("rev-parse", "--short=8", tree).strip() for tree in options.trees]
    trees = {name: options.folder.resolve() / name for name in names}
    for name, tree in trees.items():
        if not tree.exists():
            git("worktree", "add", "--detach", str(tree), name)
        git("reset", "--hard", folder=tree)
    record = options.folder / "mutants.json"
    if record.exists():
        mutants = [Mutant(**each) for each in json.loads(record.read_text("utf-8"))]
    else:
        mutants = draw(options.seed, options.count, names[0], list(trees.values()))
        record.write_text(json.dumps([asdict(each) for each in mutants], indent=1), "utf-8")
    results: dict[str, list[dict[str, str]]] = {}
    for name in names:
        kept = options.folder / f"{name}.json"
        had = json.loads(kept.read_text("utf-8")) if kept.exists() else []
        results[name] = had + [{} for _ in mutants[len(had) :]]
    for name, tree in trees.items():
        stages = STAGES if options.rooms or name != names[0] else STAGES[:1]
        for number, mutant in enumerate(mutants):
            mine, first = results[name][number], results[names[0]][number]
            for stage in stages if name == names[0] or any(first.values()) else ():
                if stage not in mine and not any(mine.values()):
                    mine[stage] = seen_by(mutant, tree, stage, first.get("near", ""))
                    text = json.dumps(results[name], indent=1)
                    (options.folder / f"{name}.json").write_text(text, "utf-8")
                    print(name, stage, mutant.commit, mine[stage] or "not seen", flush=True)
    page = PAGE.read_text("utf-8")
    block = re.compile(r"(<!-- mutants: .*? -->\n).*?(<!-- /mutants -->)", re.DOTALL)
    text = summary(mutants, results, options.seed)
    PAGE.write_text(block.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page), "utf-8")
    print(text)


if __name__ == "__main__":
    main()
