"""A registry over https: from any server that sends files, and from those that do not."""

import shutil

import pytest

from adapterhub.errors import AdapterhubError, ConfigError, FileError, RegistryError
from adapterhub.registry import http_storage, hub_client
from adapterhub.registry.http_storage import WebsiteRegistry
from adapterhub.registry.local import LocalRegistry, registry_at
from adapterhub.registry.store import Publication, Query
from tests.kit import registries, web_servers

BACKBONE = "acme--bert-small"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A registry in a folder, with two versions of a name and one of another."""
    # A site without the Hub has its own web server.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_client, "_WAITS", (0.0,))
    registry = LocalRegistry(tmp_path / "registry")
    for seed, name in enumerate(("polite", "polite", "rude")):
        made = registries.write_sample(tmp_path / f"made-{seed}", seed)
        registry.put(made, Publication(name, tags=("best",) if seed == 0 else ()))
    return registry


def names(registry, **query):
    return [f"{e.name}@{e.version}" for e in registry.search(Query(**query))]


def test_the_url_is_a_registry(folder, monkeypatch):
    with web_servers.python(folder.root) as url:
        assert isinstance(registry_at(url), WebsiteRegistry)
        monkeypatch.setenv("ADAPTERHUB_REGISTRY", f"{url}/")
        assert names(registry_at(None)) == ["polite@v2", "rude@v1"]
        assert registry_at(None).verify() == []


@pytest.mark.parametrize(
    "url", ["http://example.org/r", "https://me:secret@example.org", "https://", "https://a/b?c=d"]
)
def test_other_urls_are_refused(url):
    with pytest.raises(ConfigError, match="is not the URL of a registry") as error:
        registry_at(url)
    assert "secret" not in str(error.value)


def test_nothing_is_published(folder, tmp_path):
    with web_servers.python(folder.root) as url:
        registry = registry_at(url)
        entry = registry.resolve("polite")
        made = tmp_path / "made-0"
        for change in (
            lambda: registry.put(made, Publication("polite")),
            lambda: registry.yank(entry, "why"),
            lambda: registry.tag(entry, "good"),
            lambda: registry.delete("polite", "v1"),
            lambda: registry.index(),
        ):
            with pytest.raises(RegistryError, match=r"read over https|cannot be listed"):
                change()


def test_a_search_is_one_request_for_each_index_and_then_none_of_the_bytes(folder):
    with (
        web_servers.nginx(folder.root) if shutil.which("nginx") else pytest.skip("no nginx") as url
    ):
        registry = registry_at(url)
        sent = []
        reread = registry.storage._client.reread

        def counted(path, limit, subject, known=""):
            body = reread(path, limit, subject, known)
            sent.append((path, len(body.data), bool(known) and body.tag == known))
            return body

        registry.storage._client.reread = counted
        assert names(registry) == ["polite@v2", "rude@v1"]
        assert {path for path, _, _ in sent} == {"/index.json", f"/{BACKBONE}/index.json"}
        sent.clear()
        assert names(registry) == ["polite@v2", "rude@v1"]
        assert all(known and size == 0 for _, size, known in sent)


def test_a_newer_version_than_the_index_is_found_by_its_name(folder, tmp_path):
    with web_servers.python(folder.root) as url:
        index = folder.root / BACKBONE / "index.json"
        old = index.read_bytes()
        folder.put(registries.write_sample(tmp_path / "new", 9), Publication("polite"))
        folder.yank(folder.resolve("polite", "v1"), "bad")
        index.write_bytes(old)  # as if its publisher had died
        registry = registry_at(url)
        assert names(registry) == ["polite@v2", "rude@v1"]
        assert registry.resolve("polite").version == "v3"
        assert registry.resolve("polite", "v1").yanked == "bad"
        assert registry.resolve("polite", "best").version == "v1"


def test_without_an_index_a_name_is_found_if_the_backbone_is_known(folder):
    for file in folder.root.rglob("index.json"):
        file.unlink()
    with web_servers.python(folder.root) as url:
        registry = registry_at(url)
        for fails in (lambda: names(registry), lambda: registry.resolve("polite")):
            with pytest.raises(RegistryError, match=r"has no index\.json, so what it has"):
                fails()
        entry = registry.resolve("polite", backbone="acme/bert-small")
        assert entry.version == "v2"
        registry.get(entry)
        with pytest.raises(RegistryError, match="has no adapter 'nothing' for acme/bert-small"):
            registry.resolve("nothing", backbone="acme/bert-small")
        with pytest.raises(RegistryError, match="has no adapter 'polite' for other/gpt"):
            registry.resolve("polite", backbone="other/gpt")


LOGIN = b"<!doctype html><title>Log in</title><p>hunter2</p>"


ANSWERS = {
    "a login page": web_servers.answering(200, body=LOGIN),
    "a compressed answer": web_servers.answering(200, {"content-encoding": "gzip"}, b"\x1f\x8b"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_is_no_registry_is_one_sentence(folder, answer):
    with web_servers.python(folder.root, ANSWERS[answer]) as url:
        registry = registry_at(url)
        for act in (
            lambda: names(registry),
            lambda: registry.resolve("polite"),
            lambda: registry.resolve("polite", backbone="acme/bert-small"),
        ):
            problem = "cannot be (read|listed)|not the index|compressed"
            with pytest.raises(AdapterhubError, match=problem) as error:
                act()
            assert "hunter2" not in str(error.value)


def test_a_login_page_in_place_of_a_file_is_not_the_adapter(folder, tmp_path):
    with web_servers.python(
        folder.root, web_servers.answering(200, body=LOGIN, only=".safetensors")
    ) as url:
        registry = registry_at(url)
        entry = registry.resolve("polite")
        with pytest.raises(FileError):
            registry.get(entry, tmp_path / "mine")
        assert not (tmp_path / "mine").exists()


def test_no_token_follows_a_redirect_to_another_host(folder, monkeypatch):
    with web_servers.python(folder.root) as other:
        port = other.rpartition(":")[2]

        def answer(handler):
            handler.send_response(302)
            handler.send_header("location", f"http://localhost:{port}{handler.path}")
            handler.end_headers()
            return True

        with web_servers.python(folder.root, answer) as url:
            monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{url}=secret-token-1234")
            registry = registry_at(url)
            entry = registry.resolve("polite")
            registry.get(entry)
            sent = [{k.lower(): v for k, v in headers.items()} for _, headers in url.requests]
            assert all(h["authorization"] == "Bearer secret-token-1234" for h in sent)
            assert other.requests
            assert not any("authorization" in {k.lower() for k in h} for _, h in other.requests)


def test_a_name_with_a_million_versions_ends(folder, monkeypatch):
    monkeypatch.setattr(http_storage, "_MOST_PROBED", 100)
    file = folder.root / BACKBONE / "polite" / "names.json"
    file.write_bytes(file.read_bytes().replace(b'"highest": 2', b'"highest": 999999999'))
    assert b"999999999" in file.read_bytes()
    with web_servers.python(folder.root) as url:
        assert registry_at(url).resolve("polite").version == "v2"
        assert 100 < len(url.requests) < 200
