"""The page of `serve --try` in chromium: two answers side by side, the keyboard, hostile names."""

import json
import time

import pytest
from starlette.testclient import TestClient

from adapterhub.serving.http import try_page
from adapterhub.serving.http.admin import operations
from adapterhub.serving.http.lifecycle import ENDPOINTS, make_app
from adapterhub.web.tokens import TokenFile
from tests.kit import web_servers as web
from tests.kit.server import BACKBONE, TEXTS, running, service_of

in_browser = pytest.mark.skipif(
    bool(web.MISSING), reason=f"not installed: {', '.join(web.MISSING)}"
)
ALL = (*ENDPOINTS, *try_page.ENDPOINTS, *operations())


@pytest.fixture(scope="module")
def address(server):
    with running(service_of(server.service.engine, server.folders), ALL) as found:
        yield found


@pytest.fixture(scope="module")
def driver():
    found = web.browser()
    yield found
    found.quit()


def ask(driver, first: str, second: str, text: str = TEXTS[0], wait: float = 30) -> list[str]:
    """Fill the form in and send it; return what each place shows when both have answered."""
    for name, value in (("first", first), ("second", second), ("text", text)):
        field = driver.find_element("name", name)
        field.clear()
        field.send_keys(value)
    driver.find_element("css selector", "button[type=submit]").click()
    return answers(driver, wait)


def answers(driver, wait: float = 30) -> list[str]:
    shown = (
        "return [...document.querySelectorAll('.answers section')].map((s) => s.hidden ? '' : "
        "[...s.querySelectorAll('h2, .note, .answer, pre')].map((e) => e.innerText).join('\\n'))"
    )
    for _ in range(int(wait * 10)):
        found: list[str] = driver.execute_script(shown)
        if any(found) and not any("asked …" in each for each in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"no answer: {found}")


@in_browser
def test_two_adapters_answer_side_by_side(address, driver, server):
    driver.get(address)
    names = ("classification", "regression")
    shown = ask(driver, *names)
    for name, text in zip(names, shown, strict=True):
        expected = server.expected(name, TEXTS[0])[0]
        lines = text.splitlines()
        assert lines[0] == name
        assert " ms; digest " in text
        command = text[text.index("curl ") :]
        body = json.loads(command[command.index("{") : command.rindex("}") + 1])
        assert body == {"model": name, "inputs": [TEXTS[0]]}
        if "label" in expected:
            assert f"label: {expected['label']}" in text
            best = max(expected["scores"].values())
            assert f"{best:.3f}" in text
        else:
            assert f"value: {expected['value']:.3f}"[:-1] in text


@in_browser
def test_a_pair_has_a_field_and_the_backbone_gives_a_vector(address, driver):
    driver.get(address)
    with pytest.raises(AssertionError, match="no answer"):  # an empty second text is not sent
        ask(driver, "entailment", BACKBONE, wait=1)
    pair = driver.find_element("name", "pair")
    assert pair.is_displayed()
    pair.send_keys(TEXTS[1])
    shown = ask(driver, "entailment", BACKBONE)
    assert "label: " in shown[0]
    assert "numbers" in shown[1]
    assert "no adapter" in shown[1]


@in_browser
def test_what_is_unknown_is_said_and_nothing_is_markup(address, driver):
    driver.get(address)
    name = "<img src=x onerror=alert(1)>"
    shown = ask(driver, name, "", f"{name} & more")
    assert "not answered" in shown[0]
    assert "curl" not in shown[0]
    copied = driver.find_elements("css selector", "#first .copied, #first .copy")
    assert [each.is_displayed() for each in copied] == [False, False]
    assert shown[1] == ""
    assert driver.execute_script("return document.images.length") == 0
    log = [entry["message"] for entry in driver.get_log("browser")]
    assert not [line for line in log if "404" not in line]


def test_a_server_with_tokens_lists_nothing_without_one(server, tmp_path):
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.create("reader", adapters=("classification",))
    service = service_of(server.service.engine, server.folders)
    service.tokens = tokens
    client = TestClient(make_app(service, ALL), base_url="http://localhost")
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert 'type="password"' in page.text
    assert "classification" not in page.text
    assert client.get("/try/adapters").status_code == 401
    headers = {"Authorization": f"Bearer {token}"}
    listed = client.get("/try/adapters", headers=headers).json()["adapters"]
    assert [each["model"] for each in listed] == ["classification"]
    other = client.get("/try/adapters", params={"model": "regression"}, headers=headers)
    assert other.status_code == 404
