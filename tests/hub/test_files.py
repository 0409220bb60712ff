"""Files as they are sent and downloaded: whole, in parts, as bytes and never as a page."""

import hashlib
import time

import pytest
import torch

from adapterhub.files.manifest import BackboneRef, Manifest
from adapterhub.files.native import write_adapter
from adapterhub.hub import blobs, upload_endpoints
from adapterhub.hub.bucket_blobs import BlobBucket
from tests.kit import real_hub, registries
from tests.kit.real_hub import answered, batch, commit, create, digest, head
from tests.kit.registries import FINGERPRINT, IDENTITY, SAMPLE_BACKBONE

SMALL, LARGE = b"# card\n", b"0123456789abcdef" * (100 << 10)


@pytest.fixture(scope="module")
def client(hub):
    client = hub.as_user("ada")
    create(client, "acme/files")
    commit(client, "acme/files", {"in/card.md": SMALL, "large.txt": LARGE})
    create(client, "acme/large")
    return client


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


# Large files are sent whole, or in parts; what is not what it was said to be is refused.


def address_of(client, data, name="acme/large", **more):
    """Request where to send a file; return its digest, and what the hub says of it."""
    answer = batch(client, name, data, **more)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["objects"]
    return digest(data), found


def test_a_file_is_sent_whole_and_then_committed(hub, client):
    data = b"# a card\n" * 1000
    oid, found = address_of(client, data)
    address = found["actions"]["upload"]["href"]  # which alone allows it
    assert hub.as_user(None).put(address, content=data).status_code == 200
    verify = {"oid": oid, "size": len(data)}
    assert client.post(found["actions"]["verify"]["href"], json=verify).status_code == 200
    assert "actions" not in address_of(client, data)[1]
    for size, status in ((7, 400), (len(data), 200)):
        answered(commit(client, "acme/large", large={"a.md": (oid, size)}), status)
    assert client.get("/acme/large/resolve/main/a.md").content == data


def test_a_file_is_sent_in_parts(hub, client, monkeypatch):
    monkeypatch.setattr(upload_endpoints, "PART_BYTES", 1000)
    monkeypatch.setattr(upload_endpoints, "_WHOLE_BYTES", 1500)
    data = b"0123456789" * 250
    oid, found = address_of(client, data, transfers=["basic", "multipart"])
    action = found["actions"]["upload"]
    header = dict(action["header"])
    assert header.pop("chunk_size") == "1000"
    assert [*header] == ["00001", "00002", "00003"]
    complete = {"oid": oid, "parts": []}
    for number, address in enumerate(header.values()):
        part = data[number * 1000 : (number + 1) * 1000]
        assert client.put(address, content=part + b"x").status_code == 413
        assert client.put(address, content=part[:-1]).status_code == 400
        assert client.post(action["href"], json=complete).status_code == 400
        answer = client.put(address, content=part)
        assert answer.headers["etag"]
        complete["parts"].append({"partNumber": number + 1, "etag": answer.headers["etag"]})
    assert client.post(action["href"], json=complete).status_code == 200
    assert commit(client, "acme/large", large={"p.md": (oid, len(data))}).status_code == 200
    assert client.get("/acme/large/resolve/main/p.md").content == data
    assert hub.hub.blobs.collect_uploads(time.time() + 9, dry_run=True) == 0


@pytest.mark.parametrize("sent", [b"wrong bytes", b"right", b"right bytes!", b""])
def test_other_bytes_than_announced_are_refused(hub, client, sent):
    oid, found = address_of(client, b"right bytes")
    answer = client.put(found["actions"]["upload"]["href"], content=sent)
    assert answer.status_code in (400, 413)
    answered(
        client.put(found["actions"]["upload"]["href"], content=iter([sent, b"more and more"])), 413
    )
    assert not [*hub.hub.blobs.incoming.iterdir()]
    assert hub.hub.blobs.size(oid) < 0


def test_an_address_is_for_one_file_for_a_day(hub, client, monkeypatch):
    _, found = address_of(client, b"some bytes")
    href = found["actions"]["upload"]["href"]
    start, _, mark = href.rpartition(".")
    parts = start.rsplit("/", 1)[1].split(".")
    forged = [
        f"{start}.{'x' * len(mark)}",
        href.replace(parts[1], "0" * 64),
        href.replace(f".{parts[2]}.", f".{int(parts[2]) + 1}."),
        f"{start.rpartition('.')[0]}.99999999999.{mark}",
    ]
    for address in forged:
        assert client.put(address, content=b"some bytes").status_code == 403
    monkeypatch.setattr("time.time", lambda: float(parts[4]) + 1)
    assert client.put(href, content=b"some bytes").status_code == 403


def test_what_is_too_large_is_said_before_it_is_sent(tmp_path):
    with real_hub.serving(tmp_path / "hub", max_file=100, regular_max=50, quota=1_000) as hub:
        hub.user("ada")
        client = hub.as_user("ada")
        name = create(client, "ada/small")
        said = address_of(client, b"x" * 101, name)[1]["error"]
        assert (said["code"], "101 bytes" in said["message"]) == (413, True)
        url = f"/api/models/{name}/preupload/main"
        for size, status in ((100, 200), (101, 413), (951, 413)):
            body = {"files": [{"path": "a.md", "size": size, "sample": ""}]}
            answered(client.post(url, json=body), status)
        body["files"] = [{"path": f"{n}.md", "size": 99} for n in range(10)]
        answered(client.post(url, json=body), 413, "of its 1,000 bytes")
        assert commit(client, name, {"a.md": b"x" * 51}).status_code == 413
        for number in range(30):
            answer = commit(client, name, {f"{number}.md": b"%2d" % number * 25})
        assert answer.status_code == 413
        assert client.get(f"/{name}/resolve/main/0.md").status_code == 200
        assert not [*hub.hub.blobs.incoming.iterdir()]


def test_a_full_disk_is_said_and_reads_go_on(hub, client, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    for module, name, value in (
        (blobs.BlobReceiver, "_write", full),
        (blobs, "_FREE_BYTES", 1 << 60),
    ):
        monkeypatch.setattr(module, name, value)
        answered(commit(client, "acme/large", {"full.md": b"x"}), 507, "disk")
        assert not [*hub.hub.blobs.incoming.iterdir()]
        assert client.get("/acme/large/resolve/main/.gitattributes").status_code == 200
        monkeypatch.undo()


def test_a_locked_database_is_busy_and_no_error(new_hub, ada):
    database = new_hub.hub.database
    kind, place = type(database), database.path if new_hub.is_folder else database.place
    new_hub.hub.database, other = kind(place, 0.2), kind(place)
    name = create(ada, "ada/x")
    with other.writing():
        answer = commit(ada, name, {"a.md": b"a"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        for path, status in ((f"/api/models/{name}", 200), ("/ready", 503), ("/health", 200)):
            assert ada.get(path).status_code == status
    assert commit(ada, name, {"a.md": b"a"}).status_code == 200
    other.close()
    database.close()


def test_what_was_received_is_not_downloaded_again(tmp_path):
    """Neither for the answer whether it is here, nor to check it, nor for a version."""
    bucket, sizes = registries.Objects(), []

    def get(path, **options):
        found = bucket.store.get(path, **options)
        sizes.append(found.range[1] - found.range[0])
        return found

    bucket.get = get
    reference = BackboneRef(SAMPLE_BACKBONE, None, FINGERPRINT, "bert", identity=IDENTITY)
    manifest = Manifest(name="large", methods=({"lora": {}},), backbone=reference)
    write_adapter(tmp_path / "made", manifest, {"a": torch.zeros(1 << 20)}, card="")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    data = files.pop("adapter.safetensors")
    with real_hub.serving(tmp_path / "hub") as hub:
        hub.user("ada")
        hub.hub.blobs = BlobBucket("s3://bucket/p", bucket)
        client = hub.as_user("ada")
        name = create(client, "ada/large")
        oid, found = address_of(client, data, name)
        href = found["actions"]["upload"]["href"]
        assert client.put(href, content=data).status_code == 200
        assert "actions" not in address_of(client, data, name)[1]
        large = {path: (oid, len(data)) for path in ("adapter.safetensors", "a.safetensors")}
        assert commit(client, name, {**files, "empty.md": b""}, large=large).status_code == 200
        answered(client.post(f"/api/models/{name}/tag/main", json={"tag": "v1"}), 200)
        body = {"files": [{"path": path, "size": len(data)} for path in large]}
        answer = client.post(f"/api/models/{name}/preupload/main", json=body).json()
        assert all("oid" in each for each in answer["files"])
        assert sum(sizes) < len(data) / 8
        as_text = {"b.md": (oid, len(data))}
        assert commit(client, name, large=as_text).status_code == 200
        wrong = {"adapter_config.json": (oid, len(data))}
        assert commit(client, name, large=wrong).status_code == 400
        assert hub.hub.blobs.read(digest(b""), 9) == b""
