"""Backbones loaded with a `device_map`, whose weights accelerate loads from disk for each call."""

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AttachError, MergeError, SiteError
from adapterhub.loop.engine import recompute
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import example
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits

HALF = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu",
    "model.layers.0": "cpu", "model.layers.1": "disk",
}  # fmt: skip
# accelerate before 1.15 requires at least one module on a device.
EVERYTHING = {
    "model.embed_tokens": "disk", "model.layers": "disk", "lm_head": "disk", "model.norm": "cpu",
    "model.rotary_emb": "cpu",
}  # fmt: skip
# They train parameters of the backbone, whose updates offloading would overwrite.
BACKBONE = {"full", "freeze", "unfreeze", "staged", "norms", "bitfit", "chosen"}
SUPPORTED = [m for m in sorted(METHODS) if m not in BACKBONE and m != "head"]
ONCE = ("lora", "dora", "pissa", "prefix", "prompt", "houlsby", "ia3", "mam", "adapterfusion")
CELLS = [(m, EVERYTHING) for m in SUPPORTED if tiny_models.FULL_MATRIX or m in ONCE]
CELLS += [("lora", HALF), ("mam", HALF)]


def loaded(folder, device_map=None, **options):
    options = options or {"task": "causal-lm"}
    return ah.load_backbone(str(folder), device_map=device_map, **options)[0]


def step(model, method):
    """Attach and train for one step; return the adapter, the gradients and the new logits."""
    torch.manual_seed(0)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    rows = tiny_models.batch()
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    model(**rows, labels=rows["input_ids"]).loss.backward()
    gradients = {n: t.grad.clone() for n, t in adapter.tensors().items() if t.requires_grad}
    optimizer.step()
    return adapter, gradients, logits(model)


@long_table(("method", "device_map"), CELLS, 3)
def test_training_and_outputs_equal_those_without_offloading(
    method, device_map, backbones, tmp_path
):
    folder = backbones("llama")
    plain, offloaded = loaded(folder), loaded(folder, device_map)
    assert any(p.is_meta for p in offloaded.parameters())
    bare = logits(offloaded)
    _, expected, after = step(plain, method)
    adapter, gradients, live = step(offloaded, method)
    assert not any(t.is_meta for t in adapter.tensors().values())
    assert gradients
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    assert torch.equal(live, after)
    adapter.save(tmp_path / "a")
    ah.detach(offloaded)
    assert torch.equal(logits(offloaded), bare)
    ah.load(offloaded, tmp_path / "a")
    assert torch.equal(logits(offloaded), live)
    ah.detach(plain)
    ah.load(plain, tmp_path / "a")
    assert torch.equal(logits(plain), live)


def test_a_device_map_of_one_device_does_not_offload(backbones):
    model = loaded(backbones("llama"), {"": "cpu"})
    assert not any(p.is_meta for p in model.parameters())
    _, gradients, _ = step(model, "norms")
    assert all(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("method", sorted(BACKBONE - {"bitfit"}))
def test_methods_that_train_offloaded_weights_are_refused(method, backbones):
    model = loaded(backbones("llama"), EVERYTHING)
    flags = [p.requires_grad for p in model.parameters()]
    with pytest.raises(SiteError, match="offloaded") as error:
        ah.attach(model, example(method))
    assert error.value.offenders
    assert "lora" in error.value.hint
    assert [p.requires_grad for p in model.parameters()] == flags


def test_an_offloaded_head_is_refused_with_a_hint(backbone):
    options = {"task": "classification", "labels": ["a", "b", "c"]}
    device_map = {"bert.embeddings": "cpu", "bert.encoder": "disk", "bert.pooler": "disk"}
    with pytest.raises(AttachError, match="offloaded") as error:
        ah.attach(loaded(backbone, device_map | {"classifier": "disk"}, **options), "lora")
    assert "'classifier': DEVICE" in error.value.hint
    model = loaded(backbone, device_map | {"classifier": "cpu"}, **options)
    adapter = ah.attach(model, "lora")
    loss = model(**tiny_models.labelled_batch(model)).loss
    loss.backward()
    assert all(p.grad is not None for p in adapter.parameters())


def test_new_tokens_need_the_embedding_in_memory(backbones):
    model = loaded(backbones("llama"), EVERYTHING, task="causal-lm", new_tokens=["<new>"])
    with pytest.raises(AttachError, match="rows of new tokens") as error:
        ah.attach(model, "lora")
    assert "model.embed_tokens.weight" in error.value.offenders


def test_merging_offloaded_weights_is_refused(backbones):
    """Those of a layer in memory can train."""
    model = loaded(backbones("llama"), HALF)
    with pytest.raises(SiteError, match="offloaded"):
        ah.attach(model, "norms")
    ah.attach(model, "chosen(names=['decoder.0.*.norm.*'])").detach()
    tiny_models.scramble(ah.attach(model, "lora"))
    with pytest.raises(MergeError) as error:
        ah.merge(model)
    assert {line.split(":")[1] for line in error.value.offenders} == {" its weights are offloaded"}
    assert all("layers.1" in line for line in error.value.offenders)


def test_routes_and_gradient_checkpointing_work_offloaded(backbones):
    results = []
    for device_map in (None, EVERYTHING):
        model = loaded(backbones("llama"), device_map)
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
        results.append([routed, *(p.grad for p in adapters[0].parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
