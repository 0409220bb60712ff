"""Undo real fixes and count what sees it: the proof of power of `make test`.

    python scripts/mutants.py [--seed 0] [--count 24] [--folder build/mutants]

A fix is a commit that changes at most 60 lines of the package and adds lines to tests. Of the last
200, some are drawn by a seed among those that still can be undone, and the package's part of each
is reversed in a worktree. A fix's own tests are the functions that its commit touched. The question
is what else sees that it is gone, so these are deselected, by their names, in all tests but the
first:

1. its own tests,
2. of `make test`, the tests of the folders that mirror what it changed, up to the first failure,
3. `make test-all`, once for all fixes that are left, undone together. What fails is then run on
   each of them alone: with the cases of `make test`, and with all.

Results are kept in the folder, so that a killed run continues; the table is written into
docs/testing.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/testing.md"
LINES, FIXES = 60, 200
TEST = ["-m", "not apart"]  # what `make test` runs


@dataclass
class Fix:
    """A commit that mended something, and what saw it undone."""

    commit: str
    title: str
    files: list[str]
    tests: list[str]
    patch: str = ""
    own: bool | None = None  # None: its tests are no longer there
    others: dict[str, list[str]] = field(default_factory=dict)  # the suite -> tests that failed


def git(*words: str, folder: Path = ROOT, text: str | None = None) -> str:
    """Run git; return what it printed."""
    done = subprocess.run(
        ["git", "-C", str(folder), *words], input=text, check=True, capture_output=True, text=True
    )
    return done.stdout


def last_fixes() -> list[Fix]:
    """List the last fixes, newest first."""
    log = git("log", "--no-merges", "--format=@%h %s", "--numstat", "--", "adapterhub", "tests")
    fixes = []
    for entry in log.split("\n@"):
        head, *lines = entry.removeprefix("@").splitlines()
        changed = [line.split("\t") for line in lines if line and not line.startswith("-")]
        package = [row for row in changed if re.match(r"adapterhub/.*\.py$", row[2])]
        tests = [row for row in changed if re.match(r"tests/.*\.py$", row[2]) and int(row[0])]
        if 0 < sum(int(row[0]) + int(row[1]) for row in package) <= LINES and tests:
            commit, _, title = head.partition(" ")
            fixes.append(Fix(commit, title, [row[2] for row in package], []))
    return fixes[:FIXES]


def touched_tests(commit: str) -> list[str]:
    """Return the test functions that a commit added or changed, by name."""
    patch = git("show", "--format=", "--unified=0", "-W", commit, "--", "tests")
    names, current = set(), None
    for line in patch.splitlines():
        if found := re.match(r"[-+ ]\s*def (test_\w+)", line):
            current = found[1]
        if line.startswith(("+", "-")) and not line.startswith(("+++", "---")) and current:
            names.add(current)
    return sorted(names)


def reversal(fix: Fix, folder: Path) -> str:
    """Return the patch that undoes a fix's change of the package today; "" if it cannot be."""
    patch = git("show", "--format=", fix.commit, "--", "adapterhub/**/*.py", "adapterhub/*.py")
    try:
        git("apply", "--reverse", "--3way", text=patch, folder=folder)
        return git("diff", "HEAD", folder=folder)
    except subprocess.CalledProcessError:
        return ""
    finally:
        clean(folder)


def undo(fix: Fix, folder: Path) -> bool:
    """Undo a fix in a worktree, beside others; return whether it could be."""
    try:
        git("apply", text=fix.patch, folder=folder)  # all of it, or an error and nothing
    except subprocess.CalledProcessError:
        return False
    return True


def clean(folder: Path) -> None:
    """Restore a worktree."""
    git("reset", "--hard", folder=folder)


def draw(seed: int, count: int, folder: Path) -> list[Fix]:
    """Draw fixes that can be undone, in the order in which the seed draws them."""
    fixes = last_fixes()
    random.Random(seed).shuffle(fixes)
    drawn: list[Fix] = []
    for fix in fixes:
        if len(drawn) == count:
            break
        fix.tests = touched_tests(fix.commit)
        fix.patch = reversal(fix, folder) if fix.tests else ""
        if fix.patch:
            drawn.append(fix)
    return drawn


def run_tests(folder: Path, words: Sequence[str], every: bool = False) -> list[str]:
    """Run tests in a worktree; return those that failed."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(folder), "ADAPTERHUB_TESTS": "all" if every else "",
        "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal",
               "-p", "no:cacheprovider", f"--junitxml={report}", *words]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if not report.exists():
        return [f"pytest: {done.stdout.strip().splitlines()[-1]}"]
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            file = case.attrib["classname"].replace(".", "/") + ".py"
            failed.append(f"{file}::{case.attrib['name'].partition(' ')[0]}")
    return sorted(set(failed))


def without(fix: Fix) -> list[str]:
    """Return the words that deselect a fix's own tests."""
    return ["-k", f"not ({' or '.join(fix.tests)})"]


def neighbours(fix: Fix, folder: Path) -> list[str]:
    """Return the test files and folders that mirror the files of a fix, nearest first."""
    near: list[str] = []
    for file in fix.files:
        parts = Path(file).parts[1:]
        stem = Path(file).stem.lstrip("_")
        inner = Path("tests", *parts[:-1])
        near += [str(p.relative_to(folder)) for p in (folder / inner).glob(f"test_{stem}*.py")]
        if len(parts) > 1:
            near.append(str(Path("tests", parts[0])))
    return list(dict.fromkeys(near))


def try_alone(fix: Fix, folder: Path) -> None:
    """Undo a fix and run its own tests, then its neighbours."""
    undo(fix, folder)
    try:
        files = sorted({file for name in fix.tests for file in named_in(name)})
        if files:
            fix.own = bool(run_tests(folder, [*files, "-k", " or ".join(fix.tests)], every=True))
        near = [*neighbours(fix, folder), "-x", *without(fix), *TEST]
        failed = run_tests(folder, near)
    finally:
        clean(folder)
    fix.others["near"] = of_the_fix(failed, folder)


def of_the_fix(failed: list[str], folder: Path) -> list[str]:
    """Leave out the tests that also fail in the worktree as it is."""
    if not failed:
        return []
    functions = sorted({test.partition("[")[0] for test in failed})
    return sorted(set(failed).difference(run_tests(folder, functions, every=True)))


def named_in(name: str) -> list[str]:
    """Return the test files that define a function."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "grep", "-lw", f"def {name}", "--", "tests"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.split()


def try_together(fixes: list[Fix], folder: Path) -> None:
    """Undo fixes together, run everything, and run what failed on each of them alone."""
    undone = [fix for fix in fixes if undo(fix, folder)]
    try:
        failed = run_tests(folder, ["tests"], every=True)
    finally:
        clean(folder)
    failed = of_the_fix(failed, folder)
    for fix in undone:
        mine = sorted({test.partition("[")[0] for test in failed})
        mine = [test for test in mine if function_of(test) not in fix.tests]
        fix.others |= {"test": [], "test-all": []}
        if mine:
            undo(fix, folder)
            try:
                fix.others["test"] = run_tests(folder, [*mine, *TEST])
                fix.others["test-all"] = run_tests(folder, mine, every=True)
            finally:
                clean(folder)


def function_of(test: str) -> str:
    """Return the function of a test: `tests/a.py::test_b[c]` is of `test_b`."""
    return test.rpartition("::")[2].partition("[")[0]


def table(fixes: list[Fix], seed: int) -> str:
    """Return the table of the page."""
    own = {True: "yes", False: "no", None: "gone"}
    rows = ["| fix undone | its own test | what else saw it | where |", "|---|---|---|---|"]
    for fix in fixes:
        suite = next((name for name, tests in fix.others.items() if tests), None)
        names = {"near": "`make test`", "test": "`make test`", "test-all": "`make test-all`"}
        first = f"`{function_of(fix.others[suite][0])}`" if suite else "nothing"
        title = fix.title.replace("|", "\\|")
        rows.append(
            f"| {fix.commit} {title} | {own[fix.own]} | {first} | {names.get(suite or '', '')} |"
        )
    seen = [sum(bool(any(f.others.get(s) for s in suites)) for f in fixes)
            for suites in (("near", "test"), ("test-all",))]  # fmt: skip
    neither = sum(not any(f.others.values()) and not f.own for f in fixes)
    only_own = sum(not any(f.others.values()) and bool(f.own) for f in fixes)
    counts = (
        f"Up to commit {git('rev-parse', '--short=8', 'HEAD').strip()}, seed {seed}, {len(fixes)} "
        f"fixes: {seen[0]} are seen by other tests of `make test`, "
        f"{seen[1]} more by `make test-all`, {only_own} by their own test alone, {neither} by none."
    )
    return "\n".join([counts, "", *rows])


def main() -> None:
    """Draw, undo and count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutants")
    options = parser.parse_args()
    folder = options.folder.resolve() / "tree"
    record = folder.with_name("fixes.json")
    if not folder.exists():
        git("worktree", "add", "--detach", str(folder), "HEAD")
    if record.exists():
        fixes = [Fix(**each) for each in json.loads(record.read_text(encoding="utf-8"))]
    else:
        fixes = draw(options.seed, options.count, folder)

    def keep() -> None:
        record.write_text(json.dumps([asdict(fix) for fix in fixes], indent=1), encoding="utf-8")

    keep()
    for fix in fixes:
        if "near" not in fix.others:
            try_alone(fix, folder)
            keep()
            print(fix.commit, fix.own, fix.others["near"][:1] or "nothing near", flush=True)
    # Fixes that change the same lines are undone in different rounds.
    while left := [f for f in fixes if not any(f.others.values()) and "test" not in f.others]:
        try_together(left, folder)
        keep()
    page = PAGE.read_text(encoding="utf-8")
    block = re.compile(r"(<!-- mutants: .*? -->\n).*?(<!-- /mutants -->)", re.DOTALL)
    found = table(fixes, options.seed)
    PAGE.write_text(block.sub(lambda m: f"{m[1]}{found}\n{m[2]}", page), encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
