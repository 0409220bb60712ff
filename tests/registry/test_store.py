"""The conformance suite: every store behaves the same, whatever it keeps its files in."""

import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from adapterhub.errors import AdapterhubError, FileError, OutputError, RegistryError
from adapterhub.files.native import Saved, read_signatures
from adapterhub.files.signature import Statement, sign_statement, signatures_to_json
from adapterhub.registry import registry, version_files
from adapterhub.registry.bucket import Bucket
from adapterhub.registry.http_storage import WebsiteRegistry
from adapterhub.registry.hub import HubStore
from adapterhub.registry.local import Folder, LocalRegistry
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import ConflictError, Publication, Query
from tests.kit import fake_hub, real_hub, registries, web_servers
from tests.kit.selection import ALL


class OwnersHub(HubStore):
    """A hub with one owner, whose name is added to all adapter names."""

    def _full_name(self, name):
        return name if "/" in name else f"acme/{name}"

    def resolve(self, name, version=None, **options):
        return super().resolve(self._full_name(name), version, **options)

    def versions(self, name, **options):
        return super().versions(self._full_name(name), **options)

    def put(self, folder, publication):
        return super().put(folder, replace(publication, name=self._full_name(publication.name)))


@contextmanager
def on_hub(folder):
    with fake_hub.serving() as (hub, address):
        store = OwnersHub(address, token=False)
        store.hub = hub
        yield store


@contextmanager
def on_our_hub(place, bucket=None):
    with real_hub.serving(place, blobs=bucket) as hub:
        hub.org("acme")
        store = OwnersHub(hub.address, token=hub.user("ada", acme="write"))
        store.hub = hub
        yield store


@contextmanager
def in_bucket(folder):
    yield Registry(Bucket("s3://bucket/p", registries.Objects()))


@contextmanager
def on_server(folder):
    """A registry on the S3 server of $ADAPTERHUB_TEST_S3, such as s3://bucket."""
    yield Registry(Bucket(f"{os.environ['ADAPTERHUB_TEST_S3']}/{secrets.token_hex(8)}"))


class Published(WebsiteRegistry):
    """A folder that a web server sends: it is written as a folder, and read over http."""

    def __init__(self, url, folder):
        super().__init__(url)
        self.written = LocalRegistry(folder)

    @property
    def root(self):
        return self.written.root

    def put(self, folder, publication):
        return self.written.put(folder, publication)

    def yank(self, entry, reason):
        self.written.yank(entry, reason)

    def add_signatures(self, entry, signatures):
        self.written.add_signatures(entry, signatures)


@contextmanager
def on_web_server(folder, serve=web_servers.python):
    """Python's own server, which sends no tags and no errors of its own, or nginx."""
    folder.mkdir()
    with serve(folder) as address:
        yield Published(address, folder)


def on_nginx(folder):
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    return on_web_server(folder, web_servers.nginx)


@contextmanager
def on_moto(folder):
    """S3 over HTTP, as moto imitates it."""
    pytest.importorskip("moto")
    with web_servers.moto() as options:
        from obstore.store import S3Store

        store = S3Store("bucket", prefix=secrets.token_hex(8), **options)
        yield Registry(Bucket("s3://bucket/p", store))


STORES = {
    "bucket": in_bucket,
    "local": lambda folder: folder.mkdir() or nullcontext(LocalRegistry(folder)),
    "hub": on_hub,
    "our hub": on_our_hub,
    "https": on_web_server,
    **({"nginx": on_nginx, "s3": on_moto, "our hub, in processes": on_our_hub} if ALL else {}),
}

if "ADAPTERHUB_TEST_S3" in os.environ:
    STORES["server"] = on_server


@pytest.fixture(params=sorted(STORES))
def store(request, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    place = (tmp_path / "store",)
    if request.param == "our hub, in processes":
        place = request.getfixturevalue("new_state")()
    with STORES[request.param](*place) as store:
        yield store


def test_a_version_never_changes_and_the_same_bytes_are_the_same_version(store, publish):
    first = publish(version="v1")
    assert publish() == publish() == first
    with pytest.raises(RegistryError):
        publish(seed=1, version="v1")
    assert store.resolve("polite").digest == first.digest
    assert publish(seed=1).version == "v2"
    again = publish(version="v7", tags=("best",))
    assert (again.version, again.tags, again.digest) == ("v1", ("best",), first.digest)
    assert [entry.version for entry in store.search(Query())] == ["v2"]
    assert len(store.search(Query(all_versions=True))) == 2


def test_versions_are_listed_oldest_first_and_may_have_names(store, publish):
    published = [publish(seed=n, tags=("best",) * (n == 4)).version for n in range(11)]
    assert [entry.version for entry in store.versions("polite")] == published
    for asked, version in ((None, "v11"), ("v2", "v2"), ("best", "v5")):
        assert store.resolve("polite", asked).version == version


def short_name(entry):
    """Return the name of an entry without its owner."""
    return entry.name.removeprefix("acme/")


@pytest.fixture
def publish(store, tmp_path):
    """Write an adapter and publish it."""

    def publish(name="polite", seed=0, version=None, tags=(), **options):
        folder = tmp_path / f"made-{name}-{seed}-{len(options)}-{options.get('backbone', 'x')[:4]}"
        if not folder.exists():
            registries.write_sample(folder, seed, **options)
        return store.put(folder, Publication(name, version, tags))

    return publish


def test_a_published_adapter_can_be_fetched_and_a_missing_one_is_an_error(store, publish, tmp_path):
    with pytest.raises(RegistryError):
        store.resolve("polite")
    entry = publish(accuracy=0.9)
    with pytest.raises(RegistryError):
        store.resolve("polite", "v9")
    with pytest.raises(AdapterhubError):
        store.get(replace(entry, digest="0" * 64))
    assert store.search(Query(task="none")) == []
    assert entry.reference.endswith("polite@v1")
    assert (short_name(entry), entry.version, entry.yanked) == ("polite", "v1", None)
    assert (entry.backbone, entry.methods, entry.task) == (
        registries.SAMPLE_BACKBONE, ("lora",), "classification",
    )  # fmt: skip
    assert (entry.metrics, entry.parameters, entry.size > 0) == ({"accuracy": 0.9}, 8, True)
    got = store.get(store.resolve("polite"), tmp_path / "mine")
    assert got == tmp_path / "mine"
    with pytest.raises(OutputError):  # a copy never overwrites
        store.get(entry, got)
    manifest, tensors = Saved.at(got).read()
    assert manifest.metrics == {"accuracy": 0.9}
    assert tensors["encoder.0.attn.q.lora.a"].shape == (2, 4)
    Saved.at(store.get(entry)).read()


def test_yanked_versions_are_found_by_number_only(store, publish):
    publish(seed=0)
    second = publish(seed=1)
    store.yank(second, "trained on the dev set")
    assert store.resolve("polite").version == "v1"
    assert [entry.version for entry in store.search(Query())] == ["v1"]
    pinned = store.resolve("polite", "v2")
    assert pinned.yanked == "trained on the dev set"
    Saved.at(store.get(pinned)).read()
    store.yank(store.resolve("polite"), "too")
    with pytest.raises(RegistryError, match="yanked"):
        store.resolve("polite")


def test_signatures_are_added_without_changing_a_version_or_published_with_it(
    store, publish, tmp_path
):
    first, second = publish(seed=0), publish(seed=1)
    statement = Statement(first.digest, "polite", "v1")
    added = [sign_statement(statement, registries.new_key()) for _ in range(2)]
    others = sign_statement(Statement("1" * 64, "polite"), registries.new_key())
    for signature in added:
        store.add_signatures(first, [signature, others])
    assert store.resolve("polite", "v1") == first
    beside = read_signatures(store.get(first))
    assert {*beside, *store.signatures(first)} == set(added)
    assert not read_signatures(store.get(second))
    assert not store.signatures(second)
    folder = registries.write_sample(tmp_path / "made", 2)
    signature = sign_statement(Statement(Saved.at(folder).digest, "polite"), registries.new_key())
    (folder / "adapter.sig").write_bytes(signatures_to_json([signature]))
    entry = store.put(folder, Publication("polite"))
    assert read_signatures(store.get(entry, tmp_path / "mine")) == (signature,)
    broken = registries.write_sample(tmp_path / "broken", 3)
    (broken / "adapter.sig").write_bytes(b"x")
    with pytest.raises(FileError, match="not a valid signature file"):
        store.put(broken, Publication("rude"))


def test_a_name_may_exist_for_several_backbones(store, publish):
    fingerprint = f"bf16-{'1' * 64}"
    publish(seed=0)
    if isinstance(store, HubStore):  # a repository has one backbone
        with pytest.raises(RegistryError, match="another name"):
            publish(seed=1, backbone="other/gpt", fingerprint=fingerprint)
        with pytest.raises(RegistryError, match="is not for other/gpt"):
            store.resolve("polite", backbone="other/gpt")
        return
    publish(seed=1, backbone="other/gpt", fingerprint=fingerprint)
    with pytest.raises(RegistryError, match="several backbones"):
        store.resolve("polite")
    assert store.resolve("polite", backbone="other/gpt").version == "v1"
    assert store.resolve("polite", backbone=fingerprint).backbone == "other/gpt"
    with pytest.raises(RegistryError):
        store.resolve("polite", backbone="third/model")


def test_the_newest_come_first(store, publish, monkeypatch):
    for number, name in enumerate(("b", "c", "a")):
        date = f"2026-11-2{number}T10:00:00Z\n".encode()
        monkeypatch.setattr(registry, "date_now", lambda date=date: date)
        publish(name, seed=number)
    found = store.search(Query(sort="newest"))
    assert sorted(map(short_name, found)) == ["a", "b", "c"]
    if all(entry.published for entry in found):  # a hub does not tell
        assert list(map(short_name, found)) == ["a", "c", "b"]
        assert found[0].published == "2026-11-22T10:00:00Z"
    assert isinstance(store, Registry) == (found[0].published is not None)


def test_search_finds_by_each_field(store, publish):
    publish("a", seed=0, accuracy=0.7, tags=("english",))
    publish("b", seed=1, accuracy=0.9, method="pfeiffer")
    publish("c", seed=2, task="tagging", f1=0.5)
    publish("d", seed=3, backbone="other/gpt", fingerprint=f"bf16-{'1' * 64}")

    def found(**query):
        return [short_name(entry) for entry in store.search(Query(**query))]

    assert found() == ["a", "b", "c", "d"]
    assert found(backbone=registries.SAMPLE_BACKBONE) == ["a", "b", "c"]
    assert found(backbone=f"bf16-{'1' * 64}") == ["d"]
    assert found(task="tagging") == ["c"]
    assert found(method="pfeiffer") == ["b"]
    assert found(tags=("english",)) == ["a"]
    assert found(metric="accuracy") == ["a", "b"]
    assert found(sort="accuracy") == ["b", "a"]
    assert found(text="tagg") == ["c"]
    assert found(text="pfeiffer classification") == ["b"]
    assert found(text="nothing") == []
    assert found(limit=2) == ["a", "b"]


def refuse_writers(store):
    """Make a store refuse writers; return a function that makes it accept them again."""
    if isinstance(store, HubStore):
        return store.hub.refuse_writers()
    if isinstance(store.storage, Bucket):
        return refuse_objects(store.storage)
    store.root.rmdir()
    store.root.write_text("no folder")

    def allow():
        store.root.unlink()
        store.root.mkdir()

    return allow


def refuse_objects(bucket):
    """Make a bucket refuse to write; return a function that makes it accept again."""

    def forbidden(*args, **options):
        raise PermissionError("403 Forbidden")

    objects, bucket._objects = bucket._objects, registries.Objects(bucket._objects)
    bucket._objects.put = forbidden
    return lambda: setattr(bucket, "_objects", objects)


def test_a_refused_writer_and_an_invalid_adapter_leave_nothing(store, publish, tmp_path):
    (tmp_path / "empty").mkdir()
    broken = registries.write_sample(tmp_path / "broken")
    tensors = broken / "adapter.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x7f")
    for invalid in (tmp_path / "empty", broken):
        with pytest.raises(FileError):
            store.put(invalid, Publication("polite"))
    with pytest.raises(RegistryError):
        store.versions("polite")
    allow = refuse_writers(store)
    with pytest.raises(AdapterhubError):
        publish()
    allow()
    assert getattr(store, "written", store).search(Query()) == []  # a website needs an index
    assert publish().version == "v1"


def break_next_get(store, monkeypatch):
    """Interrupt the next download."""
    if isinstance(store, HubStore):
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        store.hub.cut_after = 40
        return
    write, calls = version_files.write_files, []

    def broken(staged, payload):
        calls.append(staged)
        if len(calls) == 1:
            write(staged, dict(list(payload.items())[:1]))
            raise OSError(5, "Input/output error")
        write(staged, payload)

    monkeypatch.setattr(version_files, "write_files", broken)


@pytest.mark.parametrize("store", sorted(s for s in STORES if "our hub" not in s), indirect=True)
def test_an_interrupted_get_leaves_nothing_and_the_next_succeeds(
    store, publish, tmp_path, monkeypatch
):
    entry = publish()
    break_next_get(store, monkeypatch)
    target = tmp_path / "got" / "mine"
    try:
        store.get(entry, target)
    except AdapterhubError:
        assert not target.exists()
        assert list(target.parent.iterdir()) == []
        store.get(entry, target)
    Saved.at(target).read()
    assert sorted(p.name for p in target.parent.iterdir()) == ["mine"]


def test_no_publication_of_concurrent_writers_is_lost(store, publish, tmp_path):
    folders = [registries.write_sample(tmp_path / f"at-once-{seed}", seed) for seed in range(3)]

    def put(folder):
        for _ in range(50):  # a writer that lost a race has to try again
            try:
                return store.put(folder, Publication("polite"))
            except RegistryError as error:
                if "another writer" not in str(error):
                    raise
        raise AssertionError("lost fifty races")

    with ThreadPoolExecutor(3) as pool:
        entries = list(pool.map(put, folders))
    assert sorted(entry.version for entry in entries) == ["v1", "v2", "v3"]
    for entry, folder in zip(entries, folders, strict=True):
        assert (
            store.resolve("polite", entry.version).digest == Saved.at(folder).digest == entry.digest
        )


# What keeps the files of a registry: a folder, or the objects of a bucket.


@pytest.fixture(params=["folder", "bucket"])
def storage(request, tmp_path):
    if request.param == "folder":
        return Folder(tmp_path)
    return Bucket("s3://bucket/x/", registries.Objects())


def test_only_the_first_of_two_writers_replaces_what_both_have_read(storage, tmp_path):
    (tmp_path / "b" / "n").mkdir(parents=True)
    assert storage.read("b/n/x", 10) is None
    storage.replace("b/n/x", b"1", None)
    with pytest.raises(ConflictError):
        storage.replace("b/n/x", b"2", None)
    read = storage.read("b/n/x", 10)
    assert read.data == b"1"
    storage.replace("b/n/x", b"3", read)
    with pytest.raises(ConflictError):
        storage.replace("b/n/x", b"4", read)
    assert storage.read("b/n/x", 10).data == b"3"
    assert list(storage.files("b/n/")) == list(storage.files()) == ["b/n/x"]
    assert (storage.folders(), storage.folders("b/")) == (["b"], ["b/n"])
