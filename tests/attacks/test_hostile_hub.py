"""A hub that floods, drips, lies, redirects and echoes: one clear error, or no effect.

Every attack runs with a token that belongs to the hub, and with a second server that must never see
it. No file is written outside of the cache, and after the attack an honest pull works.
"""

import itertools
import json
import os
import shutil
import socket
import time
import traceback

import pytest
from huggingface_hub import constants

import adapterhub as ah
from adapterhub import errors as kinds
from adapterhub.backbones import hub_network
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.hub_network import Reach
from adapterhub.backbones.load import meta_model
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import read_table
from adapterhub.errors import BackboneError, FileError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry import hub_client
from adapterhub.registry.hub import HubStore
from adapterhub.registry.store import Publication, Query
from tests.kit import fake_hub, registries
from tests.kit.fake_hub import attacking, body, bomb, drip, echo, endless, flood, on, redirect
from tests.kit.selection import long_table

TOKEN = "hf_TheUsersOwnSecretToken0123"
TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user with a token for the hub, an empty cache, and a file of their own."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.02)))
    monkeypatch.setattr(hub_client, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(hub_client, "READ_SECONDS", 0.2)
    (tmp_path / "private.txt").write_text("my diary")
    return tmp_path


@pytest.fixture
def other():
    """A second server, which answers everything."""
    with attacking() as server:
        yield server


@pytest.fixture
def hub(home, monkeypatch):
    """The hostile hub; `acme/polite` is honest until `hub.attack` is set."""
    with attacking() as server:
        monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{server.address}={TOKEN}")
        monkeypatch.setenv("HF_TOKEN", "hf_AnotherTokenOfTheSameUser")
        server.repositories["acme/polite"] = repository(home / "data" / "made")
        server.reference = f"{server.address}/acme/polite@v1"
        yield server


def repository(folder, seed=0):
    """Return a repository with one version of a sample adapter."""
    registries.write_sample(folder, seed)
    made = fake_hub.Repository()
    made.tags["v1"] = made.commit({path.name: path.read_bytes() for path in folder.iterdir()})
    return made


def outside(home):
    """Return the files outside of the cache, with their contents."""
    ignored = {home / "cache", home / "data"}
    paths = [p for p in home.rglob("*") if p.is_file() and not ignored & {*p.parents}]
    return {path: path.read_bytes() for path in paths}


def refused(action, home, *, seconds=10.0, errors=(RegistryError, FileError)):
    """Check that an action gives one clear error and writes nothing; return its text."""
    before, start = outside(home), time.monotonic()
    with pytest.raises(errors) as caught:
        action()
    assert time.monotonic() - start < seconds
    assert outside(home) == before
    assert not [*home.glob("cache/adapterhub/hubs/*/adapters/*")]
    text = str(caught.value)
    assert text.isprintable() or "\n" in text
    assert "\x1b" not in text
    whole = "".join(traceback.format_exception(caught.value))
    for secret in (TOKEN, TOKEN[::-1], TOKEN.encode().hex(), os.environ["HF_TOKEN"]):
        assert secret not in whole
    return text


REFS, YANKED = r"/refs$", r"/yanked\.json$"
MANIFEST, TENSORS, CARD = r"/adapter\.json$", r"/adapter\.safetensors$", r"/README\.md$"
SMALL = {"refs": REFS, "yanked": YANKED, "manifest": MANIFEST, "card": CARD}
EVERY = {**SMALL, "tensors": TENSORS}
HEAD = b"HTTP/1.1 200 OK\r\n"
MANY_REFS = {
    "tags": [{"name": f"v{n}", "targetCommit": "a" * 40} for n in range(1, 150_000)],
    "branches": [],
}
NESTED = b'{"tags": ' + b"[" * 200 + b"]" * 200 + b"}"

ATTACKS = {
    **{f"flood: {name}": on(path, flood) for name, path in EVERY.items()},
    **{f"size: {k}": on(path, fake_hub.claimed(10**15)) for k, path in EVERY.items()},
    **{f"bomb: {k}": on(path, bomb(8 << 20)) for k, path in EVERY.items()},
    "flood: header": on(REFS, endless(b"X" * 4096)),
    "flood: headers": on(REFS, lambda h: (h.raw(HEAD), endless(b"X-A: 1\r\n" * 99)(h))),
    "flood: informational": on(REFS, endless(b"HTTP/1.1 100 Continue\r\n\r\n")),
    "flood: refs": on(REFS, body(MANY_REFS)),
    "bomb: br": on(REFS, bomb(1 << 20, "br")),
    "drip: status": on(REFS, drip(b"HTTP/1.1 2")),
    "drip: header": on(REFS, drip(HEAD + b"X-A: ")),
    "drip: chunk": on(TENSORS, drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n000000")),
    "silence": on(MANIFEST, fake_hub.silence),
    "not HTTP": on(REFS, lambda handler: handler.raw(b"\x00\x01 SSH-2.0\r\n\r\n")),
    "two lengths": on(
        REFS, lambda h: h.raw(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}")
    ),
    "JSON: levels": on(REFS, body(NESTED)),
    "JSON: twice": on(REFS, body(b'{"tags": [], "tags": []}')),
    "JSON: NaN": on(REFS, body(b'{"tags": NaN}')),
    "JSON: cut": on(REFS, body(b'{"tags": [')),
    "JSON: list": on(REFS, body(b"[]")),
    "JSON: bytes": on(REFS, body(b"\xff\xfe{}")),
    "JSON: integer": on(REFS, body(b'{"tags": ' + b"9" * 5000 + b"}")),
    "JSON: yanked": on(YANKED, body({"v1": [1]})),
    **{
        f"lie: commit {commit}": fake_hub.either(
            on(REFS, body(refs)),
            on("/revision/", body({"sha": commit})),
        )
        for commit, refs in (
            ("../../../etc", {"tags": [{"name": "v1", "targetCommit": "../../../etc"}]}),
            ("A" * 40, {"tags": {"v1": "a" * 40}, "branches": 3}),
            (3, {"tags": [3, None, {}, {"name": 3, "targetCommit": []}]}),
        )
    },
    "lie: manifest": on(MANIFEST, body({"schema_version": 1})),
    "lie: tensors": on(TENSORS, body(b"\x00" * 120)),
    "lie: empty": on(TENSORS, body(b"")),
    "lie: part": on(TENSORS, lambda handler: handler.head({}, "206 Partial Content")),
    "redirect: loop": on(REFS, redirect(lambda handler: handler.path)),
    "redirect: http": on(TENSORS, redirect("http://example.org/x")),
    "redirect: file": on(TENSORS, redirect("file:///etc/passwd")),
    "redirect: user": on(TENSORS, redirect("https://me:pw@example.org/x")),
    "redirect: port": on(TENSORS, redirect("https://example.org:99999999/x")),
    "redirect: bracket": on(TENSORS, redirect("https://[::1/x")),
    "redirect: escape": on(TENSORS, redirect("https://example.org/\x1b[2J")),
    "redirect: nowhere": on(TENSORS, lambda handler: handler.head({}, "302 Found")),
    "echo: yanked": on(YANKED, body({"v1": f"withdrawn {TOKEN}"})),
    **{f"echo: {n}": on(MANIFEST, echo(n)) for n in (400, 401, 403, 404, 418, 500)},
    **{
        f"echo: {code}": on(MANIFEST, echo(404, code))
        for code in ("RepoNotFound", "RevisionNotFound", "GatedRepo")
    },
}


@long_table("name", ATTACKS, nightly=2)
def test_an_attack_is_one_clear_error_and_leaves_nothing(hub, home, name):
    hub.attack = ATTACKS[name]
    refused(lambda: ah.pull(hub.reference, home / "mine"), home)
    hub.attack = None
    assert Saved.at(ah.pull(hub.reference, home / "mine")).read()


@pytest.mark.parametrize(
    "headers",
    [
        {
            "ETag": '"../../../../../private.txt"',
            "X-Linked-ETag": "../../x",
            "X-Repo-Commit": "../../../../x",
            "Content-Disposition": 'attachment; filename="../../x"',
            "Set-Cookie": "token=x; Domain=.0.0.1",
        },
        {
            "ETag": '"/etc/passwd"',
            "X-Repo-Commit": "C:\\x",
            "X-Xet-Hash": "../../x",
            "X-Xet-Refresh-Route": "http://example.org/",
            "X-HF-Warning": "topic; \x1b[2J you are hacked",
            "Retry-After": "100000",
        },
    ],
)
def test_headers_have_no_effect(hub, home, headers, capfd):
    hub.attack = fake_hub.honest_but(**{k.replace("-", "_"): v for k, v in headers.items()})
    before = outside(home)
    copy = ah.pull(hub.reference, home / "mine")
    assert Saved.at(copy).read()
    assert outside(home).keys() - before.keys() == {path for path in copy.iterdir()}
    assert "hacked" not in capfd.readouterr().err


@long_table("file", EVERY, parts=2)
def test_a_redirect_elsewhere_has_no_token_and_may_not_lead_back(hub, home, other, file):
    other.repositories = hub.repositories
    hub.attack = on(EVERY[file], redirect(lambda h: f"{other.address}{h.path}"))
    assert Saved.at(ah.pull(hub.reference, home / "mine")).read()
    assert other.requests
    assert set(other.authorizations) == {None}
    assert set(hub.authorizations) == {f"Bearer {TOKEN}"}
    shutil.rmtree(home / "cache")
    hub.authorizations.clear()
    there_and_back = redirect(lambda h: f"{hub.address}{h.path}")
    other.attack = on(EVERY[file], there_and_back)
    hub.attack = lambda h: (
        "Authorization" in h.headers
        and on(EVERY[file], redirect(lambda h: f"{other.address}{h.path}"))(h)
    )
    assert Saved.at(ah.pull(hub.reference, home / "again")).read()
    assert hub.authorizations.count(None) == 1


@pytest.mark.parametrize("host", ["127.0.0.2", "private.test", "[::ffff:7f00:2]", "localhost"])
def test_a_hub_on_the_internet_cannot_lead_into_the_own_network(hub, home, monkeypatch, host):
    """The hub's own address counts as public here, and 127.0.0.2 as private."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *args, **options: resolve(
            "127.0.0.2" if name == "private.test" else name, *args, **options
        ),
    )
    reaches = {"127.0.0.1": Reach.PUBLIC, "127.0.0.2": Reach.PRIVATE}
    honest = hub_network.reach_of
    monkeypatch.setattr(hub_network, "reach_of", lambda host: reaches.get(host, honest(host)))
    with attacking("127.0.0.2") as inner:
        inner.attack = on("", body(b"{}"))
        for file in EVERY.values():
            target = f"https://{host}:{inner.port}/secret"
            hub.attack = on(file, redirect(target))
            text = refused(lambda: ah.pull(hub.reference, home / "mine"), home)
            assert "private network" in text
        assert inner.requests == []


def test_tokens_belong_to_origins(hub, home, other, monkeypatch):
    other.repositories = hub.repositories
    ah.pull(f"{other.address}/acme/polite@v1")
    assert set(other.authorizations) == {None}
    ah.pull(hub.reference)
    assert set(hub.authorizations) == {f"Bearer {TOKEN}"}
    monkeypatch.delenv("ADAPTERHUB_TOKENS")
    monkeypatch.setattr(constants, "ENDPOINT", other.address)
    other.authorizations.clear()
    ah.search(hub=other.address)
    ah.search(hub=True)
    assert set(other.authorizations) == {f"Bearer {os.environ['HF_TOKEN']}"}
    hub.authorizations.clear()
    ah.search(hub=hub.address)
    assert set(hub.authorizations) == {None}


def test_a_stranger_cannot_fill_the_cache_of_another_hub(hub, home, other):
    """The other hub serves other bytes, under the same names and commits."""
    theirs = repository(home / "data" / "theirs", seed=7)
    oid = hub.repositories["acme/polite"].tags["v1"]
    theirs.commits, theirs.tags = [(oid, theirs.commits[0][1])], {"v1": oid}
    other.repositories["acme/polite"] = theirs
    ours = ah.pull(f"{hub.address}/acme/polite@{oid}", home / "ours")
    foreign = ah.pull(f"{other.address}/acme/polite@{oid}", home / "theirs")
    shutil.rmtree(home / "ours")
    again = ah.pull(f"{hub.address}/acme/polite@{oid}", home / "again")
    name = "adapter.json"
    assert ours.name == "ours"
    honest = hub.repositories["acme/polite"].commits[0][1]
    assert (again / name).read_bytes() == honest[name] != (foreign / name).read_bytes()


@pytest.mark.parametrize("when", [REFS, YANKED, MANIFEST, TENSORS, CARD])
def test_a_tag_that_moves_during_a_pull_does_not_poison_the_cache(hub, home, when):
    honest = hub.repositories["acme/polite"]
    files = {name: data for name, data in honest.commits[0][1].items()}
    theirs = repository(home / "data" / "theirs", seed=7).commits[0][1]
    requests = iter(range(100))

    def move(handler):
        """Exchange the tag, and also what its commit contains, when the file is requested."""
        if on(when, lambda h: None)(handler) and next(requests) == 0:
            honest.commits = [(honest.commits[0][0], theirs)]
        return False

    hub.attack = move
    if when == TENSORS:
        with pytest.raises(FileError, match="not what was published"):
            ah.pull(hub.reference, home / "mine")
    else:  # all before or all after
        got = ah.pull(hub.reference, home / "mine")
        expected = files if when == CARD else theirs
        assert (got / "adapter.json").read_bytes() == expected["adapter.json"]
        assert Saved.at(got).read()
        shutil.rmtree(got)
    hub.attack = None
    honest.commits = [(honest.commits[0][0], files)]
    got = ah.pull(hub.reference, home / "mine")
    assert (got / "adapter.json").read_bytes() == files["adapter.json"]


def test_the_number_of_requests_is_bounded_whatever_a_hub_has(hub, home):
    made = hub.repositories["acme/polite"]
    made.tags |= {f"v{number}": made.tags["v1"] for number in range(2, 2000)}
    for reference in (hub.reference, f"{hub.address}/acme/polite"):
        hub.requests.clear()
        ah.pull(reference)
        assert len(hub.requests) <= 6
    hub.requests.clear()
    with pytest.warns(UserWarning, match="1899 older versions"):
        assert len(HubStore(hub.address).versions("acme/polite")) == 100
    assert len(hub.requests) <= 103
    hub.requests.clear()
    items = [{"id": f"evil/a{number}", "siblings": []} for number in range(1000)]
    hub.attack = on("^/api/models[?]", body(items))
    with pytest.warns(UserWarning, match="900 more repositories match"):
        assert HubStore(hub.address).search(Query()) == []
    assert len(hub.requests) <= 101


FOREIGN = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": b"x" * 99}


def listed(**changes):
    """Return the listing of another library's adapter, with changes to each item."""
    items = [
        {"type": "file", "path": path, "size": len(data), "oid": fake_hub.git_sha1(data)}
        for path, data in FOREIGN.items()
    ]
    return [{**item, **changes} for item in items]


LISTINGS = {
    "flood": flood,
    "size": body(listed(size=98)),
    "huge": body(listed(size=1 << 60)),
    "no room": body(listed(size=60 << 30)),
    "hash": body(listed(oid="0" * 40)),
    "no hash": body(listed(oid="../../x")),
    "lfs": body(listed(lfs={"oid": "0" * 64, "size": 99})),
    "lfs list": body(listed(lfs=[1], oid=None)),
    "names": body(
        [{**listed()[0], "path": p} for p in ("../x", "/etc/x", "con", "a\x1b", "a:b", 3, None)]
    ),
    "folder": body(listed(type="directory")),
}


@long_table("name", LISTINGS, parts=4)
def test_the_listing_of_another_librarys_adapter_is_not_trusted(hub, home, name, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 1 << 30)
    )
    theirs = hub.repositories["acme/theirs"] = fake_hub.Repository()
    theirs.commit(FOREIGN)
    hub.attack = on("/tree/", LISTINGS[name])
    errors = (RegistryError, FileError, kinds.OutputError)
    refused(lambda: ah.pull(f"{hub.address}/acme/theirs", home / "mine"), home, errors=errors)
    hub.attack = None
    copy = ah.pull(f"{hub.address}/acme/theirs", home / "mine")
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == FOREIGN


def test_a_search_survives_what_anyone_can_publish(hub, home):
    (good,) = [e for e in HubStore(hub.address).versions("acme/polite")]
    card = {"tags": ["adapterhub"], "adapterhub": {"version": "v1", "digest": good.digest,
            "methods": ["lora"], "backbone": good.backbone,
            "fingerprint": good.fingerprint}}  # fmt: skip
    item = {"id": "acme/polite", "cardData": card, "siblings": []}
    broken = [
        {**item, "id": name} for name in ("../x", "acme/..", "acme/a\x1b[2J", 3, "a" * 500, None)
    ]
    sections = [{"version": v, "digest": d, "methods": m} for v, d, m in (
        ("../../x", good.digest, []), ("v1", "../../x", []), ("v1", good.digest, 7),
        ("v1\x1b[2J", good.digest, []), (["v1"], {}, {}))]  # fmt: skip
    broken += [{**item, "id": "evil/a", "cardData": {"adapterhub": s}} for s in sections]
    texts = [json.dumps(entry).encode() for entry in [*broken, item]]
    texts += [b"[" * 5000 + b"]" * 5000, b'{"id": NaN}', b"9" * 6000, b'{"id": "\\ud800/x"}']
    hub.attack = on("^/api/models[?]", body(b"[" + b", ".join(texts) + b"]"))
    found = HubStore(hub.address).search(Query())
    assert [entry.reference for entry in found] == [f"{hub.address}/acme/polite@v1"]
    hub.attack = on("^/api/models[?]", flood)
    refused(lambda: HubStore(hub.address).search(Query()), home, seconds=20)


WRITES = {"create": "/api/repos/create", "preupload": "/preupload/", "commit": "/commit/",
          "tag": "/tag/"}  # fmt: skip


@pytest.fixture
def made(home):
    return registries.write_sample(home / "data" / "new", seed=3)


def push(hub, made):
    return HubStore(hub.address).put(made, Publication("acme/new"))


@long_table(("status", "write"), itertools.product([302, 307, 308], WRITES), parts=3)
def test_a_redirected_push_takes_no_token_elsewhere(hub, home, other, made, write, status):
    hub.attack = on(WRITES[write], redirect(lambda h: f"{other.address}{h.path}", status), "POST")
    refused(lambda: push(hub, made), home)
    assert set(other.authorizations) <= {None}


ANSWERS = {
    "echo 400": echo(400),
    "echo 403": echo(403),
    "flood": flood,
    "bomb": bomb(8 << 20),
    "huge": fake_hub.claimed(10**15),
    "levels": body(b"[" * 100_000),
    "names": body({"commitUrl": "../../x", "commitOid": "../../x", "url": "../../x"}),
    "http": redirect("http://example.org/x", 307),
    "file": redirect("file:///etc/passwd", 307),
}


@long_table(("answer", "write"), itertools.product(ANSWERS, ["create", "preupload", "commit"]))
def test_a_hostile_answer_to_a_push_is_one_error(hub, home, made, write, answer, capfd):
    hub.attack = on(WRITES[write], ANSWERS[answer], "POST")
    refused(lambda: push(hub, made), home)
    printed = capfd.readouterr()
    assert TOKEN not in printed.err + printed.out


@pytest.fixture
def endpoint(hub, home, monkeypatch):
    """The hostile hub as `$HF_ENDPOINT`, with a tiny backbone."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + TEMPLATE)
    hub.repositories["acme/bert"] = fake_hub.Repository()
    hub.repositories["acme/bert"].commit({"config.json": b"{}", "model.safetensors": b"weights"})
    return hub


def only_head(attack):
    return lambda handler: handler.command == "HEAD" and attack(handler)


def info(sha="a" * 40, name="config.json"):
    return {"id": "acme/bert", "sha": sha, "siblings": [{"rfilename": name}], "private": False,
            "tags": [], "downloads": 0, "likes": 0, "_id": "x", "modelId": "x"}  # fmt: skip


def tree_of(path="config.json", **more):
    return [{"type": "file", "path": path, "size": 2, "oid": "a" * 40, **more}]


INFO = r"/api/models/acme/bert(/revision/[^/]+)?$"
ETAGS = ('"../../../../../victim.pth"', '"{home}/private.txt"', '"a\\..\\x"', "a" * 999)
COMMITS = ("../../../../victim", "{home}/victim", "main", "a" * 41, "A" * 40)
NAMES = (
    "../../../../victim", "/etc/x", "a/../../../b", "C:\\x", "a:b", "a\x1bb", ".", "", "a//b", 3
)  # fmt: skip

BACKBONES = {
    **{
        f"{header}: {value:.30}": only_head(fake_hub.honest_but(**{header: value}))
        for header in ("ETag", "X_Linked_ETag")
        for value in ETAGS
    },
    **{f"commit: {v}": only_head(fake_hub.honest_but(X_Repo_Commit=v)) for v in COMMITS},
    **{f"sha: {v}": on(INFO, body(info(sha=v))) for v in (*COMMITS, 3)},
    **{f"name: {v}": on("/tree/", body(tree_of(v))) for v in NAMES},
    "sibling": on(INFO, body(info(name="../x"))),
    "lfs": on("/tree/", body(tree_of(lfs={"oid": "../x", "size": 1, "pointerSize": 1}))),
    "xet": on("/tree/", body(tree_of(xetHash="../x"))),
    "flood": on("/tree/", flood),
    "bomb": on("/tree/", bomb(80 << 20)),
    "levels": on("/tree/", body(b"[" * 100_000)),
    "file URL": only_head(on("config", redirect("file:///etc/passwd"))),
    "http": only_head(on("config", redirect("http://example.org/x"))),
    "next page": on("/tree/", body(tree_of(), Link='<https://h.org/x>; rel="next"')),
}


@long_table("name", BACKBONES)
def test_a_hostile_endpoint_writes_and_reads_nothing_elsewhere(endpoint, home, name, monkeypatch):
    send = fake_hub.Handler.send
    monkeypatch.setattr(
        fake_hub.Handler,
        "send",
        lambda self, status, data, headers: send(
            self, status, data, {k: v.replace("{home}", str(home)) for k, v in headers.items()}
        ),
    )
    endpoint.attack = BACKBONES[name]
    if name.startswith(("ETag", "X_")):  # a configuration alone is guarded, too
        refused(lambda: meta_model("acme/bert"), home, errors=BackboneError)
    text = refused(lambda: find_backbone("acme/bert"), home, seconds=20, errors=BackboneError)
    assert "the hub's answer is refused" in text
    endpoint.attack = None
    folder, _ = find_backbone("acme/bert")
    assert (folder / "config.json").read_bytes() == b"{}"


BROKEN = {
    "not HTTP": on("", lambda handler: handler.raw(b"\x00\x01 SSH-2.0\r\n\r\n")),
    "headers": on("", endless(b"X" * 4096)),
    "drip": on("", drip(HEAD + b"X-A: ")),
    "informational": on("", endless(b"HTTP/1.1 100 Continue\r\n\r\n", 0.01)),
    "loop": on("", redirect(lambda handler: handler.path)),
    **{f"echo {n}": on("", echo(n)) for n in (400, 401, 403, 404, 500)},
    **{
        f"echo {code}": on("", echo(404, code))
        for code in ("RepoNotFound", "RevisionNotFound", "GatedRepo", "EntryNotFound")
    },
}


@long_table("name", BROKEN, parts=4)
def test_a_broken_endpoint_is_one_error(endpoint, home, name, monkeypatch):
    monkeypatch.setattr(hub_network, "HEADER_SECONDS", 0.1)
    endpoint.attack = BROKEN[name]
    for find in (find_backbone, meta_model):
        refused(lambda find=find: find("acme/bert"), home, seconds=20, errors=BackboneError)


def test_a_dataset_is_guarded_too(hub, monkeypatch):
    import datasets

    def load(name, subset, split):
        assert hub_network._active
        raise OSError("no such dataset")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(kinds.DataError, match="no such dataset"):
        read_table("acme/reviews", DataOptions(train="acme/reviews"), "train")
    assert not hub_network._active


def test_an_api_answer_from_another_server_is_checked_too(endpoint, home, other):
    other.attack = on("", body(info(sha="../../../../victim")))
    endpoint.attack = on("/api/models", redirect(f"{other.address}/x"))
    refused(lambda: find_backbone("acme/bert"), home, errors=BackboneError)
    assert set(other.authorizations) == {None}


def test_the_tokens_of_xet_are_requested_from_the_hub_only(endpoint, home, other):
    xet = {"X_Xet_Hash": "a" * 64, "X_Xet_Refresh_Route": f"{other.address}/token"}
    endpoint.attack = only_head(fake_hub.honest_but(**xet))
    folder, _ = find_backbone("acme/bert")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert other.requests == []


PAGES = {
    "HTML": b"<!DOCTYPE html><title>Log in to the network</title>",
    "nothing": b"",
    "a text": b"OK",
    "a list that is cut": b'[{"id": "acme/polite"}',
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_no_empty_hub(hub, home, page, adapterhub):
    hub.attack = on("/api/models", body(PAGES[page]))
    code, out, err = adapterhub("list", "--endpoint", hub.address)
    assert (code, out) == (2, "")
    assert "the hub's answer is malformed" in err
    hub.attack = on("/api/models", body(b" []\n"))
    code, _, err = adapterhub("list", "--endpoint", hub.address)
    assert code == 0
    assert "no matching adapter" in err


@long_table("name", EVERY, parts=2)
def test_a_body_that_drips_takes_one_limit(hub, home, name):
    requests = []
    slow = drip(HEAD + b"Content-Length: 100000\r\n\r\n")
    hub.attack = on(EVERY[name], lambda handler: (requests.append(handler.path), slow(handler)))
    if name == "yanked":  # read only if there is a version
        hub.repositories["acme/polite"].tags["v2"] = hub.repositories["acme/polite"].tags["v1"]
    with pytest.raises(RegistryError, match="too slow"):
        ah.pull(hub.reference)
    assert len(requests) == 1


def test_redirects_share_one_limit(hub):
    requests = []

    def late(handler):
        requests.append(handler.path)
        handler.hub.stopped.wait(0.2)
        redirect(handler.path + "/a/refs")(handler)

    hub.attack = on("refs", late)
    with pytest.raises(RegistryError, match=r"too slow|redirects"):
        ah.pull(hub.reference)
    assert len(requests) <= 3  # of six, in half a second
