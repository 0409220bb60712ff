"""`adapterhub inspect` of pipelines and models of diffusers, which needs no weights."""

import json
import shutil

import pytest

import adapterhub as ah
from tests.kit.pipelines import pipeline
from tests.kit.session import refused, succeeded


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The configurations of a pipeline; there are no weights."""
    folder = tmp_path_factory.mktemp("pipeline")
    pipeline().save_pretrained(folder)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "pipeline")


def test_a_pipeline(adapterhub, saved):
    code, out, err = adapterhub("inspect", saved)
    assert code == 0, err
    assert "(StableDiffusionPipeline)" in out
    assert [row.split()[:2] for row in out.splitlines() if row.split()[:1] == ["unet"]] == [
        ["unet", "UNet2DConditionModel"]
    ]
    assert "unet.*attn.q" in out
    assert "why it does not fit" in out
    assert err == ""
    facts = json.loads(adapterhub("inspect", saved, "--json")[1])
    assert facts["fingerprint"] is None
    assert {part["part"] for part in facts["parts"]} == {"unet", "text_encoder"}
    own = ah.inspect(pipeline()).facts()
    assert facts == {"backbone": str(saved), "fingerprint": None, **own}
    assert facts["default_sites"]["lora"] == ["attn.q", "attn.v", "cross.q", "cross.v"]
    sites = {row["site"]: row for row in facts["sites"]}
    assert sites["unet.*.norm1"]["modules"] == ["LayerNorm"]
    assert facts["not_found"][0]["module"] == "GroupNorm"  # of channels: no site


def test_each_row_of_a_pipeline_can_be_named():
    pipe = pipeline()
    anatomy = ah.anatomy_of(pipe)
    for row in ah.inspect(pipe).rows:
        assert set(anatomy.select([row.site])) == set(row.sites), row.site


def test_a_single_model(adapterhub, saved):
    out = succeeded(adapterhub("inspect", saved / "unet", "--json"))
    facts = json.loads(out)
    assert (facts["type"], facts["parts"]) == ("UNet2DConditionModel", [])
    assert "attn.q" in {row["site"] for row in facts["sites"]}


def test_a_model_with_parameters_at_no_site(adapterhub, tmp_path):
    import diffusers

    prior = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=4, num_layers=1, embedding_dim=8,
        num_embeddings=3, additional_embeddings=2,
    )  # fmt: skip
    prior.save_config(tmp_path / "prior")
    succeeded(adapterhub("inspect", tmp_path / "prior"), "not found: at no site")
    facts = json.loads(adapterhub("inspect", tmp_path / "prior", "--json")[1])
    (rest,) = facts["not_found"]
    assert rest["module"] == "PriorTransformer"
    assert "positional_embedding" in rest["names"]


def test_a_hub_id_needs_its_configurations_only(adapterhub, saved, monkeypatch):
    calls = []

    def download(name, **options):
        calls.append((name, options))
        return str(saved)

    monkeypatch.setattr("adapterhub.backbones.diffusers_folder.snapshot_download", download)
    out = succeeded(adapterhub("inspect", "acme/pictures", "--revision", "v1", "--json"))
    assert json.loads(out)["type"] == "StableDiffusionPipeline"
    names = ["model_index.json", "config.json", "*/config.json"]
    assert calls == [("acme/pictures", {"revision": "v1", "allow_patterns": names})]


def test_without_diffusers(adapterhub, saved, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(
        adapterhub("inspect", saved),
        "a pipeline or a model of diffusers needs diffusers, which is not installed",
        'pip install "adapterhub[diffusers]"',
    )


PARTLESS = {"unet": [None, None], "text_encoder": [None, None]}


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("model_index.json", PARTLESS, "adapters cannot be attached to a StableDiffusionPipeline"),
        ("model_index.json", {"_class_name": "StableDifusionPipeline"}, "did you mean"),
        ("model_index.json", {"_class_name": "UNet2DConditionModel"}, "not known here"),
        ("model_index.json", {"_class_name": "Stable\x1b[31mPipeline\n"}, "not known here"),
        ("model_index.json", {"unet": ["os", "system"]}, "not known here: os.system"),
        ("model_index.json", {"unet": ["unet", "Mine"]}, "code in a folder never runs"),
        ("unet/config.json", {"block_out_channels": "many"}, "no UNet2DConditionModel can be made"),
        ("unet/config.json", None, "has no config.json"),
        ("model_index.json", "[", "is not JSON"),
    ],
)
def test_a_folder_of_another_content_is_refused(adapterhub, folder, file, fields, said):
    path = folder / file
    if fields is None:
        path.unlink()
    elif isinstance(fields, str):
        path.write_text(fields)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    code, out, err = adapterhub("inspect", folder)
    refused((code, out, err), said)
    assert "\x1b" not in out + err


@pytest.mark.parametrize("words", [["--draft-family"], ["--family", "row.yaml"]])
def test_a_row_is_for_models_of_transformers(adapterhub, saved, words):
    refused(adapterhub("inspect", saved, *words), f"{words[0]} is for models of transformers")


def test_adapters_on_a_pipeline_are_compared(adapterhub, tmp_path):
    pipe = pipeline()
    for name in ("one", "two"):
        ah.attach(pipe, "lora(sites=['unet.*.to_q'])", name=name).save(tmp_path / name)
        ah.detach(pipe)
    out = succeeded(adapterhub("compare", tmp_path / "one", tmp_path / "two", "--json"))
    assert [run["trained"] for run in json.loads(out)["runs"]] == [2048, 2048]
    assert adapterhub("report", tmp_path / "one")[0] == 0
