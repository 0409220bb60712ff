"""Files as they are downloaded: whole, in part, as bytes and never as a page."""

from __future__ import annotations

import hashlib

import pytest

from tests.kit.real_hub import commit, create, head

SMALL, LARGE = b"# card\n", b"0123456789abcdef" * (100 << 10)


@pytest.fixture(scope="module")
def client(hub):
    with hub.client("ada") as client:
        create(client, "acme/files")
        commit(client, "acme/files", {"in/card.md": SMALL, "large.txt": LARGE})
        yield client


def test_a_small_file_has_gits_hash_and_a_large_one_its_digest(client):
    url = "/acme/files/resolve/main/in/card.md"
    for answer in (client.head(url), client.get(url, follow_redirects=False)):
        assert answer.headers["x-repo-commit"] == head(client, "acme/files")
        expected = hashlib.sha1(b"blob %d\0" % len(SMALL) + SMALL).hexdigest()
        assert answer.headers["etag"] == f'"{expected}"'
        assert answer.headers["content-length"] == str(0 if answer.is_redirect else len(SMALL))
        assert "x-linked-etag" not in answer.headers
        assert not [name for name in answer.headers if "xet" in name]
    answer = client.head("/acme/files/resolve/main/large.txt")
    assert answer.headers["x-linked-etag"] == f'"{hashlib.sha256(LARGE).hexdigest()}"'
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
def test_a_part_of_a_file(client, wanted, status, first, last):
    url = "/acme/files/resolve/main/large.txt"
    answer = client.get(url, headers={"range": wanted})
    assert answer.status_code == status
    if status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(LARGE)}"
        return
    assert answer.content == LARGE[first:last]
    if status == 206:
        assert answer.headers["content-range"].endswith(f"/{len(LARGE)}")


def test_a_file_that_has_changed_is_sent_whole(client):
    url = "/acme/files/resolve/main/large.txt"
    tag = client.head(url).headers["etag"]
    for condition, status in ((tag, 206), ('"other"', 200)):
        headers = {"range": "bytes=0-9", "if-range": condition}
        assert client.get(url, headers=headers).status_code == status
    assert client.get(url, headers={"if-none-match": tag}).status_code == 304


def test_a_file_is_never_a_page(client):
    url = "/acme/files/resolve/main/in/card.md"
    sent = client.get(url).headers
    assert sent["content-type"] == "application/octet-stream"
    assert sent["content-disposition"].startswith("attachment")
    headers = client.get(url, follow_redirects=False).headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"].startswith("attachment")
    assert headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in headers["content-security-policy"]
    assert "no-transform" in headers["cache-control"]


def test_what_is_missing_has_the_commit_in_which_it_is_missing(client):
    answer = client.head("/acme/files/resolve/main/none.md")
    assert (answer.status_code, answer.headers["x-error-code"]) == (404, "EntryNotFound")
    assert answer.headers["x-repo-commit"] == head(client, "acme/files")
    answer = client.head("/acme/files/resolve/nothing/in/card.md")
    assert answer.headers["x-error-code"] == "RevisionNotFound"
    assert client.get("/api/models/acme/files/tree/main/none").headers["x-error-code"] == (
        "EntryNotFound"
    )
    for path in (
        "/gpt2/resolve/main/config.json",
        "/api/models/gpt2",
        "/api/models/gpt2/tree/main",
    ):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["x-error-code"]) == (404, "RepoNotFound")


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
