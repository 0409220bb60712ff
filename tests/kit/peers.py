"""Checkpoints of peft and of the library adapters, with the outputs of their models."""

import copy
import json
import os
from functools import cache
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

import adapterhub as ah
from tests.kit import tiny_models

# Adapters saved by `peft`, and the outputs of its models, on tiny backbones.


KINDS = {
    "classification": "SEQ_CLS",
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "features": "FEATURE_EXTRACTION",
}


def trained(folder, architecture, config, task="classification", seed=0, std=0.3, **options):
    """Save a peft adapter whose every tensor differs from its initial value; return the folder."""
    torch.manual_seed(seed)  # peft initializes at random
    model = peft.get_peft_model(tiny_models.model(architecture, task, seed, **options), config)
    trained = [parameter for _, parameter in sorted(model.named_parameters())]
    tiny_models.add_noise((p for p in trained if p.requires_grad), std, seed=3)
    model.save_pretrained(folder)
    return folder


def outputs(model, task="classification"):
    """Return the logits of a batch, or the last hidden state of a model without a head."""
    inputs = tiny_models.batch()
    if task == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        result = model.eval()(**inputs)
    return result["last_hidden_state" if task == "features" else "logits"]


def lora_config(task="classification", **options):
    return peft.LoraConfig(task_type=KINDS[task], **({"r": 4, "lora_alpha": 12} | options))


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(config), encoding="utf-8")


def edit_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def linear_names(model):
    """Return the paths of all linear layers, sites or not."""
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)]


def compare_import(
    tmp_path, architecture, config, task="classification", atol=5e-6, strip=0, std=0.3, **options
):
    """Check that an import, and our own files of it, compute what peft computes."""
    folder = trained(tmp_path / "theirs", architecture, config, task, std=std, **options)
    theirs = peft.PeftModel.from_pretrained(
        tiny_models.model(architecture, task, **options), folder
    )
    expected = outputs(theirs, task)[:, strip:] if strip else outputs(theirs, task)
    bare = outputs(tiny_models.model(architecture, task, **options), task)
    assert not torch.allclose(expected, bare, atol=1e-3)
    ours = tiny_models.model(architecture, task, **options)
    adapter = ah.load(ours, folder)
    torch.testing.assert_close(outputs(ours, task), expected, atol=atol, rtol=1e-5)
    adapter.save(tmp_path / "ours")
    again = tiny_models.model(architecture, task, **options)
    ah.load(again, tmp_path / "ours")
    assert torch.equal(outputs(again, task), outputs(ours, task))
    ah.activate(ours)
    assert torch.equal(outputs(ours, task), bare)
    ah.activate(ours, adapter.name)
    return adapter


def exported(folder, architecture, spec, task="classification", **options):
    """Attach, scramble and export an adapter; return it and its outputs."""
    model = tiny_models.model(architecture, task, **options)
    adapter = ah.attach(model, spec)
    fixed = {n: t.clone() for n, t in adapter.tensors().items() if not t.requires_grad}
    tiny_models.scramble(adapter)
    for name, tensor in fixed.items():
        adapter.tensors()[name].copy_(tensor)
    adapter.export(folder)
    return adapter, outputs(model, task)


def compare_export(
    folder, architecture, spec, task="classification", atol=1e-5, strip=0, **options
):
    """Check that peft, and our own import of the export, compute equal outputs."""
    adapter, expected = exported(folder, architecture, spec, task, **options)
    assert not torch.allclose(
        expected, outputs(tiny_models.model(architecture, task, **options), task)
    )
    theirs = peft.PeftModel.from_pretrained(
        tiny_models.model(architecture, task, **options), folder
    )
    found = outputs(theirs, task)
    found = found[:, strip:] if strip else found
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)
    held = load_file(folder / "adapter_model.safetensors")
    assert sum(t.numel() for t in held.values()) > 0
    again = tiny_models.model(architecture, task, **options)
    imported = ah.load(again, folder)
    torch.testing.assert_close(outputs(again, task), expected, atol=atol, rtol=1e-5)
    return adapter, imported


def same_bits(adapter, imported):
    own, other = adapter.saved_tensors(), imported.saved_tensors()
    assert own.keys() == other.keys() != set()
    assert all(torch.equal(own[name], other[name]) for name in own)


# Checkpoints that the library `adapters` wrote, and its outputs: tests/golden/adapters.
#
# They are generated by tests/golden/adapters/make.py with the library itself.


GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"
CASES = sorted(
    (folder.parent.name, folder.name)
    for folder in GOLDEN.glob("*/*")
    if (folder / "adapter_config.json").exists()
)
EXPECTED = {a: load_file(GOLDEN / a / "expected.safetensors") for a in {a for a, _ in CASES}}
AUTO = {
    "classification": "AutoModelForSequenceClassification",
    "tagging": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
}


def backbone(architecture, auto="AutoModel", **options):
    """Return a new copy of the backbone of the golden files, of the installed transformers."""
    return copy.deepcopy(_loaded(architecture, auto, **options))


@cache
def _loaded(architecture, auto, **options):
    cls = getattr(transformers, auto)
    folder = GOLDEN / architecture / "backbone"
    return cls.from_pretrained(folder, attn_implementation="eager", **options).eval()


def inputs(architecture):
    return {name: t for name, t in EXPECTED[architecture].items() if "." not in name}


def imported(model, architecture, case, **options):
    folder = GOLDEN / architecture / case
    return ah.load(model, folder, any_backbone=True, allow_pickle=True, **options)


# A layer without a prefix: after it, T5 has no bias of relative positions in `adapters`.
UNEVEN = {("t5", "prefix-flat")}
EXPRESSIBLE = [cell for cell in CASES if cell not in UNEVEN]
# A gate over the whole sequence in a decoder.
DECODING = {("gpt2", "unipelt"), ("t5", "gated-lora"), ("bart", "gated-lora")}
# RoBERTa and BART repeat what BERT and T5 show; ADAPTERHUB_MATRIX=full compares all of them.
REPEATED = ("everywhere", "learned-scale", "compacter", "compacter++", "lora-all", "prefix")
FULL = os.environ.get("ADAPTERHUB_MATRIX") == "full"
COMPARED = [
    (a, c) for a, c in EXPRESSIBLE if FULL or a not in ("roberta", "bart") or c not in REPEATED
]


def hidden(model, given):
    with torch.no_grad():
        return model(**given)[0]


def head_of(architecture, case):
    path = GOLDEN / architecture / case / "head_config.json"
    if not path.exists():
        return None
    tree = json.loads(path.read_text(encoding="utf-8"))
    # Without options it is the head of a transformers class, which has other labels.
    default = {"head_type": "classification", "num_labels": tree.get("num_labels")}
    return tree["config"] or default


def with_head(architecture, case):
    """Load a model with a head for the task, with other labels."""
    options = head_of(architecture, case)
    many = {"num_labels": 5} if options["head_type"] in ("classification", "tagging") else {}
    return backbone(architecture, AUTO[options["head_type"]], **many)


# Language-model heads that are not the output layer of the backbone.
OTHER_HEADS = {(a, "learned-scale") for a in ("bert", "roberta", "gpt2")}
OTHER_HEADS |= {(a, "madx") for a in ("bert", "roberta", "gpt2", "llama")}
# One layer where transformers has two, or two where it has one.
LAYERED_HEADS = (
    {(a, c) for a in ("roberta", "t5", "bart") for c in ("everywhere", "compacter")}
    | {("gpt2", c) for c in ("houlsby", "lora", "mam", "compacter++")}
    | {("llama", c) for c in ("houlsby", "lora")}
)
HEADS = [(a, c) for a, c in COMPARED if head_of(a, c) and (a, c) not in OTHER_HEADS]
