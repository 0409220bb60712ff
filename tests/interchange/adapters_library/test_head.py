"""Heads of `adapters` compute the same in models of transformers."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers.activations import ACT2FN

import adapterhub as ah
from adapterhub.errors import AttachError, MergeError, MismatchError
from adapterhub.interchange.adapters_library.files import HEAD_WEIGHTS, WEIGHTS
from adapterhub.interchange.checkpoint_files import read_tensor_file
from tests.kit import peers
from tests.kit.peers import AUTO, GOLDEN, backbone, hidden, imported, inputs, with_head
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits

POOLS = ("prefix_tunings", "shared_parameters")

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@long_table(("architecture", "case"), peers.HEADS, 8, nightly=3)
def test_equal_logits(architecture, case, tmp_path):
    model = with_head(architecture, case)
    adapter = imported(model, architecture, case)
    adapter.save(tmp_path / "own")
    if (architecture, case) in peers.LAYERED_HEADS:
        assert adapter.detach() is None
        adapter = ah.load(model, tmp_path / "own", any_tokenizer=True)
    expected, given = peers.EXPECTED[architecture], inputs(architecture)
    names = [n for n in ("logits", "start_logits", "end_logits") if f"{case}.{n}" in expected]
    assert names
    with torch.no_grad():
        output = model(**given)
    for name in names:
        found, wanted = output[name], expected[f"{case}.{name}"]
        if found.dim() > 1 and found.shape[:2] == given["input_ids"].shape:
            mask = given["attention_mask"].bool()
            found, wanted = found[mask], wanted[mask]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    options = peers.head_of(architecture, case)
    if "num_labels" in options and len(names) == 1:
        numbered = [f"LABEL_{i}" for i in range(options["num_labels"])]
        assert adapter.labels == tuple(options.get("label2id") or numbered)


@long_table(("architecture", "case"), sorted(peers.OTHER_HEADS), 2)
def test_an_unsupported_head_is_refused(architecture, case):
    model = with_head(architecture, case)
    keys = list(model.state_dict())
    with pytest.raises(MismatchError, match="head=False"):
        imported(model, architecture, case)
    assert list(model.state_dict()) == keys
    assert imported(model, architecture, case, head=False).head is None


def test_the_pooler_of_bert_is_restored():
    """The first layer of a head on BERT replaces the backbone's pooler while it is active."""
    model = with_head("bert", "houlsby")
    pooler = model.bert.pooler.dense.weight.clone()
    adapter = imported(model, "bert", "houlsby")
    assert not torch.equal(model.bert.pooler.dense.weight, pooler)
    ah.activate(model)
    assert torch.equal(model.bert.pooler.dense.weight, pooler)
    assert adapter.labels == ("a", "b", "c")


LANGUAGE_MODELS = {
    "gpt2": ("causal_lm", "pfeiffer"), "llama": ("causal_lm", "lora"),
    "t5": ("seq2seq_lm", "prefix"), "mt5": ("seq2seq_lm", "mixed"),
    "bart": ("seq2seq_lm", "prefix"), "mbart": ("seq2seq_lm", "mixed"),
}  # fmt: skip


def with_head_of_class(folder, architecture, change=None):
    """Write the head as `save_adapter` does for a transformers class; return model and folder.

    It saves all that is outside of the base model: for T5, which is its own base model, all that is
    not in a stack.
    """
    kind, case = LANGUAGE_MODELS[architecture]
    model = backbone(architecture, AUTO[kind])
    shutil.copytree(GOLDEN / architecture / case, folder)
    for name in HEAD_WEIGHTS:
        (folder / name).unlink(missing_ok=True)
    own = read_tensor_file(folder, *WEIGHTS, allow_pickle=True)
    base = ("encoder", "decoder", "shared") if "t5" in architecture else (model.base_model_prefix,)
    tensors = {n: t.clone() for n, t in model.state_dict().items() if not n.startswith(base)}
    pools = {n[n.index(kind) :]: t for n, t in own.items() for kind in POOLS if f"{kind}.own." in n}
    if "t5" in architecture:
        tensors |= {f"prefix_tuning.{n}": t.clone() for n, t in pools.items()}
    if change:
        change(tensors)
    save_file(tensors, folder / "model_head.safetensors")
    config = {"config": None, "name": None, "model_class": type(model).__name__, "num_labels": 2}
    config["label2id"] = {"LABEL_0": 0, "LABEL_1": 1}
    (folder / "head_config.json").write_text(json.dumps(config), encoding="utf-8")
    return model, folder


@pytest.mark.parametrize("architecture", LANGUAGE_MODELS)
def test_the_output_layer_of_a_language_model(tmp_path, architecture):
    """What `save_adapter` writes by default on a language model of transformers."""
    options, given = {"any_backbone": True, "allow_pickle": True}, inputs(architecture)
    model, folder = with_head_of_class(tmp_path / "theirs", architecture)
    expected, bare = copy.deepcopy(model), logits(model, **given)
    adapter = ah.load(model, folder, **options)
    assert adapter.head is None
    ah.load(expected, folder, head=False, **options)
    assert torch.equal(logits(model, **given), logits(expected, **given))
    assert not torch.allclose(logits(model, **given), bare, atol=1e-3)


CHANGED = {
    "gpt2": ("lm_head.weight", "tied to the embedding"),
    "bart": ("final_logits_bias", "a constant"),
    "t5": ("prefix_tuning.prefix_tunings.own", "differs from the adapter's own file"),
}


@pytest.mark.parametrize("architecture", CHANGED)
def test_another_output_layer_of_a_tied_model_is_refused(tmp_path, architecture):
    name, reason = CHANGED[architecture]

    def change(tensors):
        for tensor in (t for n, t in tensors.items() if n.startswith(name)):
            tensor += 1

    model, folder = with_head_of_class(tmp_path / "theirs", architecture, change)
    with pytest.raises(MismatchError, match=reason):
        ah.load(model, folder, any_backbone=True, allow_pickle=True)


LAYERS = {
    "default": (2, "tanh", True),
    "relu": (2, "relu", True),
    "new gelu": (2, "gelu_new", False),
    "one layer": (1, "tanh", True),
    "one without bias": (1, "tanh", False),
}
ARCHITECTURES = ("electra", "distilbert", "roberta", "xlm-roberta", "gpt2", "llama", "mistral")
KINDS = {"classification": "single_label_classification",
         "multilabel_classification": "multi_label_classification"}  # fmt: skip
# Heads that the class of transformers has itself.
OF_CLASS = {"bert": ["default"], "roberta": ["default"], "xlm-roberta": ["default"],
            "distilbert": ["relu"], "gpt2": ["one without bias"], "llama": ["one without bias"],
            "mistral": ["one without bias"]}  # fmt: skip
CELLS = [
    (a, layers, kind)
    for a in (*ARCHITECTURES, "bert")
    for layers in LAYERS
    for kind in KINDS
    if a != "bert" or layers == "default"  # the pooler of BERT stands in front of its head
]


def with_layers(folder, architecture, layers, kind):
    """Write the checkpoint of an adapter with such a head; return the weights of the head."""
    count, activation, bias = LAYERS[layers]
    case = "pfeiffer" if architecture in ("bert", "gpt2", "llama", "roberta") else "mixed"
    shutil.copytree(GOLDEN / architecture / case, folder)
    for name in HEAD_WEIGHTS:
        (folder / name).unlink(missing_ok=True)
    width = backbone(architecture).config.hidden_size
    shapes = {"1": (width, width), "4": (3, width)} if count == 2 else {"1": (3, width)}
    torch.manual_seed(0)
    head = {}
    for number, shape in shapes.items():
        head[f"{number}.weight"] = torch.randn(shape)
        if bias or (count == 2 and number == "1"):
            head[f"{number}.bias"] = torch.randn(shape[0])
    tree = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = {f"heads.{tree['name']}.{n}": t for n, t in head.items()}
    save_file(tensors, folder / "model_head.safetensors")
    options = {"head_type": kind, "num_labels": 3, "layers": count, "bias": bias,
               "activation_function": activation, "use_pooler": False,
               "label2id": {"a": 0, "b": 1, "c": 2}}  # fmt: skip
    config = {"config": options, "name": tree["name"], "num_labels": 3}
    (folder / "head_config.json").write_text(json.dumps(config), encoding="utf-8")
    return head


def reference(folder, architecture, head, activation, text):
    """Compute the logits as `adapters` does: layers on the first token, or on the last one."""
    bare = backbone(architecture)
    options = {"head": False, "any_backbone": True, "allow_pickle": True}
    ah.load(bare, folder, **options)
    states = hidden(bare, {"input_ids": text})
    state = states[:, -1 if architecture in ("gpt2", "llama", "mistral") else 0]
    for number in ("1", "4") if "4.weight" in head else ("1",):
        if number == "4":
            state = ACT2FN[activation](state)
        state = torch.nn.functional.linear(
            state, head[f"{number}.weight"], head.get(f"{number}.bias")
        )
    return state


@long_table(("architecture", "layers", "kind"), CELLS, 16, nightly=4)
def test_a_classifier_of_adapters_is_imported_whole(architecture, layers, kind, tmp_path):
    head = with_layers(tmp_path / "theirs", architecture, layers, kind)
    text = inputs(architecture)["input_ids"][:1, :4]
    expected = reference(tmp_path / "theirs", architecture, head, LAYERS[layers][1], text)
    model = backbone(architecture, AUTO["classification"], num_labels=5)
    bare = hidden(model, {"input_ids": text})
    options = {"any_backbone": True, "allow_pickle": True}
    adapter = ah.load(model, tmp_path / "theirs", name="theirs", **options)
    torch.testing.assert_close(hidden(model, {"input_ids": text}), expected, atol=1e-5, rtol=1e-5)
    assert adapter.labels == ("a", "b", "c")
    assert adapter.problem_type == KINDS[kind]
    adapter.save(tmp_path / "ours")
    again = ah.load(model, tmp_path / "ours", name="again")
    of_class = layers in OF_CLASS.get(architecture, ())
    if architecture == "distilbert" and not of_class:
        with pytest.raises(AttachError, match="cannot be applied row by row"):
            ah.route(model, ["again", None]).__enter__()
    elif architecture != "bert":  # its pooler is shared by all rows
        rows = ["again", None, "theirs"]
        with ah.route(model, rows), torch.no_grad():
            found = model(input_ids=text.expand(len(rows), -1))[0]
        for row, name in zip(found, rows, strict=True):
            wanted = expected[0] if name else bare[0]
            torch.testing.assert_close(row[: len(wanted)], wanted, atol=1e-5, rtol=1e-5)
    model.train()
    model(input_ids=text)[0].sum().backward()
    assert all(p.grad is not None for p in again.parameters() if p.requires_grad)
    model.eval()
    again.detach()
    ah.activate(model, "theirs")
    with pytest.raises(MismatchError, match="cannot be exported") as error:  # bottlenecks, too
        adapter.export(tmp_path / "peft")
    assert of_class is not any("a head of own layers" in line for line in error.value.offenders)
    adapter.detach()
    assert torch.equal(hidden(model, {"input_ids": text}), bare)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_head_of_own_layers_is_not_merged(architecture):
    """LoRA, whose update can be merged."""
    model = with_head(architecture, "lora")
    imported(model, architecture, "lora")
    before = logits(model, **inputs(architecture))
    with pytest.raises(MergeError, match="does not have the layers"):
        ah.merge(model)
    assert torch.equal(logits(model, **inputs(architecture)), before)
