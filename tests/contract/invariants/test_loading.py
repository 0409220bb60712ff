"""Loading restores the saved adapter exactly, or raises one error; cycles leave nothing behind."""

import copy
import gc
import os
import weakref

import pytest
import torch
from transformers import AttentionInterface

import adapterhub as ah
from adapterhub.errors import MismatchError, OutputError
from adapterhub.files.native import Saved, write_adapter
from adapterhub.methods import METHODS
from tests.kit import selection, tiny_models
from tests.kit.compare import differences, observed
from tests.kit.matrix import REFUSED, example
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits


def test_one_error_lists_every_mismatched_tensor(tmp_path):
    """One error lists every missing or unexpected tensor, and every wrong shape."""
    ah.attach(tiny_models.model("bert"), "lora(rank=2)").save(tmp_path / "a")
    manifest, tensors = Saved.at(tmp_path / "a").read()
    a, b = "encoder.0.attn.q.lora.A", "encoder.1.attn.v.lora.B"
    tensors["encoder.9.attn.q.lora.A"] = tensors.pop(a)
    tensors[b] = tensors[b][:, :1].clone()
    write_adapter(tmp_path / "b", manifest, tensors)
    model = tiny_models.model("bert")
    before = logits(model)
    with pytest.raises(MismatchError) as error:
        ah.load(model, tmp_path / "b")
    assert len(error.value.offenders) == 3
    for line in (f"missing: {a}", "unexpected: encoder.9.attn.q.lora.A", f"{b}: shape (32, 1)"):
        assert line in str(error.value)
    assert torch.equal(logits(model), before)
    assert not any("adapterhub" in name for name in model.state_dict())


def test_tensors_that_zero_3_leaves_empty_on_a_rank_are_not_saved(tmp_path):
    adapter = ah.attach(tiny_models.model("bert"), "mam")
    for parameter in adapter.parameters():
        parameter.data = torch.empty(0)
    with pytest.raises(OutputError, match="empty"):
        adapter.save(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_commit_of_the_backbone_is_saved(tmp_path):
    """The manifest contains the backbone's commit and fingerprint; the fingerprint decides."""
    model = tiny_models.model("bert")
    model.config._name_or_path, model.config._commit_hash = "acme/bert", "ab" * 20
    ah.attach(model, "lora").save(tmp_path / "a")
    ref = Saved.at(tmp_path / "a").manifest.backbone
    assert (ref.id, ref.revision, ref.dtype, ref.quantization) == (
        "acme/bert", "ab" * 20, "fp32", None,
    )  # fmt: skip
    drifted = tiny_models.model("bert", seed=5)
    drifted.config._name_or_path, drifted.config._commit_hash = "acme/bert", "cd" * 20
    with pytest.raises(MismatchError) as error:
        ah.load(drifted, tmp_path / "a")
    assert "ab" * 20 in str(error.value)
    assert str(error.value).count("v2-") == 2, "the message names both fingerprints"
    assert "any_backbone=True" in error.value.hint
    same = copy.deepcopy(model)
    ah.detach(same)
    same.config._commit_hash = "ef" * 20  # such as a commit that only edits the card
    ah.load(same, tmp_path / "a")


def test_loading_does_not_repeat_the_decomposition(tmp_path, monkeypatch):
    """PiSSA starts from a decomposition of each weight; loading reads the factors from the file."""
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "pissa")
    tiny_models.scramble(adapter)
    expected = adapter.saved_tensors()
    adapter.save(tmp_path / "a")
    adapter.detach()
    monkeypatch.setattr(torch, "svd_lowrank", None)
    before = torch.random.get_rng_state()
    loaded = ah.load(model, tmp_path / "a").saved_tensors()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    with pytest.raises(TypeError):
        ah.attach(tiny_models.model("bert"), "pissa")


DECOMPOSES = [
    "adamss", "svft", "lora-xs(rank=4, stored=false)", "psoft(rank=4, stored=false)",
    "tinylora(stored=false)", "osf",
]  # fmt: skip
SPECS = [*DECOMPOSES, *(m for m in METHODS if m not in DECOMPOSES and (m, "llama") not in REFUSED)]


def unsaved(adapter):
    """Return the buffers that a file leaves out."""
    saved = {id(t) for t in adapter.saved_tensors().values()}
    modules = [(p.site.id, p.module) for p in adapter.placed]
    named = {f"{site}.{n}": b for site, m in modules for n, b in m.named_buffers()}
    return {name: b for name, b in named.items() if id(b) not in saved}


@long_table("spec", SPECS, 4, nightly=2)
def test_what_a_file_leaves_out_is_the_same_in_another_precision_or_refused(spec, tmp_path):
    adapter = ah.attach(tiny_models.model("llama"), example(spec), name="a")
    adapter.save(tmp_path / "a")
    rounded = tiny_models.model("llama").to(torch.bfloat16)
    found = ah.load(rounded, tmp_path / "a", any_backbone=True)
    expected, computed = unsaved(adapter), unsaved(found)
    assert expected.keys() >= computed.keys(), "training needs some that files do not"
    same = all(torch.equal(b, expected[name]) for name, b in computed.items())
    assert same == (not any(part.decomposes_again() for part in example(spec).parts()))
    ah.detach(rounded)
    if same:
        ah.load(rounded, tmp_path / "a")
        return
    with pytest.raises(MismatchError, match="another precision") as error:
        ah.load(rounded, tmp_path / "a")
    assert error.value.offenders == ("this model: bf16", spec.partition("(")[0])
    assert "dtype='fp32'" in error.value.hint
    ah.attach(rounded, example(spec)).save(tmp_path / "b")
    ah.load(tiny_models.model("llama").to(torch.bfloat16).float(), tmp_path / "b")
    with pytest.raises(MismatchError, match="precision"):
        ah.load(tiny_models.model("llama"), tmp_path / "b")


LOADED = {"mam": "bert", "prompt": "gpt2", "full": "distilbert"}  # each mechanism once
MORE = {"lora": "bert", "scalar-mix": "bert", "ia3": "gpt2", "dora": "bert", "compacter": "bert"}
TIMES = 40 if selection.ALL else 20
CYCLES = [*LOADED.items(), *(MORE.items() if tiny_models.FULL_MATRIX else ())]


def rss():
    """Return the resident memory of this process, in bytes."""
    with open("/proc/self/statm", "rb") as file:  # a first decoder is 38 objects more
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors():
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(("method", "architecture"), CYCLES)
def test_load_and_unload_cycles_leave_memory_flat(method, architecture, tmp_path):
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, method)
    adapter.save(tmp_path / "adapter")
    adapter.detach()
    before, registered = observed(model), set(AttentionInterface._global_mapping)

    def cycle(use):
        loaded = ah.load(model, tmp_path / "adapter", name="served")
        if use:
            logits(model)
            with ah.route(model, ["served"] * 3):
                logits(model)
        ah.detach(model)
        return weakref.ref(loaded)

    last = [cycle(use=True) for _ in range(5)][-1]
    gc.collect()
    objects, tensors, resident = len(gc.get_objects()), live_tensors(), rss()
    for number in range(TIMES):
        last = cycle(use=number % 10 == 0)
    gc.collect()
    assert last() is None
    assert live_tensors() <= tensors  # fewer: what an earlier test left has been collected
    assert len(gc.get_objects()) - objects < TIMES, "less than one object per cycle"
    assert rss() - resident < 8e6
    assert differences(before, observed(model)) == []
    assert set(AttentionInterface._global_mapping) == registered
