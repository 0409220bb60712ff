"""Adapters saved by `peft`, and the outputs of its models, on tiny backbones."""

from __future__ import annotations

import json

import peft
import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

import adapterhub as ah
from tests.kit import tiny_models

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
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=std)
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


def core(cases, *names):
    """Return the named cases, or all cases in the full matrix."""
    assert set(names) <= set(cases)
    return list(cases) if tiny_models.FULL_MATRIX else list(names)


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
