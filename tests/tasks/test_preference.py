"""preference: the losses of trl, the reference, chats, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.route import only_foundations
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.preference_losses import Responses, orpo
from adapterhub.tasks.preference import LABELS, REFERENCE, _log_probabilities
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer, write_json_lines

ROWS = [
    Comparison("the movie was", "very good", "bad"),
    Comparison("a plot is", "dull", "a great end"),
    Comparison("the end", "fine", "poor"),
]
TOKENIZER = word_tokenizer("<s>", "")


def models():
    """Return a tiny model, and another one as its reference."""
    torch.manual_seed(0)
    return [tiny_models.model("llama", "causal-lm").eval() for _ in range(2)]


def encoded(task):
    return task.encode(ROWS, Setting(TOKENIZER, 32, positions=64), labelled=True)


@pytest.mark.parametrize("options", [{}, {"beta": 0.7}, {"loss_type": "ipo", "beta": 0.3}])
def test_the_loss_is_that_of_trl(options, tmp_path):
    """On the same tokens, which trl gets with a mask of the responses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl = pytest.importorskip("trl")
        datasets = pytest.importorskip("datasets")
        model, reference = models()
        for each in (model, reference):
            for tensor in each.parameters():
                tensor.data.add_(torch.randn_like(tensor) / 10)
        task = parse_task({"preference": options})
        rows = task.with_reference(reference, encoded(task), 2)
        batch = rows.batch(range(len(ROWS)))
        found = task.loss(rows)(model(**tokens_of(batch)), batch)
        data = datasets.Dataset.from_list(
            [{"prompt": r.text, "chosen": r.chosen, "rejected": r.rejected} for r in ROWS]
        )
        arguments = trl.DPOConfig(
            str(tmp_path), report_to="none", bf16=False, use_cpu=True, disable_dropout=True,
            gradient_checkpointing=False,
            **{"loss_type": "sigmoid", "beta": 0.1, **options},
        )  # fmt: skip
        trainer = trl.DPOTrainer(
            model, reference, args=arguments, train_dataset=data, processing_class=TOKENIZER
        )
        theirs = tokens_of(batch) | {"completion_mask": (batch[LABELS] >= 0).long()}
        expected = trainer.compute_loss(trainer.model, theirs)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)


def tokens_of(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def test_smoothing_mixes_both_directions():
    model, reference = models()
    losses = {}
    for smoothing in (0.0, 0.3):
        task = parse_task(f"preference(label_smoothing={smoothing})")
        rows = task.with_reference(reference, encoded(task), 4)
        batch = rows.batch([0, 1, 2])
        losses[smoothing] = task.loss(rows)(model(**tokens_of(batch)), batch)
    policy, _ = _log_probabilities(model(**tokens_of(batch)), batch)
    ratios = policy - batch[REFERENCE]
    z = 0.1 * (ratios[:, 0] - ratios[:, 1])
    assert torch.allclose(losses[0.3], losses[0.0] + 0.3 * z.mean(), atol=1e-6)


def test_orpo_is_the_equation_of_the_paper():
    """It reads no reference."""
    policy, tokens = torch.tensor([[-2.0, -6.0], [-3.0, -1.0]]), torch.tensor([[2, 3], [3, 4]])
    means = (policy / tokens).exp()
    odds = means / (1 - means)
    ratio = torch.log(odds[:, 0] / odds[:, 1])
    expected = -means[:, 0].log() - 0.2 * torch.log(torch.sigmoid(ratio))
    task = parse_task("preference(loss_type=orpo, beta=0.2)")
    found = orpo(Responses(policy, policy, tokens), task)
    assert torch.allclose(found, expected, atol=1e-6)
    assert not task.compares_with_reference
    rows = encoded(task)
    assert task.with_reference(models()[0], rows, 4) is rows


def test_log_probabilities_are_of_the_responses_alone():
    model, _ = models()
    task = parse_task("preference(template='{text} ')")
    batch = encoded(task).batch([0])
    policy, tokens = _log_probabilities(model(**tokens_of(batch)), batch)
    assert tokens.tolist() == [[3, 2]]  # with the end of the text
    prompt = TOKENIZER("the movie was ")["input_ids"]
    for column, response in enumerate(("very good", "bad")):
        answer = TOKENIZER(response, add_special_tokens=False)["input_ids"]
        ids = [*prompt, *answer, TOKENIZER.eos_token_id]
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(scores[i - 1, ids[i]] for i in range(len(prompt), len(ids)))
        assert policy[0, column].item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("method", ["lora", "full", "prompt"])
def test_the_reference_is_the_model_with_the_adapter_off(method):
    model, _ = models()
    task = parse_task("preference")
    expected = task.with_reference(model, encoded(task), 4).rows
    adapter = ah.attach(model, method, name="a")
    for tensor in adapter.tensors().values():
        tensor.data.add_(torch.randn_like(tensor))
    with only_foundations(model):
        found = task.with_reference(model, encoded(task), 4).rows
    on = task.with_reference(model, encoded(task), 4).rows
    for row, own, other in zip(expected, found, on, strict=True):
        assert own["reference"] == pytest.approx(row["reference"], abs=1e-4)
        assert other["reference"] != pytest.approx(row["reference"], abs=1e-2)


def test_chats(tmp_path):
    chat = [{"role": "user", "content": "the movie"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("good", "bad")]
    whole = {"chosen": chat + answers[0], "rejected": chat + answers[1]}
    parts = {"prompt": chat, "chosen": answers[0], "rejected": answers[1]}
    for name, row in (("whole", whole), ("parts", parts)):
        source = str(write_json_lines(tmp_path / f"{name}.jsonl", [row] * 3))
        task, choice = parse_task("preference").fitted(source, DataOptions(), "train")
        assert task.data == "chat"
        (example, *_) = task.read(source, choice.options, "train")
        assert example == Comparison((("user", "the movie"),), "good", "bad")
        rows = task.encode([example], Setting(TOKENIZER, 32), labelled=True)
        assert task.show_row(rows.rows[0], rows.setting) == {
            "chosen": "·x7 good </s>", "rejected": "·x7 bad </s>",
        }  # fmt: skip
    assert task.example(["a film"], choice.options).prompt == (("user", "a film"),)
