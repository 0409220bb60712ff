"""`adapterhub inspect`."""

from __future__ import annotations

import importlib
import json

from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from adapterhub.anatomy import anatomy_of
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.methods import METHODS

_roles = importlib.import_module("adapterhub.cli.inspect")._roles


def test_inspect_shows_the_anatomy(adapterhub, backbone):
    code, out, _ = adapterhub("inspect", backbone)
    assert code == 0
    assert "encoder.attn.q" in out
    assert "2 (encoder)" in out
    code, out, _ = adapterhub("inspect", backbone, "--json")
    facts = json.loads(out)
    assert facts["type"] == "bert"
    assert {s["layers"] for s in facts["sites"] if ".attn" in s["site"]} == {"all"}
    assert facts["methods"].keys() == METHODS.keys()


def test_inspect_shows_which_layers_have_a_site():
    """The last layer has a plain network, the others a mixture of experts."""
    options = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_experts": 4}
    options |= {"num_attention_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**options, mlp_only_layers=[3]))
    layers = {row["site"]: row["layers"] for row in _roles(anatomy_of(model))}
    assert layers["decoder.ffn"] == layers["decoder.attn.q"] == "all"
    assert layers["decoder.ffn.up"] == "1 of 4: 3"
    assert layers["decoder.mix"] == ""


def test_inspect_names_the_fingerprint(adapterhub, backbone):
    code, out, _ = adapterhub("inspect", backbone, "--json")
    assert code == 0
    assert json.loads(out)["fingerprint"] == fingerprint(backbone)
