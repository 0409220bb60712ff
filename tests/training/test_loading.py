"""The backbone and rows of a run: shared by runs, lengths, dtypes and attention of choice."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml

import adapterhub as ah
from adapterhub.adapters.attach import attach
from adapterhub.anatomy.backbone import DTYPES, TransformersBackbone
from adapterhub.backbones import layer_timing
from adapterhub.backbones.layer_timing import EAGER, SDPA, Kernels
from adapterhub.backbones.load import load_backbone
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import TrainingError
from adapterhub.loop.report import Reporter
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import dump_methods, parse_methods
from adapterhub.recipe.recipe import Recipe
from adapterhub.tasks import Setting, parse_task
from adapterhub.training import loading
from adapterhub.training.loading import KernelChoice, SharedLoader, can_compute, fit_rows
from adapterhub.training.run import prepare, run
from adapterhub.training.run_data import RunData, read_data
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.runs import Notes, adapter_bytes, final_bytes, quiet
from tests.kit.selection import cases_of, long_table

FUSED = "adapterfusion"  # is built from adapters that are attached
SPECS = {name: list(dump_methods([m.example()])) for name, m in METHODS.items() if name != FUSED}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mock]:
    """Count the calls that load a backbone and that encode rows."""
    counts = {name: Mock(wraps=getattr(loading, name)) for name in ("_load", "fit_rows")}
    for name, mock in counts.items():
        monkeypatch.setattr(loading, name, mock)
    return counts


@pytest.fixture
def recipe(recipe_with) -> Recipe:
    words = ["method=lora(rank=2)", "train.max_steps=3", "dtype=fp32", "train.log_every=1"]
    return recipe_with(*words, "train.tensorboard=false", "train.report=false")


def train(recipe: Recipe, output: Path, loader: SharedLoader | None = None) -> tuple[bytes, ...]:
    """Train into a folder; return the bytes that only recipe, data and versions decide."""
    recipe = replace(recipe, output=str(output))
    run(recipe, quiet(recipe), loader=loader)
    return (*final_bytes(output), adapter_bytes(output))


def test_every_method_ends_as_alone_and_leaves_the_backbone_as_it_was(
    recipe, tmp_path, counted, subtests
):
    """All have one backbone, one after the other."""
    assert SPECS.keys() == METHODS.keys() - {FUSED}
    expected, shared = train(recipe, tmp_path / "alone"), SharedLoader()
    assert train(recipe, tmp_path / "first", shared) == expected
    loaded = counted["_load"].call_count
    for name in cases_of(sorted(SPECS), 16, nightly=8):
        method = replace(recipe, method=SPECS[name], seed=4)
        with subtests.test(name):
            alone = train(method, tmp_path / f"alone-{name}")
            loaded += 1
            assert train(method, tmp_path / name, shared) == alone
            # What a method changes in the backbone is gone when its run has ended.
            assert train(recipe, tmp_path / f"after-{name}", shared) == expected
            assert counted["_load"].call_count == loaded


@pytest.mark.parametrize(
    ("changes", "loads", "encodings"),
    [
        ([{"seed": seed} for seed in range(2)], 1, 1),
        ([{"dtype": dtype} for dtype in ("fp32", "bf16", "fp32")], 2, None),
        ([{"new_tokens": ("<new>",)}] * 2, 2, None),
    ],
)
def test_a_backbone_is_loaded_and_rows_are_encoded_once(
    recipe, tmp_path, counted, changes, loads, encodings
):
    """Another dtype is another backbone, and new tokens are not shared; each seed draws anew."""
    shared = SharedLoader()
    runs = [
        train(replace(recipe, **change), tmp_path / str(number), shared)
        for number, change in enumerate(changes)
    ]
    assert counted["_load"].call_count == loads
    assert encodings in (None, counted["fit_rows"].call_count)
    assert (runs[0] == runs[1]) == ("new_tokens" in changes[0])


def test_a_backbone_after_a_run_that_failed_and_a_head_that_cannot_be_drawn_again(
    recipe, tmp_path, counted, monkeypatch
):
    """The former is shared, and one with the latter is loaded each time."""
    seeded = replace(recipe, seed=1)
    expected = [train(each, tmp_path / f"alone-{each.seed}") for each in (recipe, seeded)]
    shared = SharedLoader()
    counted["_load"].reset_mock()
    wild = replace(recipe, method="full", train=replace(recipe.train, learning_rate=1e30))
    with pytest.raises(TrainingError, match="training stopped"):
        train(wild, tmp_path / "wild", shared)
    assert train(recipe, tmp_path / "next", shared) == expected[0]
    assert counted["_load"].call_count == 1
    draw = TransformersBackbone.initialize_again

    def otherwise(backbone: TransformersBackbone) -> None:
        torch.rand(1)
        draw(backbone)

    monkeypatch.setattr(TransformersBackbone, "initialize_again", otherwise)
    shared = SharedLoader()
    for each, found in zip((recipe, seeded), expected, strict=True):
        assert train(each, tmp_path / f"again-{each.seed}", shared) == found
    assert counted["_load"].call_count == 3


def test_frozen_layers_are_computed_once_for_all_runs(recipe, tmp_path):
    options = replace(recipe.train, max_steps=None, epochs=2)
    shared, notes = SharedLoader(), Notes()
    for seed in (0, 1):
        head = replace(recipe, method="head", seed=seed, train=options)
        run(replace(head, output=str(tmp_path / f"shared-{seed}")), notes, loader=shared)
    assert adapter_bytes(tmp_path / "shared-1") == train(head, tmp_path / "alone")[-1]
    about = [note for note in notes.notes if "frozen layer" in note]
    assert ["from an earlier run" in note for note in about] == [False, True]


def test_a_model_with_other_adapters_is_not_given_away(recipe, tmp_path, counted):
    shared = SharedLoader()
    train(recipe, tmp_path / "first", shared)
    (kept,) = shared.kept.values()
    ah.attach(kept.loaded.model, "lora", name="mine")
    train(recipe, tmp_path / "second", shared)
    assert counted["_load"].call_count == 2
    assert list(ah.adapters(kept.loaded.model)) == ["mine"]


def fitted(words, chosen=None, reads=1000, trained=None, task="classification", held=1):
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = 1 << 30
    texts = [" ".join(["good"] * count) for count in words]
    examples = [Example(text, None, "ab"[i % 2]) for i, text in enumerate(texts)]
    data = RunData(parse_task(task), ("a", "b"), examples, examples[:held], DataOptions())
    setting = Setting(tokenizer, reads, ("a", "b"), positions=reads)
    return fit_rows(data, setting, chosen, trained)


def test_the_length_is_chosen_and_told():
    for longest, reads, length in ((5, 1000, 128), (129, 1000, 136), (136, 1000, 136), (5, 64, 64)):
        assert fitted([longest], reads=reads).max_length == length
    rows = fitted([200, 3])
    assert (rows.max_length, rows.train.lengths) == (200, [200, 3])
    assert rows.notes == ("train.max_length is 200: no text is cut, the longest has 200 tokens",)
    rows = fitted([200, 3], reads=150)
    assert rows.max_length == 150
    assert "lose 25% of their tokens (longest 200); the backbone reads no more" in rows.notes[1]
    rows = fitted([900, 3])
    assert rows.max_length == 512
    assert "train.max_length=904 keeps all" in rows.notes[1]
    rows = fitted([200, 3], chosen=50)
    assert (rows.max_length, rows.train.lengths, rows.lost[0].cut) == (50, [50, 3], 1)
    assert rows.notes[0].startswith("1 of 2 training texts are longer than 50 tokens and lose 75%")
    assert fitted([3], chosen=50).notes == ()
    for most in (64, 128, 129, 1000):
        lowered = [n for n in fitted([200, 3], most, reads=128).notes if "is lowered to 128" in n]
        assert bool(lowered) is (most > 128)
    assert "trained on at most 256 tokens" in fitted([300], trained=256).notes[-1]
    # Packed rows are as long as is allowed, and texts that are split lose nothing.
    assert fitted([3, 4], task="causal-lm(data=text, pack=true)").max_length == 1000
    for task in ("classification", "masked-lm"):
        rows = fitted([3, 4], task=task, held=0)
        assert (len(rows.train.rows), rows.evaluation.rows, len(rows.notes)) == (2, [], 1)


USUAL, SHORTEST = Kernels("fp32", SDPA), loading.SHORTEST


@pytest.fixture
def recipe_of(recipe_with):
    return partial(recipe_with, "train.epochs=2", "train.report=false")


def choice(recipe: Recipe) -> KernelChoice:
    return loading.choose_kernels(recipe, read_data(recipe), parse_methods("lora"))


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
def test_the_fastest_is_chosen(recipe_of, fastest, best, share, expected):
    timed = fastest(best, share)
    chosen, count = choice(recipe_of()), len(timed)
    assert (chosen.dtype, chosen.attention) == expected
    assert chosen.dtype in chosen.note
    assert choice(recipe_of()) == chosen, "it is measured once on a machine"
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
def test_what_the_recipe_says_stays(recipe_of, fastest, words, timed):
    candidates = fastest(Kernels("bf16", EAGER))
    given = recipe_of(*words)
    chosen = choice(given)
    assert set(candidates) == timed
    assert given.dtype in (None, chosen.dtype)
    assert given.attention in (None, chosen.attention)


def test_what_is_not_measured(recipe_of, fastest, monkeypatch):
    """Short runs, several processes, and eager attention whose scores would be large."""
    timed = fastest(USUAL)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        assert choice(recipe_of()) == KernelChoice(None, None)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "SHORTEST", SHORTEST)
        assert choice(recipe_of()) == KernelChoice(None, None)
    assert not timed
    monkeypatch.setattr(loading, "_MOST_SCORES", 0)
    choice(recipe_of())
    assert {each.attention for each in timed} == {SDPA}


def test_the_choice_is_in_the_recipe_and_a_resumed_run_keeps_it(
    recipe_of, fastest, tmp_path, monkeypatch
):
    fastest(Kernels("bf16", EAGER))
    words = ("train.max_steps=6", "train.save_every=2")
    run(recipe_of(*words, output="whole"), Reporter())
    written = yaml.safe_load((tmp_path / "whole/recipe.yaml").read_text(encoding="utf-8"))
    assert (written["dtype"], written["attention"]) == ("bf16", "eager")
    with pytest.raises(KeyboardInterrupt):
        run(recipe_of(*words), Notes(stop_after=4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    fastest(USUAL)
    run(recipe_of(*words), Reporter(), resume=True)
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(tmp_path / "whole")


def test_a_gpu_computes_in_bf16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert loading._on_gpu(KernelChoice(None, None)).dtype == "bf16"
    assert loading._on_gpu(KernelChoice("fp32", None)).dtype == "fp32"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert loading._on_gpu(KernelChoice(None, None)).dtype is None


# Their classes in transformers mix fp32 tensors into the computation.
WITHOUT_BF16 = {"deberta", "xlnet"}


@long_table("name", tiny_models.ARCHITECTURES, nightly=2)
def test_every_architecture_trains_in_bf16_with_eager_attention(name, tmp_path):
    config = tiny_models.usual_model(name).config
    assert loading.layer_shape(config, 32, 16).width == config.get_text_config().hidden_size
    losses, kind = {}, {"task": "classification", "labels": ["a", "b", "c"]}
    if name in tiny_models.WITHOUT_CLASSIFIER:
        kind = {"task": "seq2seq" if name in tiny_models.ENCODER_DECODERS else "causal-lm"}
    tiny_models.usual_model(name).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    for dtype, attention in (("fp32", None), ("bf16", "eager")):
        torch.manual_seed(0)
        model, _ = load_backbone(str(tmp_path), dtype=dtype, attention=attention, **kind)
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


def test_a_class_that_does_not_compute_in_bf16_stays_in_fp32(recipe_of, fastest, tmp_path):
    fastest(Kernels("bf16", EAGER))
    tiny_models.usual_model("deberta", num_labels=2).save_pretrained(tmp_path / "deberta")
    word_tokenizer().save_pretrained(tmp_path / "deberta")
    prepared = prepare(recipe_of(f"backbone={tmp_path / 'deberta'}"))
    assert prepared.model.dtype == torch.float32
    assert prepared.recipe.dtype == "fp32"
    assert "does not compute in bf16" in prepared.notes[-1]


@pytest.mark.parametrize(
    ("stored", "dtype", "named"),
    [("fp32", (), ()), ("bf16", (), ("bf16", "fp32")), ("bf16", ("dtype=bf16",), ()),
     ("fp32", ("dtype=fp16",), ("fp32", "fp16"))],
)  # fmt: skip
def test_sharded_processes_say_what_a_conversion_costs(recipe_of, tmp_path, stored, dtype, named):
    model = tiny_models.model("bert", "features").to(DTYPES[stored])
    model.save_pretrained(tmp_path / stored)
    word_tokenizer().save_pretrained(tmp_path / stored)
    words = (f"backbone={tmp_path / stored}", "train.shard=true", *dtype)
    note = choice(recipe_of(*words)).note
    assert bool(note) == bool(named)
    for name in named:
        assert name in note
