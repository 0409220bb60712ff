"""`adapterhub backbones`, and `inspect`: of transformers, and of diffusers, without weights."""

import json
import re
import shutil

import pytest
import transformers
import yaml

import adapterhub as ah
from adapterhub.anatomy import Family, Stack
from adapterhub.anatomy.family_file import read_family
from adapterhub.backbones import find
from adapterhub.backbones.find import GOOD, default_backbone
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.methods import METHODS
from tests.kit.pipelines import pipeline
from tests.kit.session import refused, succeeded

MINILM, SMOLLM = GOOD[0].id, "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hub's cache; the function adds a model of one weight file to it."""
    monkeypatch.setattr(find.constants, "HF_HUB_CACHE", str(tmp_path))

    def add(name, architecture, size=100):
        folder = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "0123"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        (folder / "model.safetensors").write_bytes(bytes(size))

    return add


def test_a_good_one_that_is_here_is_chosen_else_the_smallest(cache):
    assert {default_backbone(task)[0] for task in TASK_MODELS} <= {each.id for each in GOOD}
    assert default_backbone("causal-lm") == (SMOLLM, "Hub")
    cache("acme/big", "LlamaForCausalLM", 500)
    cache("acme/small", "GPT2LMHeadModel", 100)
    cache("acme/encoder", "BertForMaskedLM", 1)
    assert default_backbone("causal-lm") == ("acme/small", "Hub cache")
    cache(SMOLLM, "LlamaForCausalLM", 900)
    assert default_backbone("causal-lm") == (SMOLLM, "Hub cache")
    assert default_backbone("tagging")[0] == MINILM


def test_the_command_lists_what_is_here_and_what_is_good(cache, adapterhub, tmp_path):
    for number, text in enumerate(("", "[]", '{"architectures": 3}', '{"architectures": [[]]}')):
        cache(f"acme/m{number}", "x")  # it cannot be read
        (tmp_path / f"models--acme--m{number}/snapshots/0123/config.json").write_text(text)
    cache("acme/chat", "LlamaForCausalLM", 2048)
    _, shown, _ = adapterhub("backbones")
    assert "acme/chat" in shown
    assert "acme/m" not in shown
    assert "2.0 kB" in shown
    assert all(each.id in shown for each in GOOD)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    data = json.loads(adapterhub("backbones", "--json")[1])
    found = {"id": "acme/chat", "kind": "language model", "bytes": 2048, "place": "Hub cache"}
    assert found in data["here"]


# `adapterhub inspect`: of models of transformers, and of diffusers, which needs no weights.


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


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
MIXTURE = SMALL | {"num_experts": 4, "moe_intermediate_size": 16}


def test_inspect_says_how_experts_are_reached(adapterhub, backbone, tmp_path):
    folder = shutil.copytree(backbone, tmp_path / "moe")
    config = transformers.Qwen2MoeConfig(**MIXTURE, num_hidden_layers=2)
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(folder)
    out = succeeded(adapterhub("inspect", folder))
    line = next(line for line in out.splitlines() if "routed experts" in line)
    assert line.split(maxsplit=1)[1].startswith("4 routed experts, fused as tensors of 3")
    assert "lora(sites=[ffn.experts.*]) reaches them" in out
    assert re.search(r"decoder\.ffn\.experts\.gate_up\s+weight\s+32\s+32", out)
    out = succeeded(adapterhub("inspect", folder, "--json"))
    assert [group["experts"] for group in json.loads(out)["groups"]] == [4]


@pytest.fixture
def persimmon(backbone, tmp_path):
    """Write a model without a row, with the tokenizer of another one."""
    folder = shutil.copytree(backbone, tmp_path / "persimmon")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    special = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.PersimmonConfig(**SMALL, **special, num_hidden_layers=2)
    transformers.PersimmonForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_draft_is_a_row_for_family_that_must_fit(adapterhub, persimmon, tmp_path):
    draft = succeeded(adapterhub("inspect", persimmon, "--draft-family"))
    row = tmp_path / "row.yaml"
    row.write_text(draft.replace("attn.qkv: whole", "attn.qkv: heads"))
    succeeded(adapterhub("inspect", persimmon, "--family", row), "decoder.attn.v")
    assert "decoder.attn.v" not in adapterhub("inspect", persimmon)[1]
    source = succeeded(adapterhub("inspect", persimmon, "--draft-family", "--python"))
    assert eval(source, {"Family": Family, "Stack": Stack}) == read_family(yaml.safe_load(draft))
    row.write_text(draft.replace("mlp.dense_h_to_4h", "mlp.dense_h_to_4"))
    near = "decoder.ffn.up: 'mlp.dense_h_to_4'; did you mean 'mlp.dense_h_to_4h'"
    refused(adapterhub("inspect", persimmon, "--family", row), near)


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
    family = yaml.safe_load((run / "recipe.yaml").read_text())["family"]
    assert family["model_types"] == ["persimmon"]
    out = succeeded(adapterhub("predict", run, "good film"))
    assert out.split("\t")[0].split()[0] in ("yes", "no")
    assert adapterhub("merge", run, "--output", tmp_path / "merged")[0] == 0


# Pipelines and models of diffusers


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


def test_a_pipeline_and_a_part_of_it(adapterhub, saved):
    code, out, err = adapterhub("inspect", saved)
    assert (code, err) == (0, "")
    for text in ("(StableDiffusionPipeline)", "unet.*attn.q", "why it does not fit"):
        assert text in out
    rows = [row.split()[:2] for row in out.splitlines() if row.split()[:1] == ["unet"]]
    assert rows == [["unet", "UNet2DConditionModel"]]
    facts = json.loads(adapterhub("inspect", saved, "--json")[1])
    assert facts["fingerprint"] is None
    assert {part["part"] for part in facts["parts"]} == {"unet", "text_encoder"}
    own = ah.inspect(pipeline()).facts()
    assert facts == {"backbone": str(saved), "fingerprint": None, **own}
    assert facts["default_sites"]["lora"] == ["attn.q", "attn.v", "cross.q", "cross.v"]
    sites = {row["site"]: row for row in facts["sites"]}
    assert sites["unet.*.norm1"]["modules"] == ["LayerNorm"]
    assert facts["not_found"][0]["module"] == "GroupNorm"  # of channels: no site
    facts = json.loads(succeeded(adapterhub("inspect", saved / "unet", "--json")))
    assert (facts["type"], facts["parts"]) == ("UNet2DConditionModel", [])
    assert "attn.q" in {row["site"] for row in facts["sites"]}
    pipe = pipeline()  # each row can be named
    anatomy = ah.anatomy_of(pipe)
    for row in ah.inspect(pipe).rows:
        assert set(anatomy.select([row.site])) == set(row.sites), row.site


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


def test_a_row_is_for_transformers_and_diffusers_are_needed(adapterhub, saved, monkeypatch):
    for words in (["--draft-family"], ["--family", "row.yaml"]):
        refused(adapterhub("inspect", saved, *words), f"{words[0]} is for models of transformers")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(adapterhub("inspect", saved), 'pip install "adapterhub[diffusers]"')


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
    result = adapterhub("inspect", folder)
    refused(result, said)
    assert "\x1b" not in "".join(result[1:])


def test_inspect_shows_which_layers_have_a_site():
    """The last layer has a plain network, the others a mixture of experts."""
    config = transformers.Qwen2MoeConfig(**MIXTURE, num_hidden_layers=4, mlp_only_layers=[3])
    model = transformers.Qwen2MoeForCausalLM(config)
    layers = {row["site"]: row["layers"] for row in ah.inspect(model).facts()["sites"]}
    assert layers["decoder.ffn"] == layers["decoder.attn.q"] == "all"
    assert layers["decoder.ffn.up"] == "1 of 4: 3"
    assert layers["decoder.mix"] == ""
