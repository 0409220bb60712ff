"""What is saved: equal logits and labels elsewhere, heads, inference forms, four bytes a number.

Of the tensors, what only training needs is left out, and fixed random numbers are computed again.
"""

import copy
import itertools
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import MismatchError
from adapterhub.inference.open import open_adapter
from tests.kit import processes, selection, tiny_models
from tests.kit.data import train
from tests.kit.matrix import CELLS, METHODS, example
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits

# Each method on an encoder, and one on each architecture.
SAVED = [(m, a) for m, a in CELLS if a == "bert" or m == "lora" or selection.WHOLE]
LABELS = {
    "id2label": {0: "ham", 1: "eggs", 2: "spam"},
    "label2id": {"ham": 0, "eggs": 1, "spam": 2},
}


def load_all(folder: Path, backbone: str) -> None:
    """Load every adapter of a folder and write its logits and labels; runs in another process."""
    outputs, labels = {}, {}
    for method, architecture in SAVED:
        model = tiny_models.usual_model(architecture)  # without the labels and the trained head
        adapter = ah.load(model, folder / f"{method}-{architecture}")
        outputs[f"{method}-{architecture}"] = logits(model)
        labels[f"{method}-{architecture}"] = adapter.labels
    opened = open_adapter(str(folder / "opened"), backbone)  # neither head nor labels are given
    inputs = opened.setting.tokenizer(["a good movie"], return_tensors="pt")
    outputs["opened"] = logits(opened.model.eval(), **inputs)
    labels["opened"] = [*opened.model.config.id2label.values()]
    save_file(outputs, folder / "outputs.safetensors")
    (folder / "labels.json").write_text(json.dumps(labels), encoding="utf-8")


@pytest.mark.apart
def test_a_new_process_computes_equal_logits(backbone, tmp_path):
    expected = {}
    for method, architecture in SAVED:
        model = tiny_models.usual_model(architecture, **LABELS)
        adapter = ah.attach(model, example(method))
        tiny_models.scramble(adapter)
        adapter.save(tmp_path / f"{method}-{architecture}")
        expected[f"{method}-{architecture}"] = logits(model)
    names = [*LABELS["label2id"]]
    model, tokenizer = ah.load_backbone(str(backbone), task="classification", labels=names)
    adapter = ah.attach(model, "lora")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "opened")
    inputs = tokenizer(["a good movie"], return_tensors="pt")
    expected["opened"] = logits(model.eval(), **inputs)
    ended = processes.run(__file__, tmp_path, backbone)
    assert ended.returncode == 0, ended.printed[-3000:]
    outputs = load_file(tmp_path / "outputs.safetensors")
    labels = json.loads((tmp_path / "labels.json").read_text(encoding="utf-8"))
    assert len(outputs) == len(labels) == len(SAVED) + 1 > 1
    for cell, value in expected.items():
        assert torch.equal(outputs[cell], value), cell
        headless = cell.endswith(tiny_models.WITHOUT_CLASSIFIER)
        assert labels[cell] == ([] if headless else names), cell


@pytest.fixture
def saved(tmp_path):
    model = tiny_models.model("bert", **LABELS)
    adapter = ah.attach(model, "lora")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "adapter")
    return tmp_path / "adapter", logits(model)


def test_a_model_of_another_size_or_without_a_head_is_refused(saved):
    folder, _ = saved
    with pytest.raises(MismatchError) as error:
        ah.load(tiny_models.model("bert", hidden_size=16), folder, any_backbone=True)
    assert len(error.value.offenders) >= 8
    with pytest.raises(MismatchError, match="has a task head") as error:
        ah.load(tiny_models.model("bert", "features"), folder)
    assert "ham" in error.value.hint


INFERENCE_FORMS = {
    "prefix(length=4, reparametrize=True, middle=6)": "prefix(length=4)",
    "p-tuning(length=4)": "prompt(length=4)",
    "p-tuning(length=4, encoder='lstm', middle=6)": "prompt(length=4)",
}


@long_table(
    ("spec", "architecture"),
    list(itertools.product(INFERENCE_FORMS, ("bert", "gpt2", "llama", "bart"))),
    4,
)
def test_an_adapter_is_copied_saved_and_loaded_in_its_inference_form(spec, architecture, tmp_path):
    """Copies have their own network."""
    torch.manual_seed(0)
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, spec)
    names = [n for n, _ in model.named_parameters(remove_duplicate=False) if "adapterhub" in n]
    own = sum(len(list(placed.module.parameters())) for placed in adapter.placed)
    assert len(names) == len(set(names)) == own
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)
    before = {n: t.detach().clone() for n, t in adapter.tensors().items()}
    losses = train(adapter, steps=6)
    assert losses[-1] < losses[0]
    for name, tensor in adapter.tensors().items():
        assert not torch.equal(tensor, before[name]), name
    expected = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), expected)
        parameters = {n: p for n, p in copied.named_parameters() if "adapterhub" in n}
        assert not {id(p) for p in parameters.values()} & {id(p) for p in adapter.parameters()}
        with torch.no_grad():
            next(p for n, p in parameters.items() if "trunk.prefix" in n or "prompt" in n).add_(1)
        assert not torch.equal(logits(copied), expected)
        assert torch.equal(logits(model), expected)
        ah.detach(copied)
    state = torch.get_rng_state()
    adapter.save(tmp_path / "adapter")
    assert torch.equal(torch.get_rng_state(), state), "saving uses no random numbers"
    plain = ah.attach(tiny_models.model(architecture), INFERENCE_FORMS[spec])
    saved = load_file(tmp_path / "adapter" / "adapter.safetensors")
    assert {n: t.shape for n, t in saved.items()} == {
        n: t.shape for n, t in plain.tensors().items()
    }
    again = tiny_models.model(architecture)
    loaded = ah.load(again, tmp_path / "adapter")
    assert {m.name for m in loaded.methods} == {m.name for m in plain.methods}
    assert torch.equal(logits(again), expected)
    losses = train(loaded, steps=3)
    assert losses[-1] < losses[0], "the loaded adapter trains"


def test_a_network_in_a_composition_is_saved_in_its_inference_form(tmp_path):
    adapter = ah.attach(tiny_models.model("bert"), ["prefix(reparametrize=True, middle=6)", "lora"])
    tiny_models.scramble(adapter)
    expected = logits(adapter.model)
    adapter.save(tmp_path / "adapter")
    loaded = ah.load(tiny_models.model("bert"), tmp_path / "adapter")
    assert [m.name for m in loaded.methods] == ["prefix", "lora"]
    assert not loaded.methods[0].reparametrize
    assert torch.equal(logits(loaded.model), expected)


_COMPONENTS = "computed from the weight, and another decomposition may have other signs"
# Methods whose files have other numbers: the end of their tensors' names, and why they have them.
FIXED: dict[str, tuple[str, str]] = {
    "adamss": (r"\.places", "clusters, which another release of a library may compute otherwise"),
    "adapterfusion": (r"\.members\..*", "the fused adapters, which may no longer exist elsewhere"),
    "cartridge": (r"\.first", "keys and values of the first tokens of a text"),
    "delora": (r"\.norms", "norms of the weight, which a quantized backbone does not have exactly"),
    "kasa": (r"\.[AB]0", _COMPONENTS),
    "lora-fa": (r"\.A", "drawn by torch, or computed from the data"),
    "lora-ga": (r"\.[AB]0", "computed from gradients on the data"),
    "lora-xs": (r"\.[AB]0", f"{_COMPONENTS}; `stored: false` leaves them out"),
    "mica": (r"\.B", _COMPONENTS),
    "olora": (r"\.[AB]0", _COMPONENTS),
    "pissa": (r"\.[AB]0", _COMPONENTS),
    "psoft": (r"\.[AB]0", f"{_COMPONENTS}; `stored: false` leaves them out"),
    "tinylora": (r"\.[AB]0", f"{_COMPONENTS}; `stored: false` leaves them out"),
}
FORMAT = Path(__file__).parents[3] / "docs" / "reference" / "format.md"


LEFT_OUT = ["lora-xs(rank=4, stored=false)", "psoft(rank=4, stored=false)",
            "tinylora(stored=false)"]  # fmt: skip


@long_table("spec", [*sorted(METHODS), *LEFT_OUT], 3)
def test_a_file_has_four_bytes_for_each_trained_number(spec, tmp_path):
    adapter = ah.attach(tiny_models.model("bert"), example(spec))
    adapter.save(tmp_path / "a")
    file = tmp_path / "a" / "adapter.safetensors"
    sizes = {name: t.numel() * t.element_size() for name, t in load_file(file).items()}
    total = file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
    forms = (method.inference_form() for method in adapter.methods)
    trained = 4 * sum(form.count(adapter.anatomy) for form in forms)
    head = sum(size for name, size in sizes.items() if name.startswith("head."))
    fixed = FIXED[spec][0] if spec in FIXED else "(?!)"
    more = sum(size for name, size in sizes.items() if re.search(f"{fixed}$", name))
    assert (more > 0) == (spec in FIXED)
    assert total - head - more == trained


def test_the_specification_lists_the_methods_with_other_numbers():
    text = " ".join(FORMAT.read_text(encoding="utf-8").split())
    (listed,) = re.findall(r"four bytes for each number that trains, but for (.*?):", text)
    assert re.findall(r"`([a-z-]+)`", listed) == sorted(FIXED)


if __name__ == "__main__":
    load_all(Path(sys.argv[1]), sys.argv[2])
