"""Runs with a teacher: an adapter on the same backbone, the backbone, or another model."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import adapterhub as ah
from adapterhub.errors import AdapterhubError, ConfigError
from adapterhub.files.card import taught_by
from adapterhub.files.native import Saved
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.common.distillation import divergences
from adapterhub.training.run import prepare, run, training_session
from tests.kit import tiny_models
from tests.kit.data import WORDS, sentences, word_tokenizer, write_json_lines, write_tsv
from tests.kit.runs import Notes, adapter_bytes

RUN = ("dtype=fp32", "attention=eager", "train.tensorboard=false", "train.report=false",
       "train.batch_size=4", "train.log_every=1", "train.learning_rate=0.02")  # fmt: skip


@pytest.fixture(scope="module")
def place(backbones, tmp_path_factory):
    """Return a folder with data, two backbones, and a trained teacher on each."""
    folder, number = tmp_path_factory.mktemp("teachers"), random.Random(0)
    words = [" ".join(number.sample(WORDS, 3)) for _ in range(24)]
    rows = [{"prompt": text, "response": " ".join(sorted(text.split()))} for text in words]
    write_json_lines(folder / "rows.jsonl", rows)
    write_tsv(folder / "labels.tsv", sentences(32))
    shutil.copytree(backbones("llama"), folder / "llama")
    shutil.copytree(backbones("bert"), folder / "bert")
    deeper = tiny_models.model("llama", "causal-lm", num_hidden_layers=3, vocab_size=72)
    deeper.save_pretrained(folder / "deeper")
    word_tokenizer("<s>", "").save_pretrained(folder / "deeper")
    for output in ("of-llama", "whole-llama", "of-deeper", "of-bert"):
        kind, _, backbone = output.partition("-")
        method = "method=full" if kind == "whole" else "method=lora(rank=4)"
        data = "labels.tsv" if backbone == "bert" else "rows.jsonl"
        words = (method, "train.max_steps=12")
        run(recipe_in(folder, *words, backbone=backbone, data=data, output=output), Reporter())
    return folder


def recipe_in(
    folder: Path, *words: str, backbone="llama", data="rows.jsonl", output="run", teacher=None
) -> Recipe:
    flags = {"backbone": str(folder / backbone), "output": str(folder / output),
             "data": {"train": str(folder / data), "eval": str(folder / data)}}  # fmt: skip
    if teacher is not None:
        flags["teacher"] = {"model": str(folder / teacher)}
    kind = ("task=causal-lm",) * data.endswith("jsonl")
    return read(None, [*RUN, *kind, "method=lora(rank=2)", "train.max_steps=6", *words], flags)


@pytest.mark.parametrize(
    ("teacher", "method"),
    [(teacher, "lora(rank=2)") for teacher in ("of-llama", "whole-llama", "llama", "of-deeper")]
    + [("of-llama", "full"), ("deeper", "full")],
)
def test_the_loss_of_a_step_compares_with_the_teacher_alone(teacher, method, place):
    words = ("teacher.divergence=jsd", "teacher.beta=0.3", "teacher.temperature=1.5")
    prepared = prepare(recipe_in(place, *words, f"method={method}", teacher=teacher))
    taught = prepared.distillation
    shared = "llama" in teacher
    assert taught.teacher.shared == shared == (taught.teacher.model is prepared.model)
    assert (taught.heads[0] is None) == (method == "full")
    tiny_models.scramble(prepared.adapter, std=0.05)
    engine = training_session(prepared, Reporter(), False).engine
    batch = prepared.train.batch([0, 1, 2])
    tensors = list(prepared.adapter.tensors().values())
    found = engine.loss_of(batch)
    gradients = torch.autograd.grad(found, tensors)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    student, learned = prepared.model(**inputs).logits, batch["labels"][:, 1:] != IGNORED
    backbone = teacher.rpartition("-")[2]
    alone = AutoModelForCausalLM.from_pretrained(place / backbone).eval()
    if teacher != backbone:
        ah.load(alone, place / teacher / "adapter", any_tokenizer=True)
    wanted = tiny_models.logits(alone, **inputs)
    expected = divergences(student[:, :-1][learned], wanted[:, :-1][learned], taught.options).mean()
    assert found.item() == pytest.approx(expected.item(), rel=2e-5)
    for ours, other in zip(gradients, torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)
    if (adapter := taught.teacher.adapter) is not None:
        assert not any(parameter.requires_grad for parameter in adapter.parameters())


def test_a_classifier_learns_the_probabilities_of_another(place):
    notes = Notes()
    recipe = recipe_in(place, "train.max_steps=20", backbone="bert", data="labels.tsv",
                       teacher="of-bert", output="student")  # fmt: skip
    outcome = run(recipe, notes)
    assert outcome.metrics["divergence"] < notes.losses[0] / 2
    manifest = Saved.at(outcome.folder).manifest
    digest = Saved.at(place / "of-bert" / "adapter").digest
    assert manifest.training["teacher"]["digest"] == digest
    assert taught_by(manifest) == f"of-bert, sha256 {digest[:12]}"
    assert "model" not in manifest.training["recipe"]["teacher"]
    assert notes.about("without a second model")


def test_a_resumed_run_samples_the_same_texts(place):
    words = ("teacher.on_policy=0.6", "teacher.sft_weight=0.5", "task=causal-lm(new_tokens=5)",
             "train.save_every=1", "train.gradient_accumulation=2")  # fmt: skip
    whole = recipe_in(place, *words, teacher="of-llama", output="whole")
    run(whole, Reporter())
    stopped = replace(whole, output=str(place / "stopped"), name="whole")
    with pytest.raises(KeyboardInterrupt):
        run(stopped, Notes(stop_after=3))
    run(stopped, Reporter(), resume=True)
    assert adapter_bytes(stopped.output) == adapter_bytes(whole.output)
    other = replace(stopped.teacher, model=str(place / "llama"))
    with pytest.raises(ConfigError, match="another run"):
        run(replace(stopped, teacher=other), Reporter(), resume=True)


def test_the_share_of_sampled_batches_is_that_of_the_option(place):
    prepared = prepare(recipe_in(place, "teacher.on_policy=0.5", "task=causal-lm(new_tokens=3)",
                                 "train.batch_size=1", teacher="of-llama"))  # fmt: skip
    session = training_session(prepared, Reporter(), False)
    batches = [session.batches(epoch)[index] for epoch in (0, 1) for index in range(24)]
    sampled = [batch for batch in batches if "loss.sampled" in batch]
    assert 12 <= len(sampled) <= 36
    end = prepared.train.setting.tokenizer.eos_token_id
    for batch in sampled:
        labels = batch["labels"][0]
        own = labels[labels != IGNORED].tolist()
        assert len(own) == 3 or own[-1] == end
    assert session.engine.loss_of(sampled[0]).item() > 0


COLUMNS = ("data.label=response", "data.pair=prompt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("task=preference", "data.text=prompt", *COLUMNS), "its own loss"),
        (("task=reward", "data.text=prompt", *COLUMNS), "reward: its outputs"),
        (("teacher.on_policy=1", "task=causal-lm(pack=true)"), "several prompts"),
        (("teacher.on_policy=1", "task=causal-lm(data=text)", "data.text=prompt"), "no prompts"),
        (("new_tokens=[zzz]",), "new_tokens"),
        (("train.best_metric=accuracy",), "divergence"),
    ],
)
def test_what_does_not_fit_a_teacher_is_refused(words, message, place):
    with pytest.raises(AdapterhubError, match=message):
        prepare(recipe_in(place, *words, teacher="of-llama"))


def test_a_teacher_with_other_tokens_labels_or_no_head_is_refused(place):
    other = place / "other"
    shutil.copytree(place / "deeper", other)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["entirely", "new"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match="other tokens") as error:
        prepare(recipe_in(place, teacher="other"))
    size = len(tokenizer.get_vocab())
    for part in (f"{other}: {size} tokens", f"llama: {size - 2} tokens", "'entirely', 'new'"):
        assert part in str(error.value)
    missing = recipe_in(place, teacher="other")
    missing = replace(missing, teacher=replace(missing.teacher, model="nowhere"))
    with pytest.raises(AdapterhubError, match="no teacher 'nowhere'"):
        prepare(missing)
    classify = {"backbone": "bert", "data": "labels.tsv"}
    with pytest.raises(ConfigError, match="lacks a trained head"):
        prepare(recipe_in(place, teacher="bert", **classify))
    named = "data.labels={pos: good, neg: bad}"
    with pytest.raises(ConfigError, match="other labels"):
        prepare(recipe_in(place, named, teacher="of-bert", **classify))
