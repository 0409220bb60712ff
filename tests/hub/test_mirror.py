"""A mirror before another hub of ours, the fake hub and the hostile one: cut, slow, lying, busy."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from filelock import FileLock
from huggingface_hub import HfApi, snapshot_download
from sqlalchemy import select, update

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.files.native import MANIFEST_FILE
from adapterhub.hub import mirror as mirror_module
from adapterhub.hub import mirror_client as upstream_module
from adapterhub.hub import mirror_store as copies_module
from adapterhub.hub.backups import backup_hub
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.database import KEEPING, grants, now_text
from adapterhub.hub.gc import collect, verify_hub
from adapterhub.hub.mirror import Mirror
from adapterhub.hub.server import HubApp, serve_hub
from adapterhub.hub.state import HubOptions, create_hub, open_hub
from adapterhub.registry import hub_client
from adapterhub.registry.hub import HubStore
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.store import Publication
from adapterhub.web.errors import UpstreamError
from tests.kit import fake_hub, real_hub, registries
from tests.kit.real_hub import answered, commit, create, digest, head
from tests.kit.session import wait_until

pytestmark = pytest.mark.usefixtures("online")
CARD, LARGE = b"# A card\n", b"0123456789abcdef" * (100 << 10)
FILES = {"README.md": CARD, "in/large.txt": LARGE}
INFO, FILE = "/api/models/acme/x", "/acme/x/resolve/main/README.md"


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """Ask again at once."""
    monkeypatch.setattr(hub_client, "_WAITS", (0.0,))
    for name in ("REFS_SECONDS", "_QUIET_SECONDS"):
        monkeypatch.setattr(copies_module, name, 0.0)
    for name in ("RETRY_SECONDS", "_ABSENT_SECONDS"):
        monkeypatch.setattr(mirror_module, name, 0.0)


def fails(status, **headers):
    """Answer with a status alone."""
    return lambda handler: handler.head(headers, status)


@contextmanager
def impatient():
    """Wait shortly for an upstream that may be slow; an honest one has as long as ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_client, "GRACE_SECONDS", 0.5)
        patch.setattr(hub_client, "READ_SECONDS", 0.3)
        patch.setattr(upstream_module, "ASK_SECONDS", 0.5)
        yield


@pytest.fixture
def fake():
    """An upstream that counts, and attacks where a test says so."""
    with fake_hub.attacking() as hub:
        hub.repositories["acme/x"] = fake_hub.Repository()
        hub.repositories["acme/x"].commit(FILES)
        yield hub


@pytest.fixture
def mirroring(tmp_path):
    """Run mirrors of an upstream, each with a user bob."""
    with ExitStack() as stack:

        def start(upstream, name="mirror", **options):
            place = tmp_path / name
            running = stack.enter_context(real_hub.serving(place, upstream=upstream, **options))
            running.user("bob", "admin", is_admin=True)
            return running

        yield start


@pytest.fixture
def bob(fake, mirroring):
    """A client of a mirror of the fake hub."""
    running = mirroring(fake.address)
    client = running.as_user("bob")
    client.running = running
    return client


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An upstream and a mirror of it, for tests of one repository each."""
    place = tmp_path_factory.mktemp("pair") / "mirror"
    with fake_hub.attacking() as fake, real_hub.serving(place, upstream=fake.address) as running:
        running.user("bob", "admin", is_admin=True)
        client = running.as_user("bob")
        client.running = running
        yield fake, client


@pytest.fixture
def shared(pair):
    """The two, and the name and the card of a repository that only the upstream has."""
    fake, client = pair
    number = len(fake.repositories)
    name, card = f"acme/x{number}", b"# %06d\n" % number
    fake.repositories[name] = fake_hub.Repository()
    fake.repositories[name].commit({"README.md": card})
    fake.attack = None
    return fake, client, name, card


def asked(fake, path):
    return [line for line in fake.requests if path in line]


def left_over(running):
    """Return what is being received, and the files that are kept."""
    return [*running.hub.blobs.incoming.iterdir()], [*running.hub.blobs.all()]


def is_kept(client, data):
    """Return whether a file is kept, and nothing beside it that was not received whole."""
    incoming, kept = left_over(client.running)
    assert not incoming
    return digest(data) in kept


def test_stock_clients_and_ours_get_what_the_upstream_has_and_keep_it(
    tmp_path, mirroring, monkeypatch
):
    def download(cache):
        options = {"endpoint": running.address, "token": running.tokens["bob"], "cache_dir": cache}
        return Path(snapshot_download("acme/polite", **options))

    with real_hub.serving(tmp_path / "up", open_reading=True) as up:
        up.org("acme")
        up.user("wil", acme="write")
        registries.write_sample(tmp_path / "made", 1, card="# Polite\n")
        publication = Publication("acme/polite", tags=("best",))
        put = HubStore(up.address, token=up.tokens["wil"]).put(tmp_path / "made", publication)
        running = mirroring(up.address)
        with up.client("wil") as wil, running.client("bob") as client:
            tagged = head(wil, "acme/polite")
            commit(wil, "acme/polite", {"in/large.txt": LARGE})
            oid = head(wil, "acme/polite")
            create(wil, "acme/rows", type="dataset")
            url = "/api/datasets/acme/rows/commit/main"
            assert (
                wil.post(url, content=real_hub.commit_lines({"a b.csv": b"a,b\n"})).status_code
                == 200
            )
            assert client.get("/datasets/acme/rows/resolve/main/a%20b.csv").content == b"a,b\n"
            assert client.get("/api/models/acme/rows").status_code == 404
        api = HfApi(endpoint=running.address, token=running.tokens["bob"])
        there = HfApi(endpoint=up.address, token=False)
        info, expected = api.model_info("acme/polite"), there.model_info("acme/polite")
        assert (info.sha, info.tags, info.siblings) == (oid, expected.tags, expected.siblings)
        for method in ("list_repo_refs", "list_repo_files"):
            assert getattr(api, method)("acme/polite") == getattr(there, method)("acme/polite")
        trees = [[*a.list_repo_tree("acme/polite", recursive=True)] for a in (api, there)]
        assert trees[0] == trees[1]
        first = download(tmp_path / "first")
        assert (first / "in/large.txt").read_bytes() == LARGE
        monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{running.address}={running.tokens['bob']}")
        pulled = ah.pull(f"{running.address}/acme/polite@best", backbone=None)
        assert digest((Path(pulled) / MANIFEST_FILE).read_bytes()) == put.digest
        commit(up.as_user("wil"), "acme/polite", {"later.md": b"later"})
    # The upstream is cut: what was asked for is here, also for a client with an empty cache.
    place = download(tmp_path / "second")
    assert place.name == first.name == oid
    files = [path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file()]
    assert len(files) >= 5
    assert all((place / each).read_bytes() == (first / each).read_bytes() for each in files)
    assert api.model_info("acme/polite", revision="best").sha == tagged
    with pytest.raises(Exception, match="503"):
        api.model_info("acme/other")
    for page in ("/acme/polite", "/acme/polite/tree/main", f"/acme/polite/commit/{oid}"):
        assert running.as_user("bob").get(page).status_code == 200


@pytest.mark.parametrize(
    ("at", "attack", "status", "words"),
    [
        ("revision", fake_hub.body(b"<html>log in"), 502, ""),
        ("revision", fails("429 Too Many Requests", **{"Retry-After": "1"}), 503, ""),
        ("revision", fake_hub.silence, 503, ""),
        ("revision", fake_hub.claimed(10_000), 503, ""),
        ("revision", fake_hub.flood, 502, ""),
        ("revision", fake_hub.body({"sha": "../../etc"}), 502, ""),
        ("revision", fake_hub.body({"sha": "0" * 40, "siblings": []}), 502, ""),
        ("revision", fake_hub.redirect("http://192.168.0.1/"), 502, ""),
        ("revision", fake_hub.echo(404, "RepoNotFound"), 404, ""),
        ("revision", fake_hub.echo(403, "GatedRepo"), 403, ""),
        ("resolve", fake_hub.body(b"0" * len(CARD)), 502, "git's sha1"),
        ("resolve", fake_hub.body(CARD[:-1]), 502, "size"),
        ("resolve", fake_hub.body(CARD + b"more"), 502, "more than"),
        ("resolve", fails("404 Gone"), 502, "does not give it"),
        ("resolve", fake_hub.silence, 503, "upstream fails"),
        ("resolve", fake_hub.echo(403, "GatedRepo"), 403, "--upstream-token"),
    ],
)
def test_what_an_upstream_answers_wrongly_is_told_and_not_kept(shared, at, attack, status, words):
    """About a repository, or as the contents of a file."""
    fake, bob, name, card = shared
    file = FILE.replace("acme/x", name)
    path = file if at == "resolve" else f"/api/models/{name}"
    fake.attack = fake_hub.on(f"/{at}/", attack)
    began = time.monotonic()
    # An upstream that answers may do so late where the machine does other things.
    with impatient() if status == 503 else nullcontext():
        answer = bob.get(path)
    assert (answer.status_code, time.monotonic() - began < 10) == (status, True), answer.text
    assert words in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)
    assert "\x1b" not in answer.text
    if at == "revision" and status in (502, 503):
        assert name in answer.json()["error"]
        assert "x-error-code" not in answer.headers
    assert not is_kept(bob, card)
    fake.attack = None
    assert bob.get(f"/api/models/{name}").json()["sha"] == fake.repositories[name].commits[-1][0]
    assert bob.get(file).content == card
    assert is_kept(bob, card)


def test_a_download_needs_room_and_goes_on_where_it_was_cut(fake, bob, monkeypatch):
    bob.head(FILE)
    path = "/acme/x/resolve/main/in/large.txt"
    with monkeypatch.context() as patch:
        patch.setattr("adapterhub.hub.blobs._FREE_BYTES", 1 << 60)
        assert bob.get(path).status_code == 507
        assert not asked(fake, "large.txt")
    fake.cut_after = 1_200_000
    assert bob.get(path).content == LARGE
    assert fake.resumed_at == [1_200_000]


def test_one_download_serves_all_who_ask(fake, bob):
    bob.get(INFO)
    path = "/acme/x/resolve/main/in/large.txt"
    fake.attack = delayed(fake_hub.on("large", lambda handler: time.sleep(0.3)))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: bob.get(path).content, range(8)))
    assert found == [LARGE] * 8
    assert bob.get(path, headers={"range": "bytes=5-9"}).content == LARGE[5:10]
    assert len(asked(fake, "large.txt")) == 1


def delayed(attack):
    """Answer late, and honestly."""

    def act(handler):
        attack(handler)
        return False

    return act


def test_a_slow_upstream_stops_nobody_else(fake, bob):
    create(bob, "bob/own")
    bob.get(INFO)
    fake.attack = fake_hub.on("/resolve/", fake_hub.silence)
    with ThreadPoolExecutor(60) as pool:
        for _ in range(60):
            pool.submit(bob.get, FILE)
        wait_until(lambda: asked(fake, "/resolve/"))
        began = time.monotonic()
        assert bob.get("/api/models/bob/own").status_code == 200
        assert time.monotonic() - began < hub_client.READ_SECONDS
        fake.stopped.set()


def test_what_is_kept_is_served_while_news_fail_and_news_come_whole(fake, bob):
    repository = fake.repositories["acme/x"]
    first = bob.get(INFO).json()["sha"]
    second = repository.commit({"README.md": b"# New\n"})
    fake.attack = fake_hub.on("/revision/", lambda handler: handler.head({}, "503 Busy"))
    assert bob.head(FILE).headers["x-repo-commit"] == first
    assert bob.get(f"{INFO}/refs").json()["branches"][0]["targetCommit"] == first
    fake.attack = fake_hub.on("", lambda handler: handler.head({}, "429 Slow down"))
    assert bob.get(FILE).content == CARD
    fake.attack = fake_hub.on("", fake_hub.echo(404, "RepoNotFound"))  # it was deleted there
    assert bob.get(FILE).content == CARD
    fake.attack = None
    assert bob.head(FILE).headers["x-repo-commit"] == second
    assert bob.get(FILE).content == b"# New\n"
    assert bob.get(FILE.replace("main", first)).content == CARD
    repository.tags["v1"] = first
    assert bob.get(f"{INFO}/revision/v1").json()["sha"] == first
    del repository.tags["v1"]
    assert bob.get(f"{INFO}/revision/v1").headers["x-error-code"] == "RevisionNotFound"
    assert bob.get(f"{INFO}/revision/{'0' * 40}").headers["x-error-code"] == "RevisionNotFound"


def test_a_minute_passes_before_the_upstream_is_asked_again(fake, bob, monkeypatch, tmp_path):
    monkeypatch.setattr(copies_module, "REFS_SECONDS", 60.0)
    monkeypatch.setattr(mirror_module, "_ABSENT_SECONDS", 60.0)
    for _ in range(5):
        assert bob.get(FILE).content == CARD
        assert bob.get("/api/models/acme/none").headers["x-error-code"] == "RepoNotFound"
    assert len(asked(fake, "/refs")) == 2
    assert len(asked(fake, "/resolve/")) == 1
    with (
        real_hub.serving(tmp_path / "mirror", upstream=fake.address) as again,
        httpx2.Client(base_url=again.address, headers=bob.headers) as client,
    ):
        for _ in range(5):
            assert client.get(FILE).content == CARD
    assert len(asked(fake, "/refs")) == 3


def test_without_an_upstream_what_was_mirrored_is_served(fake, mirroring, tmp_path):
    with mirroring(fake.address).client("bob") as client:
        assert client.get(FILE).content == CARD
        token = client.headers["authorization"]
    count = len(fake.requests)
    with real_hub.serving(tmp_path / "mirror") as running, running.client() as client:
        client.headers["authorization"] = token
        assert client.get(FILE).content == CARD
        answered(client.get("/acme/x/resolve/main/in/large.txt"), 503, "--upstream")
        assert client.get("/api/models/acme/y").headers["x-error-code"] == "RepoNotFound"
        assert verify_hub(running.hub) == []
        assert collect(running.hub, grace=0).files == 0
        assert backup_hub(running.hub.place, tmp_path / "backup") == 1
    assert len(fake.requests) == count


def test_no_token_of_a_user_is_sent_on_and_offline_nothing_is_asked(fake, bob, monkeypatch):
    assert bob.get(FILE).content == CARD
    with bob.running.client() as nobody:
        headers = {"authorization": "Bearer hf_TheTokenOfAnotherService"}
        assert nobody.get("/api/models/acme/z", headers=headers).status_code == 401
        assert nobody.get("/api/models/acme/z").status_code == 401
    assert {*fake.authorizations} == {None}
    assert not asked(fake, "acme/z")
    count = len(fake.requests)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert bob.get(FILE).content == CARD
    answered(bob.get("/api/models/acme/y"), 503, "HF_HUB_OFFLINE")
    assert len(fake.requests) == count


def test_the_operators_token_is_for_what_he_lists_and_for_the_upstream(
    fake, mirroring, monkeypatch
):
    monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{fake.address}=the-operators-token")
    fake.tokens["the-operators-token"] = "read"
    fake.repositories["acme/closed"] = fake_hub.Repository(private=True)
    fake.repositories["acme/closed"].commit(FILES)
    fake.repositories["acme/other"] = fake.repositories["acme/closed"]
    with fake_hub.attacking() as elsewhere:
        elsewhere.repositories = fake.repositories
        away = fake_hub.redirect(lambda handler: f"{elsewhere.address}{handler.path}")
        fake.attack = fake_hub.on("/resolve/.*/large", away)
        running = mirroring(fake.address, upstream_token=("Acme/cl*",))
        elsewhere.tokens = {}
        fake.repositories["acme/closed"].private = True
        client = running.as_user("bob")
        assert client.get("/acme/closed/resolve/main/README.md").content == CARD
        assert client.get("/api/models/acme/other").headers["x-error-code"] == "RepoNotFound"
        elsewhere.tokens = {"": "read"}
        assert client.get("/acme/closed/resolve/main/in/large.txt").content == LARGE
    assert {*elsewhere.authorizations} == {None}
    for line, token in zip(fake.requests, fake.authorizations, strict=True):
        assert token == ("Bearer the-operators-token" if "closed" in line else None)


def test_nobody_writes_to_what_is_mirrored_and_who_asked_for_it_is_on_record(bob):
    assert bob.get(INFO).status_code == 200
    row = bob.get("/api/adapterhub/audit").json()[0]
    assert (row["who"], row["action"], row["target"]) == ("bob", "mirror", "acme/x")
    answered(commit(bob, "acme/x", {"a.md": b"a"}), 403, "mirrored")
    assert real_hub.tag(bob, "acme/x", "v9").status_code == 403
    assert real_hub.delete(bob, "acme/x").status_code == 403
    body = {"name": "x", "organization": "acme"}
    assert bob.post("/api/repos/create", json=body).status_code in (403, 409)
    assert bob.get(FILE).content == CARD


def test_a_name_of_this_hub_is_never_asked_upstream(fake, bob):
    assert bob.get(FILE).content == CARD
    bob.running.org("ACME")
    count = len(fake.requests)
    for name in ("acme/x", "Acme/X", "bob/private"):
        assert bob.get(f"/api/models/{name}").headers["x-error-code"] == "RepoNotFound"
    create(bob, "ACME/x", private=True)
    assert bob.get(FILE).status_code == 404
    assert len(fake.requests) == count


def test_a_name_that_becomes_one_of_this_hub_while_the_upstream_is_asked(fake, bob):
    assert bob.get(FILE).content == CARD
    bob.running.user("eve")

    def take(handler):
        fake.attack = None
        bob.running.org("acme")
        create(bob, "acme/x", private=True)
        commit(bob, "acme/x", {"README.md": b"private"})

    fake.attack = delayed(fake_hub.on("/refs", take))
    assert bob.running.as_user("eve").get(FILE).headers["x-error-code"] == "RepoNotFound"
    assert bob.get(FILE).content == b"private"


def test_names_that_are_none_here_and_those_that_differ_in_case(fake, bob):
    for name in ("acme/con", "acme/x.", "a/b--c", "acme/%2e%2e", "a%2fb/c", "x"):
        assert bob.get(f"/api/models/{name}").status_code in (400, 404)
    assert not fake.requests
    assert bob.get("/api/models/ACME/X").status_code == 404
    fake.repositories["ACME/X"] = fake.repositories["acme/x"]
    for name in ("ACME/X", "acme/x"):
        assert bob.get(f"/api/models/{name}").json()["id"] == "ACME/X"
    fake.repositories["acme/y"] = fake_hub.Repository()
    fake.repositories["acme/y"].commit({"A.md": b"a", "a.md": b"b"})
    answered(bob.get("/api/models/acme/y"), 502, "differ by case")


def test_files_that_run_and_paths_that_are_none_are_left_out(fake, bob):
    odd = {"model.bin": b"a", "run.py": b"b", "../up.md": b"c", "con.md": b"d", "a.onnx": b"e"}
    fake.repositories["acme/x"].commit({**odd, "data.txt": b"\x80\x04K\x01."})
    paths = [each["rfilename"] for each in bob.get(INFO).json()["siblings"]]
    assert paths == ["a.onnx", "data.txt"]
    answered(bob.get("/acme/x/resolve/main/data.txt"), 403, "pickle")
    assert left_over(bob.running) == ([], [])
    real_hub.set_rules(bob.running, fake.address, allowed=("pickle",))
    assert bob.get("/acme/x/resolve/main/data.txt").content == b"\x80\x04K\x01."


def test_a_hash_that_the_upstream_names_opens_no_private_file(fake, bob):
    secret = b"a private text of this hub\n"
    create(bob, "bob/own", private=True)
    commit(bob, "bob/own", {"README.md": secret, "large.md": secret * 90_000})
    bob.running.user("eve")
    large = {"sha256": digest(secret * 90_000), "size": len(secret) * 90_000}
    names = [
        {"rfilename": "README.md", "size": len(secret), "lfs": {
            "sha256": digest(secret), "size": len(secret)}},
        {"rfilename": "large.md", "size": large["size"], "lfs": large},
    ]  # fmt: skip
    oid = fake.repositories["acme/x"].commits[-1][0]
    info = {"id": "acme/x", "sha": oid, "siblings": names}
    fake.attack = fake_hub.on("/revision/", fake_hub.body(info))
    eve = bob.running.as_user("eve")
    assert eve.get(INFO).status_code == 200
    assert "private text" not in eve.get("/acme/x").text
    for path in ("README.md", "large.md"):
        answered(eve.get(f"/acme/x/resolve/main/{path}"), 502)
    assert bob.get("/bob/own/resolve/main/README.md").content == secret


def test_limits_hold_and_what_was_not_used_is_evicted(fake, mirroring):
    third = b"fedcba9876543210" * (100 << 10)
    fake.repositories["acme/x"].commit({**FILES, "third.txt": third, "more.md": b"m" * 5_000})
    limits = {"max_file": 2 << 20, "quota": 2 << 20}
    running = mirroring(fake.address, **limits)
    fake.repositories["acme/x"].commit(
        {"big.txt": LARGE + third, "large.txt": LARGE, "third.txt": third, "more.md": CARD}
    )
    client = running.as_user("bob")
    answer = client.get("/acme/x/resolve/main/big.txt")
    assert (answer.status_code, "2,097,152" in answer.text) == (413, True)
    assert not asked(fake, "/resolve/main/big")
    for path, data in (("more.md", CARD), ("large.txt", LARGE)):
        assert client.get(f"/acme/x/resolve/main/{path}").content == data
    age(running, digest(LARGE))
    assert client.get("/acme/x/resolve/main/third.txt").content == third
    assert {*running.hub.blobs.all()} == {digest(CARD), digest(third)}
    # A backup reads the files: none is removed meanwhile, and the client is told to wait.
    with FileLock(running.hub.place / KEEPING):
        answer = client.get("/acme/x/resolve/main/large.txt")
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert client.get("/acme/x/resolve/main/large.txt").content == LARGE
    assert verify_hub(running.hub) == []
    assert left_over(running)[0] == []


def age(running, sha256):
    """Let a file have been used an hour ago, and the others now."""
    with running.hub.database.writing() as connection:
        old = update(grants).where(grants.c.sha256 == sha256)
        connection.execute(old.values(granted=now_text(3600)))


def test_what_is_used_is_noted(fake, tmp_path):
    options = {"upstream": fake.address, "open_reading": True}
    with real_hub.serving(tmp_path / "hub", **options) as running, running.client() as client:
        client.get(FILE)
        age(running, digest(CARD))
        client.get(FILE)
    with open_hub(tmp_path / "hub") as hub, hub.database.reading() as connection:
        assert connection.execute(select(grants.c.granted)).scalar_one() > now_text(60)


def test_a_flipped_bit_is_found_and_the_file_fetched_again(fake, bob):
    assert bob.get(FILE).content == CARD
    path = bob.running.hub.blobs.path(digest(CARD))
    os.chmod(path, 0o600)
    path.write_bytes(b"# b card\n")
    (problem,) = verify_hub(bob.running.hub)
    assert "its bytes have changed (of acme/x); removed, and fetched again" in problem
    assert verify_hub(bob.running.hub) == []
    assert bob.get(FILE).content == CARD
    os.chmod(path, 0o600)
    for damage in (lambda: path.write_bytes(b"#"), path.unlink):
        damage()
        assert bob.get(FILE).content == CARD
    assert path.read_bytes() == CARD


def test_what_cannot_mirror(fake, mirroring, tmp_path):
    made = registries.write_sample(tmp_path / "made")
    (tmp_path / "registry").mkdir()
    LocalRegistry(tmp_path / "registry").put(made, Publication("polite"))
    with pytest.raises(ConfigError, match="cannot store a mirror"):
        serve_hub(tmp_path / "registry", "127.0.0.1", 0, HubOptions(upstream="https://a.example"))
    with pytest.raises(ConfigError, match="no token"):
        upstream_module.Upstream("https://hub.example.org", ("a/b",))
    mirroring(fake.address)
    other = HubOptions(upstream="https://hub.example.org")
    with open_hub(tmp_path / "mirror", other) as hub, pytest.raises(ConfigError, match="mirrors"):
        Mirror(hub)


def test_nothing_is_kept_of_a_download_when_the_server_ends(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_client, "GRACE_SECONDS", 60)
    slow = fake_hub.drip(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(LARGE))
    fake.attack = fake_hub.on("large", slow)
    create_hub(tmp_path / "hub")
    with open_hub(tmp_path / "hub", HubOptions(upstream=fake.address)) as hub:
        app = HubApp(hub)
        found = app.mirror._copies.add("models", "acme/x")
        blob = BlobInfo("", len(LARGE), fake_hub.git_sha1(LARGE))
        oid = fake.repositories["acme/x"].commits[-1][0]

        async def serve():
            waiting = asyncio.ensure_future(app.mirror.file(found, oid, "in/large.txt", blob))
            await asyncio.to_thread(wait_until, lambda: [*hub.blobs.incoming.iterdir()])
            messages = iter(({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}))
            await app({"type": "lifespan"}, lambda: soon(next(messages)), soon)
            with pytest.raises(UpstreamError, match="stopped"):
                await waiting

        async def soon(message):
            return message

        asyncio.run(serve())
        assert left_over(SimpleNamespace(hub=hub)) == ([], [digest(CARD)])
