"""Adapters in other forms: `merge`, `export`, `convert`, `resize` and `combine`."""

import json
import re

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import adapterhub as ah
from adapterhub.errors import OutputError
from adapterhub.files.native import Saved
from adapterhub.inference.merged_checkpoint import write_checkpoint
from adapterhub.inference.open import open_adapter
from tests.kit import own_models, tiny_models
from tests.kit.data import word_tokenizer, write_tsv
from tests.kit.server import EXAMPLES, write_adapter
from tests.kit.session import refused, succeeded
from tests.kit.tiny_adapters import write_language_model, write_noisy

TEXTS = ["the movie was good", "the plot was very bad"]


@pytest.fixture
def saved(backbone, tmp_path):
    """The folder of an adapter of the tiny backbone."""
    return write_adapter(backbone, tmp_path / "adapter", ["lora", "norms"])


def test_merge_writes_a_checkpoint_that_needs_no_adapterhub(saved, adapterhub, backbone, tmp_path):
    out, folder = tmp_path / "new" / "merged", saved
    text = succeeded(adapterhub("merge", folder, "--output", out, "--backbone", backbone))
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["merged", "reloaded"]
    assert text.count("max |difference|") == 2
    assert "AutoModelForSequenceClassification" in text
    live = open_adapter(folder, str(backbone))
    rows = live.setting.tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = live.model(**rows).logits
    model = AutoModelForSequenceClassification.from_pretrained(out)
    rows = AutoTokenizer.from_pretrained(out)(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        torch.testing.assert_close(model(**rows).logits, expected, atol=1e-4, rtol=1e-4)
    assert not [name for name in model.state_dict() if "adapterhub" in name]
    assert "adapterhub" not in (out / "config.json").read_text(encoding="utf-8")
    assert model.config.use_cache
    assert model.config.id2label == {0: "neg", 1: "pos"}
    assert sorted(p.name for p in out.parent.iterdir()) == ["merged"]


def test_a_failed_merge_leaves_no_files(saved, adapterhub, backbone, tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    where = ("--output", place / "out", "--backbone", backbone)
    arguments = ("merge", saved, *where, "--base-dtype", "bf16")
    refused(adapterhub(*arguments, "--tolerance", "1e-9"), "max |difference|")
    with monkeypatch.context() as patch:

        def full(*args, **kwargs):
            raise SafetensorError("No space left on device")

        patch.setattr(PreTrainedModel, "save_pretrained", full)
        refused(adapterhub(*arguments), "No space left")
    with monkeypatch.context() as patch:
        new = AutoModelForSequenceClassification.from_config
        reloaded = "adapterhub.inference.merged_checkpoint._reloaded"
        patch.setattr(reloaded, lambda model, folder: new(model.config))
        code, text, err = adapterhub(*arguments)
        assert code == 2
        assert "does not compute" in err
        assert "max |difference|" in text, "the difference is printed before anything is written"
    assert not list(place.iterdir())
    (place / "out").mkdir()
    (place / "out" / "mine.txt").write_text("mine")
    result = adapterhub(*arguments)
    refused(result, "already exists")
    assert "overwrite" not in result[2]
    assert [path.name for path in (place / "out").iterdir()] == ["mine.txt"]


def test_methods_that_cannot_be_merged_are_listed(adapterhub, backbone, tmp_path):
    saved = write_adapter(backbone, tmp_path / "mam", "mam")
    words = ("merge", saved, "--output", tmp_path / "out", "--backbone", backbone)
    refused(adapterhub(*words), "prefix at encoder.attn.kv", "scaled-parallel at encoder.ffn")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("limit", [20, 2000, 20_000, "the tokenizer"])
def test_a_full_disk_leaves_nothing(tmp_path, limit, monkeypatch):
    """The system refuses bytes beyond a limit: of the model, or of the tokenizer alone."""
    resource = pytest.importorskip("resource")
    model, tokenizer = tiny_models.model("bert").eval(), word_tokenizer()
    tiny_models.scramble(ah.attach(model, "lora"))
    expected = ah.merge(model).expected
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = model.save_pretrained

    def save_then_fill(folder):
        save(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))

    if limit == "the tokenizer":
        monkeypatch.setattr(model, "save_pretrained", save_then_fill)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OutputError, match="cannot write"):
            write_checkpoint(model, tokenizer, tmp_path / "out", expected)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


# `adapterhub export`.


def test_a_run_is_exported_to_peft(trained, adapterhub, tmp_path):
    succeeded(adapterhub("export", trained, "--output", tmp_path / "theirs"))
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    code, out, _ = adapterhub("export", trained, "--check", "peft")
    assert (code, out) == (0, "peft: no problems; outputs equal with random weights\n")
    code, out, _ = adapterhub("export", trained, "--check", "vllm")
    assert code == 1
    assert "BertForSequenceClassification: vLLM serves LoRA on" in out
    refused(adapterhub("export", trained, "--output", tmp_path / "theirs"), "already exists")


@pytest.fixture
def config_only(tmp_path):
    """A folder with a configuration, and no weights."""
    tiny_models.model("llama", "causal-lm").config.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_check_before_training(adapterhub, config_only, tmp_path):
    """Of a method, and of a recipe."""
    where = ("--backbone", config_only)
    code, out, err = adapterhub("export", "--check", "vllm", "--method", "lora(rank=16)", *where)
    assert (code, out) == (0, "vllm: no problems; outputs equal with random weights\n"), err
    code, out, _ = adapterhub("export", "--check", "vllm", "--method", "lora(rank=64)", *where)
    assert (code, "--max-lora-rank 64" in out) == (1, True)
    words = ("export", "--check", "vllm", "--method", "dora(rank=64)", *where)
    succeeded(adapterhub(*words), "converted to a LoRA of rank 16")
    code, out, _ = adapterhub("export", "--check", "peft", "--method", "houlsby", *where)
    assert (code, "houlsby: peft has no such method" in out) == (1, True)
    recipe = tmp_path / "recipe.yaml"
    content = {"backbone": str(config_only), "method": "prefix", "task": "causal-lm"}
    recipe.write_text(json.dumps(content | {"output": "out", "data": {"train": "train.txt"}}))
    code, out, _ = adapterhub("export", recipe, "--check", "peft")
    assert (code, "prefix(positions=true)" in out) == (1, True)


def test_an_adapter_is_exported_to_vllm(adapterhub, tmp_path):
    backbone, adapter, output = tmp_path / "llama", tmp_path / "noisy", tmp_path / "out"
    write_language_model(backbone, "llama")
    write_noisy(adapter, backbone, "dora(rank=2)")
    words = ("export", adapter, "--to", "vllm", "--output", output, "--max-lora-rank", "8")
    refused(adapterhub(*words), "as a LoRA of rank 8, noisy loses", "--max-lost")
    assert not output.exists()
    out = succeeded(adapterhub(*words, "--max-lost", "1"))
    told, note, serve = out.splitlines()
    assert told == f"{output}: noisy for vLLM, a LoRA of rank 8"
    assert note.startswith("- converted to a LoRA of rank 8, which loses up to ")
    assert serve.startswith("vllm serve ")
    assert serve.endswith(f" --enable-lora --max-lora-rank 8 --lora-modules noisy={output}")
    assert len(list(output.iterdir())) == 3


# `adapterhub convert`, `resize` and `combine`: adapters that are made of others.


@pytest.fixture
def three(backbone, tmp_path):
    """Save adapters of three methods, all called `served`; return their folders by name."""
    methods = {"oft": "oft(block=4)", "lora": "lora(rank=4)", "rslora": "rslora(rank=2)"}
    return {
        name: write_adapter(backbone, tmp_path / name, method, seed=number)
        for number, (name, method) in enumerate(methods.items(), 1)
    }


def test_convert_then_resize(three, adapterhub, backbone, tmp_path):
    rows = [("the movie was good", "pos"), ("the movie was bad", "neg")]
    data = write_tsv(tmp_path / "test.tsv", rows)
    where = ("--backbone", backbone)
    words = ("convert", three["oft"], "--output", tmp_path / "new", "--energy", 1, "--eval", data)
    out = succeeded(adapterhub(*words, *where))
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert float(lines["difference"].split()[0]) < 1e-4
    after, before = lines["accuracy"].replace(" before", "").split(", ")
    assert after == before
    assert set(Saved.at(tmp_path / "new").manifest.methods[0]) == {"lora"}
    words = ("resize", tmp_path / "new", "--output", tmp_path / "small", "--rank", 2, "--json")
    out = succeeded(adapterhub(*words, *where))
    facts = json.loads(out)
    assert facts["ranks"] == [2, 2]
    assert 0 < facts["lost"] < 1
    assert facts["parameters"] < facts["parameters before"]
    assert Saved.at(tmp_path / "small").manifest.labels == ("neg", "pos")


def test_without_a_folder_it_prints_what_each_rank_keeps(three, adapterhub, backbone):
    out = succeeded(adapterhub("resize", three["lora"], "--json", "--backbone", backbone))
    kept = json.loads(out)["kept"]
    assert [*kept] == ["1", "2", "4"]
    assert 0 < kept["1"] < kept["2"] < kept["4"] == 1
    code, out, err = adapterhub("resize", three["lora"], "--backbone", backbone)
    assert (code, err) == (0, "")
    assert out.split()[-2:] == ["4", "100.0%"]
    refused(adapterhub("resize", three["oft"], "--backbone", backbone), "--energy 0.99")
    words = ("convert", three["oft"], "--output", "new", "--backbone", backbone)
    refused(adapterhub(*words), "--energy, --rank")


def test_the_training_of_a_language_model_names_a_sufficient_rank(adapterhub, tmp_path):
    checkpoint = own_models.save_checkpoint(tiny_models.model("llama", "causal-lm"), tmp_path / "m")
    (tmp_path / "notes.txt").write_text("the movie was good\n\nthe movie was bad\n" * 8)
    words = ("train", tmp_path / "notes.txt", "--backbone", checkpoint, "--task")
    words += ("causal-lm(data=text)", "--steps", 3, "--output", tmp_path / "run")
    out = succeeded(adapterhub(*words))
    rank, whole, kept = re.search(r"(\d+) of (\d+) would keep (\d+) % of", out).groups()
    assert 2 * int(rank) <= int(whole)
    assert int(kept) >= 95
    command = re.search(r"adapterhub (resize .*) DIR", out)[1]
    succeeded(adapterhub(*command.split(), tmp_path / "small"))


def test_combine_then_predict_and_merge(three, adapterhub, backbone, tmp_path):
    """And with ties, in a rank."""
    where, folders = ("--backbone", backbone), (three["lora"], three["rslora"])
    words = ("combine", *folders, "--weights", "0.5,-0.25", "--output", tmp_path / "sum", *where)
    succeeded(adapterhub(*words), "linear of 2 adapters")
    manifest = Saved.at(tmp_path / "sum").manifest
    assert manifest.name == "combined"
    assert manifest.labels == ("neg", "pos")
    assert manifest.training["combined"]["weights"] == [0.5, -0.25]
    assert manifest.methods[0]["lora"]["rank"] == 6
    out = succeeded(adapterhub("predict", tmp_path / "sum", "the movie was good", *where))
    assert out.split()[0] in ("neg", "pos")
    succeeded(adapterhub("merge", tmp_path / "sum", "--output", tmp_path / "out", *where))
    words = ("combine", *folders, "--how", "ties", "--density", 0.2, "--rank", 4, "--name", "both")
    out = succeeded(adapterhub(*words, *where, "--output", tmp_path / "both", "--json"))
    facts = json.loads(out)
    assert (facts["how"], facts["density"], facts["rank"]) == ("ties", 0.2, 4)
    assert 0 < facts["lost"] < 1
    assert Saved.at(tmp_path / "both").manifest.name == "both"


def test_a_head_is_chosen_where_labels_differ(three, adapterhub, backbone, tmp_path):
    five = write_adapter(backbone, tmp_path / "five", "lora(rank=4)", EXAMPLES[1])
    words = ("combine", three["lora"], five, "--backbone", backbone, "--output", tmp_path / "new")
    refused(adapterhub(*words), "1: served: neg, pos", "--head ADAPTER")
    assert not (tmp_path / "new").exists()
    succeeded(adapterhub(*words, "--head", five))
    assert Saved.at(tmp_path / "new").manifest.labels == EXAMPLES[1].labels
