"""README and docs match the code, the commands and the records."""

import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path

import pictures
import pytest
import tables
from speed import plot

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adapterhub"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.stem)
def test_tables_match_the_code_and_the_records(page):
    written = page.read_text(encoding="utf-8")
    assert written == tables.written(written), "python scripts/tables.py writes them"


@pytest.mark.parametrize("script", [pictures, plot], ids=lambda script: script.__name__)
def test_pictures_are_as_their_script_draws_them(script):
    for name, drawn in script.files().items():
        assert text(f"docs/assets/{name}") == drawn, f"python {script.__file__} draws them"


@pytest.mark.parametrize(
    ("page", "pattern", "folder", "least"),
    [
        ("README.md", r"`(adapterhub/[\w/.]+)`", ROOT, 3),
        ("docs/architecture.md", r"`(\w+/[\w/]+\.py)`", PACKAGE, 41),
    ],
)
def test_paths_in_a_page_exist(page, pattern, folder, least):
    paths = re.findall(pattern, text(page))
    assert len(paths) >= least
    assert not [path for path in paths if not (folder / path).exists()]


def test_architecture_lists_the_rooms():
    in_table = re.findall(r"^\| `(\w+)/` \|", text("docs/architecture.md"), re.MULTILINE)
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert len(in_table) == len(rooms)
    assert set(in_table) == rooms


def test_the_front_is_short_and_quotes_the_short_comparison():
    table = text("docs/comparison.md").split("## In short\n\n")[1].split("\n\n")[0]
    assert table in text("README.md")
    for page in ("README.md", "docs/index.md"):
        assert len(text(page).splitlines()) <= 150, page


def test_the_index_of_guides_has_the_groups_of_the_sidebar():
    """Every guide has one line, in the group and order of the navigation."""
    sidebar = re.search(
        r"^  - Guides:\n(.*?)^  - \w", text("mkdocs.yml"), re.DOTALL | re.MULTILINE
    )[1]
    groups = re.findall(r"^ {6}- ([\w ]+):\n((?: {10}- .*\n)+)", sidebar, re.MULTILINE)
    index = re.split(r"^## ", text("docs/guides/index.md"), flags=re.MULTILINE)[1:]
    listed = {
        part.partition("\n")[0]: re.findall(
            r"^- \[[^]]+\]\(([\w-]+)\.md\): .*\.", part, re.MULTILINE
        )
        for part in index
    }
    assert listed == {name: re.findall(r"guides/([\w-]+)\.md", pages) for name, pages in groups}
    names = {path.stem for path in (ROOT / "docs/guides").glob("*.md")} - {"index"}
    assert sorted(name for part in listed.values() for name in part) == sorted(names)


WRITERS = {"page", "_page", "index", "_index", "_overview", "_study"}  # of scripts/reference


@cache
def generated():
    """The paths of the pages that mkdocs.yml has generated."""
    names = re.findall(r"- generated: (\w+)$", text("mkdocs.yml"), re.MULTILINE)
    modules = [importlib.import_module(f"reference.{name}") for name in names]
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:  # what is written on a page takes seconds, and is not asked for
            for part in WRITERS & vars(module).keys():
                patch.setattr(module, part, lambda *_: "")
        return {f"docs/{path}" for module in modules for path in module.pages()}


def test_relative_links_exist(subtests):
    for page in PAGES:
        targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", text(page))
        folder = os.path.dirname(page)
        paths = {os.path.normpath(os.path.join(folder, target)) for target in targets}
        with subtests.test(page):
            assert not {p for p in paths - generated() if not (ROOT / p).exists()}


def test_format_page_matches_the_code():
    from adapterhub.backbones.fingerprint import BackboneIdentity
    from adapterhub.files import manifest, native

    page = text("docs/reference/format.md")
    assert native.__doc__.strip() in page
    manifest_page, identity_page = page.split("## The identity of the backbone")
    fields = re.findall(r"^\| `(\w+)` \|", manifest_page, re.MULTILINE)
    assert fields == [*manifest.Manifest.__dataclass_fields__, "sha256"]
    fields = re.findall(r"^\| (`.+?`) \|", identity_page, re.MULTILINE)
    record = BackboneIdentity("v2-0", "v2-0", {}).record()
    assert sorted(re.findall(r"\w+", " ".join(fields))) == sorted(record)


def test_make_installs_every_extra():
    """Tests are skipped without their extra, so each extra is in one environment of the Makefile.

    trl, torchao and liger have separate environments.
    """
    extras = re.search(r"optional-dependencies\]\n(.*?)\n\n", text("pyproject.toml"), re.DOTALL)[1]
    names = set(re.findall(r"^([\w-]+) =", extras, re.MULTILINE)) - {"real-models"}
    environments = re.findall(
        r"^\.(venv[\w-]*)/\.(?:installed|complete): EXTRAS := (.*)$", text("Makefile"), re.MULTILINE
    )
    installed = {name: set(line.split(",")) for name, line in environments}
    assert "quantized" in installed["venv"]
    assert set().union(*installed.values()) == names
    assert names - installed["venv"] == {"trl", "torchao", "liger"}, (
        "these have separate environments"
    )
    assert re.search(r"^bitsandbytes==", text("constraints.txt"), re.MULTILINE)
    if Path(sys.prefix) == ROOT / ".venv":
        assert importlib.util.find_spec("bitsandbytes")
