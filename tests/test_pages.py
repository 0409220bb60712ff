"""Every page, guide and notebook runs, from top to bottom, and shows what it printed."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import nbformat
import notebooks
import pages
import pytest

from adapterhub import __version__
from adapterhub.data.docstrings import load_docstrings
from adapterhub.methods import METHODS
from tests.kit import matrix, processes, stand_ins

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def is_run(page: str) -> bool:
    if pages.IN_COPY in text(page):
        return False  # by a test of guides
    if pages.ON_TRAINED_WEIGHTS in text(page):
        return False  # by tests/real/test_small_models.py
    return any(block.kind not in pages.SHOWN for block in pages.blocks(text(page)))


RUN = [page for page in PAGES if is_run(page)]


@pytest.mark.apart
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    """In a process of their own."""
    stand_ins.serve()
    record = tmp_path / "done.json"
    words = ("scripts/pages.py", page, "--quick", "--record", record)
    ended = processes.run(*words, folder=ROOT)
    assert ended.returncode == 0, ended.printed
    done = json.loads(record.read_text(encoding="utf-8"))
    assert len(done) == len(pages.blocks(text(page)))
    if page == "docs/start.md":
        check_start(done)


def check_start(done: list[dict]) -> None:
    """The first half hour prints what its text promises."""
    printed = "".join(output for block in done for output in block["outputs"])
    for promised in (
        "docstrings.csv: semicolon-separated", "guessed: --text summary --label part",
        "rows are held out, in the same shares of each label", "[CLS]", "lora - head", "part@v1",
    ):  # fmt: skip
        assert promised in printed
    labels = {example.label for example in load_docstrings()[0]}
    predicted = [o for block in done for o in block["outputs"] if o.strip() in labels]
    assert predicted, "the last block predicts in Python"
    page = text("docs/start.md")
    times = re.findall(r"```\n\n\*[\d.]+ s\.\*", page)
    assert len(times) == page.count("```console") >= 7, "each command shows its time"


def test_every_block_runs_or_is_of_a_language_that_is_only_shown() -> None:
    shown = [b for page in PAGES for b in pages.blocks(text(page)) if not b.title]
    assert {b.kind for b in shown} <= {"python", "console", *pages.SHOWN}
    fences = sum(len(re.findall(r"^ *```", text(page), re.MULTILINE)) for page in PAGES)
    setups = sum(text(page).count("\n<!-- setup\n") for page in PAGES)
    assert fences == 2 * (sum(len(pages.blocks(text(page))) for page in PAGES) - setups)


def test_outputs_are_written_below_their_commands(tmp_path: Path) -> None:
    page = (
        "```console\n$ echo a \\\n    b\n$ true\nold\n```\n\n*9.0 s.*\n\n"
        "<!-- setup\none = 1\n-->\n```python\nprint(one)\n```\n"
        '```text title="output"\nold\n```\n'
    )
    done = pages.run_page("page", page, tmp_path)
    assert [one.outputs for one in done] == [["a b\n", ""], [""], ["1\n"], []]
    once = pages.with_outputs(page, done)
    assert once.startswith("```console\n$ echo a \\\n    b\na b\n$ true\n```\n\n*0.")
    assert once.endswith('```text title="output"\n1\n```\n')
    assert pages.with_outputs(once, pages.run_page("page", once, tmp_path)).count("a b\n") == 1
    titled = (
        '```python title="x.py"\none = 1\n```\n```python title="x.py, at the end"\ntwo = 2\n```\n'
    )
    pages.run_page("page", titled, tmp_path)
    signed = pages.signed(pages.signed("# A\n\ntext\n"))
    assert signed.count(f"printed by adapterhub {__version__} on") == 1
    assert (tmp_path / "x.py").read_text() == "one = 1\n\ntwo = 2\n"


@pytest.mark.parametrize(
    ("shown", "output", "written"),
    [
        ("a 1\n...\nd\n", "a 1\nb\nc\nd\n", "a 1\n...\nd\n"),  # as printed
        ("a 1\n...\nd 1\n", "a 2\nb\nc\nd 2\n", "a 2\n...\nd 2\n"),
        ("...\nd 1\n", "a 2\nd 2\n", "...\nd 2\n"),
        ("a 1\n...\n", "a 2\nd 2\n", "a 2\n...\n"),
        ("...\n", "a\n", "...\n"),
        ("a 1\nb 1\n...\nc 1\n", "a 2\n", "a 2\n"),
        # Each shown line stays, wherever it is now, and so do new ones next to it.
        ("a 1\n...\nd 1\n...\nf 1\n", "a 2\nb\nd 2\ne\nf 2\n", "a 2\n...\nd 2\n...\nf 2\n"),
        ("...\nd 1\nf 1\n", "a\nb\nd 2\ne\nf 2\n", "...\nd 2\ne\nf 2\n"),
        ("a 1\n...\n", "new\na 2\nb\nc\n", "new\na 2\n...\n"),
        ("", "a\n", "a\n"),
        ("a\n", "", ""),
    ],
)
def test_what_a_page_leaves_out_stays_left_out(shown, output, written) -> None:
    assert pages.cut(shown, output) == written


TABLE = "\n  name   score\n ──────────────\n  a      0.5\n\n"


@pytest.mark.parametrize(
    ("shown", "printed", "refused"),
    [
        ("accuracy     0.54\n", "accuracy     0.61 (0.5-0.7, n = 60)\n", ""),
        ("time   9 s\n", "time   8 s\nnext   adapterhub publish\n", "'next'"),
        ("time   9 s\nnext   all\n", "time   8 s\n", "'next'"),
        ("...\ntime   9 s\n", "a.csv: 9 rows\ntime   8 s\n", ""),
        ("", "time   8 s\n", ""),  # the page shows no output
        ('{"model":"a"}\n', '{"error":"no adapter a"}\n', "model"),
        (TABLE, TABLE.replace("0.5", "0.6"), ""),
        (TABLE, TABLE.replace("score", "rank "), "'name score'"),
        ("a@0123456789ab: intact\n", "a@ba9876543210: intact\n", ""),
        ("sst2@v1: intact\n", "sst2@v2: intact\n", ""),
    ],
)
def test_a_page_is_compared_with_the_form_of_what_is_printed(
    shown, printed, refused, tmp_path
) -> None:
    (tmp_path / "printed").write_text(printed, encoding="utf-8")
    page = f"```console\n$ cat printed\n{shown}```\n"
    if not refused:
        pages.run_page("page", page, tmp_path, quick=True)
        return
    with pytest.raises(RuntimeError, match=re.escape(refused)):
        pages.run_page("page", page, tmp_path, quick=True)


def test_a_failing_block_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)page:2: no-such-command failed"):
        pages.run_page("page", "```console\n$ no-such-command\n```\n", tmp_path)
    with pytest.raises(RuntimeError, match="page:3: division"):
        pages.run_page("page", "\n```python\n1 / 0\n```\n", tmp_path)
    page = '```python\nprint(1)\n```\n```text title="output"\n2\n```\n'
    with pytest.raises(RuntimeError, match="the page shows"):
        pages.run_page("page", page, tmp_path, quick=True)
    varying = page.replace('"output"', '"output, numbers vary"')
    assert pages.run_page("page", varying, tmp_path, quick=True)
    with pytest.raises(RuntimeError, match="the page shows"):
        pages.run_page("page", varying.replace("\n2\n", "\ntwo\n"), tmp_path, quick=True)
    answers = varying.replace("numbers vary", "a model's words").replace("1", "'it: 1, 2'")
    assert pages.run_page("page", answers.replace("\n2\n", "\nit: so\n"), tmp_path, quick=True)
    for other in ("\nthat: so\n", "\nit: so\nit: so\n"):
        with pytest.raises(RuntimeError, match="the page shows"):
            pages.run_page("page", answers.replace("\n2\n", other), tmp_path, quick=True)
    with pytest.raises(RuntimeError, match="without a title"):
        pages.run_page("page", "```\nx\n```\n", tmp_path)


# Page -> the tests that its command must run, and how often at least.
GUIDES = {
    "docs/tutorials/new-method.md": {
        "test_the_weight_gets_a_product_of_three": 3,
        "test_a_cell": 2,
    },
    "docs/tutorials/new-architecture.md": {
        "test_value_features_are_those_attention_uses": 1,
        "test_an_update_of_a_part_equals_the_update_of_its_rows": 3,
        "test_a_cell": 12,
    },
    "docs/tutorials/new-task.md": {
        "test_the_metrics_are_those_of_scikit_learn": 1,
        "test_a_prediction_is_on_the_scale": 4,
        "test_train_eval_predict": 1,
    },
}


@pytest.mark.apart
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_leads_to_tests_that_pass(page: str, tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    # Methods of half of the signatures are enough; the guide names the whole table.
    cells = "tests/contract/invariants/test_cells.py::test_a_cell"
    others = sorted(METHODS.keys() - set(matrix.one_of_each_signature()[::2]))
    left_out = [f"--deselect={cells}[{method}-persimmon]" for method in others]
    environment = {
        "PYTEST_ADDOPTS": f"--junitxml={results} -p no:cacheprovider {' '.join(left_out)}",
        "MAKEFLAGS": r"PYTEST=.venv/bin/python\ -m\ pytest",  # one process, not two workers
    }
    words = (ROOT / "scripts/pages.py", ROOT / page, "--quick")
    ended = processes.run(*words, folder=tmp_path, environment=environment)
    assert ended.returncode == 0, ended.printed
    cases = list(ElementTree.parse(results).iter("testcase"))
    assert not [case for case in cases if len(case.findall("skipped"))]
    passed = Counter(case.attrib["name"].partition("[")[0] for case in cases)
    assert {n: passed[n] for n, least in GUIDES[page].items() if passed[n] < least} == {}, passed


def test_every_page_of_a_copy_is_a_guide() -> None:
    in_copies = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "docs").rglob("*.md")
        if pages.IN_COPY in path.read_text(encoding="utf-8")
    }
    assert in_copies == set(GUIDES)


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
_MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|work|opt|private|Users|mnt|var)/\S+")


def outputs_text(notebook: nbformat.NotebookNode) -> str:
    """Return what the cells printed and displayed as text."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
    return "\n".join(texts)


@pytest.fixture(scope="module")
def quick_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nbformat.NotebookNode]:
    """Run all notebooks with short trainings, in a new process."""
    record = tmp_path_factory.mktemp("notebooks") / "record.json"
    script = ROOT / "scripts/notebooks.py"
    result = subprocess.run(
        [sys.executable, script, *NOTEBOOKS, "--record", record],
        env=os.environ | {"QUICK": "1", "PYTHONPATH": str(ROOT)}, text=True, check=False,
        timeout=280, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    ran = json.loads(record.read_text(encoding="utf-8"))
    return {name: nbformat.reads(json.dumps(book), as_version=4) for name, book in ran.items()}


def test_the_notebooks_are_found() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["classifier", "peft", "routing"]
    listed = re.findall(r"\]\((\w+\.ipynb)\)", (ROOT / "examples/README.md").read_text())
    assert sorted(listed) == [path.name for path in NOTEBOOKS]


@pytest.mark.apart
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, quick_runs: dict[str, nbformat.NotebookNode]) -> None:
    ran = quick_runs[path.name]
    assert any(cell.get("outputs") for cell in ran.cells)
    text = outputs_text(ran)
    if path.stem == "routing":
        assert text.count("largest difference below 1e-5: True") == 6
        assert text.count("False") == 0
    if path.stem == "peft":
        differences = re.findall(r"largest difference to peft: (\S+)", text)
        assert len(differences) == 2
        assert all(float(difference) < 1e-5 for difference in differences)
        assert "the same names: True the same values: True" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_clean_and_has_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert len(outputs) >= 3
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert notebooks.cleaned(nbformat.read(path, as_version=4)) == notebook
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"
    assert not _MACHINE_PATH.search(outputs_text(notebook))
    assert path.stat().st_size < 120_000
    assert sum(len(cell.source.splitlines()) for cell in notebook.cells) < 100, "a screen or two"
    assert all(re.fullmatch(r"[a-z-]+", cell.id) for cell in notebook.cells)
