"""The gate: what can be downloaded keeps the promises of its namespace, whoever writes what."""

from __future__ import annotations

import hashlib
import pickle
import random
from contextlib import ExitStack

import numpy as np
import pytest
from safetensors.numpy import save

import adapterhub as ah
from adapterhub.errors import RegistryError
from adapterhub.files.native import Saved
from adapterhub.files.signature import Statement, sign_statement, signatures_to_json
from adapterhub.hub.gc import collect, verify_hub
from adapterhub.hub.import_export import import_registry
from adapterhub.registry.hub import HubStore
from adapterhub.registry.store import Publication
from adapterhub.registry.version_files import beside_bytes
from tests.kit import registries
from tests.kit.real_hub import Writers, broken_promises, commit, create, set_rules

pytestmark = pytest.mark.usefixtures("online")
PEFT = {
    "adapter_config.json": b'{"peft_type": "LORA", "base_model_name_or_path": "acme/bert"}',
    "adapter_model.safetensors": save({"a": np.zeros(8, "float32")}),
}
OTHER = save({"encoder.0.attn.q.lora.a": np.ones((2, 4), "float32")})


def files_of(folder, key=None, name="signed", version=None):
    """Return the files of an adapter, signed or not."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if key:
        statement = Statement(Saved.at(folder).digest, name, version)
        files["adapter.sig"] = signatures_to_json([sign_statement(statement, key)])
    return files


def batch(client, sizes, name):
    """Request addresses for files of these sizes; return the answer and the files."""
    made = [bytes([65 + number]) * size for number, size in sizes]
    objects = [{"oid": hashlib.sha256(data).hexdigest(), "size": len(data)} for data in made]
    body = {"operation": "upload", "objects": objects}
    return client.post(f"/{name}.git/info/lfs/objects/batch", json=body), made


@pytest.fixture
def made(tmp_path):
    return registries.write_sample(tmp_path / "made")


@pytest.fixture
def signed(new_hub, key, made):
    """A repository with a signed adapter, in a namespace that takes no others."""
    with new_hub.client("ada") as client:
        create(client, "acme/signed")
        set_rules(new_hub, "acme", signers=(key.public.id,))
        answer = commit(client, "acme/signed", files_of(made, key))
        assert answer.status_code == 200, answer.text
        yield client


CHANGES = {
    "other tensors beside the signed manifest": ({"adapter.safetensors": OTHER}, ()),
    "peft's files beside it": (PEFT, ()),
    "an adapter in a subfolder": ({f"in/{path}": data for path, data in PEFT.items()}, ()),
    "weights in a subfolder": ({"in/model.safetensors": OTHER}, ()),
    "an adapter of peft once the manifest is deleted": (PEFT, ("adapter.json", "adapter.sig")),
    "no signature": ({}, ("adapter.sig",)),
    "no manifest": ({}, ("adapter.json",)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["commit", "branch of a commit", "move"])
def test_all_that_is_loaded_is_signed(new_hub, signed, made, key, change, way):
    files, deleted = CHANGES[change]
    if way == "commit":
        answer = commit(signed, "acme/signed", files, deleted=deleted)
    else:
        create(signed, "ada/elsewhere")
        assert commit(signed, "ada/elsewhere", files_of(made, key)).status_code == 200
        done = commit(signed, "ada/elsewhere", files, deleted=deleted)
        assert done.status_code == 200
        set_rules(new_hub, "ada", signers=(key.public.id,))
        if way == "move":
            body = {"fromRepo": "ada/elsewhere", "toRepo": "acme/moved"}
            answer = signed.post("/api/repos/move", json=body)
        else:
            body = {"startingPoint": done.json()["commitOid"]}
            answer = signed.post("/api/models/ada/elsewhere/branch/dev", json=body)
    assert answer.status_code == 400, answer.text
    assert "keys has signed" in answer.json()["error"]


def test_texts_and_what_another_key_adds_need_no_signature(signed, key, made):
    texts = {"README.md": b"# hi", "data.parquet": b"PAR1xPAR1", "signatures/v1.sig": b"{}"}
    assert commit(signed, "acme/signed", texts).status_code == 200
    tag = "/api/models/acme/signed/tag/main"
    assert signed.post(tag, json={"tag": "v1"}).status_code == 200
    for_another = files_of(made, key, version="v9")
    assert commit(signed, "acme/signed", for_another).status_code == 200
    assert signed.post(tag, json={"tag": "v2"}).status_code == 400  # it is signed as v9
    assert commit(signed, "acme/signed", files_of(made, key, "else")).status_code == 400


@pytest.mark.parametrize("kind", ["as it is", "of another manifest", "by another key", "stale"])
def test_files_of_peft_are_signed_by_a_list_of_them(signed, key, made, kind):
    digest = "0" * 64 if kind == "of another manifest" else Saved.at(made).digest
    data = beside_bytes(digest, PEFT)
    signer = registries.new_key() if kind == "by another key" else key
    statement = Statement(hashlib.sha256(data).hexdigest(), "acme/signed", None)
    signature = signatures_to_json([sign_statement(statement, signer)])
    files = {**PEFT, "beside.json": data, "beside.sig": signature}
    if kind == "stale":
        files["adapter_model.safetensors"] = OTHER
    status = commit(signed, "acme/signed", files).status_code
    assert status == (200 if kind == "as it is" else 400)


@pytest.mark.parametrize("way", ["push --sign", "sign, then push"])
def test_the_ways_of_the_guide_work_where_signatures_are_required(
    new_hub, tmp_path, monkeypatch, key, way
):
    set_rules(new_hub, "acme", signers=(key.public.id,))
    monkeypatch.setattr("adapterhub.registry.publish.peft_files", lambda *_: (PEFT, ah_peft()))
    monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{new_hub.address}={new_hub.tokens['ada']}")
    address = f"{new_hub.address}/acme/c"
    for number in (1, 2):
        folder = registries.write_sample(tmp_path / f"made-{number}", number)
        with pytest.raises(RegistryError, match="keys has signed"):
            ah.push(folder, address, peft=True)
        if way == "push --sign":
            entry = ah.push(folder, address, peft=True, sign=key)
        else:
            ah.sign(folder, key, name="c", version=f"v{number}")
            entry = ah.push(folder, address, peft=True)
        assert entry.version == f"v{number}"
        with new_hub.client("ada") as client:
            found = client.get(f"/acme/c/resolve/v{number}/adapter_config.json").status_code
        assert found == (200 if way == "push --sign" else 404)
    assert ah.push(folder, address, sign=key, peft=False).version == "v2"
    folder = registries.write_sample(tmp_path / "made-3", 3)
    assert ah.push(folder, address, sign=key, peft=False).version == "v3"  # without peft's of v2
    HubStore(new_hub.address, token=new_hub.tokens["ada"]).delete("acme/c", "v3")
    assert broken_promises(new_hub) == []


def ah_peft():
    from adapterhub.files.card import InPeft

    return InPeft("classification", ())


def test_a_move_obeys_the_rules_of_where_it_goes(new_hub):
    set_rules(new_hub, "ada", allowed=("pickle", "contents"))
    with new_hub.client("ada") as client:
        for number, (path, data) in enumerate({"a.bin": b"x", "a.md": pickle.dumps({})}.items()):
            name = create(client, f"ada/x{number}")
            assert commit(client, name, {path: data}).status_code == 200
            assert commit(client, name, {}, deleted=[path]).status_code == 200
            body = {"fromRepo": name, "toRepo": f"acme/x{number}"}
            answer = client.post("/api/repos/move", json=body)  # the first commit still has it
            assert (answer.status_code, "pickle" in answer.text) == (400, True)
            assert client.get(f"/api/models/acme/x{number}").status_code == 404


def test_an_import_passes_the_gate(new_hub, tmp_path, key, made):
    set_rules(new_hub, "acme", signers=(key.public.id,))
    ah.publish(made, "bare", registry=tmp_path / "registry")
    ah.publish(made, "named", registry=tmp_path / "registry", sign=key)
    report = import_registry(new_hub.hub, str(tmp_path / "registry"), "acme")
    assert [each.rpartition("/")[2] for each in report.copied] == ["named@v1"]
    ((refused, reason),) = report.refused.items()
    assert refused.endswith("bare@v1")
    assert "keys has signed" in reason
    assert broken_promises(new_hub) == []


def test_a_quota_holds_for_moves_and_promises(new_hub):
    set_rules(new_hub, "acme", quota=1000)
    with new_hub.client("ada") as client:
        name, moved = create(client, "acme/x"), create(client, "ada/large")
        assert commit(client, moved, {"a.md": b"x" * 990}).status_code == 200
        body = {"fromRepo": moved, "toRepo": "acme/large"}
        answer = client.post("/api/repos/move", json=body)
        assert (answer.status_code, "of its 1,000 bytes" in answer.text) == (413, True)
        answers = [batch(client, [(number, 300)], name) for number in range(4)]
        assert [answer.status_code for answer, _ in answers] == [200, 200, 200, 413]
        assert batch(client, [(0, 300)], name)[0].status_code == 200  # the same once more
        assert commit(client, name, {"b.md": b"y" * 300}).status_code == 413
        large = {}
        for number, (answer, (data,)) in enumerate(answers[:3]):
            (found,) = answer.json()["objects"]
            href = found["actions"]["upload"]["href"]
            assert client.put(href, content=data).status_code == 200
            large[f"{number}.md"] = (found["oid"], len(data))
        set_rules(new_hub, "acme", quota=500)
        assert commit(client, name, large=large).status_code == 200  # they are here already
        assert commit(client, name, {"b.md": b"y"}).status_code == 413


def test_room_is_looked_for_again_when_bytes_come(new_hub):
    set_rules(new_hub, "acme", quota=1000)
    with new_hub.client("ada") as client:
        name = create(client, "acme/x")
        answer, (data,) = batch(client, [(1, 600)], name)
        set_rules(new_hub, "acme", quota=500)
        href = answer.json()["objects"][0]["actions"]["upload"]["href"]
        assert client.put(href, content=data).status_code == 413
        large = {"a.md": (hashlib.sha256(data).hexdigest(), len(data))}
        assert commit(client, name, large=large).status_code == 400


BROKEN = {
    "beside none": ("adapter.safetensors", None, "missing"),
    "beside others": ("adapter.safetensors", OTHER, "another one"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_version_is_whole_and_equals_its_manifest(new_hub, made, kind):
    path, data, words = BROKEN[kind]
    files = files_of(made)
    files |= {path: data} if data else {}
    if data is None:
        del files[path]
    with new_hub.client("wil") as wil:
        name = create(wil, "acme/broken")
        assert commit(wil, name, files).status_code == 200
        address = f"/api/adapterhub/models/{name}/tag/v1"
        for answer in (
            wil.post(f"/api/models/{name}/tag/main", json={"tag": "v1"}),
            wil.put(address, json={"revision": "main"}),
        ):
            assert (answer.status_code, words in answer.text) == (400, True)
        assert commit(wil, name, files_of(made)).status_code == 200
        assert wil.put(address, json={"revision": "main"}).status_code == 200


def test_what_is_deleted_is_in_no_commit_without_its_manifest(new_hub, tmp_path):
    store = HubStore(new_hub.address, token=new_hub.tokens["ada"])
    for seed in range(2):
        folder = registries.write_sample(tmp_path / f"made-{seed}", seed)
        entry = store.put(folder, Publication("acme/polite"))
    gone = hashlib.sha256((folder / "adapter.safetensors").read_bytes()).hexdigest()
    with new_hub.client("ada") as client:
        assert client.post("/api/models/acme/polite/branch/dev", json={}).status_code == 200
        deleted = ["adapter.json"]
        assert commit(client, "acme/polite", revision="dev", deleted=deleted).status_code == 200
        store.delete("acme/polite", entry.version)
        for revision in ("main", "dev"):
            assert client.get(f"/api/models/acme/polite/tree/{revision}").status_code == 200
    collect(new_hub.hub, grace=-1)
    assert new_hub.hub.blobs.size(gone) < 0
    assert verify_hub(new_hub.hub) == []


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
def test_a_tag_takes_no_commits(new_hub):
    """Stock clients see the same for a tag and for what is not there."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    with new_hub.client("ada") as client:
        name = create(client, "acme/tagged")
        assert client.post(f"/api/models/{name}/tag/main", json={"tag": "best"}).status_code == 200
        oid = client.get(f"/api/models/{name}").json()["sha"]
        api = HfApi(endpoint=new_hub.address, token=new_hub.tokens["ada"])
        for revision in ("best", oid, "nowhere"):
            answer = commit(client, name, {"a.md": b"a"}, revision=revision)
            assert (answer.status_code, answer.headers["x-error-code"]) == (404, "RevisionNotFound")
            with pytest.raises(RevisionNotFoundError):
                api.upload_file(
                    path_or_fileobj=b"a", path_in_repo="a.md", repo_id=name, revision=revision
                )


def test_a_write_that_passes_by_the_gate_is_undone(new_hub):
    from adapterhub.hub.commits import move_ref
    from adapterhub.hub.repositories import find_repository

    with new_hub.client("ada") as client:
        create(client, "acme/x")
        oid = client.get("/api/models/acme/x").json()["sha"]

        def pass_by():
            with new_hub.hub.database.writing() as connection:
                found = find_repository(connection, "models", "acme/x")
                move_ref(connection, found.id, "branch", "dev", oid)

        with pytest.raises(RuntimeError, match="changing"):
            pass_by()
        assert client.get("/api/models/acme/x/revision/dev").status_code == 404


@pytest.mark.parametrize("seed", range(3))
def test_promises_hold_after_any_writes_of_anyone(new_hub, tmp_path, seed):
    """After each write, whatever can be downloaded is as the rules of its namespace say."""
    statuses = {}
    with ExitStack() as stack:
        writers = Writers(new_hub, random.Random(seed), tmp_path, stack)
        for _ in range(60):
            write, status = writers.write()
            statuses.setdefault(write, []).append(status)
            assert status < 500, (write, status)
            assert broken_promises(new_hub) == [], (write, status)
    taken = [write for write, found in statuses.items() if 200 in found]
    assert len(taken) > 4, statuses
    collect(new_hub.hub, grace=-1)
    assert verify_hub(new_hub.hub) == []
