"""The client of hubs: HTTP, reading, writing; tests/attacks/test_hostile_hub.py attacks it."""

import hashlib
import itertools
import json
import os

import pytest
from huggingface_hub import constants, get_session
from huggingface_hub.errors import HTTPError
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.backbones.hub_network import guarded_hub
from adapterhub.errors import ConfigError, FileError, OutputError, RegistryError
from adapterhub.registry import hub_client
from adapterhub.registry.hub_client import (
    Expected,
    HubClient,
    MissingFileError,
    UnreachableError,
    network_hint,
)
from adapterhub.registry.hub_reader import HubCache, HubReader, Refs, split_items
from adapterhub.registry.hub_writer import HubWriter, entry_from_card, hub_card
from adapterhub.registry.store import Entry
from tests.kit import fake_hub
from tests.kit.fake_hub import card_data
from tests.kit.selection import long_table

DATA = bytes(range(256)) * 400


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_client, "_WAITS", (0.0, 0.0, 0.0))
    with fake_hub.attacking() as server:
        made = server.repositories["acme/a"] = fake_hub.Repository()
        made.tags["v1"] = made.commit({"file": DATA})
        yield server


def download(hub, path, **expected):
    HubClient(hub.address).download(
        "/acme/a/resolve/v1/file", path, Expected(len(DATA), **expected), "acme/a"
    )


EXPECTED = (
    {"size": len(DATA)},
    {"sha256": hashlib.sha256(DATA).hexdigest()},
    {"git_sha1": fake_hub.git_sha1(DATA)},
)


def test_an_answer_has_a_limit_and_the_query_and_the_token_are_sent(hub):
    client = HubClient(f"{hub.address}/", "secret-token")
    assert client.read("/acme/a/resolve/v1/file", len(DATA), "acme/a") == DATA
    with pytest.raises(RegistryError, match="more than the 99 bytes"):
        client.read("/acme/a/resolve/v1/file", 99, "acme/a")
    hub.attack = lambda handler: fake_hub.body(handler.path.encode())(handler) or True
    assert client.read("/x", 99, "x", (("filter", "a:b/c"), ("n", "1"))) == (
        b"/x?filter=a%3Ab%2Fc&n=1"
    )
    assert set(hub.authorizations) == {"Bearer secret-token"}


@pytest.mark.parametrize("expected", EXPECTED, ids=str)
def test_a_download_is_verified(hub, tmp_path, expected):
    download(hub, tmp_path / "a", **expected)
    assert (tmp_path / "a").read_bytes() == DATA
    files = hub.repositories["acme/a"].commits[0][1]
    files["file"] = DATA[:-2]
    with pytest.raises((FileError, RegistryError)):
        download(hub, tmp_path / "b", **expected)


def test_a_download_goes_on_where_it_was_cut_or_without_ranges_begins_again(hub, tmp_path):
    cuts, client = iter((100, 5000, 0)), HubClient(hub.address)
    expected = Expected(len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    for attack in (
        lambda handler: setattr(hub, "cut_after", next(cuts, None)),
        lambda handler: handler.headers.__delitem__("Range"),
    ):
        hub.attack, hub.cut_after, counts = attack, 100, []
        client.download("/acme/a/resolve/v1/file", tmp_path / "a", expected, "a", counts.append)
        assert (tmp_path / "a").read_bytes() == DATA
        assert sum(counts) == len(DATA)
        (tmp_path / "a").unlink()
    assert hub.resumed_at == [100, 5100, 5100]


def test_the_attempts_are_counted_from_the_last_progress(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_client, "_PROGRESS_BYTES", 10_000)
    hub.attack = lambda handler: setattr(hub, "cut_after", 11_000)
    download(hub, tmp_path / "a")
    assert len(hub.resumed_at) == len(DATA) // 11_000
    hub.attack = lambda handler: setattr(hub, "cut_after", 9_000)
    with pytest.raises(UnreachableError, match="try again"):
        download(hub, tmp_path / "b")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overload_is_waited_for(hub, status):
    answers = iter((True, True))
    refuse = fake_hub.echo(status)
    hub.attack = lambda handler: next(answers, False) and (refuse(handler) or True)
    assert HubClient(hub.address).read("/acme/a/resolve/v1/file", 1 << 20, "a") == DATA
    assert len(hub.requests) == 3


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(401, "", "you have no access"), (404, "RepoNotFound", "you have no access"),
     (404, "", "you have no access"), (404, "RevisionNotFound", "no such version"),
     (403, "GatedRepo", "gated"), (403, "", "needs a token"), (410, "", "answered 410"),
     (206, "", "answered 206")],
)  # fmt: skip
def test_a_refusal_is_explained_without_the_servers_words(hub, status, code, words):
    hub.attack = fake_hub.on("", fake_hub.echo(status, code))
    with pytest.raises(RegistryError, match=words):
        HubClient(hub.address).read("/x", 99, "acme/a")


def test_a_missing_file_and_a_missing_hub_are_told_apart(hub, monkeypatch):
    with pytest.raises(MissingFileError):
        HubClient(hub.address).read("/acme/a/resolve/v1/other", 99, "acme/a")
    with pytest.raises(UnreachableError):
        HubClient("http://127.0.0.1:9").read("/x", 99, "acme/a")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE"):
        HubClient(hub.address).read("/x", 99, "acme/a")
    assert hub.requests == []


@pytest.mark.parametrize("base", ["", "h.org", "ftp://h.org", "https://me:pw@h.org"])
def test_a_malformed_endpoint_is_an_error(base):
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        HubClient(base)
    assert hub_client.login_hint("https://huggingface.co") == "hf auth login, or set HF_TOKEN"
    assert hub_client.login_hint("https://h.org:443/x") == "adapterhub login https://h.org"


_UNUSABLE = (
    "socks5://u:secret@127.0.0.1:9", "socks5h://127.0.0.1:9", "socks4://127.0.0.1:9", "socks://h",
    "ftp://127.0.0.1:9", "http://[bad", "http://h:port", "http://", " http://h:9", "http://h h",
)  # fmt: skip
_DEAD = ("http://127.0.0.1:9", "127.0.0.1:9", "http://u:secret@127.0.0.1:9", "https://127.0.0.1:9")
_EXCLUDED = ("127.0.0.1", "localhost, 127.0.0.1", "*", "127.0.0.1:{port}", "127.0.0.0/8")


@pytest.fixture
def by_guard(hub, monkeypatch):
    """Ask the hub by huggingface_hub's client, as `push` and backbones do."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def ask():
        try:
            with guarded_hub(hub.address):
                get_session().get(f"{hub.address}/acme/a/resolve/v1/file").raise_for_status()
        except HTTPError as error:
            raise RegistryError(type(error).__name__, hint=network_hint(hub.address)) from None

    return ask


@long_table(
    ("name", "proxy"), itertools.product(["ALL_PROXY", "http_proxy"], [*_UNUSABLE, *_DEAD]), 3
)
def test_a_proxy_of_the_environment(hub, by_guard, monkeypatch, subtests, name, proxy):
    for variable in [v for v in os.environ if v.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(name, proxy)
    clients = {
        "own": lambda: HubClient(hub.address).read("/acme/a/resolve/v1/file", 1 << 20, "acme/a"),
        "huggingface_hub": by_guard,
    }
    for client, ask in clients.items():
        with subtests.test(client=client), pytest.raises(RegistryError) as caught:
            ask()
        assert name in caught.value.hint
        assert "NO_PROXY" in caught.value.hint
        assert "secret" not in str(caught.value)
        assert ("pip install socksio" in caught.value.hint) == proxy.startswith("socks5")
        assert os.environ[name] == proxy
        for excluded in _EXCLUDED:
            with subtests.test(client=client, excluded=excluded), monkeypatch.context() as patch:
                port = hub.address.rpartition(":")[2]
                patch.setenv("NO_PROXY", excluded.format(port=port))
                ask()


# What a hub says is checked field by field, and kept in a cache.


A, B = "a" * 40, "b" * 40


class Answers:
    """A client that gives one answer to everything."""

    def __init__(self, answer):
        self.answer, self.paths = answer, []

    def read(self, path, limit, subject, params=()):
        self.paths.append(path)
        if self.answer is None:
            raise MissingFileError("none")
        return self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()


def reader(answer):
    return HubReader(Answers(answer), "hf:")


def test_refs_with_other_names_or_commits_are_left_out():
    tags = [
        {"name": "v1", "targetCommit": A},
        {"name": "release/1", "targetCommit": B},
        *({"name": name, "targetCommit": A} for name in ("../x", "a b", "\x1b", 3, None, A * 9)),
        *({"name": f"w{n}", "targetCommit": c} for n, c in enumerate(("main", A[1:], "A" * 40, 3))),
    ]  # fmt: skip
    branches = [{"name": "main", "targetCommit": B}]
    refs = reader({"tags": tags, "branches": branches}).refs("a/b")
    assert refs.tags == {"v1": A, "release/1": B}
    assert (refs.head, refs.branches) == (B, {"main": B})
    assert reader({}).refs("a/b").head is None


def test_a_revision_is_one_segment_of_the_path():
    reading = reader({"sha": A})
    assert reading.commit_of("a/b", "refs/pr/1") == A
    assert reading.client.paths == ["/api/models/a/b/revision/refs%2Fpr%2F1"]
    for wrong in ({}, {"sha": None}, {"sha": "../x"}, {"sha": [A]}):
        with pytest.raises(RegistryError, match="malformed"):
            reader(wrong).commit_of("a/b", "main")


def test_a_listing_gives_sizes_and_hashes():
    items = [
        {"type": "file", "path": "small", "size": 3, "oid": A},
        {"type": "file", "path": "large", "size": 130, "oid": B,
         "lfs": {"oid": "c" * 64, "size": 9, "pointerSize": 130}},
        {"type": "directory", "path": "d", "oid": A},
    ]  # fmt: skip
    assert reader(items).listing("a/b", A) == {
        "small": Expected(3, 3, git_sha1=A),
        "large": Expected(9, 9, sha256="c" * 64),
    }


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(JSON, max_size=5), st.binary() | st.text('[]{},"\\ 1').map(str.encode))
def test_items_are_split_as_a_parser_splits_them(items, other):
    for indent in (None, 1):
        data = json.dumps(items, indent=indent, ensure_ascii=False).encode("utf-8", "replace")
        assert [json.loads(item) for item in split_items(data)] == json.loads(data)
    assert isinstance(split_items(other), list)


# What a hub said is kept in a cache.


def test_each_hub_has_its_own_folder(tmp_path):
    hosts = ("h.org", "h.org:8443", "h.org/x", "H.org", "[::1]", "a" * 300)
    bases = [f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts]
    folders = {HubCache(base).folder for base in bases}
    assert len(folders) == len(bases)
    assert {path.parent for path in folders} == {tmp_path / "cache" / "adapterhub" / "hubs"}
    assert all(len(path.name) < 100 and ":" not in path.name for path in folders)


def test_a_version_enters_complete_or_not_at_all():
    cache, digest = HubCache("https://h.org"), "0" * 64
    with pytest.raises(OutputError), cache.adding(digest) as staged:
        (staged / "file").write_bytes(b"half") and staged.write_bytes(b"")
    assert not cache.adapter(digest).exists()
    assert not list(cache.adapter(digest).parent.iterdir())
    for data in (b"first", b"second"):  # of two processes, the first wins
        with cache.adding(digest) as staged:
            (staged / "file").write_bytes(data)
    assert (cache.adapter(digest) / "file").read_bytes() == b"first"


def test_a_damaged_or_read_only_cache_is_as_empty(monkeypatch, tmp_path):
    cache = HubCache("https://h.org")
    cache.keep_refs("a/b", Refs(A))
    (file,) = (cache.folder / "names").iterdir()
    for text in ("", "{", "[]", '{"head": "../x", "branches": {}, "tags": {}, "yanked": {}}'):
        file.write_text(text)
        assert cache.refs("a/b") is None
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "plain"))
    HubCache("https://h.org").keep_refs("a/b", Refs(A))


# Writing to a hub: its errors, without its words where they repeat the token.


TOKEN = "hf_AbCdEfGhIjKl"


def writer(hub, token=TOKEN):
    return HubWriter(hub.address, token, "hf:")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(401, "", "adapterhub login http://127.0.0.1"), (404, "RepoNotFound", "you have no access"),
     (403, "", "lacks the permission"), (403, "GatedRepo", "gated"), (409, "", "another writer"),
     (412, "", "another writer"), (418, "", "repeats your token")],
)  # fmt: skip
def test_errors_are_explained(hub, monkeypatch, status, code, words):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    writer(hub, None).create("acme/a", private=False)
    assert set(hub.authorizations) == {None}  # no token is no token
    hub.attack = fake_hub.on("", fake_hub.echo(status, code))
    with pytest.raises(RegistryError) as caught:
        writer(hub).create_tag("acme/a", "v1", "a" * 40)
    assert words in str(caught.value)
    assert caught.value.__suppress_context__


# The metadata of a card: an entry is written to it and read back.


ENTRY = Entry(
    reference="hf:acme/polite@v2", name="acme/polite", version="v2", digest="0" * 64,
    backbone="acme/bert", fingerprint=f"bf16-{'1' * 64}", methods=("lora", "norms"), task="tagging",
    metrics={"f1": 0.5}, tags=("best",), size=9, parameters=8, license="mit", language=("en",),
    topics=("manners",), description="Short.",
)  # fmt: skip


def test_an_entry_is_read_back_from_its_card():
    data = card_data({"README.md": hub_card(b"# Polite\n", ENTRY)})
    assert entry_from_card(data, "acme/polite", "hf:") == ENTRY
    copy = entry_from_card(data, "other/copy", "https://h.org/")
    assert (copy.name, copy.reference) == ("other/copy", "https://h.org/other/copy@v2")


def test_the_writers_text_and_metadata_are_kept():
    card = b"---\ninference: false\ntags: [mine]\n---\n# Polite\n\nMy text.\n"
    written = hub_card(card, ENTRY)
    data = card_data({"README.md": written})
    assert b"# Polite\n\nMy text." in written
    assert (data["inference"], data["base_model"]) == (False, "acme/bert")
    assert (data["base_model_relation"], data["library_name"]) == ("adapter", "adapterhub")
    assert {"mine", "adapterhub", "lora", "norms"} <= set(data["tags"])
    (result,) = data["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "f1", "value": 0.5}]
    assert data["adapterhub"]["digest"] == ENTRY.digest
    assert hub_card(written, ENTRY) == written


VALID = {"version": "v1", "digest": "0" * 64, "methods": ["lora"]}


WRONG = (
    None, "text", {}, {"version": "v1", "digest": "0" * 64}, VALID | {"digest": "0"},
    *(VALID | {"version": version} for version in ("v1\x1b[2J", ["v1"], "../../x", "main")),
    *(VALID | {"size": size} for size in (-1, 2**70, "1e9")),
    *(VALID | {"parameters": number} for number in (True, -1)),
    *(VALID | {"metrics": metrics} for metrics in ({"f1": float("nan")}, {"f1": "high"}, [1])),
    VALID | {"digest": "../x"}, VALID | {"task": ["x"]}, VALID | {"methods": 3},
    VALID | {"backbone": "a b\x07"}, VALID | {"description": ["x"]}, VALID | {"tags": "best"},
)  # fmt: skip


def test_an_unreadable_card_gives_no_entry():
    assert entry_from_card({"adapterhub": VALID}, "a/b", "hf:") is not None
    assert entry_from_card(None, "a/b", "hf:") is None
    for section in WRONG:
        assert entry_from_card({"adapterhub": section}, "a/b", "hf:") is None, section
