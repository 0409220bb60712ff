"""The commit: atomic, in its turn, once, and of valid paths."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit import real_hub
from tests.kit.real_hub import answered, batch, commit, create, digest, head


@pytest.fixture(scope="module")
def client(hub):
    with hub.client("ada") as client:
        yield client


@pytest.fixture(scope="module")
def wrong(client):
    """The name of a repository that takes no commit of the tests."""
    return create(client, "acme/wrong")


def with_file(fields):
    """Return a body with a line of a file."""
    line = '{"key":"file","value":{' + fields + ',"encoding":"base64"}}\n'
    return real_hub.commit_lines({}) + line.encode()


def files_of(client, name, revision="main"):
    tree = client.get(f"/api/models/{name}/tree/{revision}?recursive=true").json()
    return {item["path"] for item in tree if item["type"] == "file"}


def test_a_commit_that_comes_again_is_made_once(client):
    name = create(client, "acme/again")
    parent = head(client, name)
    first = commit(client, name, {"a.md": b"a"}, parent=parent)
    again = commit(client, name, {"a.md": b"a"}, parent=parent)
    without = commit(client, name, {"a.md": b"a"})
    assert first.status_code == again.status_code == without.status_code == 200
    assert first.json()["commitOid"] == again.json()["commitOid"] == without.json()["commitOid"]
    assert len(client.get(f"/api/models/{name}/commits/main").json()) == 2


def test_a_stale_parent_is_refused(client):
    name = create(client, "acme/stale")
    parent = head(client, name)
    assert commit(client, name, {"a.md": b"a"}, parent=parent).status_code == 200
    answered(commit(client, name, {"b.md": b"b"}, parent=parent), 412, "moved")
    assert files_of(client, name) == {".gitattributes", "a.md"}


def test_of_eight_with_one_parent_one_wins_and_twelve_without_are_all_kept(client):
    name = create(client, "acme/race")
    parent = head(client, name)
    with ThreadPoolExecutor(12) as pool:
        found = [
            pool.submit(commit, client, name, {f"{n}.md": b"x"}, parent=parent) for n in range(8)
        ]
        statuses = sorted(each.result().status_code for each in found)
        assert statuses == [200] + [412] * 7
        found = [pool.submit(commit, client, name, {f"k{n}.md": b"x"}) for n in range(12)]
        assert {each.result().status_code for each in found} == {200}
    assert {f"k{n}.md" for n in range(12)} <= files_of(client, name)
    assert len(client.get(f"/api/models/{name}/commits/main").json()) == 14


def test_files_and_folders_are_removed(client):
    name = create(client, "acme/removed")
    commit(client, name, {"a.md": b"a", "in/b.md": b"b", "in/c/d.md": b"d"})
    assert commit(client, name, deleted=["a.md"], folders=["in/c/"]).status_code == 200
    assert files_of(client, name) == {".gitattributes", "in/b.md"}
    answer = commit(client, name, deleted=["a.md"])
    assert (answer.status_code, answer.headers["x-error-code"]) == (404, "EntryNotFound")
    assert "A file with this name doesn't exist" in answer.json()["error"]
    url, body = f"/api/models/{name}/commit/main", real_hub.commit_lines({"a.md": b"x"})
    answered(client.post(f"{url}?create_pr=1", content=body), 400, "pull requests")


@pytest.mark.parametrize(
    "path",
    ["../a.md", "./a.md", "a//b.md", "/a.md", "a\\b.md", "a:b.md", "a\x00.md", "a\n.md",
     "\ud800.md", "e\u0301.md", "x" * 256 + ".md", "/".join(["y" * 200] * 6) + ".md", ".git/a.md",
     ".GIT/config", ".cache/a.md", "con.md", "a/NUL", "dot./a.md", "end.md.", "end ", ""],
)  # fmt: skip
def test_a_path_that_could_harm_is_refused(client, wrong, path):
    before = head(client, wrong)
    answered(commit(client, wrong, {path: b"x"}), 400)
    assert head(client, wrong) == before


def test_names_that_would_be_one_on_some_disks_are_refused(client):
    name = create(client, "acme/cases")
    assert commit(client, name, {"Read.md": b"x", "in/a.md": b"x"}).status_code == 200
    for path in ("READ.md", "in", "read.md/b.md", "IN/b.md"):
        answered(commit(client, name, {path: b"x"}), 400)
    assert files_of(client, name) == {".gitattributes", "Read.md", "in/a.md"}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "no header"),
        (b"not json\n", 400, "not JSON"),
        (b'{"key": "header"}\n', 400, "no value"),
        (b'{"key": "what", "value": {}}\n', 400, "unknown key"),
        (b"[" * 20_000, 400, "nested"),
        (real_hub.commit_lines({"a.md": b"x"})[:-30], 400, "ends within|not JSON"),
        (with_file('"content":"?","path":"a.md"'), 400, "base64"),
        (with_file('"content":"YQ==","path":3'), 400, "no path"),
        (real_hub.commit_lines(large={"a.md": ("x", 3)}), 400, "sha256"),
        (real_hub.commit_lines(large={"a.md": ("0" * 64, 3)}), 400, "no file with sha256"),
        (b"\xff\xfe\n", 400, "not JSON"),
        (real_hub.commit_lines(title="x" * (1 << 20) + "y"), 413, ""),
    ],
)
def test_a_malformed_body_is_refused_and_leaves_nothing(hub, client, wrong, body, status, words):
    before = head(client, wrong)
    answer = client.post(f"/api/models/{wrong}/commit/main", content=body)
    assert answer.status_code == status
    assert any(word in answer.json()["error"] for word in words.split("|"))
    assert head(client, wrong) == before
    assert list(hub.hub.blobs.incoming.iterdir()) == []


def test_a_file_that_another_repository_has_is_not_given(hub, client):
    """Who knows a digest has not the file: the leak of shared stores."""
    secret = b"the secret of eve"
    with hub.client("eve") as eve:
        own = create(eve, "eve/own", private=True)
        commit(eve, own, {"a.md": secret})
        (item,) = eve.post(f"/api/models/{own}/paths-info/main", data={"paths": ["a.md"]}).json()
        assert item["size"] == len(secret)
    name = create(client, "acme/thief")
    answered(commit(client, name, large={"a.md": (digest(secret), len(secret))}), 400)
    (found,) = batch(client, name, secret).json()["objects"]
    assert "actions" in found  # not "already there"


def test_branches_with_a_slash_are_branches(client):
    name = create(client, "acme/branches")
    assert client.post(f"/api/models/{name}/branch/feat%2Fx", json={}).status_code == 200
    assert client.post(f"/api/models/{name}/branch/feat%2Fx", json={}).status_code == 409
    assert commit(client, name, {"b.md": b"b"}, revision="feat%2Fx").status_code == 200
    assert files_of(client, name, "feat%2Fx") == {".gitattributes", "b.md"}
    assert client.get(f"/{name}/resolve/feat%2Fx/b.md").content == b"b"
    assert files_of(client, name) == {".gitattributes"}
    assert client.delete(f"/api/models/{name}/branch/main").status_code == 403
    assert client.delete(f"/api/models/{name}/branch/feat%2Fx").status_code == 200
    assert client.delete(f"/api/models/{name}/branch/feat%2Fx").status_code == 404
    for bad in ("a..b", "0" * 40, "v7", "7", "x.lock"):
        assert client.post(f"/api/models/{name}/branch/{bad}", json={}).status_code == 400


def test_writers_queue_and_readers_do_not(tmp_path, online):
    """Stock clients do not try again: 9 of 128 commits at once were once refused as busy."""
    from huggingface_hub import CommitOperationAdd, HfApi

    with real_hub.serving(tmp_path / "hub") as hub, ThreadPoolExecutor(44) as pool:
        hub.user("ada")

        def write(number):
            api = HfApi(endpoint=hub.address, token=hub.tokens["ada"])
            added = CommitOperationAdd(f"{number}.md", b"x")
            return api.create_commit("ada/x", [added], commit_message="x", num_threads=1).oid

        with hub.client("ada") as client:
            create(client, "ada/x")
            with hub.hub.database.writing():  # as somebody whose disk is slow
                writers = [pool.submit(write, number) for number in range(44)]
                end = time.monotonic() + 5.5
                while time.monotonic() < end:
                    began = time.perf_counter()
                    assert client.get("/api/models/ada/x").status_code == 200
                    assert time.perf_counter() - began < 2.5
                    time.sleep(0.1)
            assert len({writer.result() for writer in writers}) == 44
            listed = client.get("/api/models/ada/x/tree/main").json()
            assert len(listed) == 45
