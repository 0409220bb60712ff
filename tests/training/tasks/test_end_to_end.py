"""Each registered task trains, evaluates and predicts on the command line, and learns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import json_lines, sentences, write_json_lines, write_tsv

from adapterhub.training.tasks import TASKS, task_of

LEARN = ("--method", "full", "train.learning_rate=3e-3", "train.tensorboard=false")


@dataclass
class Case:
    """A backbone, a task spec, data, the words of `predict`, and what a learned model gives."""

    backbone: str
    task: str
    data: object
    predict: tuple[str, ...]
    key: str
    least: float | None = None
    most: float | None = None
    words: tuple[str, ...] = ()
    epochs: int = 24


def classes(folder: Path) -> Path:
    return write_tsv(folder / "classes.tsv", sentences(48))


def numbers(folder: Path) -> Path:
    rows = [(text, {"pos": "1.0", "neg": "-1.0"}[label]) for text, label in sentences(48)]
    return write_tsv(folder / "numbers.tsv", rows)


def tagged(folder: Path) -> Path:
    """CoNLL columns: `very good` and `good` are one kind of entity, `bad` another."""
    lines = []
    for text, label in sentences(48):
        inside = False
        for token in text.split():
            named = inside or token in ("very", text.split()[-1])
            tag = f"{'I' if inside else 'B'}-{label}" if named else "O"
            inside = named
            lines.append(f"{token}\t{tag}")
        lines.append("\t")
    (folder / "tags.conll").write_text("\n".join(lines) + "\n")
    return folder / "tags.conll"


def questions(folder: Path) -> Path:
    """SQuAD's form: the answer is the last word; of a question on the plot there is none."""
    paragraphs = []
    for i, (text, _) in enumerate(sentences(48)):
        answer = text.split()[-1]
        item = {"id": str(i), "question": "the movie was"}
        item |= {"answers": [{"text": answer, "answer_start": text.rindex(answer)}]}
        none = {"id": f"{i}x", "question": "a plot", "answers": [], "is_impossible": True}
        paragraphs.append({"context": text, "qas": [item, none]})
    file = folder / "squad.json"
    file.write_text(json.dumps({"version": "2", "data": [{"paragraphs": paragraphs}]}))
    return file


def pairs(folder: Path) -> Path:
    """The response to a sentence is one of two words."""
    rows = [
        {"text": text, "label": {"pos": "good", "neg": "bad"}[label]}
        for text, label in sentences(48)
    ]
    return write_json_lines(folder / "pairs.jsonl", rows)


def choices(folder: Path) -> Path:
    """Of two sentences, the one that is good."""
    texts = {label: [t for t, found in sentences(48) if found == label] for label in ("pos", "neg")}
    rows = [
        {"text": "the movie", "choices": [one, other][:: 1 - 2 * (i % 2)], "label": "AB"[i % 2]}
        for i, (one, other) in enumerate(zip(*texts.values(), strict=True))
    ]
    return write_json_lines(folder / "choices.jsonl", rows)


def lines(folder: Path) -> Path:
    (folder / "raw.txt").write_text("\n".join(text for text, _ in sentences(48)) + "\n")
    return folder / "raw.txt"


CASES = {
    "classification": Case("bert", "classification", classes, ("the film was bad",), "label", 0.9),
    "regression": Case("bert", "regression", numbers, ("the movie was good",), "value", 0.9),
    "tagging": Case("bert", "tagging", tagged, ("the movie was very good",), "entities", 0.9),
    "question-answering": Case(
        "bert", "question-answering(unanswerable=true)", questions,
        ("the movie was", "--pair", "the film was awful"), "answer", 0.9,
    ),
    "seq2seq": Case(
        "t5", "seq2seq(metric=exact, new_tokens=4)", pairs, ("the film was bad",), "generated", 0.9,
    ),
    "causal-lm": Case(
        "llama", "causal-lm(generate=true, new_tokens=4)", pairs, ("the film was bad",),
        "generated", 0.9,
    ),
    "multiple-choice": Case(
        "bert", "multiple-choice", choices,
        ("the movie was good", "--pair", "bad", "--pair", "good"), "choice", 0.9,
    ),
    "masked-lm": Case("bert", "masked-lm", lines, ("the [MASK] was good",), "filled", most=2.0),
    "prompted": Case(
        "bert", "prompted(template='{text} is {mask}', words={'pos': 'good', 'neg': 'bad'})",
        classes, ("the film was dull",), "label", 0.9, epochs=60,
    ),
    "span-corruption": Case(
        "t5", "span-corruption(new_tokens=5)", lines, ("the <extra_id_0> was good",), "generated",
        most=2.0,
    ),
}  # fmt: skip


def test_each_task_has_a_case():
    assert CASES.keys() == TASKS.keys()
    assert len(CASES) > 5
    assert all(task_of(case.task).name == name for name, case in CASES.items())


@pytest.mark.parametrize("name", sorted(CASES))
def test_train_eval_predict(name, adapterhub, backbones, tmp_path):
    case = CASES[name]
    file = case.data(tmp_path)
    run = tmp_path / "run"
    code, out, err = adapterhub(
        "train", "--backbone", backbones(case.backbone), "--task", case.task, "--train", file,
        "--eval", file, "--output", run, *LEARN, f"train.epochs={case.epochs}", *case.words,
        "--quiet",
    )  # fmt: skip
    assert code == 0, err
    manifest = json.loads((run / "adapter/adapter.json").read_text())
    assert manifest["task"] == name
    code, out, err = adapterhub("eval", run, "--data", file, "--json")
    assert code == 0, err
    metrics = json.loads(out)
    main = task_of(case.task).main_metric
    saved = {k: v for k, v in manifest["metrics"].items()}
    assert {k: v for k, v in metrics.items() if k != "examples"} == pytest.approx(saved, abs=1e-5)
    assert case.least is None or metrics[main] >= case.least, metrics
    assert case.most is None or metrics[main] <= case.most, metrics
    code, out, err = adapterhub("predict", run, *case.predict, "--json")
    assert code == 0, err
    (row,) = json_lines(out)
    assert case.key in row
    code, out, err = adapterhub("predict", run, *case.predict)
    assert code == 0, err
    assert out.count("\n") == 1
    code, out, err = adapterhub("predict", run, "--data", file, "--json")
    assert code == 0, err
    assert len(json_lines(out)) == metrics["examples"]


def test_a_backbone_is_a_baseline_without_training(adapterhub, backbones, tmp_path):
    words = ("--data", classes(tmp_path), "--json")
    task = "prompted(template='{text} is {mask}', words={'pos': 'good', 'neg': 'bad'}, model=%s)"
    for backbone, kind in (("bert", "masked-lm"), ("llama", "causal-lm"), ("gpt2", "causal-lm")):
        code, out, err = adapterhub(
            "eval", "--backbone", backbones(backbone), "--task", task % kind, *words
        )
        assert code == 0, err
        assert 0 <= json.loads(out)["accuracy"] <= 1
    for extra, expected in (
        (("--backbone", backbones("bert"), "--task", "classification"), "needs a trained head"),
        (("--backbone", backbones("bert")), "nothing to evaluate"),
        (("--backbone", backbones("llama"), "--task", task % "masked-lm"), "AutoModelForMaskedLM"),
    ):
        code, _, err = adapterhub("eval", *extra, *words)
        assert code == 2, extra
        assert expected in err
