"""What a hub takes, by name and by contents, and what an administrator allows."""

from __future__ import annotations

import io
import json
import pickle
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save

from tests.kit.real_hub import answered, commit, create, set_rules

TENSORS = save({"a": np.zeros(8, "float32"), "b": np.ones(3, "int8")})
KEY = "hf_" + "aB3dE6gH9j" * 4


def torch_archive():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02.")
    return data.getvalue()


def header(tree, size=0):
    text = json.dumps(tree).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * size


@pytest.fixture(scope="module")
def client(hub):
    with hub.client("ada") as client:
        create(client, "acme/taken")
        yield client


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("a.safetensors", TENSORS),
        ("tokenizer.json", b'{"a": 1}'),
        ("in/spiece.model", b"\x0a\x05"),
        ("README.md", b"# hi\n"),
        ("chat_template.jinja", b"{{ messages }}"),
        ("data.parquet", b"PAR1xxxxPAR1"),
        ("LICENSE", b"Apache"),
        ("adapter_config.json", b'{"peft_type": "LORA", "base_model_name_or_path": "acme/bert"}'),
    ],
)
def test_what_adapters_and_data_have_is_taken(client, path, data):
    assert commit(client, "acme/taken", {path: data}).status_code == 200


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
        ("a.safetensors", header({"a": 1}), "no place"),
        ("a.safetensors", header({"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}}, 3),
         "size differs"),
        ("a.safetensors", header({"a": {"dtype": "I8", "shape": [2], "data_offsets": [1, 3]}}, 3),
         "gaps"),
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
def test_what_could_harm_is_refused_with_the_file_and_the_rule(hub, client, path, data, words):
    answer = commit(client, "acme/taken", {"ok.md": b"ok", path: data})
    said = answer.json()["error"]
    assert answer.status_code == 400, said
    assert ascii(path)[1:-1] in said
    assert words in said
    assert KEY not in said
    assert not [*hub.hub.blobs.incoming.iterdir()]
    assert client.get("/acme/taken/resolve/main/ok.md").status_code == 404


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
