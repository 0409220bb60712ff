"""Versions: numbers that are given once, tags that are protected, and what is deleted is gone."""

from __future__ import annotations

import hashlib

import pytest

import adapterhub as ah
from adapterhub.errors import AdapterhubError, FileError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.files.signature import Statement, sign_statement, signatures_to_json
from adapterhub.hub import blobs
from adapterhub.hub.accounts import change_owner, find_owner
from adapterhub.hub.gate import NamespaceRules, rules_text
from adapterhub.hub.gc import collect, verify_hub
from adapterhub.registry.hub import HubStore
from adapterhub.registry.store import Publication
from tests.kit import real_hub, registries
from tests.kit.real_hub import commit, create, head

pytestmark = [
    pytest.mark.usefixtures("online"),
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),  # of the client
]


def set_rules(hub, name, **rules):
    with hub.hub.database.writing() as connection:
        owner = find_owner(connection, name)
        change_owner(connection, owner.id, rules_text(NamespaceRules(**rules)), None)


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


@pytest.mark.parametrize("files", ["all within the commit", "all by LFS"])
def test_a_push_needs_no_xet(files, tmp_path, monkeypatch, caplog):
    """Files above --regular-max are sent before the commit, which clients with Xet refuse to do."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    most = 1 if files == "all by LFS" else 1 << 20
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


def test_a_number_is_given_once(new_hub, publish):
    assert [publish(seed).version for seed in range(3)] == ["v1", "v2", "v3"]
    with new_hub.client("wil") as wil, new_hub.client("ada") as ada:
        tag = "/api/models/acme/polite/tag"
        assert wil.post(f"{tag}/main", json={"tag": "v3"}).status_code == 409
        assert wil.put("/api/adapterhub/models/acme/polite/tag/v3", json={"revision": "v1"}) \
            .status_code == 409  # fmt: skip
        assert wil.delete(f"{tag}/v3").status_code == 403
        assert wil.post(f"{tag}/main", json={"tag": "3"}).status_code == 400
        assert ada.delete(f"{tag}/v3").status_code == 200
        assert wil.post(f"{tag}/main", json={"tag": "v3"}).status_code == 409
        body = {"fromRepo": "acme/polite", "toRepo": "acme/moved"}
        assert ada.post("/api/repos/move", json=body).status_code == 200
        assert wil.post("/api/models/acme/moved/tag/main", json={"tag": "v3"}).status_code == 409
        create(ada, "acme/polite")
        assert wil.post(f"{tag}/main", json={"tag": "v3"}).status_code == 409
        assert wil.post(f"{tag}/main", json={"tag": "v4"}).status_code == 200
        body = {"name": "polite", "organization": "acme"}
        assert ada.request("DELETE", "/api/repos/delete", json=body).status_code == 200
        create(ada, "acme/polite")
        assert wil.post(f"{tag}/main", json={"tag": "v4"}).status_code == 409


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


def test_a_deleted_version_is_gone_and_the_others_stay(new_hub, publish):
    entries = [publish(seed) for seed in range(3)]
    wil, ada = store_of(new_hub, "wil"), store_of(new_hub, "ada")
    wil.yank(entries[2], "why not")
    with pytest.raises(RegistryError, match="permission"):
        wil.delete("acme/polite", "v3")
    ada.delete("acme/polite", "v3")
    assert [entry.version for entry in ada.versions("acme/polite")] == ["v1", "v2"]
    with new_hub.client("ada") as client:
        assert client.get("/acme/polite/resolve/v3/adapter.json").status_code == 404
        at_head = client.get("/acme/polite/resolve/main/adapter.json").content
        assert hashlib.sha256(at_head).hexdigest() == entries[1].digest
        for item in client.get("/api/models/acme/polite/commits/main").json():
            data = client.get(f"/acme/polite/resolve/{item['id']}/adapter.json").content
            assert hashlib.sha256(data).hexdigest() != entries[2].digest
    assert new_hub.hub.blobs.size(entries[2].digest) >= 0
    collect(new_hub.hub)
    assert new_hub.hub.blobs.size(entries[2].digest) < 0
    for entry in entries[:2]:
        Saved.at(ada.get(entry)).read()
    assert verify_hub(new_hub.hub) == []
    assert publish(2).version == "v4"
    for version in ("v1", "v2", "v4"):
        ada.delete("acme/polite", version)
    with pytest.raises(AdapterhubError):
        ada.resolve("acme/polite")
    assert publish(0).version == "v5"


@pytest.mark.parametrize("changed", [{}, {"b.md": b"b"}, {"adapter.json": None}])
def test_what_is_deleted_does_not_come_back_from_another_branch(new_hub, publish, changed):
    entries = [publish(seed) for seed in range(2)]
    with new_hub.client("ada") as client:
        branch = "/api/models/acme/polite/branch"
        for name in ("dev", "old"):
            assert client.post(f"{branch}/{name}", json={}).status_code == 200
        assert commit(client, "acme/polite", {"c.md": b"c"}, revision="dev").status_code == 200
        store_of(new_hub, "ada").delete("acme/polite", "v2")
        for name in ("dev", "old"):
            files = {path: data for path, data in changed.items() if data is not None}
            gone = [path for path, data in changed.items() if data is None]
            answer = commit(client, "acme/polite", files, revision=name, deleted=gone)
            assert answer.status_code == 200, answer.text
        collect(new_hub.hub, grace=0)
        for name in ("main", "dev", "old"):
            data = client.get(f"/acme/polite/resolve/{name}/adapter.safetensors").content
            assert data == client.get("/acme/polite/resolve/v1/adapter.safetensors").content
            listed = client.get(f"/api/models/acme/polite/tree/{name}")
            assert listed.status_code == 200
    assert new_hub.hub.blobs.size(entries[1].digest) < 0
    assert verify_hub(new_hub.hub) == []


def test_versions_are_numbered_one_after_the_other(new_hub, publish):
    publish(0)
    with new_hub.client("wil") as wil, new_hub.client("ada") as ada:
        tag, own = "/api/models/acme/polite/tag/main", "/api/adapterhub/models/acme/polite/tag"
        for number in (3, 10, 999_999_999):
            assert wil.post(tag, json={"tag": f"v{number}"}).status_code == 409
            answer = wil.put(f"{own}/v{number}", json={"revision": "main"})
            assert answer.status_code == 409
            assert "v2" in answer.json()["error"]
        assert ada.post(tag, json={"tag": "v999999999"}).status_code == 409
        assert wil.post(tag, json={"tag": "v2"}).status_code == 200
        assert ada.post(tag, json={"tag": "v5"}).status_code == 200  # of a copy with gaps
        assert wil.post(tag, json={"tag": "v5.1"}).status_code == 200
    assert publish(1).version == "v6"


def test_of_two_versions_with_the_same_files_one_is_deleted(new_hub, publish):
    entry = publish(0)
    with new_hub.client("ada") as client:
        address = "/api/adapterhub/models/acme/polite"
        assert client.put(f"{address}/tag/v2", json={"revision": "v1"}).status_code == 200
        assert client.delete(f"{address}/versions/v2").status_code == 200
        found = client.get(f"{address}/versions").json()
        assert [each["version"] for each in found["versions"]] == ["v1"]
        assert found["highest"] == 2
        assert client.get("/acme/polite/resolve/v2/adapter.json").status_code == 404
    Saved.at(store_of(new_hub, "ada").get(entry)).read()
    assert verify_hub(new_hub.hub) == []


def test_our_commands_change_a_hub_as_a_folder(new_hub, publish, monkeypatch):
    publish(0)
    publish(1)
    name = f"{new_hub.address}/acme/polite"
    monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{new_hub.address}={new_hub.tokens['ada']}")
    assert ah.tag(f"{name}@v1", "best") == {"best": "v1"}
    assert ah.tag(f"{name}@v2", "best") == {"best": "v2"}
    assert ah.tag(name, "best", remove=True) == {}
    ah.yank(f"{name}@v2", "no")
    assert [entry.version for entry in ah.search(hub=new_hub.address)] == ["v1"]
    assert ah.delete(f"{name}@v1") == f"{name}@v1"
    with pytest.raises(RegistryError):
        ah.delete(f"{name}@v1")


def test_a_version_that_no_listed_key_signed_is_refused(new_hub, tmp_path):
    key = registries.new_key()
    set_rules(new_hub, "acme", signers=(key.public.id,))
    store = store_of(new_hub, "wil")
    folder = registries.write_sample(tmp_path / "made")
    with pytest.raises(RegistryError, match="keys has signed"):
        store.put(folder, Publication("acme/signed"))
    for signer, taken in ((registries.new_key(), False), (key, True)):
        statement = Statement(Saved.at(folder).digest, "signed")
        signature = sign_statement(statement, signer)
        (folder / "adapter.sig").write_bytes(signatures_to_json([signature]))
        if taken:
            assert store.put(folder, Publication("acme/signed")).version == "v1"
        else:
            with pytest.raises(RegistryError, match="keys has signed"):
                store.put(folder, Publication("acme/signed"))


def test_our_client_refuses_a_flipped_bit(new_hub, publish):
    entry = publish(0)
    with new_hub.client("wil") as client:
        sha256 = hashlib.sha256(
            client.get("/acme/polite/resolve/v1/adapter.safetensors").content
        ).hexdigest()
    data = bytearray(new_hub.hub.blobs.read(sha256, 1 << 20))
    data[-1] ^= 1
    new_hub.overwrite(sha256, bytes(data))
    with pytest.raises(FileError, match="not what was published"):
        store_of(new_hub, "wil").get(entry)


def test_a_hub_finds_what_its_adapters_are(new_hub, publish):
    """Tools overwrite cards, so tags come from the adapter's own files."""
    publish(0)
    with new_hub.client("wil") as client:
        commit(client, "acme/polite", {"README.md": b"---\nlibrary_name: x\ntags: []\n---\n"})
        found = client.get(
            f"/api/models?filter=adapterhub&filter=base_model:adapter:{registries.SAMPLE_BACKBONE}"
        )
        assert [each["id"] for each in found.json()] == ["acme/polite"]
        body = client.get("/api/adapterhub/models/acme/polite/versions").json()
        assert [each["version"] for each in body["versions"]] == ["v1"]
        assert head(client, "acme/polite") != body["versions"][0]["commit"]
        assert client.get("/api/adapterhub").json()["can"]


@pytest.mark.parametrize("deleted", ["newest", "all", "repository"])
def test_a_signature_is_for_the_number_that_the_hub_gives(new_hub, tmp_path, monkeypatch, deleted):
    monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{new_hub.address}={new_hub.tokens['ada']}")
    key, address = registries.new_key(), f"{new_hub.address}/acme/polite"
    for number in (1, 2, 3):
        folder = registries.write_sample(tmp_path / f"made-{number}", number)
        if number == 3:
            store = store_of(new_hub, "ada")
            for version in {"newest": ["v2"], "all": ["v1", "v2"]}.get(deleted, ()):
                store.delete("acme/polite", version)
            if deleted == "repository":
                with new_hub.client("ada") as ada:
                    body = {"organization": "acme", "name": "polite"}
                    answer = ada.request("DELETE", "/api/repos/delete", json=body)
                    assert answer.status_code == 200
        set_rules(new_hub, "acme", signers=(key.public.id,))
        assert ah.push(folder, address, sign=key, peft=False).version == f"v{number}"
        stated = [each.signature.statement for each in ah.verify(address).signatures]
        assert stated == [Statement(Saved.at(folder).digest, "acme/polite", f"v{number}")]
