"""The pages of a registry as files: what they show, and that strangers' texts stay texts."""

import base64
import gzip
import hashlib
import json
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from urllib.parse import unquote

import pytest

from adapterhub.cli._site import command_of, study_boards
from adapterhub.errors import ConfigError, OutputError
from adapterhub.files.manifest import from_json
from adapterhub.pages import card_html as card_module
from adapterhub.pages import leaderboards
from adapterhub.pages.card_html import card_html
from adapterhub.pages.leaderboards import UNKNOWN_ROWS, Leaderboard, RankedScore, best_first
from adapterhub.pages.site import SiteOptions, write_site
from adapterhub.registry.local import registry_at
from tests.kit.registries import CARD, TEAM_BACKBONE, digest, write_adapters, write_team
from tests.kit.selection import ALL
from tests.kit.web_servers import ParsedPage

MOST_BYTES = 150_000  # of a page without its charts


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """A registry with everything that may be in one."""
    return write_team(tmp_path_factory.mktemp("team") / "registry")


@pytest.fixture(scope="module")
def site(team, tmp_path_factory):
    output = tmp_path_factory.mktemp("site") / "site"
    written = write_site(registry_at(team), output, SiteOptions("Team", "https://hub.example/team"))
    assert written.page == output / "index.html"
    assert written.problems == 1
    return output


def pages(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.html"))


def parsed(path: Path) -> ParsedPage:
    return ParsedPage(path.read_text(encoding="utf-8"))


def page(site: Path, path: str) -> str:
    return (site / path).read_text(encoding="utf-8")


def rows_of(site: Path) -> dict:
    text = page(site, "rows.js")
    assert "<" not in text
    return json.loads(re.fullmatch(r"adapterhubRows\((.*)\);\n", text, re.DOTALL)[1])


def test_every_script_runs_by_its_hash_and_nothing_else_is_allowed(site):
    for path in pages(site):
        found = parsed(path)
        (script,) = found.scripts
        policy = "Content-Security-Policy"
        (policy,) = (own["content"] for _, own in found.elements if policy in own.values())
        wanted = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == rules["form-action"] == rules["base-uri"] == "'none'"
        loads = " 'strict-dynamic'" if path.name == "index.html" and path.parent == site else ""
        assert rules["script-src"] == f"'sha256-{wanted}'{loads}", path
        assert not {"connect-src", "img-src", "frame-src", "font-src"} & rules.keys()


def test_texts_of_strangers_are_never_markup_and_lead_nowhere(site):
    for path in pages(site):
        for tag, attributes in parsed(path).elements:
            assert tag not in ("img", "iframe", "object", "embed", "link", "base", "video"), path
            for name, value in attributes.items():
                if not name.startswith("xmlns") and name not in ("content", "aria-label"):
                    assert not re.search(r"(?i)//|javascript:|data:", value), (path, name, value)
    text = page(site, f"adapters/{TEAM_BACKBONE}/hostile.html")
    assert text.count("&lt;script&gt;alert(1)") >= 3
    assert "49" not in text.partition("{{ 7 * 7 }}")[0][-20:]


def test_every_link_leads_to_a_page_of_the_site(site):
    for path in pages(site):
        for tag, attributes in parsed(path).elements:
            if tag == "a":
                target, _, anchor = unquote(attributes["href"]).partition("#")
                assert not target or (path.parent / target).is_file(), (path, target)
                assert target or anchor == "main"


def test_a_card_is_text_without_links_and_pictures():
    shown = str(card_html(CARD))
    assert "<a" not in shown
    assert "<img" not in shown
    assert "<script" not in shown
    assert "tracked (https://evil.example/pixel.png)" in shown
    assert "site (https://evil.example)" in shown
    assert "<h3>A card</h3>" in shown
    assert "<h4>deep</h4>" in shown
    assert "<td>&lt;script&gt;1&lt;/script&gt;</td>" in shown
    assert "hidden" not in str(card_html("<!-- hidden -->shown\n\n> " * 2000))


def test_without_its_libraries_it_says_what_to_install(team, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nh3", None)
    card_module._reader.cache_clear()
    with pytest.raises(ConfigError, match="nh3") as error:
        write_site(registry_at(team), tmp_path / "site", SiteOptions())
    assert 'pip install "adapterhub[site]"' in str(error.value)
    assert not (tmp_path / "site").exists()


def test_a_page_of_an_adapter_has_all_that_is_known(site, team):
    text = page(site, f"adapters/{TEAM_BACKBONE}/several.html")
    for shown in (
        digest(team, "several", 2),
        "ah.load(model, &#39;several@v2&#39;, registry=&#39;https://hub.example/team&#39;)",
        "@misc{several-v2,",
        "for several v2: valid",
        "adapterhub diff several@v1 several@v2 --registry https://hub.example/team",
        "peft cannot load it",
        "vLLM cannot serve it",
        "metrics.accuracy",
        "best",
    ):
        assert shown in text, shown
    assert "on top of adapter-0" in page(site, f"adapters/{TEAM_BACKBONE}/hostile.html")


def test_yanked_versions_have_a_page_and_broken_ones_are_listed(site):
    text = page(site, f"adapters/{TEAM_BACKBONE}/gone.html")
    assert "was withdrawn: <bdi>&lt;script&gt;alert(1)" in text
    assert "gone.html" in page(site, f"backbones/{TEAM_BACKBONE}/index.html")
    assert ">gone<" not in page(site, "index.html")
    assert f"{TEAM_BACKBONE}/broken/v1" in page(site, "problems.html")
    assert 'problems.html">Problems</a>' in page(site, "index.html")


def test_rows_have_each_version_with_its_own_score_and_date(site):
    found = rows_of(site)
    rows = [row for row in found["rows"] if row[0] == "several"]
    versions = [(row[1], row[6], row[9]) for row in rows]
    assert versions == [("v2", 0.71, "2026-02-02"), ("v1", 0.99, "2026-02-01")]
    assert found["strings"][rows[1][10][0]] == "best"
    assert len(rows[0][13]) == 1  # the key that signed it
    assert "gone" not in [row[0] for row in found["rows"]]


def test_only_scores_on_the_same_rows_are_ranked_together(site):
    text = page(site, f"leaderboards/{TEAM_BACKBONE}/classification.html")
    sections = text.split("<section>")[1:]
    ranked = [part for part in sections if ">rank<" in part]
    assert len(ranked) >= 2
    assert all(len(re.findall(r"sha256 [0-9a-f]{64}", part)) == 1 for part in ranked)
    assert len([part for part in sections if UNKNOWN_ROWS in part]) == 1
    assert UNKNOWN_ROWS in sections[-1]
    assert ">rank<" not in sections[-1]


def board(*scores, lower=False):
    found = best_first(
        (RankedScore(name, value, "", parameters=size) for name, value, size in scores), lower=lower
    )
    return Leaderboard("rows", "", "accuracy", found, lower_is_better=lower)


def test_the_front_has_what_nothing_as_small_beats_and_a_chart_marks_it():
    scores = [("a", 0.9, 100), ("b", 0.8, 10), ("c", 0.85, 200), ("d", 0.8, 20), ("e", 0.95, 0)]
    found = board(*scores)
    assert [score.name for score in found.scores] == ["e", "a", "c", "b", "d"]
    assert [found.scores[i].name for i in leaderboards.pareto_front(found)] == ["b", "a"]
    lower = board(*scores, lower=True)
    assert [score.name for score in lower.scores][:2] == ["b", "d"]
    assert [lower.scores[i].name for i in leaderboards.pareto_front(lower)] == ["b"]
    chart = board(("a", 0.9, 100), ("<b>", 0.8, 10), ("c", 0.7, 1000)).chart
    assert 'role="img" aria-label="accuracy against trained parameters' in chart.svg
    assert "&lt;b&gt;" in chart.svg
    assert board(("a", 0.9, 100)).chart is None


def test_a_folder_with_other_files_is_not_replaced_and_an_empty_registry_has_a_page(team, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"not part of a registry's site"):
        write_site(registry_at(team), tmp_path, SiteOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    written = write_site(registry_at(tmp_path / "empty"), tmp_path / "site", SiteOptions())
    assert written.adapters == 0
    assert "0 adapters" in written.page.read_text(encoding="utf-8")


def test_many_adapters_are_written_in_time_and_in_small_pages(tmp_path):
    count = 1000 if ALL else 60
    registry = registry_at(write_adapters(tmp_path / "registry", count, backbones=1))
    registry.everything()
    start = time.process_time()
    written = write_site(registry, tmp_path / "site", SiteOptions())
    assert time.process_time() - start < count * 0.015  # a minute for 10,000 on a machine alone
    assert written.adapters == count
    for path in pages(tmp_path / "site"):
        without_charts = re.sub(rb"<svg.*?</svg>", b"", path.read_bytes(), flags=re.DOTALL)
        assert len(without_charts) < MOST_BYTES
    assert len(rows_of(tmp_path / "site")["rows"]) == count


# The leaderboards of a study: their numbers are those of its records.


ROOT = Path(__file__).parents[2]
GLUE = ROOT / "benchmarks/studies/glue"
TASKS = {"sst2": "accuracy", "mrpc": "accuracy", "stsb": "pearson"}


def test_the_numbers_of_a_leaderboard_are_those_of_the_records_and_of_the_report():
    boards = {each.task: each for each in study_boards(GLUE)}
    finals = defaultdict(list)
    for path in sorted((GLUE / "records").glob("*.jsonl.gz")):
        for record in map(json.loads, gzip.decompress(path.read_bytes()).splitlines()):
            cell = record["cell"]
            if cell["stage"] == "final" and record["status"] == "done":
                finals[cell["task"], cell["method"]].append(record)
    scores = {task: {each.name: each for each in boards[task].board.scores} for task in TASKS}
    checked = dict.fromkeys(TASKS, 0)
    for (task, method), records in finals.items():
        if task not in TASKS or len({r["cell"]["rate"] for r in records}) > 1:
            continue
        score = scores[task][method]
        mean = 100 * fmean(record["tested"][TASKS[task]] for record in records)
        # As shown: the records keep five digits of each row, from which the score is computed.
        assert score.value == pytest.approx(mean, abs=0.05)
        assert score.text.startswith(f"{score.value:.1f} ±")
        assert score.low < score.value < score.high
        assert score.interval == f"{score.low:.1f} to {score.high:.1f}"
        costs = records[0]["costs"]
        assert score.parameters == costs["trained"] + costs["head"]
        checked[task] += 1
    assert min(checked.values()) >= 25
    report = (GLUE / "report.md").read_text(encoding="utf-8")
    for task in TASKS:
        assert boards[task].backbone == "sentence-transformers/all-MiniLM-L6-v2"
        found = boards[task].board.scores
        assert [*found] == sorted(found, key=lambda score: -score.value)
        assert len(found) >= 30
        section = report.partition(f"## {task}:")[2].partition("\n## ")[0]
        for score in found:
            assert f"| {score.name} | {score.text} | {score.interval} |" in section


def test_the_recipe_of_each_reference_adapter_is_a_command():
    files = sorted((ROOT / "registry").glob("*/*/v*/adapter.json"))
    assert len(files) >= 12
    for path in files:
        manifest = from_json(path.read_bytes())
        command = command_of(manifest)
        assert command.startswith(f"adapterhub train --backbone {manifest.backbone.id} --method ")
        assert " --train FILE" in command
