"""The gate: what can be downloaded keeps the promises of its namespace, whoever writes what."""

import pickle

import numpy as np
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import RevisionNotFoundError
from safetensors.numpy import save

import adapterhub as ah
from adapterhub.errors import RegistryError
from adapterhub.files.card import InPeft
from adapterhub.files.native import Saved
from adapterhub.files.signature import Statement, sign_statement, signatures_to_json
from adapterhub.hub.commits import move_ref
from adapterhub.hub.import_export import import_registry
from adapterhub.hub.repositories import find_repository
from adapterhub.registry.hub import HubStore
from adapterhub.registry.version_files import beside_bytes
from tests.kit import real_hub, registries
from tests.kit.real_hub import answered, batch, commit, create, digest, head

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


@pytest.fixture
def made(tmp_path):
    return registries.write_sample(tmp_path / "made")


@pytest.fixture
def signed(new_hub, ada, key, made):
    """A repository with a signed adapter, in a namespace that takes no others."""
    create(ada, "acme/signed")
    real_hub.set_rules(new_hub, "acme", signers=(key.public.id,))
    answered(commit(ada, "acme/signed", files_of(made, key)), 200)
    return ada


CHANGES = {
    "other tensors beside the signed manifest": ({"adapter.safetensors": OTHER}, ()),
    "peft's files beside it": (PEFT, ()),
    "an adapter in a subfolder": ({f"in/{path}": data for path, data in PEFT.items()}, ()),
    "weights in a subfolder": ({"in/model.safetensors": OTHER}, ()),
    "an adapter of peft once the manifest is deleted": (PEFT, ("adapter.json", "adapter.sig")),
    "no signature": ({}, ("adapter.sig",)),
    "no manifest": ({}, ("adapter.json",)),
    "a text": ({"README.md": b"# hi"}, ()),
}


@pytest.mark.parametrize("way", ["commit", "branch of a commit", "move"])
def test_all_that_is_loaded_is_signed(new_hub, signed, made, key, way):
    for number, (change, (files, deleted)) in enumerate(CHANGES.items()):
        if way != "commit" and number not in (0, 4, 7):
            continue
        if way == "commit":
            answer = commit(signed, "acme/signed", files, deleted=deleted)
        else:
            name = create(signed, f"ada/x{number}")
            assert commit(signed, name, files_of(made, key, f"x{number}")).status_code == 200
            done = commit(signed, name, files, deleted=deleted)
            assert done.status_code == 200
            real_hub.set_rules(new_hub, "ada", signers=(key.public.id,))
            if way == "move":
                answer = real_hub.move(signed, name, f"acme/x{number}")
            else:
                body = {"startingPoint": done.json()["commitOid"]}
                answer = signed.post(f"/api/models/{name}/branch/dev", json=body)
            real_hub.set_rules(new_hub, "ada")
        assert answer.status_code == (200 if change == "a text" else 400), (change, answer.text)
        assert change == "a text" or "keys has signed" in answer.json()["error"]


def test_texts_and_what_another_key_adds_need_no_signature(signed, key, made):
    texts = {"README.md": b"# hi", "data.parquet": b"PAR1xPAR1", "signatures/v1.sig": b"{}"}
    assert commit(signed, "acme/signed", texts).status_code == 200
    assert real_hub.tag(signed, "acme/signed", "v1").status_code == 200
    for_another = files_of(made, key, version="v9")
    assert commit(signed, "acme/signed", for_another).status_code == 200
    assert real_hub.tag(signed, "acme/signed", "v2").status_code == 400  # it is signed as v9
    assert commit(signed, "acme/signed", files_of(made, key, "else")).status_code == 400


def test_files_of_peft_are_signed_by_a_list_of_them(signed, key, made):
    def status(digest_=None, signer=key, **changed):
        data = beside_bytes(digest_ or Saved.at(made).digest, PEFT)
        statement = Statement(digest(data), "acme/signed", None)
        signature = signatures_to_json([sign_statement(statement, signer)])
        files = {**PEFT, "beside.json": data, "beside.sig": signature, **changed}
        return commit(signed, "acme/signed", files).status_code

    assert status("0" * 64) == 400
    assert status(signer=registries.new_key()) == 400
    assert status(**{"adapter_model.safetensors": OTHER}) == 400
    assert status() == 200


@pytest.mark.parametrize("way", ["push --sign", "sign, then push"])
def test_the_ways_of_the_guide_work_where_signatures_are_required(
    new_hub, ada, tmp_path, monkeypatch, key, way
):
    real_hub.set_rules(new_hub, "acme", signers=(key.public.id,))
    in_peft = InPeft("classification", ())
    monkeypatch.setattr("adapterhub.registry.publish.peft_files", lambda *_: (PEFT, in_peft))
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
        found = ada.get(f"/acme/c/resolve/v{number}/adapter_config.json").status_code
        assert found == (200 if way == "push --sign" else 404)
    assert ah.push(folder, address, sign=key, peft=False).version == "v2"
    folder = registries.write_sample(tmp_path / "made-3", 3)
    assert ah.push(folder, address, sign=key, peft=False).version == "v3"  # without peft's of v2
    HubStore(new_hub.address, token=new_hub.tokens["ada"]).delete("acme/c", "v3")


def test_a_move_obeys_the_rules_of_where_it_goes(new_hub, ada):
    real_hub.set_rules(new_hub, "ada", allowed=("pickle", "contents"))
    for number, (path, data) in enumerate({"a.bin": b"x", "a.md": pickle.dumps({})}.items()):
        name = create(ada, f"ada/x{number}")
        assert commit(ada, name, {path: data}).status_code == 200
        assert commit(ada, name, {}, deleted=[path]).status_code == 200
        answered(real_hub.move(ada, name, f"acme/x{number}"), 400, "pickle")
        assert ada.get(f"/api/models/acme/x{number}").status_code == 404


def test_an_import_passes_the_gate(new_hub, tmp_path, key, made):
    real_hub.set_rules(new_hub, "acme", signers=(key.public.id,))
    ah.publish(made, "bare", registry=tmp_path / "registry")
    ah.publish(made, "named", registry=tmp_path / "registry", sign=key)
    report = import_registry(new_hub.hub, str(tmp_path / "registry"), "acme")
    assert [each.rpartition("/")[2] for each in report.copied] == ["named@v1"]
    ((refused, reason),) = report.refused.items()
    assert refused.endswith("bare@v1")
    assert "keys has signed" in reason


def test_a_quota_holds_for_moves_and_promises(new_hub, ada):
    real_hub.set_rules(new_hub, "acme", quota=1000)
    name, moved = create(ada, "acme/x"), create(ada, "ada/large")
    assert commit(ada, moved, {"a.md": b"x" * 990}).status_code == 200
    answer = real_hub.move(ada, moved, "acme/large")
    assert (answer.status_code, "of its 1,000 bytes" in answer.text) == (413, True)
    files = [bytes([65 + number]) * 300 for number in range(4)]
    answers = [batch(ada, name, data) for data in files]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 413]
    assert batch(ada, name, files[0]).status_code == 200  # the same once more
    assert commit(ada, name, {"b.md": b"y" * 300}).status_code == 413
    (found,) = answers[0].json()["objects"]
    real_hub.set_rules(new_hub, "acme", quota=200)  # room is looked for again when bytes come
    assert ada.put(found["actions"]["upload"]["href"], content=files[0]).status_code == 413
    assert commit(ada, name, large={"0.md": (found["oid"], 300)}).status_code == 400
    real_hub.set_rules(new_hub, "acme", quota=1000)
    large = {}
    for number, (answer, data) in enumerate(zip(answers[:3], files, strict=False)):
        (found,) = answer.json()["objects"]
        assert ada.put(found["actions"]["upload"]["href"], content=data).status_code == 200
        large[f"{number}.md"] = (found["oid"], len(data))
    real_hub.set_rules(new_hub, "acme", quota=500)
    assert commit(ada, name, large=large).status_code == 200  # they are here already
    assert commit(ada, name, {"b.md": b"y"}).status_code == 413


@pytest.mark.parametrize(("data", "words"), [(None, "missing"), (OTHER, "another one")])
def test_a_version_is_whole_and_equals_its_manifest(new_hub, made, data, words):
    files = {path: own for path, own in files_of(made).items() if path != "adapter.safetensors"}
    files |= {"adapter.safetensors": data} if data else {}
    wil = new_hub.as_user("wil")
    name = create(wil, "acme/broken")
    assert commit(wil, name, files).status_code == 200
    address = f"/api/adapterhub/models/{name}/tag/v1"
    for answer in (real_hub.tag(wil, name, "v1"), wil.put(address, json={"revision": "main"})):
        assert (answer.status_code, words in answer.text) == (400, True)
    assert commit(wil, name, files_of(made)).status_code == 200
    assert wil.put(address, json={"revision": "main"}).status_code == 200


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
def test_a_tag_takes_no_commits(new_hub, ada):
    """Stock clients see the same for a tag and for what is not there."""
    name = create(ada, "acme/tagged")
    assert real_hub.tag(ada, name, "best").status_code == 200
    api = HfApi(endpoint=new_hub.address, token=new_hub.tokens["ada"])
    for revision in ("best", head(ada, name), "nowhere"):
        answer = commit(ada, name, {"a.md": b"a"}, revision=revision)
        assert (answer.status_code, answer.headers["x-error-code"]) == (404, "RevisionNotFound")
        given = {"path_or_fileobj": b"a", "path_in_repo": "a.md", "revision": revision}
        with pytest.raises(RevisionNotFoundError):
            api.upload_file(repo_id=name, **given)


def test_a_write_that_passes_by_the_gate_is_undone(new_hub, ada):
    create(ada, "acme/x")
    found = new_hub.change(find_repository, "models", "acme/x")
    with pytest.raises(RuntimeError, match="changing"):
        new_hub.change(move_ref, found.id, "branch", "dev", head(ada, "acme/x"))
    assert ada.get("/api/models/acme/x/revision/dev").status_code == 404
