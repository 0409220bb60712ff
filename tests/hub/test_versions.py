"""Versions: numbers that are given once, tags that are protected, and what is deleted is gone."""

import pytest

import adapterhub as ah
from adapterhub.errors import AdapterhubError, FileError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.files.signature import Statement
from adapterhub.hub import blobs
from adapterhub.hub.gc import collect, verify_hub
from adapterhub.registry.hub import HubStore
from adapterhub.registry.store import Publication
from tests.kit import real_hub, registries
from tests.kit.real_hub import answered, commit, create, delete, digest, head, move, set_rules, tag

pytestmark = [
    pytest.mark.usefixtures("online"),
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),  # of the client
]


def store_of(hub, user):
    return HubStore(hub.address, token=hub.tokens[user])


@pytest.fixture
def publish(new_hub, tmp_path):
    def publish(seed, user="wil", **options):
        folder = tmp_path / f"made-{seed}"
        if not folder.exists():
            registries.write_sample(folder, seed)
        return store_of(new_hub, user).put(folder, Publication("acme/polite", **options))

    return publish


@pytest.mark.parametrize("most", [1, 1 << 20], ids=["all by LFS", "all within the commit"])
def test_a_push_needs_no_xet(most, tmp_path, monkeypatch, caplog):
    """Files above --regular-max are sent before the commit, which clients with Xet refuse to do."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    with real_hub.serving(tmp_path / "hub", regular_max=most) as running:
        running.org("acme")
        running.user("wil", acme="write")
        store = store_of(running, "wil")
        entry = store.put(registries.write_sample(tmp_path / "made", 0), Publication("acme/large"))
        assert store.versions("acme/large") == [entry]
        assert Saved.at(store.get(entry, tmp_path / "got")).read()
        assert "Xet" not in caplog.text

        def full(self, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(blobs.BlobReceiver, "_write", full)
        made = registries.write_sample(tmp_path / "more", 1)
        with pytest.raises(RegistryError, match="answered 507"):
            store.put(made, Publication("acme/large"))


def test_a_number_is_given_once_and_one_after_the_other(new_hub, ada, publish):
    assert [publish(seed).version for seed in range(2)] == ["v1", "v2"]
    name = "acme/polite"
    tags, own = f"/api/models/{name}/tag", f"/api/adapterhub/models/{name}/tag"
    wil = new_hub.as_user("wil")
    for number in (2, 4, 10, 999_999_999):
        assert tag(wil, name, f"v{number}").status_code == 409
        answer = wil.put(f"{own}/v{number}", json={"revision": "v1"})
        assert (answer.status_code, number == 2 or "v3" in answer.text) == (409, True)
    assert tag(ada, name, "v999999999").status_code == 409
    assert wil.delete(f"{tags}/v2").status_code == 403
    assert tag(wil, name, "3").status_code == 400
    assert ada.delete(f"{tags}/v2").status_code == 200
    assert tag(wil, name, "v2").status_code == 409
    assert tag(wil, name, "v3").status_code == 200
    assert tag(ada, name, "v7").status_code == 200  # of a copy with gaps
    assert tag(wil, name, "v7.1").status_code == 200
    assert publish(2).version == "v8"
    assert move(ada, name, "acme/moved").status_code == 200
    assert tag(wil, "acme/moved", "v8").status_code == 409
    create(ada, name)
    assert tag(wil, name, "v8").status_code == 409
    assert tag(wil, name, "v9").status_code == 200
    assert delete(ada, name).status_code == 200
    create(ada, name)
    assert tag(wil, name, "v9").status_code == 409


def test_tags_on_the_list_are_for_admins(new_hub, publish):
    first, second = publish(0, tags=("prod-1", "best")), publish(1)
    set_rules(new_hub, "acme", protected=("prod-*",))
    wil, ada = store_of(new_hub, "wil"), store_of(new_hub, "ada")
    wil.tag(second, "best")
    assert wil.resolve("acme/polite", "best").version == "v2"
    for change in (wil.tag, wil.untag):
        with pytest.raises(RegistryError, match="permission"):
            change(second, "prod-1")
    assert wil.resolve("acme/polite", "prod-1").version == first.version
    ada.tag(second, "prod-1")
    assert ada.resolve("acme/polite", "prod-1").version == "v2"
    ada.untag(second, "prod-1")
    with pytest.raises(RegistryError):
        ada.resolve("acme/polite", "prod-1")


def test_a_deleted_version_is_gone_and_the_others_stay(new_hub, ada, publish):
    entries = [publish(seed) for seed in range(3)]
    wil, store = store_of(new_hub, "wil"), store_of(new_hub, "ada")
    wil.yank(entries[2], "why not")
    with pytest.raises(RegistryError, match="permission"):
        wil.delete("acme/polite", "v3")
    store.delete("acme/polite", "v3")
    assert [entry.version for entry in store.versions("acme/polite")] == ["v1", "v2"]
    assert ada.get("/acme/polite/resolve/v3/adapter.json").status_code == 404
    at_head = ada.get("/acme/polite/resolve/main/adapter.json").content
    assert digest(at_head) == entries[1].digest
    for item in ada.get("/api/models/acme/polite/commits/main").json():
        data = ada.get(f"/acme/polite/resolve/{item['id']}/adapter.json").content
        assert digest(data) != entries[2].digest
    assert new_hub.hub.blobs.size(entries[2].digest) >= 0
    collect(new_hub.hub)
    assert new_hub.hub.blobs.size(entries[2].digest) < 0
    for entry in entries[:2]:
        Saved.at(store.get(entry)).read()
    assert verify_hub(new_hub.hub) == []
    assert publish(2).version == "v4"
    for version in ("v1", "v2", "v4"):
        store.delete("acme/polite", version)
    with pytest.raises(AdapterhubError):
        store.resolve("acme/polite")
    assert publish(0).version == "v5"


@pytest.fixture
def stopped_clock(monkeypatch):
    """Give all commits the same millisecond."""
    monkeypatch.setattr("adapterhub.hub.commits.now_precisely", lambda: "2026-01-01T00:00:00.000Z")


@pytest.mark.usefixtures("stopped_clock")
def test_one_change_of_two_branches_in_one_millisecond(new_hub, ada, publish):
    publish(0)
    branches = ("main", "dev", "old")
    for name in branches[1:]:
        assert ada.post(f"/api/models/acme/polite/branch/{name}", json={}).status_code == 200
    for name in branches:
        answered(commit(ada, "acme/polite", {"c.md": b"c"}, revision=name), 200)
    heads = [ada.get(f"/api/models/acme/polite/revision/{name}").json()["sha"] for name in branches]
    assert len({*heads}) == 1
    answered(commit(ada, "acme/polite", {"c.md": b"d"}, revision="dev"), 200)
    assert ada.get("/acme/polite/resolve/old/c.md").content == b"c"
    assert verify_hub(new_hub.hub) == []


@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.parametrize(
    ("files", "gone", "before"),
    [({}, [], False), ({"b.md": b"b"}, [], True), ({}, ["adapter.json"], False)],
)
def test_what_is_deleted_does_not_come_back_from_another_branch(
    new_hub, ada, publish, tmp_path, files, gone, before
):
    entries = [publish(seed) for seed in range(2)]
    for name in ("dev", "old"):
        assert ada.post(f"/api/models/acme/polite/branch/{name}", json={}).status_code == 200
    assert commit(ada, "acme/polite", {"c.md": b"c"}, revision="dev").status_code == 200

    def change_branches():
        for name in ("dev", "old"):
            answered(commit(ada, "acme/polite", files, revision=name, deleted=gone), 200)

    if before:
        change_branches()
    store_of(new_hub, "ada").delete("acme/polite", "v2")
    if not before:
        change_branches()
    collect(new_hub.hub, grace=0)
    first = ada.get("/acme/polite/resolve/v1/adapter.safetensors").content
    for name in ("main", "dev", "old"):
        assert ada.get(f"/acme/polite/resolve/{name}/adapter.safetensors").content == first
        assert ada.get(f"/api/models/acme/polite/tree/{name}").status_code == 200
    tensors = digest((tmp_path / "made-1/adapter.safetensors").read_bytes())
    assert max(map(new_hub.hub.blobs.size, (entries[1].digest, tensors))) < 0
    assert verify_hub(new_hub.hub) == []


def test_of_two_versions_with_the_same_files_one_is_deleted(new_hub, ada, publish):
    entry, address = publish(0), "/api/adapterhub/models/acme/polite"
    assert ada.put(f"{address}/tag/v2", json={"revision": "v1"}).status_code == 200
    assert ada.delete(f"{address}/versions/v2").status_code == 200
    found = ada.get(f"{address}/versions").json()
    assert [each["version"] for each in found["versions"]] == ["v1"]
    assert found["highest"] == 2
    assert ada.get("/acme/polite/resolve/v2/adapter.json").status_code == 404
    Saved.at(store_of(new_hub, "ada").get(entry)).read()
    assert verify_hub(new_hub.hub) == []


def test_our_commands_change_a_hub_as_a_folder(new_hub, publish, monkeypatch):
    publish(0)
    publish(1)
    name = f"{new_hub.address}/acme/polite"
    monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{new_hub.address}={new_hub.tokens['ada']}")
    assert ah.tag(f"{name}@v1", "best") == {"best": "v1"}
    assert ah.tag(name) == {"best": "v1"}
    assert ah.tag(f"{name}@v2", "best") == {"best": "v2"}
    assert ah.tag(name, "best", remove=True) == {}
    ah.yank(f"{name}@v2", "no")
    assert [entry.version for entry in ah.search(hub=new_hub.address)] == ["v1"]
    with pytest.warns(UserWarning, match="was yanked: no"):
        ah.pull(f"{name}@v2")
    assert ah.delete(f"{name}@v1") == f"{name}@v1"
    with pytest.raises(RegistryError):
        ah.delete(f"{name}@v1")


def test_a_hub_finds_what_its_adapters_are_and_our_client_a_flipped_bit(new_hub, publish):
    """Tools overwrite cards, so tags come from the adapter's own files."""
    entry = publish(0)
    client = new_hub.as_user("wil")
    commit(client, "acme/polite", {"README.md": b"---\nlibrary_name: x\ntags: []\n---\n"})
    found = client.get(
        f"/api/models?filter=adapterhub&filter=base_model:adapter:{registries.SAMPLE_BACKBONE}"
    )
    assert [each["id"] for each in found.json()] == ["acme/polite"]
    body = client.get("/api/adapterhub/models/acme/polite/versions").json()
    assert [each["version"] for each in body["versions"]] == ["v1"]
    assert head(client, "acme/polite") != body["versions"][0]["commit"]
    assert client.get("/api/adapterhub").json()["can"]
    tensors = digest(client.get("/acme/polite/resolve/v1/adapter.safetensors").content)
    data = bytearray(new_hub.hub.blobs.read(tensors, 1 << 20))
    data[-1] ^= 1
    new_hub.overwrite(tensors, bytes(data))
    with pytest.raises(FileError, match="not what was published"):
        store_of(new_hub, "wil").get(entry)


def test_a_signature_is_for_the_number_that_the_hub_gives(new_hub, ada, tmp_path, monkeypatch):
    """Also after the deletion of all versions, and of the repository."""
    monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{new_hub.address}={new_hub.tokens['ada']}")
    key, address = registries.new_key(), f"{new_hub.address}/acme/polite"
    set_rules(new_hub, "acme", signers=(key.public.id,))
    for number in (1, 2, 3):
        folder = registries.write_sample(tmp_path / f"made-{number}", number)
        assert ah.push(folder, address, sign=key, peft=False).version == f"v{number}"
        stated = [each.signature.statement for each in ah.verify(address).signatures]
        assert stated == [Statement(Saved.at(folder).digest, "acme/polite", f"v{number}")]
        if number == 1:
            store_of(new_hub, "ada").delete("acme/polite", "v1")
        else:
            assert delete(ada, "acme/polite").status_code == 200
