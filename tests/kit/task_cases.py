"""One training case for each registered task: a suitable backbone, data, and expected results."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.kit import media
from tests.kit.data import sentences, write_json_lines, write_tsv


@dataclass
class Case:
    """A backbone, a task spec, data, the arguments of `predict`, and the expected results.

    `key` is a field of each prediction; `least` and `most` bound the main metric after training. In
    `predict`, DATA is the file or folder of the data.
    """

    backbone: str
    task: str
    data: Callable[[Path], Path]
    predict: tuple[str, ...]
    key: str
    least: float | None = None
    most: float | None = None
    words: tuple[str, ...] = ()
    epochs: int = 24

    def asked(self, data: Path) -> list[str]:
        """Return the arguments of `predict` for some data."""
        return [word.replace("DATA", str(data)) for word in self.predict]


def classes(folder: Path) -> Path:
    """Write sentences with their class."""
    return write_tsv(folder / "classes.tsv", sentences(48))


def several(folder: Path) -> Path:
    """Write sentences with any number of labels: one for the last word, one for `very`."""
    rows = [
        (text, "; ".join([*["good"] * (label == "pos"), *["strong"] * ("very" in text)]))
        for text, label in sentences(48)
    ]
    return write_tsv(folder / "several.tsv", rows)


def tagged(folder: Path) -> Path:
    """Write CoNLL columns in which `very good` is an entity of one kind and `bad` of another."""
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
    """Write SQuAD 2 JSON: the answer is the last word; questions about the plot have none."""
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


def numbers(folder: Path) -> Path:
    """Write sentences with a number, 1 or -1."""
    rows = [(text, {"pos": "1.0", "neg": "-1.0"}[label]) for text, label in sentences(48)]
    return write_tsv(folder / "numbers.tsv", rows)


def rows_of(name: str, row: Callable[[str, bool], dict[str, object]]) -> Callable[[Path], Path]:
    """Return a function that writes a row for each sentence, which is positive or not."""

    def write(folder: Path) -> Path:
        rows = [row(text, label == "pos") for text, label in sentences(48)]
        return write_json_lines(folder / f"{name}.jsonl", rows)

    return write


def word(good: bool) -> str:
    return "good" if good else "bad"


def choices(folder: Path) -> Path:
    """Write pairs of sentences of which one is positive."""
    rows = [
        {"text": "the movie", "choices": [one, other][:: 1 - 2 * (i % 2)], "label": "AB"[i % 2]}
        for i, (one, other) in enumerate(positive_and_negative())
    ]
    return write_json_lines(folder / "choices.jsonl", rows)


def rated(folder: Path) -> Path:
    """Write pairs of sentences of which the positive one is better."""
    rows = [
        {"prompt": "the movie", "chosen": chosen, "rejected": rejected}
        for chosen, rejected in positive_and_negative()
    ]
    return write_json_lines(folder / "rated.jsonl", rows)


def positive_and_negative() -> list[tuple[str, str]]:
    texts = [[t for t, given in sentences(48) if given == label] for label in ("pos", "neg")]
    return list(zip(*texts, strict=True))


pairs = rows_of("pairs", lambda text, good: {"text": text, "label": word(good)})
asked = rows_of("asked", lambda text, good: {  # the answer is the last word of the context
    "question": "the movie was", "context": text, "answer": text.split()[-1]})  # fmt: skip
partners = rows_of("partners", lambda text, good: {  # a word that means the same
    "anchor": text, "positive": "great" if good else "awful"})  # fmt: skip
relevant = rows_of("relevant", lambda text, good: {  # queries for something great
    "query": f"great {text.split()[1]}", "passage": text, "label": int(good)})  # fmt: skip
compared = rows_of("compared", lambda text, good: {
    "prompt": text, "chosen": word(good), "rejected": word(not good)})  # fmt: skip


def lines(folder: Path) -> Path:
    """Write plain text, one sentence per line."""
    (folder / "raw.txt").write_text("\n".join(text for text, _ in sentences(48)) + "\n")
    return folder / "raw.txt"


CASES = {
    "classification": Case("bert", "classification", classes, ("the film was bad",), "label", 0.9),
    "multi-label": Case(
        "bert", "multi-label(threshold=0.4)", several, ("the film was very good",), "scores", 0.9,
    ),
    "regression": Case("bert", "regression", numbers, ("the movie was good",), "value", 0.9),
    "tagging": Case("bert", "tagging", tagged, ("the movie was very good",), "entities", 0.9),
    "question-answering": Case(
        "bert", "question-answering(unanswerable=true)", questions,
        ("the movie was", "--pair", "the film was awful"), "answer", 0.9,
    ),
    "seq2seq": Case(
        "t5", "seq2seq(metric=exact, new_tokens=4)", pairs, ("the film was bad",), "generated", 0.9,
    ),
    "unified-qa": Case(
        "t5", "unified-qa(new_tokens=4)", asked, ("the movie was", "--pair", "the film was bad"),
        "generated", 0.9,
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
    "embedding": Case("bert", "embedding", partners, ("the film was bad",), "vector", 0.9),
    "reranking": Case(
        "bert", "reranking", relevant, ("great film", "--pair", "the film was good"), "value", 0.9,
    ),
    "preference": Case(
        "llama", "preference(new_tokens=4)", compared, ("the film was bad",), "generated", 0.9,
    ),
    "grpo": Case(
        "llama", "grpo(reward='regex:good', group=4, new_tokens=4)", pairs, ("the film was bad",),
        "generated", 0.9, epochs=8,
    ),
    "reward": Case(
        "bert", "reward", rated, ("the movie", "--pair", "the film was good"), "value", 0.9,
    ),
    "span-corruption": Case(
        "t5", "span-corruption(new_tokens=5)", lines, ("the <extra_id_0> was good",), "generated",
        most=2.0,
    ),
    "image-classification": Case(
        "vit", "image-classification",
        lambda folder: media.write_digits(folder / "digits", classes=3, each=12),
        ("DATA/1/1.png",), "label", 0.9, epochs=8,
    ),
    "audio-classification": Case(
        "wav2vec2", "audio-classification", lambda folder: media.write_tones(folder / "tones"),
        ("DATA/low/1.wav",), "label", 0.9, epochs=16,
    ),
    "speech-recognition": Case(
        "speech-ctc", "speech-recognition", lambda folder: media.write_speech(folder / "speech"),
        ("DATA/1.wav",), "generated", most=0.1, epochs=120,
    ),
    "image-text-to-text": Case(
        "vlm-llava", "image-text-to-text(new_tokens=2)",
        lambda folder: media.write_questions(folder / "vqa").parent,
        ("DATA/0-1.png", "--pair", "which digit?"), "generated", 0.9, epochs=80,
    ),
    "denoising": Case(
        "bart", "denoising(new_tokens=5)", lines, ("the <mask> was good",), "generated", most=2.0,
    ),
}  # fmt: skip
