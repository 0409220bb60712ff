"""`device_map`: backbones of which accelerate keeps weights on a disk, and brings them in for the
time of a call."""

from __future__ import annotations

import os

import pytest
import tiny_models
import torch
from matrix import example

import adapterhub as ah
from adapterhub.errors import AttachError, MergeError, SiteError
from adapterhub.methods import METHODS
from adapterhub.training.gradient_checkpointing import recompute

HALF = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu",
    "model.layers.0": "cpu", "model.layers.1": "disk",
}  # fmt: skip
# accelerate before 1.15 wants something on a device.
ALL = {
    "model.embed_tokens": "disk", "model.layers": "disk", "lm_head": "disk", "model.norm": "cpu",
    "model.rotary_emb": "cpu",
}  # fmt: skip
# They train the backbone's own parameters, which would be brought in again as they were.
BACKBONE = {"full", "freeze", "unfreeze", "staged", "norms", "bitfit", "chosen"}
FULL = os.environ.get("ADAPTERHUB_MATRIX") == "full"
KEPT = [m for m in sorted(METHODS) if m not in BACKBONE and m != "head"]
ONCE = ("lora", "dora", "pissa", "prefix", "prompt", "houlsby", "ia3", "mam", "adapterfusion")
CELLS = [(m, ALL) for m in KEPT if FULL or m in ONCE] + [("lora", HALF), ("mam", HALF)]


def loaded(folder, device_map=None, **options):
    options = options or {"task": "causal-lm"}
    return ah.load_backbone(str(folder), device_map=device_map, **options)[0]


def step(model, method):
    """The gradients of one step, and what the model computes after it."""
    torch.manual_seed(0)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    rows = tiny_models.batch()
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    model(**rows, labels=rows["input_ids"]).loss.backward()
    gradients = {n: t.grad.clone() for n, t in adapter.tensors().items() if t.requires_grad}
    optimizer.step()
    return adapter, gradients, logits(model)


def logits(model):
    with torch.no_grad():
        return model(**tiny_models.batch()).logits


@pytest.mark.parametrize(("method", "device_map"), CELLS)
def test_it_trains_and_serves_as_on_a_backbone_that_fits(method, device_map, backbones, tmp_path):
    folder = backbones("llama")
    there, here = loaded(folder), loaded(folder, device_map)
    assert any(p.is_meta for p in here.parameters())
    bare = logits(here)
    _, expected, after = step(there, method)
    adapter, gradients, live = step(here, method)
    assert not any(t.is_meta for t in adapter.tensors().values())
    assert gradients
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    assert torch.equal(live, after)
    adapter.save(tmp_path / "a")
    ah.detach(here)
    assert torch.equal(logits(here), bare)
    ah.load(here, tmp_path / "a")
    assert torch.equal(logits(here), live)
    ah.detach(there)
    ah.load(there, tmp_path / "a")
    assert torch.equal(logits(there), live)


def test_a_map_onto_one_device_is_no_offloading(backbones):
    model = loaded(backbones("llama"), {"": "cpu"})
    assert not any(p.is_meta for p in model.parameters())
    _, gradients, _ = step(model, "norms")
    assert all(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("method", sorted(BACKBONE - {"bitfit"}))
def test_what_trains_the_backbone_is_refused(method, backbones):
    model = loaded(backbones("llama"), ALL)
    flags = [p.requires_grad for p in model.parameters()]
    with pytest.raises(SiteError, match="offloaded") as error:
        ah.attach(model, example(method))
    assert error.value.offenders
    assert "lora" in error.value.hint
    assert [p.requires_grad for p in model.parameters()] == flags


def test_parameters_of_layers_that_stay_may_train(backbones):
    model = loaded(backbones("llama"), HALF)
    with pytest.raises(SiteError, match="offloaded"):
        ah.attach(model, "norms")
    ah.attach(model, "chosen(names=['decoder.0.*.norm.*'])")


def test_a_head_that_is_offloaded_says_where_to_put_it(backbone):
    options = {"task": "classification", "labels": ["a", "b", "c"]}
    kept = {"bert.embeddings": "cpu", "bert.encoder": "disk", "bert.pooler": "disk"}
    with pytest.raises(AttachError, match="offloaded") as error:
        ah.attach(loaded(backbone, kept | {"classifier": "disk"}, **options), "lora")
    assert "'classifier': DEVICE" in error.value.hint
    model = loaded(backbone, kept | {"classifier": "cpu"}, **options)
    adapter = ah.attach(model, "lora")
    loss = model(**tiny_models.labelled_batch(model)).loss
    loss.backward()
    assert all(p.grad is not None for p in adapter.parameters())


def test_new_tokens_need_their_table(backbones):
    model = loaded(backbones("llama"), ALL, task="causal-lm", new_tokens=["<new>"])
    with pytest.raises(AttachError, match="rows of new tokens") as error:
        ah.attach(model, "lora")
    assert "model.embed_tokens.weight" in error.value.offenders


def test_a_merge_is_refused(backbones):
    model = loaded(backbones("llama"), HALF)
    tiny_models.scramble(ah.attach(model, "lora"))
    with pytest.raises(MergeError) as error:
        ah.merge(model)
    assert {line.split(":")[1] for line in error.value.offenders} == {" its weights are offloaded"}
    assert all("layers.1" in line for line in error.value.offenders)


def test_routes_and_gradient_checkpointing(backbones):
    there, here = (loaded(backbones("llama"), m) for m in (None, ALL))
    found = []
    for model in (there, here):
        adapters = []
        for seed, name in enumerate("ab"):
            torch.manual_seed(0)
            adapters.append(ah.attach(model, "lora", name=name))
            tiny_models.scramble(adapters[-1], seed=seed)
        with ah.route(model, ["a", None, "b"]):
            routed = logits(model)
        ah.activate(model, "a")
        rows = tiny_models.batch()
        with recompute(model, True) as layers:
            layers.apply()
            model(**rows, labels=rows["input_ids"]).loss.backward()
        found.append([routed, *(p.grad for p in adapters[0].parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
