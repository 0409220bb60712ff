"""`adapterhub inspect`."""

import json
import re
import shutil

import pytest
import yaml
from transformers import (
    PersimmonConfig,
    PersimmonForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    ResNetConfig,
    ResNetModel,
)

import adapterhub as ah
from adapterhub.anatomy import Family, Stack
from adapterhub.anatomy.family_file import read_family
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.methods import METHODS
from tests.kit.session import refused, succeeded


def test_inspect_shows_the_anatomy(adapterhub, backbone):
    succeeded(adapterhub("inspect", backbone), "encoder.attn.q", "2 (encoder)")
    facts = json.loads(succeeded(adapterhub("inspect", backbone, "--json")))
    assert {"backbone", "type", "parameters", "groups"} < facts.keys()
    assert (facts["type"], facts["fingerprint"]) == ("bert", fingerprint(backbone))
    query = next(site for site in facts["sites"] if site["site"] == "encoder.attn.q")
    assert {"kind", "in", "out", "host", "layers"} <= query.keys()
    assert isinstance(query["in"], int)
    assert isinstance(facts["methods"]["lora"], int)
    assert {s["layers"] for s in facts["sites"] if ".attn" in s["site"]} == {"all"}
    assert facts["methods"].keys() == METHODS.keys()
    assert facts["default_sites"]["lora"] == ["attn.q", "attn.v"]
    by_path = {site["host"] for site in facts["sites"] if "." not in site["site"]}
    assert "embeddings.word_embeddings" in by_path
    assert facts["not_found"] == []


def test_a_backbone_without_a_tokenizer(adapterhub, tmp_path):
    """A model of pictures without attention: its convolutions are named by their paths."""
    options = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    ResNetModel(ResNetConfig(**options)).save_pretrained(tmp_path / "resnet")
    out = succeeded(adapterhub("inspect", tmp_path / "resnet", "--json"))
    facts = json.loads(out)
    (row,) = facts["sites"]
    assert (row["site"], row["modules"], row["number"]) == ("convolution", ["Conv2d"], 8)
    assert "Conv2d" in facts["named_sites"]["lora"]


def test_inspect_shows_which_layers_have_a_site():
    """The last layer has a plain network, the others a mixture of experts."""
    options = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_experts": 4}
    options |= {"num_attention_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**options, mlp_only_layers=[3]))
    layers = {row["site"]: row["layers"] for row in ah.inspect(model).facts()["sites"]}
    assert layers["decoder.ffn"] == layers["decoder.attn.q"] == "all"
    assert layers["decoder.ffn.up"] == "1 of 4: 3"
    assert layers["decoder.mix"] == ""


def test_inspect_says_how_experts_are_reached(adapterhub, backbone, tmp_path):
    options = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_experts": 4}
    options |= {"num_attention_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16}
    folder = tmp_path / "moe"
    shutil.copytree(backbone, folder)
    Qwen2MoeForCausalLM(Qwen2MoeConfig(**options)).save_pretrained(folder)
    out = succeeded(adapterhub("inspect", folder))
    line = next(line for line in out.splitlines() if "routed experts" in line)
    assert line.split(maxsplit=1)[1].startswith("4 routed experts, fused as tensors of 3")
    assert "lora(sites=[ffn.experts.*]) reaches them" in out
    assert re.search(r"decoder\.ffn\.experts\.gate_up\s+weight\s+32\s+32", out)
    out = succeeded(adapterhub("inspect", folder, "--json"))
    assert [group["experts"] for group in json.loads(out)["groups"]] == [4]


PERSIMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip


@pytest.fixture
def persimmon(backbone, tmp_path):
    """Write a model without a row, with the tokenizer of another one."""
    folder = tmp_path / "persimmon"
    shutil.copytree(backbone, folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    config = PersimmonConfig(**PERSIMMON)
    PersimmonForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_draft_is_a_row_for_family(adapterhub, persimmon, tmp_path):
    draft = succeeded(adapterhub("inspect", persimmon, "--draft-family"))
    row = tmp_path / "row.yaml"
    row.write_text(draft.replace("attn.qkv: whole", "attn.qkv: heads"))
    succeeded(adapterhub("inspect", persimmon, "--family", row), "decoder.attn.v")
    assert "decoder.attn.v" not in adapterhub("inspect", persimmon)[1]
    source = succeeded(adapterhub("inspect", persimmon, "--draft-family", "--python"))
    assert eval(source, {"Family": Family, "Stack": Stack}) == read_family(yaml.safe_load(draft))


def test_a_row_that_does_not_fit_is_refused(adapterhub, persimmon, tmp_path):
    draft = adapterhub("inspect", persimmon, "--draft-family")[1]
    row = tmp_path / "row.yaml"
    row.write_text(draft.replace("mlp.dense_h_to_4h", "mlp.dense_h_to_4"))
    refused(
        adapterhub("inspect", persimmon, "--family", row),
        "decoder.ffn.up: 'mlp.dense_h_to_4'; did you mean 'mlp.dense_h_to_4h'",
    )


def test_a_run_with_a_row_is_opened_without_it(adapterhub, persimmon, tmp_path):
    draft = adapterhub("inspect", persimmon, "--draft-family")[1]
    row, data, run = tmp_path / "row.yaml", tmp_path / "data.tsv", tmp_path / "run"
    row.write_text(draft.replace("attn.qkv: whole", "attn.qkv: heads"))
    data.write_text("text\tlabel\n" + "good film\tyes\nbad film\tno\n" * 4)
    words = ("--backbone", persimmon, "--train", data, "--eval", data, "--output", run, "--quiet")
    words += ("--method", "lora(sites=[attn.v])", "--steps", "2")
    refused(adapterhub("train", *words), "attn.v")
    succeeded(adapterhub("train", *words, "--family", row))
    row.unlink()
    assert yaml.safe_load((run / "recipe.yaml").read_text())["family"]["model_types"] == [
        "persimmon"
    ]
    out = succeeded(adapterhub("predict", run, "good film"))
    assert out.split("\t")[0].split()[0] in ("yes", "no")
    assert adapterhub("merge", run, "--output", tmp_path / "merged")[0] == 0
