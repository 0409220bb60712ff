"""The choice of the dtype of the backbone and of the attention implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from transformers import PreTrainedModel

from adapterhub.adapters.attach import attach
from adapterhub.anatomy.backbone import DTYPES
from adapterhub.backbones import layer_timing
from adapterhub.backbones.layer_timing import EAGER, SDPA, Kernels
from adapterhub.backbones.load import load_backbone
from adapterhub.loop.report import Reporter
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe.recipe import Recipe
from adapterhub.training import loading
from adapterhub.training.loading import KernelChoice, can_compute, choose_kernels, layer_shape
from adapterhub.training.run import prepare, run
from adapterhub.training.run_data import read_data
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.runs import Notes, adapter_bytes
from tests.kit.selection import long_table

USUAL, SHORTEST = Kernels("fp32", SDPA), loading.SHORTEST


@pytest.fixture
def recipe(recipe_with):
    """A recipe on the tiny backbone, with overrides."""
    return partial(recipe_with, "train.epochs=2", "train.report=false")


@pytest.fixture
def fastest(monkeypatch, tmp_path) -> Callable[..., list[Kernels]]:
    """Make a candidate the fastest one; return the candidates that are timed."""
    monkeypatch.setattr(loading, "SHORTEST", 0)
    monkeypatch.setattr(layer_timing, "times_in_bf16", lambda: 0.5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    timed: list[Kernels] = []

    def fastest(best: Kernels, share: float = 0.5) -> list[Kernels]:
        def times(shape, candidates) -> dict[Kernels, float]:
            timed.extend(candidates)
            return {each: share if each == best else 1.0 for each in candidates}

        monkeypatch.setattr(layer_timing, "time_kernels", times)
        return timed

    return fastest


def choice(recipe: Recipe) -> KernelChoice:
    return choose_kernels(recipe, read_data(recipe), parse_methods("lora"))


@pytest.mark.parametrize(
    ("best", "share", "expected"),
    [
        (Kernels("bf16", EAGER), 0.5, ("bf16", "eager")),
        (Kernels("bf16", SDPA), 0.5, ("bf16", None)),
        (Kernels("fp32", EAGER), 0.5, ("fp32", "eager")),
        (Kernels("fp32", SDPA), 0.5, ("fp32", None)),
        (Kernels("bf16", EAGER), 0.95, ("fp32", None)),  # too little to give up precision
    ],
)
def test_the_fastest_is_chosen(recipe, fastest, best, share, expected):
    timed = fastest(best, share)
    chosen, count = choice(recipe()), len(timed)
    assert (chosen.dtype, chosen.attention) == expected
    assert chosen.dtype in chosen.note
    assert choice(recipe()) == chosen, "it is measured once on a machine"
    assert len(timed) == count


@pytest.mark.parametrize(
    ("words", "timed"),
    [
        ([], {Kernels(d, a) for d in ("fp32", "bf16") for a in (SDPA, EAGER)}),
        (["dtype=fp32"], {Kernels("fp32", SDPA), Kernels("fp32", EAGER)}),
        (["attention=sdpa"], {Kernels("fp32", SDPA), Kernels("bf16", SDPA)}),
        (["dtype=bf16", "attention=eager"], set()),
        (["dtype=fp16"], set()),
        (["attention=flex_attention"], set()),
        (["train.mixed_precision=bf16"], set()),
        (["quantize=nf4"], set()),
    ],
)
def test_what_the_recipe_says_stays(recipe, fastest, words, timed):
    candidates = fastest(Kernels("bf16", EAGER))
    given = recipe(*words)
    chosen = choice(given)
    assert set(candidates) == timed
    assert given.dtype in (None, chosen.dtype)
    assert given.attention in (None, chosen.attention)


def test_eager_attention_is_no_choice_where_its_scores_are_large(recipe, fastest, monkeypatch):
    monkeypatch.setattr(loading, "_MOST_SCORES", 0)
    assert {each.attention for each in fastest(USUAL)} <= {SDPA}
    choice(recipe())


def test_short_runs_and_several_processes_are_not_measured(recipe, fastest, monkeypatch):
    timed = fastest(Kernels("bf16", EAGER))
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        assert choice(recipe()) == KernelChoice(None, None)
    monkeypatch.setattr(loading, "SHORTEST", SHORTEST)
    assert choice(recipe()) == KernelChoice(None, None)
    assert not timed


def test_the_choice_is_in_the_recipe_and_a_resumed_run_keeps_it(
    recipe, fastest, tmp_path, monkeypatch
):
    fastest(Kernels("bf16", EAGER))
    words = ("train.max_steps=6", "train.save_every=2")
    run(recipe(*words, output="whole"), Reporter())
    written = yaml.safe_load((tmp_path / "whole/recipe.yaml").read_text(encoding="utf-8"))
    assert (written["dtype"], written["attention"]) == ("bf16", "eager")
    with pytest.raises(KeyboardInterrupt):
        run(recipe(*words), Notes(stop_at=5))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    fastest(USUAL)
    run(recipe(*words), Reporter(), resume=True)
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(tmp_path / "whole")


def test_a_gpu_computes_in_bf16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert loading._on_gpu(KernelChoice(None, None)).dtype == "bf16"
    assert loading._on_gpu(KernelChoice("fp32", None)).dtype == "fp32"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert loading._on_gpu(KernelChoice(None, None)).dtype is None


# Their classes in transformers mix fp32 tensors into the computation.
WITHOUT_BF16 = {"deberta", "xlnet"}


@long_table("name", tiny_models.ARCHITECTURES)
def test_every_architecture_trains_in_bf16_with_eager_attention(name, tmp_path):
    config = tiny_models.usual_model(name).config
    assert layer_shape(config, 32, 16).width == config.get_text_config().hidden_size
    losses = {}
    for dtype, attention in (("fp32", None), ("bf16", "eager")):
        model = load_tiny(name, tmp_path / dtype, dtype, attention)
        assert can_compute(model) == (dtype == "fp32" or name not in WITHOUT_BF16)
        if not can_compute(model):
            return
        adapter = attach(model, "houlsby")
        loss = model(**tiny_models.labelled_batch(model)).loss
        loss.backward()
        assert all(p.dtype == torch.float32 for p in adapter.parameters())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in adapter.parameters())
        losses[dtype] = loss.item()
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)


def load_tiny(name: str, folder: Path, dtype: str, attention: str | None) -> PreTrainedModel:
    """Save a tiny model, and load it with a dtype and an attention implementation."""
    task, labels = "classification", ["a", "b", "c"]
    if name in tiny_models.WITHOUT_CLASSIFIER:
        labels = []
        task = "seq2seq" if name in tiny_models.ENCODER_DECODERS else "causal-lm"
    tiny_models.usual_model(name).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    options = {"task": task, "labels": labels, "dtype": dtype, "attention": attention}
    return load_backbone(str(folder), **options)[0]


def test_a_class_that_does_not_compute_in_bf16_stays_in_fp32(
    recipe, fastest, tmp_path, monkeypatch
):
    fastest(Kernels("bf16", EAGER))
    tiny_models.usual_model("deberta", num_labels=2).save_pretrained(tmp_path / "deberta")
    word_tokenizer().save_pretrained(tmp_path / "deberta")
    prepared = prepare(recipe(f"backbone={tmp_path / 'deberta'}"))
    assert prepared.model.dtype == torch.float32
    assert prepared.recipe.dtype == "fp32"
    assert "does not compute in bf16" in prepared.notes[-1]


@pytest.mark.parametrize(
    ("stored", "dtype", "named"),
    [("fp32", (), ()), ("bf16", (), ("bf16", "fp32")), ("bf16", ("dtype=bf16",), ()),
     ("fp32", ("dtype=fp16",), ("fp32", "fp16"))],
)  # fmt: skip
def test_sharded_processes_say_what_a_conversion_costs(recipe, tmp_path, stored, dtype, named):
    model = tiny_models.model("bert", "features").to(DTYPES[stored])
    model.save_pretrained(tmp_path / stored)
    word_tokenizer().save_pretrained(tmp_path / stored)
    words = (f"backbone={tmp_path / stored}", "train.shard=true", *dtype)
    note = choice(recipe(*words)).note
    assert bool(note) == bool(named)
    for name in named:
        assert name in note
