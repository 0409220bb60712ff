"""Rows of one batch through different adapters: each as it would be alone."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from fixtures import word_tokenizer
from matrix import CELLS, example
from transformers import AutoModelForMaskedLM

import adapterhub as ah
from adapterhub.errors import AttachError
from adapterhub.methods import METHODS

ROUTED = [cell for cell in CELLS if not METHODS[cell[0]].trains_backbone]
FULL = tiny_models.MATRIX == tiny_models.ARCHITECTURES
# Each mechanism once.
MECHANISMS = ("lora", "dora", "houlsby", "ia3", "mam", "prompt", "scalar-mix")
GENERATING = [
    (m, a)
    for m, a in ROUTED
    if a in tiny_models.GENERATORS and m != "head" and (FULL or m in MECHANISMS)
]
routed_cells = pytest.mark.parametrize(("method", "architecture"), ROUTED)

# DeBERTa-v2 sends its relative positions, which belong to no row, through these projections.
SHARED = {"deberta-v2": ("attn.q", "attn.k")}
# A second adapter of the same method, where rows may differ in more than values.
SMALLER = {
    "prefix": "prefix(length=4)",
    "mam": "mam(length=3, size=8)",
    "prompt": "prompt(length=5)",
    "p-tuning": "p-tuning(length=3)",
    "lora": "lora(rank=3, sites=['attn.v', 'attn.o', 'attn'])",
    "pfeiffer": "pfeiffer(size=8, layers='top 1')",
    "ia3": "ia3(sites=['attn.v', 'attn'])",
}


def logits(model, **inputs):
    inputs = inputs or tiny_models.batch()
    with torch.no_grad():
        return model(**inputs, **tiny_models.decoder_inputs(model, inputs)).logits


def two(model, method):
    """Two trained adapters of one method, different in size where the method has one."""
    first = ah.attach(model, example(method), name="a")
    tiny_models.scramble(first, seed=1)
    try:
        second = ah.attach(model, SMALLER.get(method) or example(method), name="b")
    except ah.AdapterhubError:
        second = ah.attach(model, example(method), name="b")
    tiny_models.scramble(second, seed=2)
    return first, second


def alone(model, name, run):
    """What a run gives where one adapter is active for all rows; None: no adapter."""
    ah.activate(model, *([name] if name else []))
    return run()


def padded_batch():
    """Four rows, two of them with padding at the end."""
    ids = tiny_models.batch(4, 9, seed=7)["input_ids"]
    for row, length in ((0, 5), (3, 7)):
        ids[row, length:] = tiny_models.PAD
        ids[row, length - 1] = tiny_models.EOS
    return {"input_ids": ids, "attention_mask": ids.ne(tiny_models.PAD).long()}


def shared(architecture, *adapters):
    roles = SHARED.get(architecture, ())
    return any(p.site.role in roles for a in adapters for p in a.placed)


@routed_cells
def test_each_row_equals_its_solo_run(method, architecture):
    model = tiny_models.usual_model(architecture)
    adapters = two(model, method)
    batch = padded_batch()
    rows = ["b", "a", None, "b"]
    solo = [alone(model, name, lambda: logits(model, **batch)) for name in rows]
    ah.activate(model, "b")
    if shared(architecture, *adapters):
        with pytest.raises(AttachError, match=r"the batch at .* has 1"), ah.route(model, rows):
            logits(model, **batch)
        return
    with ah.route(model, rows):
        together = logits(model, **batch)
    expected = torch.stack([each[i] for i, each in enumerate(solo)])
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together[0], solo[1][0], atol=1e-4), "the adapters differ"
    assert torch.equal(logits(model, **batch), solo[0]), "what was active is active again"


def test_routing_covers_methods_and_architectures():
    assert len({m for m, _ in ROUTED}) >= 12
    assert {a for _, a in ROUTED} == set(tiny_models.MATRIX)
    assert SMALLER.keys() < {m for m, _ in ROUTED}


def generated(model, ids, beams=1, **options):
    """The sequences that generate gives, and the logits of its steps."""
    output = model.generate(
        ids, attention_mask=ids.ne(tiny_models.PAD).long(), max_new_tokens=6, min_new_tokens=6,
        do_sample=False, pad_token_id=tiny_models.PAD, num_beams=beams,
        return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits)


def prompts(architecture):
    ids = tiny_models.batch(3, 8, seed=5)["input_ids"]
    ids[:, -1] = 9
    if architecture not in tiny_models.ENCODER_DECODERS:
        ids[0, :3] = tiny_models.PAD  # on the left
    return ids


@pytest.mark.parametrize(("method", "architecture"), GENERATING)
def test_generate_by_rows_equals_solo_runs(method, architecture):
    model = tiny_models.language_model(architecture)
    adapters = two(model, method)
    ids, rows = prompts(architecture), ["a", None, "b"]
    solo = [alone(model, name, lambda: generated(model, ids)) for name in rows]
    expected = torch.stack([each[1][:, i] for i, each in enumerate(solo)], dim=1)
    windowed = architecture == "gemma3_text"
    if windowed and any(p.site.kind == "embed" for a in adapters for p in a.placed):
        return  # its window counts the padding of the shorter prompts
    with ah.route(model, rows):
        for cache in (True, False):
            _, found = generated(model, ids, use_cache=cache)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


BEAMS = [(m, a) for m, a in GENERATING if a in ("llama", "t5", "bart") and m in
         ("lora", "houlsby", "mam", "prompt", "ia3")]  # fmt: skip


@pytest.mark.parametrize(("method", "architecture"), BEAMS)
def test_beams_and_returned_sequences_follow_their_row(method, architecture):
    model = tiny_models.language_model(architecture)
    two(model, method)
    ids, rows = prompts(architecture), ["a", None, "b"]
    options = {"beams": 3, "num_return_sequences": 2}
    solo = [alone(model, name, lambda: generated(model, ids, **options)[0]) for name in rows]
    with ah.route(model, rows):
        found = generated(model, ids, **options)[0]
    for i, each in enumerate(solo):
        assert torch.equal(found[2 * i : 2 * i + 2], each[2 * i : 2 * i + 2])


MIXED = ["lora", "pfeiffer", "prompt(length=4)", "ia3", "scalar-mix", "prefix", "mam"]


@pytest.mark.parametrize("architecture", ["bert", "roberta", "gpt2", "opt", "xlnet", "t5", "bart"])
def test_methods_mix_in_one_batch(architecture):
    """One row a method, a stack and an average."""
    model = tiny_models.model(architecture)
    names = []
    for number, method in enumerate(MIXED):
        try:
            tiny_models.scramble(ah.attach(model, method, name=method), seed=number)
            names.append(method)
        except ah.AdapterhubError:
            assert architecture == "xlnet"
    names += [None, ("pfeiffer", "ia3"), ah.Average(["pfeiffer", "ia3"], [0.25, 0.75])]
    batch = tiny_models.batch(len(names), 9, seed=2)
    batch["input_ids"][1, 5] = tiny_models.EOS
    batch["input_ids"][1, 6:] = tiny_models.PAD
    batch["attention_mask"][1, 6:] = 0
    solo = [alone(model, name, lambda: logits(model, **batch)) for name in names]
    with ah.route(model, names):
        together = logits(model, **batch)
    expected = torch.stack([each[i] for i, each in enumerate(solo)])
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)


def saved(folder, architecture, count, seed):
    """An adapter with a head of so many classes, on disk."""
    names = {"id2label": {i: f"{count}-{i}" for i in range(count)}}
    model = tiny_models.model(architecture, num_labels=count, **names)
    plain = architecture not in ("xlnet", "mixtral")  # lora has no projections in their ffn
    adapter = ah.attach(model, "lora(sites=['ffn.up'])" if plain else "houlsby")
    tiny_models.scramble(adapter, seed=seed)
    adapter.save(folder)
    return folder


@pytest.mark.parametrize(
    "architecture", [a for a in tiny_models.MATRIX if a not in tiny_models.WITHOUT_CLASSIFIER]
)
def test_heads_of_different_sizes_in_one_batch(architecture, tmp_path):
    model = tiny_models.model(architecture)
    for count in (2, 3, 5):
        folder = saved(tmp_path / str(count), architecture, count, seed=count)
        ah.load(model, folder, name=str(count), any_backbone=True)
    rows = ["5", "2", None, "3", "2"]
    batch = tiny_models.batch(5, 9)
    solo = [alone(model, name, lambda: logits(model, **batch)) for name in rows]
    ah.activate(model)
    config = model.config.to_dict()
    with ah.route(model, rows) as routed:
        together = logits(model, **batch)
    assert together.shape == (5, 5)
    assert torch.isneginf(together[1, 2:]).all()
    assert routed.labels[1] == ("2-0", "2-1")
    assert [len(row) for row in routed.split(together)] == [5, 2, 3, 3, 2]
    for i, row in enumerate(routed.split(together)):
        torch.testing.assert_close(row, solo[i][i], atol=1e-5, rtol=1e-5)
    assert model.config.to_dict() == config


@pytest.mark.parametrize("method", ["lora", "houlsby", "mam", "prompt", "scalar-mix"])
@pytest.mark.parametrize("precision", [{"dtype": "bf16"}, {"dtype": "fp16"}, {"quantize": "nf4"}])
def test_rows_on_a_backbone_of_a_shorter_dtype(method, precision, tmp_path):
    """Heads, and the pooler that the checkpoint lacks, train in fp32: so they do row by row."""
    if "quantize" in precision:
        pytest.importorskip("bitsandbytes")
    bare = tmp_path / "bare"
    AutoModelForMaskedLM.from_config(tiny_models.model("bert").config).save_pretrained(bare)
    options = {"task": "classification", "labels": ["x", "y", "z"], **precision}
    word_tokenizer().save_pretrained(bare)
    model, _ = ah.load_backbone(str(bare), **options)
    adapters = two(model, method)
    assert all(any(c.method is None for c in a.changed) for a in adapters), "a fresh pooler"
    names = ["a", "b", None, "b"]
    batch = tiny_models.batch(len(names), 9)
    solo = [alone(model, name, lambda: logits(model, **batch))[i] for i, name in enumerate(names)]
    with ah.route(model, names):
        together = logits(model, **batch)
    for row, expected in zip(together, solo, strict=True):
        torch.testing.assert_close(row, expected.to(row.dtype), atol=2e-2, rtol=2e-2)
    if method not in ("mam", "prompt"):  # virtual tokens have no average
        ah.activate(model, ah.Average(["a", "b"]))
        assert logits(model, **batch).isfinite().all()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["lora", "mam", "scalar-mix", "prompt"])
def test_gradients_by_rows_equal_those_of_solo_runs(method, checkpointing):
    """A batch with labels trains several adapters at once, each on its rows alone."""
    gradients = []
    for together in (True, False):
        model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
        torch.manual_seed(0)
        adapters = two(model, method)
        if checkpointing:
            tiny_models.recompute(model)
            model.train()
        batch, labels = tiny_models.batch(4, 7), torch.tensor([0, 1, 2, 1])
        if together:
            with ah.route(model, ["a", "b", "a", "b"]):
                (4 * model(**batch, labels=labels).loss).backward()
        else:
            for name, rows in (("a", [0, 2]), ("b", [1, 3])):
                ah.activate(model, name)
                inputs = {k: v[rows] for k, v in batch.items()}
                (2 * model(**inputs, labels=labels[rows]).loss).backward()
        gradients.append([p.grad for a in adapters for p in a.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


def test_a_row_does_not_see_what_is_wrong_in_another_adapter():
    model = tiny_models.model("gpt2")
    for seed, (name, method) in enumerate({"a": "lora", "b": "lora(rank=2)", "nan": "mam"}.items()):
        tiny_models.scramble(ah.attach(model, method, name=name), seed=seed)
    for parameter in model._adapterhub.adapters["nan"].parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    with ah.route(model, ["b", None, "nan", "a", "b"]):
        found = logits(model, **tiny_models.batch(5))
    assert found.isnan().any(1).tolist() == [False, False, True, False, False]
