"""Rows as data and as source, read strictly, and rows of the user's own."""

from dataclasses import replace

import every_type
import pytest
import torch
import transformers
import yaml

import adapterhub as ah
from adapterhub.anatomy import FAMILIES, Family, Stack, family_file
from adapterhub.anatomy.backbone import Backbone
from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.family_file import family_data, family_yaml, read_family, use_family
from adapterhub.errors import BackboneError, ConfigError, FileError, MismatchError
from adapterhub.files.native import Saved
from tests.kit import tiny_models


def copies(row, folder):
    """Read a row again: from YAML, from plain data, from source."""
    path = folder / "row.yaml"
    path.write_text(family_yaml(row), "utf-8")
    source = eval(family_file.row_text(row), {"Family": Family, "Stack": Stack})
    return read_family(path), read_family(family_data(row)), source


def test_a_row_survives(tmp_path):
    for architecture, row in FAMILIES.items():
        assert copies(row, tmp_path) == (row,) * 3, architecture


@pytest.mark.parametrize("model_type", ["jamba", "clip", "persimmon", "gemma3n_text"])
def test_a_draft_survives(model_type, tmp_path):
    """Layers that differ, several stacks, parts that are not known, further projections."""
    row = discover(every_type.build(model_type, every_type.autos(model_type)[-1]))
    assert copies(row, tmp_path) == (row,) * 3


VALID = {
    "model_types": ["new"],
    "stacks": [{"name": "decoder", "layers": "layers", "sites": {"attn.qkv": "qkv"}}],
    "below": [],
}


def with_stack(**fields):
    return VALID | {"stacks": [VALID["stacks"][0] | fields]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (VALID | {"belov": []}, "did you mean 'below'"),
        ({k: v for k, v in VALID.items() if k != "below"}, "below is missing"),
        (with_stack(fusd={}), "did you mean 'fused'"),
        (with_stack(fused={"attn.qkv": "head"}), "did you mean 'heads'"),
        (
            with_stack(sites={"atn.q": "q", "ffn.up": "up"}, fused={"ffn.up": "heads"}),
            r"(?s)did you mean 'attn\.q'.*only qkv|only qkv.*did you mean 'attn\.q'",
        ),
        (with_stack(fused={"attn.qvk": "heads"}), "did you mean 'attn.qkv'"),
        (with_stack(sites={"attn.q": "q"}, fused={"attn.q": "heads"}), "only qkv and gate_up"),
        (with_stack(sites={"atn.q": "q"}), "did you mean 'attn.q'"),
        (with_stack(sites={"attn.q": 3}), "expected str"),
        (with_stack(own={"first": {}}), "own.first is not the number of a layer"),
        (VALID | {"stacks": []}, "stacks is empty"),
        (VALID | {"stacks": VALID["stacks"] * 2}, "two stacks are named 'decoder'"),
        (VALID | {"model_types": []}, "model_types is empty"),
        (VALID | {"stacks": "layers"}, "stacks is 'layers'"),
    ],
)
def test_a_problem_of_a_row_is_named(data, message):
    with pytest.raises(ConfigError, match=message):
        read_family(data)


SITES = {
    "attn.qkv": "self_attn.query_key_value", "attn.o": "self_attn.dense", "attn.kv": "self_attn",
    "ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h",
}  # fmt: skip
ROW = ah.Family(
    ("persimmon",),
    (ah.Stack("decoder", "layers", SITES, fused={"attn.qkv": "heads"}, norms="pre"),),
    ("embed_tokens",),
)


@pytest.fixture
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 1}
    torch.manual_seed(0)
    return transformers.PersimmonForCausalLM(transformers.PersimmonConfig(**sizes)).eval()


@pytest.fixture
def rows():
    """Let a test add a row."""
    yield
    FAMILIES.pop("persimmon", None)


def logits(model):
    with torch.no_grad():
        return model(input_ids=tiny_models.batch()["input_ids"]).logits


@pytest.mark.parametrize("form", [lambda row: row, family_data, "file"])
def test_a_registered_row_is_used_for_all_models_of_its_type(model, rows, form, tmp_path):
    assert "decoder.0.attn.v" not in ah.anatomy_of(model).sites
    path = tmp_path / "row.yaml"
    path.write_text(family_yaml(ROW))
    assert ah.register_family(path if form == "file" else form(ROW)) == ROW
    assert ah.anatomy_of(model).family == ROW
    assert ah.attach(model, "lora(sites=[attn.v])").placed


def test_another_row_of_a_type_is_refused_unless_it_replaces(rows):
    ah.register_family(ROW)
    ah.register_family(ROW)  # the same one
    other = replace(ROW, below=())
    with pytest.raises(ConfigError, match="there is a row for persimmon already"):
        ah.register_family(other)
    ah.register_family(other, replace=True)
    assert FAMILIES["persimmon"] == other
    with pytest.raises(ConfigError, match="there is a row for bert already"):
        ah.register_family(replace(ROW, model_types=("bert", "new")))
    assert "new" not in FAMILIES


def test_a_row_is_used_for_one_model_of_its_type(model):
    use_family(model, ROW)
    assert Backbone.of(model).family == ROW == ah.anatomy_of(model).family
    Backbone.of(model).family = None
    assert Backbone.of(model).family is None
    assert "decoder.0.attn.v" not in ah.anatomy_of(model).sites
    with pytest.raises(BackboneError, match="the row is for new, the model is of type persimmon"):
        use_family(model, replace(ROW, model_types=("new",)))


def test_every_path_that_a_model_lacks_is_listed(model):
    sites = SITES | {"attn.o": "self_attn.dens", "ffn.gate": "mlp.gate|mlp.dense_h_to_4h"}
    stack = replace(ROW.stacks[0], sites=sites, root="decoder", own={1: {"ffn.up": "mlp.up"}})
    with pytest.raises(BackboneError) as error:
        use_family(model, replace(ROW, stacks=(stack,), below=("embed_token",)))
    assert len(error.value.offenders) == 5
    for line in (
        "decoder.attn.o: 'self_attn.dens'; did you mean 'self_attn.dense'",
        "decoder.ffn.gate: 'mlp.gate'", "decoder.own.1.ffn.up: 'mlp.up'", "root 'decoder'",
        "below: 'embed_token'; did you mean 'embed_tokens'",
    ):  # fmt: skip
        assert line in "\n".join(error.value.offenders)
    with pytest.raises(BackboneError, match="no module list 'layer'; did you mean 'layers'"):
        use_family(model, replace(ROW, stacks=(replace(stack, layers="layer", root=""),)))


@pytest.fixture
def saved(model, tmp_path):
    """Save an adapter at a site of the row alone, and take the row from the model."""
    use_family(model, ROW)
    adapter = ah.attach(model, "lora(sites=[attn.v])", name="own")
    tiny_models.scramble(adapter)
    expected = logits(model)
    adapter.save(tmp_path / "own")
    adapter.detach()
    Backbone.of(model).family = None
    return expected


def test_an_adapter_brings_its_row(model, saved, tmp_path):
    bare = logits(model)
    loaded = ah.load(model, tmp_path / "own")
    assert torch.equal(logits(model), saved)
    loaded.save(tmp_path / "again")
    again, first = (Saved.at(tmp_path / name).manifest.training for name in ("again", "own"))
    assert again["family"] == first["family"] == family_data(ROW)
    loaded.detach()
    assert torch.equal(logits(model), bare)


def test_a_refused_adapter_with_a_row_leaves_none(model, saved, tmp_path):
    """On a model with other sites, and on other weights."""
    ah.attach(model, "lora(sites=[ffn.up])", name="discovered")
    with pytest.raises(MismatchError, match="another row of sites"):
        ah.load(model, tmp_path / "own")
    assert list(ah.adapters(model)) == ["discovered"]
    other = type(model)(model.config)
    with pytest.raises(MismatchError):
        ah.load(other, tmp_path / "own")
    assert Backbone.of(other).family is None


@pytest.mark.parametrize("recorded", ["row.yaml", ["row"], {"model_types": ["persimmon"]}])
def test_a_broken_recorded_row_is_refused(model, recorded, tmp_path):
    adapter = ah.attach(model, "lora", name="own")
    adapter.metadata.training["family"] = recorded
    adapter.save(tmp_path / "own")
    adapter.detach()
    with pytest.raises(FileError, match="the family row of 'own' cannot be used"):
        ah.load(model, tmp_path / "own")


def test_load_backbone_takes_a_row(model, backbone, tmp_path):
    row = family_data(FAMILIES["bert"])
    del row["stacks"][0]["sites"]["ffn.up"]
    path = tmp_path / "row.yaml"
    path.write_text(yaml.safe_dump(row))
    loaded, _ = ah.load_backbone(str(backbone), family=path)
    assert "encoder.0.ffn.up" not in ah.anatomy_of(loaded).sites
    with pytest.raises(BackboneError, match="the row is for persimmon"):
        ah.load_backbone(str(backbone), family=ROW)
