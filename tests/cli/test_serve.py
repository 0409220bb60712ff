"""`adapterhub serve` and `adapterhub token`: flags, the table of adapters, and errors.

A running server is tested in tests/serving/http.
"""

import json

import pytest

pytest.importorskip("starlette", reason='pip install "adapterhub[serve]"')

import adapterhub as ah
from adapterhub.web.tokens import TokenFile
from tests.kit.server import EXAMPLES, write_adapter
from tests.kit.session import succeeded


@pytest.fixture
def registry(backbone, tmp_path):
    root = tmp_path / "registry"
    for example, method in ((EXAMPLES[0], "lora(rank=2)"), (EXAMPLES[5], "bitfit")):
        folder = write_adapter(backbone, tmp_path / example.task, method, example)
        ah.publish(folder, example.task, registry=root)
    return root


def test_check_lists_which_adapters_share_the_backbone_and_what_cannot_be_served(
    adapterhub, registry
):
    out = succeeded(adapterhub("serve", "--registry", registry, "--check"))
    lines = {line.split()[0]: line for line in out.splitlines() if "@v1" in line}
    assert " yes " in lines["classification@v1"]
    assert " no " in lines["tagging@v1"]
    assert "trains parameters" in lines["tagging@v1"]
    assert "2 adapters can be served" in out
    (file,) = registry.glob("**/tagging/v1/adapter.safetensors")
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = adapterhub("serve", "--registry", registry, "--check")
    assert code == 2
    assert "classification@v1" in out
    assert "1 adapter cannot be served" in err
    assert "tagging: " in err


def test_options_of_a_file_and_of_flags(adapterhub, registry, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(f"adapters: [classification]\nregistry: {registry}\nport: none\n")
    code, _, err = adapterhub("serve", "--config", file, "--check")
    assert (code, "port" in err) == (2, True)
    succeeded(
        adapterhub("serve", "--config", file, "--port", 0, "--check"), "1 adapter can be served"
    )


def test_a_token_is_shown_once(adapterhub, tmp_path):
    file = tmp_path / "tokens.json"
    code, out, _ = adapterhub("token", "create", "shop", "--adapter", "team-*", "--file", file)
    token = out.strip()
    assert code == 0
    assert TokenFile(file).check(token).adapters == ("team-*",)
    code, out, _ = adapterhub("token", "list", "--file", file)
    assert "shop" in out
    assert token not in out
    _, out, _ = adapterhub("token", "list", "--file", file, "--json")
    (listed,) = json.loads(out)
    assert listed["name"] == "shop"
    assert "sha256" not in listed
    assert adapterhub("token", "revoke", "shop", "--file", file)[0] == 0
    assert adapterhub("token", "list", "--file", file)[1] == "no tokens\n"


def test_the_users_own_file_is_the_default(adapterhub):
    made = adapterhub("token", "create", "one", "--role", "admin", "--expires", "90d")
    assert made[0] == 0
    _, listed, _ = adapterhub("token", "list", "--json")
    (token,) = json.loads(listed)
    assert (token["roles"], token["expires"] > token["created"]) == (["admin"], True)
