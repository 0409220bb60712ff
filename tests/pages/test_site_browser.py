"""The pages of a registry in chromium: sizes, colours, no scripts, the keyboard, axe-core."""

import json

import pytest

from adapterhub.pages.leaderboards import Leaderboard, RankedScore, best_first
from adapterhub.pages.site import SiteOptions, StudyBoard, write_site
from adapterhub.pages.versions import file_part
from adapterhub.registry.local import registry_at
from tests.kit import web_servers
from tests.kit.registries import TEAM_BACKBONE, write_team
from tests.kit.web_servers import MISSING, press, shown_as, tab_to

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
PAGES = (
    "index.html",
    "leaderboards.html",
    "datasets.html",
    "problems.html",
    f"adapters/{TEAM_BACKBONE}/several.html",
    f"adapters/{TEAM_BACKBONE}/hostile.html",
    f"adapters/{TEAM_BACKBONE}/gone.html",
    f"backbones/{TEAM_BACKBONE}/index.html",
    f"leaderboards/{TEAM_BACKBONE}/classification.html",
    f"compare/{TEAM_BACKBONE}/classification.html",
    f"datasets/{file_part('data 4')}/index.html",
    "studies/study/task.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    scores = best_first(
        (RankedScore(f"m{i}", i, str(i), "1 to 2", i - 1, i + 1, 10**i) for i in range(1, 6)),
        lower=False,
    )
    board = Leaderboard("accuracy on task", "A study.", "accuracy", scores)
    studies = [StudyBoard("study", "task", "owner-0/backbone-0", board)]
    registry = registry_at(write_team(folder / "registry"))
    write_site(registry, folder / "site", SiteOptions("Team", studies=studies))
    return folder / "site"


@pytest.fixture(scope="module")
def driver():
    found = web_servers.browser()
    yield found
    found.quit()


def complaints(driver) -> list[str]:
    """What the page wrote to the console, and what it asked for beyond files."""
    found = [entry["message"] for entry in driver.get_log("browser")]
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            address = message["params"]["request"]["url"]
            found += [address] * (not address.startswith(("file:", "data:,", "chrome:")))
    return found


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
def test_pages_fit_ask_for_nothing_and_complain_of_nothing(site, scripts, driver):
    used = driver if scripts else web_servers.browser(scripts=False)
    try:
        for width in (390, 1280):
            for scheme in ("light", "dark"):
                shown_as(used, width, scheme)
                for path in PAGES:
                    used.get((site / path).as_uri())
                    assert web_servers.overflow(used) <= 0, (path, width)
                    assert complaints(used) == [], (path, width, scheme)
    finally:
        if not scripts:
            used.quit()


def test_from_the_front_page_to_a_copied_line_by_keyboard_alone(site, driver):
    from selenium.webdriver.common.keys import Keys

    shown_as(driver, 1280, "light")
    driver.get((site / "index.html").as_uri())
    tab_to(driver, 'href="#main"')
    tab_to(driver, 'name="q"')
    press(driver, "several")
    tab_to(driver, "several.html")
    press(driver, Keys.ENTER)
    assert driver.current_url.endswith("several.html")
    tab_to(driver, "Copy: adapterhub")
    press(driver, Keys.ENTER)
    copied = "return document.activeElement.nextSibling.textContent"
    for _ in range(200):
        if driver.execute_script(copied):
            break
    assert driver.execute_script(copied).startswith((" copied", " selected"))
    assert complaints(driver) == []


FILTER = """
const form = document.querySelector("form.search");
form.elements[arguments[0]].value = arguments[1];
const start = performance.now();
form.dispatchEvent(new Event("input"));
const rows = [...document.querySelectorAll("#found tbody tr")];
return [performance.now() - start, rows.map((row) => [...row.cells].map((c) => c.textContent))];
"""


def filtered(driver, field: str, value: str) -> tuple[float, list[list[str]]]:
    milliseconds, rows = driver.execute_script(FILTER, field, value)
    return milliseconds / 1000, rows


def loaded(driver, address: str) -> None:
    driver.get(address)
    for _ in range(200):
        if driver.execute_script("return !document.querySelector('form.search').hidden"):
            return
    raise AssertionError("the rows were not loaded")


def test_a_filter_shows_the_version_that_matches(site, driver):
    loaded(driver, (site / "index.html").as_uri())
    _, rows = filtered(driver, "tag", "best")
    assert [(row[0], row[4], row[7]) for row in rows] == [
        ("several@v1", "accuracy 0.990", "2026-02-01")
    ]
    loaded(driver, (site / "index.html").as_uri() + "?q=second")
    shown = driver.execute_script("return document.querySelector('#found tbody').textContent")
    assert "several" in shown
    assert "adapter-1" not in shown


@pytest.mark.skipif(not web_servers.AXE.is_file(), reason="axe-core is not installed")
def test_axe_has_no_findings(site, driver):
    for scheme in ("light", "dark"):
        shown_as(driver, 390 if scheme == "dark" else 1280, scheme)
        for path in PAGES:
            driver.get((site / path).as_uri())
            assert web_servers.axe_findings(driver) == [], (path, scheme)
