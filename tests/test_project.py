"""Files that a contributor and the forge use: targets, workflows, pins, the version."""

import ast
import re
from pathlib import Path

import house
import pytest
import release_check
import yaml

import adapterhub

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
VERSION = adapterhub.__version__


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def targets() -> set[str]:
    """The targets of the Makefile that are commands."""
    return set(re.search(r"^\.PHONY: (.*)$", text("Makefile"), re.MULTILINE)[1].split())


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def test_every_command_of_the_makefile_is_declared_and_defined():
    defined = set(re.findall(r"^([a-z][\w-]*):(?!=)", text("Makefile"), re.MULTILINE))
    assert targets() == defined
    assert len(defined) > 15
    fast = re.search(r"^FAST := ((?:.*\\\n)*.*)$", text("Makefile"), re.MULTILINE)[1]
    paths = re.findall(r"tests/\S+", fast)
    assert len(paths) > 8
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_of_the_makefile(workflow):
    runs = [step["run"] for step in steps(workflow) if "run" in step]
    made = [run.split()[1:] for run in runs if run.startswith("make ")]
    assert made
    assert {target for line in made for target in line} <= targets()
    others = [run for run in runs if not run.startswith("make ")]
    assert others == [run for run in others if "_version.py" in run], "a target for each command"


def test_workflows_cover_what_a_release_needs():
    named = ["ci.yml", "clients.yml", "docs.yml", "nightly.yml", "release.yml"]
    assert [path.name for path in WORKFLOWS] == named
    runs = {step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step}
    needed = {"check", "docs-test test", "test-all", "docs", "release-check", "newest", "oldest"}
    assert {f"make {each}" for each in needed} <= runs
    ci = yaml.safe_load(text(".github/workflows/ci.yml"))
    tested = ci["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    assert tested == [f"3.{minor}" for minor in range(10, 14)]
    assert f'requires-python = ">={tested[0]}"' in text("pyproject.toml")


def test_workflows_have_few_rights_and_actions_have_a_version():
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}
        assert all("timeout-minutes" in job for job in workflow["jobs"].values())
        used = [step["uses"] for step in steps(path) if "uses" in step]
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", action) for action in used)


def test_the_version_is_the_newest_of_the_changelog_and_the_citation():
    releases = re.findall(r"^## \[(.+)\] - (\d{4}-\d\d-\d\d)$", text("CHANGELOG.md"), re.MULTILINE)
    assert releases[0][0] == VERSION == release_check.version()
    assert releases == sorted(releases, reverse=True)
    citation = yaml.safe_load(text("CITATION.cff"))
    assert (citation["version"], citation["date-released"]) == releases[0]
    assert len(releases) >= 2
    headings = re.findall(r"^### (.*)$", text("CHANGELOG.md"), re.MULTILINE)
    assert set(headings) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_a_release_without_a_file_or_with_another_one_is_refused():
    names = ["adapterhub/py.typed", "tests/test_docs.py", "adapterhub/__pycache__/x.pyc"]
    assert release_check.contents_problems(names, ["LICENSE", names[0]]) == [
        "LICENSE is missing",
        "tests/test_docs.py does not belong there",
        "adapterhub/__pycache__/x.pyc does not belong there",
    ]
    found = release_check.metadata_problems("Name: adapterhub\nVersion: 0.0.1\n\nOld\n")
    assert f"Version is '0.0.1', not '{VERSION}'" in found
    assert found[-1] == "another README"


def defined(tree: ast.Module) -> set[str]:
    """The names that a module defines or imports, in branches of its body too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


IMPORT = re.compile(r"^ *from (adapterhub[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)


def test_what_tests_and_scripts_import_exists():
    """A name that moved is seen here in a second, not when the file that needs it is collected."""
    package = Path(adapterhub.__file__).parent
    modules = {f"adapterhub.{m.name}": defined(m.tree) for m in house.modules(package)}
    modules["adapterhub"] = {*adapterhub.__all__, *(m.room for m in house.modules(package))}
    lost = [
        f"{file.relative_to(ROOT)}: {module}.{name}"
        for folder in ("tests", "scripts", "benchmarks", "examples")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for module, names in IMPORT.findall(file.read_text(encoding="utf-8"))
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", names))
        if name not in modules.get(module, ()) and f"{module}.{name}" not in modules
    ]
    assert not lost


def pins(name: str) -> list[str]:
    lines = text(name).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_constraint_is_one_version_without_hashes_and_used():
    """pip refuses to install a folder if any constraint has a hash.

    Builds in isolation are pinned by a variable of the environment, another in new releases of pip.
    """
    (requires,) = re.findall(r"^requires = \[(.+)\]$", text("pyproject.toml"), re.MULTILINE)
    required = re.findall(r'"([^"]+)"', requires)
    assert required
    assert set(required) <= set(pins("constraints-build.txt"))
    makefile = text("Makefile")
    assert 'PIP_CONSTRAINT="$(PINS) constraints-build.txt"' in makefile
    assert "PIP_BUILD_CONSTRAINT=constraints-build.txt" in makefile
    installs = re.findall(r"^\t.*pip install.*$", makefile, re.MULTILINE)
    assert installs
    assert all(line.startswith("\t$(PINNED) ") for line in installs)
    for name in ("constraints.txt", "constraints-oldest.txt", "constraints-build.txt"):
        versions = pins(name)
        assert len(versions) >= 5
        for line in versions:
            assert re.fullmatch(r'[\w.-]+==[\w.]+( ; python_version >= "3.11")?', line), line
