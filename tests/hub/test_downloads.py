"""Files as they are downloaded: whole, in part, as bytes and never as a page."""

from __future__ import annotations

import hashlib

import pytest

from tests.kit.real_hub import commit, create, digest, head

SMALL, LARGE = b"# card\n", b"0123456789abcdef" * (100 << 10)


@pytest.fixture(scope="module")
def client(hub):
    with hub.client("ada") as client:
        create(client, "acme/files")
        commit(client, "acme/files", {"in/card.md": SMALL, "large.txt": LARGE})
        yield client


def test_a_small_file_has_gits_hash_and_a_large_one_its_digest_and_none_is_a_page(client):
    url = "/acme/files/resolve/main/in/card.md"
    for answer in (client.head(url), client.get(url, follow_redirects=False), client.get(url)):
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment")
    for answer in (client.head(url), client.get(url, follow_redirects=False)):
        sent = answer.headers
        assert sent["x-repo-commit"] == head(client, "acme/files")
        expected = hashlib.sha1(b"blob %d\0" % len(SMALL) + SMALL).hexdigest()
        assert sent["etag"] == f'"{expected}"'
        assert sent["content-length"] == str(0 if answer.is_redirect else len(SMALL))
        assert "x-linked-etag" not in sent
        assert not [name for name in sent if "xet" in name]
        assert sent["x-content-type-options"] == "nosniff"
        assert "sandbox" in sent["content-security-policy"]
        assert "no-transform" in sent["cache-control"]
    answer = client.head("/acme/files/resolve/main/large.txt")
    assert answer.headers["x-linked-etag"] == f'"{digest(LARGE)}"'
    assert answer.headers["x-linked-size"] == str(len(LARGE))
    assert client.get("/acme/files/resolve/main/large.txt").content == LARGE


@pytest.mark.parametrize(
    ("wanted", "status", "first", "last"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=10-", 206, 10, None),
        ("bytes=1000000-1300000", 206, 1_000_000, 1_300_001),
        ("bytes=-5", 206, -5, None),
        ("bytes=5-99999999999", 206, 5, None),
        ("bytes=99999999-", 416, 0, 0),
        ("bytes=9-3", 416, 0, 0),
        ("bytes=-", 200, 0, None),
        ("lines=1-2", 200, 0, None),
    ],
)
def test_a_part_of_a_file_unless_it_has_changed(client, wanted, status, first, last):
    url = "/acme/files/resolve/main/large.txt"
    answer = client.get(url, headers={"range": wanted})
    assert answer.status_code == status
    if status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(LARGE)}"
        return
    assert answer.content == LARGE[first:last]
    if status == 206:
        assert answer.headers["content-range"].endswith(f"/{len(LARGE)}")
    tag = client.head(url).headers["etag"]
    for condition, expected in ((tag, status), ('"other"', 200)):
        headers = {"range": wanted, "if-range": condition}
        assert client.get(url, headers=headers).status_code == expected
    assert client.get(url, headers={"if-none-match": tag}).status_code == 304


def test_what_is_missing_has_the_commit_in_which_it_is_missing(client):
    for path, code in (
        ("/acme/files/resolve/main/none.md", "EntryNotFound"),
        ("/acme/files/resolve/nothing/in/card.md", "RevisionNotFound"),
        ("/api/models/acme/files/tree/main/none", "EntryNotFound"),
        ("/gpt2/resolve/main/config.json", "RepoNotFound"),
        ("/api/models/gpt2", "RepoNotFound"),
        ("/api/models/gpt2/tree/main", "RepoNotFound"),
    ):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["x-error-code"]) == (404, code)
    answer = client.head("/acme/files/resolve/main/none.md")
    assert answer.headers["x-repo-commit"] == head(client, "acme/files")


@pytest.mark.parametrize(
    "path",
    ["..%2f..%2fhub.sqlite", "%2e%2e/hub.sqlite", "..%252fhub.sqlite", "a%00b", "%ff%fe",
     "in/..%2f..",
     "%2fetc%2fpasswd", "in%5c..", "a%0d%0ax-evil:1"],
)  # fmt: skip
def test_a_path_leads_nowhere_else(client, path):
    answer = client.get(f"/acme/files/resolve/main/{path}")
    assert answer.status_code in (400, 404)
    assert "x-evil" not in answer.headers
    assert client.get(f"/api/models/acme/files/tree/main/{path}").status_code in (400, 404)


def test_a_list_of_many_files_has_pages(client):
    create(client, "acme/many")
    commit(client, "acme/many", {f"{n:03}.md": b"x" for n in range(25)})
    found, url = [], "/api/models/acme/many/tree/main?limit=10"
    while url:
        answer = client.get(url)
        found += [item["path"] for item in answer.json()]
        url = answer.headers.get("link", "").partition(">")[0].removeprefix("<")
    assert found == [".gitattributes", *(f"{n:03}.md" for n in range(25))]


def test_other_paths_and_methods_are_said_to_be_none(client):
    assert client.get("/nothing/at/all/here").status_code == 404
    assert client.post("/acme/files/resolve/main/in/card.md").status_code == 405
    assert client.get("/file-too-large:x").status_code == 404
    assert client.get("/api/agent-harnesses").json() == {"standardEnvVars": [], "harnesses": {}}
    assert client.post("/v1/telemetry", json={}).status_code == 200
    card = {"content": "---\na: [\n---\n", "repoType": "model"}
    assert client.post("/api/validate-yaml", json=card).status_code == 400
    card["content"] = "---\na: b\n---\n"
    assert client.post("/api/validate-yaml", json=card).json() == {"errors": [], "warnings": []}
    card["content"] = "---\n" + "a: b\n" * 50_000 + "---\n"
    assert client.post("/api/validate-yaml", json=card).status_code == 400
    assert client.post("/api/validate-yaml", content=b"[" * 9999).status_code == 400
    assert client.post("/api/validate-yaml", content=b"x" * (5 << 20)).status_code == 413
