"""Pages for people: they only read, run no script but ours, and say what somebody may see."""

import html
import re
import shlex

import pytest
from click.testing import CliRunner

import adapterhub as ah
from adapterhub import cli
from adapterhub.errors import RegistryError
from adapterhub.registry.hub import HubStore
from adapterhub.registry.store import Publication
from adapterhub.registry.tokens import token_for
from tests.kit import real_hub, registries
from tests.kit.real_hub import answered, commit, create, head
from tests.kit.server import write_adapter


@pytest.fixture(scope="module")
def pages(hub, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        patch.setenv("XDG_CACHE_HOME", str(tmp / "cache"))
        store = HubStore(hub.address, token=hub.tokens["ada"])
        for seed in range(3):
            folder = registries.write_sample(tmp / f"{seed}", seed, accuracy=0.5 + seed / 10)
            store.put(folder, Publication("acme/polite", None, ("best",)))
        folder = registries.write_sample(tmp / "rude", 7, task="tagging", f1=0.9)
        store.put(folder, Publication("acme/rude", visibility="private"))
    return hub


@pytest.fixture
def client(pages):
    with pages.client() as client:
        answered(client.post("/settings/login", data={"token": pages.tokens["wil"]}), 303)
        yield client


def words(answer):
    assert answer.status_code == 200, answer.text
    text = re.sub(r"(?s)<(style|script|head)\b.*?</\1>", "", answer.text)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text))


def test_the_front_page_finds_adapters(client):
    assert "acme/polite" in words(client.get("/"))
    assert "acme/rude" in words(client.get("/?task=tagging&q=rud"))
    assert "acme/polite" not in words(client.get("/?task=tagging")).replace("any", "")
    assert "1 adapter " in words(client.get("/?q=rude"))
    nothing = client.get("/?q=absent")
    assert "Nothing is found" in words(nothing)
    assert '<div id="found" class="listing" hidden>' in nothing.text
    for sort in ("name", "newest", "size", "score", "nonsense"):
        assert "acme/polite" in words(client.get(f"/?sort={sort}"))
    assert 'href="/acme/polite"' in client.get("/").text


def test_each_address_that_a_client_prints_is_a_page(client, pages):
    text = words(client.get("/acme/polite"))
    assert "v3 · acme/bert-small" in text
    assert "accuracy" in text
    assert f"{pages.address}/acme/polite@v3" in text
    for revision in ("main", "v1"):
        assert "adapter.safetensors" in words(client.get(f"/acme/polite/tree/{revision}"))
    oid = head(client, "acme/polite")
    assert "Publish v3" in words(client.get(f"/acme/polite/commit/{oid}"))
    assert oid[:12] in words(client.get("/acme/polite/commits/main"))
    assert "logged in as wil" in words(client.get("/settings/tokens"))
    for path in ("/", "/acme/polite", "/acme/polite/tree/main"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe-inline'; script" not in policy.partition("script-src")[2]


def test_a_repository_without_an_adapter_has_a_page_of_its_files(pages, client):
    ada = pages.as_user("ada")
    create(ada, "acme/data", type="dataset")
    url = "/api/datasets/acme/data/commit/main"
    assert ada.post(url, content=real_hub.commit_lines({"in/a.csv": b"a,b\n"})).status_code == 200
    assert "in folder" in words(client.get("/datasets/acme/data"))
    below = client.get("/datasets/acme/data/tree/main/in")
    assert "a.csv" in words(below)
    assert "Files of main, in in" in words(below)
    assert "4 B" in words(below)
    assert '<a href="/datasets/acme/data/tree/main"><bdi>up to all files</bdi>' in below.text
    assert client.get("/datasets/acme/data/tree/main/none").status_code == 404


def test_a_login_only_reads(pages, client):
    cookie = client.cookies.jar._cookies["127.0.0.1"]["/"]["adapterhub"]
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite").lower() == "strict"
    assert pages.tokens["wil"] not in cookie.value
    assert client.post("/api/repos/create", json={"name": "x"}).status_code == 401
    assert commit(client, "acme/polite", {"a.md": b"a"}).status_code == 401
    forged = {"cookie": f"adapterhub={cookie.value[:-2]}xx"}
    with pages.client() as other:
        assert other.get("/acme/rude", headers=forged).status_code == 401
        answer = other.post("/settings/login", data={"token": "ah_" + "x" * 43})
        assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    assert client.post("/settings/logout").status_code == 303
    assert client.get("/acme/rude").status_code == 401


def test_what_others_write_is_text_on_a_page(pages, client):
    evil = "<script>alert(1)</script>"
    ada = pages.as_user("ada")
    create(ada, "acme/evil")
    card = f"# {evil}\n\n## A card\n\n|a|b|\n|-|-|\n|1|2|\n"
    commit(ada, "acme/evil", {"README.md": card.encode()}, title=evil)
    oid = head(client, "acme/evil")
    for path in ("", "/tree/main", f"/commit/{oid}", "/commits/main"):
        assert evil not in client.get(f"/acme/evil{path}").text
    assert evil not in client.get("/?q=%3Cscript%3Ealert(1)%3C/script%3E").text
    text = client.get("/acme/evil").text
    assert re.search("<h[34]>A card</h[34]>", text)
    assert '<div class="scroll" tabindex="0"><table>' in text


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_a_stranger_is_asked_for_a_token_wherever_one_is_needed(pages):
    with pages.client() as client:
        text = words(client.get("/"))
        assert pages.address.removeprefix("http://") in text
        assert "A hub of adapters" in text
        assert "acme/polite" not in text
        for answer in (
            client.get("/acme/polite", headers=BROWSER),
            client.post("/settings/login", data={"token": "ah_wrong"}, headers=BROWSER),
        ):
            assert answer.status_code == 401
            assert 'action="/settings/login"' in answer.text
            assert 'type="password"' in answer.text
        assert "not a token of this hub" in answer.text
        answer = client.post("/settings/login", data={"token": pages.tokens["wil"]})
        assert "acme/polite" in words(client.get(answer.headers["location"]))


def test_an_empty_hub_shows_how_to_push(new_hub, ada):
    text = ada.get("/").text
    assert f"adapterhub push RUN {new_hub.address}/ada/NAME" in text
    assert 'role="search"' not in text
    assert "<table" not in text
    assert "Push the first" not in ada.get("/?q=absent").text


def test_a_wrong_address_is_a_page_in_a_browser(client):
    for path in ("/no/such/place/here", "/acme/absent", "/acme/polite/tree/none"):
        page, other = client.get(path, headers=BROWSER), client.get(path)
        assert page.status_code == other.status_code == 404
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "Not found" in page.text
        assert "HF_ENDPOINT" not in page.text
        assert 'href="/"' in page.text
        assert other.headers["content-type"] == "application/json"
        assert other.headers["x-error-message"] == page.headers["x-error-message"]
    api = client.get("/api/models/acme/absent", headers=BROWSER)
    assert api.headers["content-type"] == "application/json"


def test_what_an_adapters_page_shows_works(
    pages, backbone, tmp_path, monkeypatch, adapterhub, online
):
    monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{pages.address}={pages.tokens['ada']}")
    ah.push(write_adapter(backbone, tmp_path / "real"), f"{pages.address}/acme/real", peft=False)
    page = pages.as_user("wil").get("/acme/real").text
    shown = html.unescape(re.sub(r"<[^>]*>", "", page))
    python = re.search(r"import adapterhub as ah\nprint\(.*\)", shown)[0]
    reference = f"{pages.address}/acme/real@v1"
    assert f'adapterhub predict {reference} "a text"\nadapterhub serve {reference}' in shown
    assert f"print(ah.open('{reference}').predict(\"a text\"))" in python
    printed = []
    exec(python, {"print": printed.append})
    predict, serve = re.findall(r"adapterhub (?:predict|serve) http.*", shown)
    code, out, err = adapterhub(*shlex.split(predict)[1:])
    assert code == 0, err
    assert printed[0].label in out
    assert adapterhub(*shlex.split(serve)[1:], "--check")[0] == 0


def test_a_token_is_stored_once_the_hub_knows_it(pages, tmp_path, monkeypatch, online):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    wrong, right = (
        CliRunner().invoke(cli.group, ["login", pages.address], input=token)
        for token in ("ah_" + "x" * 43, pages.tokens["wil"])
    )
    assert "does not accept this token" in str(wrong.exception)
    assert right.output == f"stored a token for {pages.address}\n"
    assert token_for(pages.address) == pages.tokens["wil"]


def test_a_push_asks_for_the_permission_first(pages, tmp_path, monkeypatch, online):
    folder = registries.write_sample(tmp_path / "made")
    monkeypatch.setattr("adapterhub.registry.publish.peft_files", None)  # it would compute
    reader = pages.token("wil", "read", "reader")
    cases = (
        (reader, "acme/new", "may only read"),
        (pages.tokens["eve"], "acme/polite", "no access to it|permission"),
        ("ah_" + "x" * 43, "acme/new", "no access"),
    )
    for token, name, words in cases:
        monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{pages.address}={token}")
        with pytest.raises(RegistryError, match=words):
            ah.push(folder, f"{pages.address}/{name}", peft=True)
