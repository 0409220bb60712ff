"""The commit: atomic, in its turn, once, of valid paths and contents, and read in pieces."""

import base64
import hashlib
import io
import json
import pickle
import time
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from adapterhub.hub import commit_endpoints
from adapterhub.hub.blobs import BlobFolder, BlobInfo
from adapterhub.hub.commit_endpoints import CommitLines
from adapterhub.hub.commits import CommitChange, changed_tree
from adapterhub.web.errors import HubRefusal, MissingEntryError, TooManyBytesError
from tests.kit import real_hub
from tests.kit.real_hub import answered, batch, commit, create, digest, head, set_rules


@pytest.fixture(scope="module")
def wrong(client):
    """The name of a repository that takes no commit of the tests."""
    return create(client, "acme/wrong")


def with_file(content, path='"a"'):
    """Return a body with a line of a file."""
    line = '{"key":"file","value":{"content":%s,"path":%s,"encoding":"base64"}}\n'
    return real_hub.commit_lines() + (line % (content, path)).encode()


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


def test_of_eight_with_one_parent_one_wins(client):
    name = create(client, "acme/race")
    parent = head(client, name)
    with ThreadPoolExecutor(8) as pool:
        found = [
            pool.submit(commit, client, name, {f"{n}.md": b"x"}, parent=parent) for n in range(8)
        ]
        assert sorted(each.result().status_code for each in found) == [200] + [412] * 7
    assert len(files_of(client, name)) == 2
    answered(commit(client, name, {"b.md": b"b"}, parent=parent), 412, "moved")


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
        (with_file('"?"'), 400, "base64"),
        (with_file('"YQ=="', "3"), 400, "no path"),
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
    eve = hub.as_user("eve")
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

        client = hub.as_user("ada")
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
        assert len(files_of(client, "ada/x")) == 45


# What a hub takes, by name and by contents, and what an administrator allows.


KEY = "hf_" + "aB3dE6gH9j" * 4


def torch_archive():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02.")
    return data.getvalue()


def header(offsets):
    """Return a file of tensors with three bytes, of which a tensor has those between offsets."""
    text = json.dumps({"a": {"dtype": "I8", "shape": [2], "data_offsets": offsets}}).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 3


TAKEN = {
    "a.safetensors": save({"a": np.zeros(8, "float32"), "b": np.ones(3, "int8")}),
    "tokenizer.json": b'{"a": 1}',
    "in/spiece.model": b"\x0a\x05",
    "README.md": b"# hi\n",
    "chat_template.jinja": b"{{ messages }}",
    "data.parquet": b"PAR1xxxxPAR1",
    "LICENSE": b"Apache",
    "adapter_config.json": b'{"peft_type": "LORA", "base_model_name_or_path": "acme/bert"}',
}


def test_what_adapters_and_data_have_is_taken(client):
    name = create(client, "acme/taken")
    answered(commit(client, name, TAKEN), 200)
    assert files_of(client, name) == {".gitattributes", *TAKEN}


@pytest.mark.parametrize(
    ("path", "data", "words"),
    [
        ("a.bin", b"", "pickle"),
        ("in/model.PT", b"x", "pickle"),
        ("a.md", pickle.dumps({}), "pickle"),
        ("b.json", torch_archive(), "pickle"),
        ("weights.npy", b"x", "pickle"),
        ("modeling.py", b"import os", "runs where it is loaded"),
        ("run.json", b"#!/bin/sh\n", "runs where it is loaded"),
        ("a.txt", b"\x7fELF\x02", "runs where it is loaded"),
        ("page.html", b"<script>", "runs where it is loaded"),
        ("a.xyz", b"x", "kind of file"),
        ("noname", b"x", "kind of file"),
        ("a.json", b"\xff\xfe", "UTF-8"),
        ("a.png", b"GIF89a", "contents"),
        ("a.safetensors", b"x", "claims"),
        ("a.safetensors", (1 << 40).to_bytes(8, "little") + b"{}", "claims"),
        ("a.safetensors", b"\7" + b"\0" * 7 + b'{"a":1}', "no place"),
        ("a.safetensors", header([0, 2]), "size differs"),
        ("a.safetensors", header([1, 3]), "gaps"),
        ("adapter.json", b"{}", "contents"),
        ("adapter_config.json", b"[]", "contents"),
        ("adapter_config.json", b'{"base_model_name_or_path": "/home/x/bert"}', "backbone"),
        *((f"a{c}b.md", b"a", "invisible") for c in "\u202e\u2066\u200b\u200d\xad\ufeff\u2028"),
        ("\u212a.md", b"a", "NFC"),  # the sign of Kelvin, which looks like a K
        ("adapter_config.json", b'{"base_model_name_or_path": "C:\\\\bert"}', "backbone"),
        ("README.md", f"token {KEY}".encode(), "secrets"),
        ("in/config.json", json.dumps({"token": KEY}).encode(), "secrets"),
    ],
)  # fmt: skip
def test_what_could_harm_is_refused_with_the_file_and_the_rule(
    hub, client, wrong, path, data, words
):
    answer = commit(client, wrong, {"ok.md": b"ok", path: data})
    said = answer.json()["error"]
    assert answer.status_code == 400, said
    assert ascii(path)[1:-1] in said
    assert words in said
    assert KEY not in said
    assert not [*hub.hub.blobs.incoming.iterdir()]
    assert client.get(f"/{wrong}/resolve/main/ok.md").status_code == 404


def test_an_administrator_allows_more(hub, client):
    set_rules(hub, "ada", allowed=("pickle", "kind"))
    name, secret = create(client, "ada/free"), f"token {KEY}".encode()
    assert commit(client, name, {"a.bin": pickle.dumps({}), "b.xyz": b"x"}).status_code == 200
    assert commit(client, name, {"a.py": b"x"}).status_code == 400
    said = commit(client, name, {"a.md": secret}).json()["error"]
    code = said.rsplit("--allow-finding ", 1)[1].split()[0]
    set_rules(hub, "ada", findings=(code,))
    assert commit(client, name, {"a.md": secret}).status_code == 200
    assert commit(client, name, {"b.md": secret}).status_code == 400


def test_what_is_said_before_files_are_sent(client):
    name = create(client, "acme/ignoring")

    def preupload(*files, **more):
        body = {"files": [{"size": 3, **file} for file in files], **more}
        return client.post(f"/api/models/{name}/preupload/main", json=body)

    for file in ({"path": "a.pkl"}, {"path": "a.md", "sample": "gAJ9"}):
        answered(preupload(file), 400, "pickle")
    answer = preupload({"path": "a.PARQUET"}, {"path": "a.md"}).json()["files"]
    # Dataset.push_to_hub deletes a Parquet file before the commit.
    assert [each["uploadMode"] for each in answer] == ["lfs", "regular"]
    files = [{"path": path} for path in ("a.md", ".env", "in/b.log")]
    answer = preupload(*files, gitIgnore=".env\n*.log\n").json()["files"]
    assert [each["shouldIgnore"] for each in answer] == [False, True, True]
    commit(client, name, {".gitignore": b"a.md\n"})
    assert preupload(files[0]).json()["files"][0]["shouldIgnore"]


# The body of a commit is read in any pieces, with little memory.


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    folder = BlobFolder(tmp_path_factory.mktemp("blobs"))
    folder.create()
    return folder


def read(blobs, body, sizes=(1 << 30,), most=1 << 30):
    lines = CommitLines(blobs, most)
    place = 0
    try:
        while place < len(body):
            for size in sizes:
                lines.feed(body[place : place + size])
                place += size
        change = lines.finish()
        return {path: staged.path.read_bytes() for path, staged in change.files.items()}, change
    finally:
        lines.discard()


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text('abc/"\\ü{}:,', min_size=1, max_size=9), st.binary(max_size=90), max_size=4
    ),
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
)
def test_pieces_of_any_size_give_the_same_files(blobs, files, sizes):
    found, change = read(blobs, real_hub.commit_lines(files, title="a title"), sizes)
    assert found == files
    assert change.title == "a title"
    assert list(blobs.incoming.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        '{"value": {"path": "a", "encoding": "base64", "content": "aGk="}, "key": "file"}',
        '{"key":"file","value":{"encoding":"base64","path":"a","content":"aGk="}}',
        '{ "key" : "file" , "value" : { "content" : "aGk=" , "path" : "a", "encoding":"base64" } }',
        '{"key":"file","value":{"path":"a","content":"aGk=","encoding":"base64","extra":1}}',
    ],
)
def test_any_order_of_the_fields(blobs, line):
    body = b'{"key":"header","value":{"summary":"s"}}\n' + line.encode()
    for sizes in ((1 << 20,), (7,), (1,)):
        assert read(blobs, body, sizes)[0] == {"a": b"hi"}


def test_memory_does_not_grow_with_a_file(blobs):
    data = bytes(range(256)) * (12 << 12)  # 12 MiB
    lines, body = CommitLines(blobs, 1 << 30), real_hub.commit_lines({"a": data})
    tracemalloc.start()
    for place in range(0, len(body), 256 << 10):
        lines.feed(body[place : place + (256 << 10)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (staged,) = lines.finish().files.values()
    assert staged.info.sha256 == hashlib.sha256(data).hexdigest()
    assert peak < 3 << 20
    lines.discard()


def test_what_is_not_base64_is_refused(blobs):
    for text in ("a", "ab=c", "abc", "####", "YQ=YQ===", "YQ==YQ=="):
        for sizes in ((1 << 20,), (1,)):
            with pytest.raises(HubRefusal, match="base64"):
                read(blobs, with_file(f'"{text}"'), sizes)
    data = bytes([255, 239, 191] * 50)
    text = base64.b64encode(data).decode()
    assert "/" in text  # which JSON may escape
    body = with_file('"{}"'.format(text.replace("/", "\\/")))
    assert read(blobs, body, (5,))[0] == {"a": data}
    with pytest.raises(TooManyBytesError, match="111"):
        read(blobs, body, most=111)
    assert list(blobs.incoming.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "most"),
    [
        (b'{"key":"deletedFile","value":{"path":"a.md"}}\n', 1 << 19),
        (b"\n", 1 << 19),
        (b'{"key":"deletedFile","value":{"path":"%s"}}\n' % (b"a" * 1000), 4 << 20),
        (b'{"key":"deletedFolder","value":{"path":"%s"}}\n' % (b"a" * 1_000_000), 2 << 20),
        (b" " * 1_000_000 + b"\n", 5 << 20),
    ],
)
def test_endless_lines_are_refused_soon(blobs, line, most, monkeypatch):
    """A body of 150 MB once took 24 s and 160 MB; it is refused after some megabytes."""
    assert (commit_endpoints.MOST_LINES, commit_endpoints.MOST_WORDS) == (25_000, 32 << 20)
    monkeypatch.setattr(commit_endpoints, "MOST_LINES", 2_500)
    monkeypatch.setattr(commit_endpoints, "MOST_WORDS", 3 << 20)
    lines, sizes = CommitLines(blobs, 1 << 30), []
    piece = line * max(1, (256 << 10) // len(line))

    def feed_all():
        for _ in range(20):
            sizes.append(len(piece))
            lines.feed(piece)

    tracemalloc.start()
    with pytest.raises(HubRefusal, match=r"lines|path"):
        feed_all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) <= most
    assert peak < 8 << 20


def test_many_removed_folders_take_no_time_of_other_writers():
    info = BlobInfo("0" * 64, 1, "")
    tree = {f"a{n}/b/c{n}.md": info for n in range(15_000)}
    change = CommitChange(removed_folders=[*(f"a{n}/b/" for n in range(14_999)), "a14999"])
    began = time.perf_counter()
    assert changed_tree(tree, change, {}) == {}
    assert time.perf_counter() - began < 2  # once some 20 s
    with pytest.raises(MissingEntryError, match="a/b/c"):
        changed_tree({"a/b.md": info}, CommitChange(removed_folders=["a/b/c"]), {})
