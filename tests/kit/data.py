"""Small data files: sentences, tables, shards, files as people have them, and their tokenizer."""

from __future__ import annotations

import datetime
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import Recipe, RunOptions, read
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.batches import IGNORED
from tests.kit import tiny_models

# Small data sets, a word-level tokenizer and a short training loop for tests.


WORDS = [
    "the", "a", "movie", "film", "was", "is", "very", "good", "great", "fine", "bad", "poor",
    "awful", "dull", "plot", "actor", "scene", "end",
]  # fmt: skip
GOOD, BAD = ("good", "great", "fine"), ("bad", "poor", "awful", "dull")


SENTINELS = [f"<extra_id_{i}>" for i in range(8)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def word_tokenizer(start: str = "", end: str = "") -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer with the special ids of `tiny_models`.

    It puts the tokens `start` and `end` around each text.
    """
    special = ["<unk>", "<pad>", "</s>", "<s>", "<mask>"]
    words = [*special, *SENTINELS, *WORDS, "user", "assistant", ":", "0", "1", "2", "3"]
    assert len(words) <= tiny_models.VOCAB
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(w, words.index(w)) for w in (start, end) if w]
    if around:
        single = " ".join(part for part in (start, "$A", end) if part)
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="</s>",
        bos_token="<s>", mask_token="<mask>", additional_special_tokens=SENTINELS,
        model_max_length=64, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def write_json_lines(path: Path, rows: list[dict]) -> Path:
    """Write rows to a JSON Lines file and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sentences(count: int) -> list[tuple[str, str]]:
    """Generate (sentence, label) pairs; one word of the sentence determines its label."""
    rows = []
    for i in range(count):
        label, words = ("pos", GOOD) if i % 2 else ("neg", BAD)
        thing = ("movie", "film", "plot", "actor", "scene", "end")[i // 2 % 6]
        rows.append(
            (f"the {thing} was {'very ' * (i // 5 % 2)}{words[i // 3 % len(words)]}", label)
        )
    return rows


def write_tsv(path: Path, rows: list[tuple[str, ...]], header: str = "text\tlabel") -> Path:
    """Write rows to a tab-separated file and return its path."""
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path


def json_lines(text: str) -> list[dict]:
    """Parse JSON Lines."""
    return [json.loads(line) for line in text.splitlines()]


def train(adapter, steps, learning_rate=None):
    """Train with AdamW, by default at the method's own learning rate; return the losses."""
    options = RunOptions(learning_rate=learning_rate, head_learning_rate=learning_rate or 1e-3)
    groups = AdapterTrainee(adapter).param_groups(options)
    optimizer = torch.optim.AdamW(groups)
    losses = []
    for _ in range(steps):
        loss = adapter.model(**tiny_models.labelled_batch(adapter.model)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Readable rows, and errors in data, for the tests of tasks.


def words_of(tokenizer, ids: list[int]) -> list[str]:
    """Return the tokens of ids, without ignored labels."""
    return tokenizer.convert_ids_to_tokens([i for i in ids if i != IGNORED])


def read_error(task: str, file: Path, text: str) -> str:
    """Write a data file, read it for a task, and return the error message."""
    file.write_text(text)
    with pytest.raises(AdapterhubError) as error:
        parse_task(task).read(str(file), DataOptions(), "train")
    return str(error.value)


# Parquet shards to stream, and recipes that stream them.


def write_shards(folder: Path, sizes: tuple[int, ...] = (20, 13, 31), rows: int = 5) -> str:
    """Write sentences with their class into Parquet files of some sizes; return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    made, start = sentences(sum(sizes)), 0
    for number, size in enumerate(sizes):
        texts = [
            f"{text} {own_words(start + i)}" for i, (text, _) in enumerate(made[start:][:size])
        ]
        labels = [label for _, label in made[start : start + size]]
        table = pa.table({"text": texts, "label": labels})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=rows)
        start += size
    return str(folder / "part-*.parquet")


def own_words(number: int) -> str:
    """Return three words without a meaning for the class, other ones for each number to 511."""
    return " ".join(WORDS[number // 8**place % 8] for place in range(3))


def streamed_recipe(backbone: Path, output: Path, source: str, *words: str, **data: Any) -> Recipe:
    """Return a recipe that streams a source without evaluation; words are KEY=VALUE."""
    flags = {
        "backbone": str(backbone),
        "output": str(output),
        "data": {"train": source, "eval": "none", "stream": True} | data,
    }
    usual = ["method=lora(rank=2)", "train.batch_size=4", "train.max_steps=12", "data.buffer=16",
             "train.log_every=1", "train.tensorboard=false", "train.report=false"]  # fmt: skip
    return read(None, [*usual, *words], flags)


# A run with three tasks on a tiny backbone: two classifications and a regression.


HEADS = {"mood": ("neg", "pos"), "thing-2": ("actor", "end", "film"), "length": ()}


def write_tasks(folder: Path) -> dict[str, dict[str, Any]]:
    """Write the data of three tasks of 24, 20 and 9 rows, and return them for a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = sentences(96)
    things = [(text, word) for text, _ in rows if (word := text.split()[1]) in HEADS["thing-2"]]
    lengths = [(text, str(len(text.split()) / 2)) for text, _ in rows[5:]]
    data = {"mood": rows[:24], "thing-2": things[:20], "length": lengths[:9]}
    tasks = {}
    for name, own in data.items():
        train = write_tsv(folder / f"{name}.tsv", own)
        dev = write_tsv(folder / f"{name}-dev.tsv", own[::2])
        tasks[name] = {"data": {"train": str(train), "eval": str(dev)}}
    tasks["length"] |= {"task": "regression", "weight": 0.5}
    return tasks


def mixed_recipe(
    backbone: Path, folder: Path, *words: str, tasks: dict[str, Any] | None = None
) -> Recipe:
    """Return a recipe with three tasks, in a new folder; words are KEY=VALUE."""
    flags = {
        "backbone": str(backbone),
        "output": str(folder / "run"),
        "tasks": tasks or write_tasks(folder / "data"),
    }
    usual = ["method=lora(rank=2)", "train.batch_size=4", "train.epochs=2", "train.log_every=1"]
    usual += ["train.tensorboard=false", "train.report=false"]
    return read(None, [*usual, *words], flags)


# Data files as people have them: what `train FILE` is to read in each, or what it is to say.


TOPICS = {
    "billing": ("the invoice of {} names the wrong amount", "please refund the payment of {}"),
    "access": ("the password of {} is not accepted", "the account of {} is locked since noon"),
    "delivery": ("the parcel of {} has not arrived", "the courier left the box of {} outside"),
}
WHEN = ("March", "April", "May", "June", "July", "August", "today", "last week", "Tuesday", "2021")


def tickets(names: Iterable[str] = TOPICS) -> list[tuple[str, str]]:
    """Sixty different texts, each with its class, under other names of the classes."""
    named = dict(zip(TOPICS, names, strict=False))
    return [
        (text.format(when), named[topic])
        for when in WHEN
        for topic, texts in TOPICS.items()
        if topic in named
        for text in texts
    ]


class OddFile(NamedTuple):
    """A file, and what is right for it."""

    name: str
    write: Callable[[Path], None]
    task: str = ""
    columns: Mapping[str, Any] = MappingProxyType({})
    labels: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def lines(path: Path, rows: Iterable[Iterable[object]], sep: str = ",", **form: Any) -> None:
    text = "\n".join(sep.join(map(str, row)) for row in rows) + "\n"
    path.write_text(text, **{"encoding": "utf-8", **form})


def jsonl(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def table(*header: str, sep: str = ",", names: Iterable[str] = TOPICS, **form: Any) -> Any:
    return lambda path: lines(path, [header, *tickets(names)], sep, **form)


def records(row: Callable[[str, str], Any]) -> Any:
    return lambda path: jsonl(path, [row(*ticket) for ticket in tickets()])


def one_json(content: Callable[[list[dict[str, str]]], Any]) -> Any:
    rows = [{"text": text, "label": label} for text, label in tickets()]
    return lambda path: path.write_text(json.dumps(content(rows)), encoding="utf-8")


def _one_hot(path: Path) -> None:
    rows = [(text, int(t == "billing"), int(t == "access"), int("box" in text or "2021" in text))
            for text, t in tickets()]  # fmt: skip
    lines(path, [("comment", "money", "login", "urgent"), *rows])


def _hot(*names: str, states: tuple[str, str] = ("0", "1"), sep: str = ",", **others: str) -> Any:
    """Three columns of two states, one with empty cells; `others` have one value each."""
    rows = [
        (text, *others.values(), states[t == "billing"], states["box" in text],
         states["2021" in text] if number % 5 else "")
        for number, (text, t) in enumerate(tickets())
    ]  # fmt: skip
    return lambda path: lines(path, [("comment", *others, *names), *rows], sep)


def _genres(sep: str) -> Any:
    rows = [(text, sep.join([topic, *["drama"] * (n % 3 == 0), *["war"] * (n % 4 == 0)]))
            for n, (text, topic) in enumerate(tickets())]  # fmt: skip
    return lambda path: lines(path, [("plot", "genre"), *rows], "\t")


def _beside(path: Path) -> None:
    rows = [(t, c, n % 2, int(n % 3 == 0)) for n, (t, c) in enumerate(tickets())]
    lines(path, [("text", "category", "is_reply", "verified"), *rows])


def _spaced(path: Path) -> None:
    rows = [(t, c.replace("ll", " " * (2 + n % 4) + "l")) for n, (t, c) in enumerate(tickets())]
    lines(path, [("text", "label"), *rows])


def _struct(path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    docs = [{"id": n, "content": {"text": text}} for n, (text, _) in enumerate(tickets())]
    kinds = [topic for _, topic in tickets()]
    write_table(pyarrow.table({"doc": docs, "kind": kinds}), path)


def _sheets(path: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    book.active.append(["These are the tickets"])
    sheet = book.create_sheet("Data")
    sheet.append(["Date", "Text", "Class"])
    for number, row in enumerate(tickets()):
        sheet.append([datetime.datetime(2024, 1, 1 + number % 28), *row])
        if number % 10 == 3:
            sheet.append([])
    book.save(path)


def _joined(sep: str) -> Any:
    rows = [(text, sep.join([topic, *["urgent"] * ("2021" in text)])) for text, topic in tickets()]
    return lambda path: lines(path, [("text", "tags"), *rows], "\t")


def _cased(path: Path) -> None:
    rows = [(text, topic.title() if number % 7 == 0 else topic)
            for number, (text, topic) in enumerate(tickets())]  # fmt: skip
    lines(path, [("text", "label"), *rows])


def _floats(path: Path) -> None:
    lines(path, [("text", "label"), *((t, float(c == "billing")) for t, c in tickets())])


def _numbered(path: Path) -> None:
    rows = [(1000 + n, text, topic) for n, (text, topic) in enumerate(tickets())]
    lines(path, [("ticket_id", "text", "label"), *rows])


def _only_ids(path: Path) -> None:
    lines(path, [("id", "note"), *((1000 + n, text) for n, (text, _) in enumerate(tickets()))])


def _quoted_lines(path: Path) -> None:
    rows = [f'"Hello,\nI say ""{text}"".\n",{topic}' for text, topic in tickets()]
    path.write_text("text,label\n" + "\n".join(rows) + "\n", encoding="utf-8")


def _marked(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(
        [b"text,label", *(f"{t},{c}".encode() for t, c in tickets())]))  # fmt: skip


def _chat(text: str, topic: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": topic}]
    }


def _share(text: str, topic: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": topic}]}


def _tagged(text: str, topic: str) -> dict[str, Any]:
    words = text.split()
    return {"tokens": words, "ner_tags": ["B-TIME" if w in WHEN else "O" for w in words]}


def _conll(path: Path) -> None:
    sentences = ["\n".join(f"{w}\t{'B-TIME' if w in WHEN else 'O'}" for w in text.split())
                 for text, _ in tickets()]  # fmt: skip
    path.write_text("\n\n".join(sentences) + "\n", encoding="utf-8")


def _squad(path: Path) -> None:
    paragraphs = []
    for number, (text, topic) in enumerate(tickets()):
        answer = {"text": topic, "answer_start": 0}
        asked = {"id": str(number), "question": "What is it about?", "answers": [answer]}
        paragraphs.append({"context": f"{topic}: {text}", "qas": [asked]})
    path.write_text(json.dumps({"data": [{"title": "x", "paragraphs": paragraphs}]}))


def _excel(path: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    for row in [("Subject", "Category"), *tickets()]:
        book.active.append(row)
    book.save(path)


def _features() -> Any:
    import datasets

    names = list(TOPICS)
    rows = {"text": [t for t, _ in tickets()], "label": [names.index(c) for _, c in tickets()]}
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def _saved(path: Path) -> None:
    _features().save_to_disk(str(path))


def _parquet(path: Path) -> None:
    _features().to_parquet(str(path))


def _folders(path: Path) -> None:
    for number, (text, topic) in enumerate(tickets()):
        (path / topic).mkdir(parents=True, exist_ok=True)
        (path / topic / f"{number}.txt").write_text(text, encoding="utf-8")


def _zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.csv", "text,label\n" + "\n".join(",".join(row) for row in tickets()))


CLASSES = ("access", "billing", "delivery")
TEXT = {"text": "text", "label": "label"}
ODD_FILES = (
    OddFile("plain.csv", table("text", "label"), "classification", TEXT, CLASSES),
    OddFile("betreff.csv", table(["Betreff", "Beschreibung"][0], "Kategorie", sep=";",
            names=("Prüfung", "Zugang", "Lieferung"), encoding="cp1252"), "classification",
            {"text": "Betreff", "label": "Kategorie"}, ("Lieferung", "Prüfung", "Zugang")),
    OddFile("noheader.tsv", lambda p: lines(p, ((c, t) for t, c in tickets()), "\t"),
            "classification", {"text": "1", "label": "0"}, CLASSES),
    OddFile("utf16.tsv", table("text", "label", sep="\t", encoding="utf-16"), "classification",
            TEXT, CLASSES),
    OddFile("marked.csv", _marked, "classification", TEXT, CLASSES),
    OddFile("pipes.txt", table("text", "label", sep="|"), "classification", TEXT, CLASSES),
    OddFile("quoted.csv", _quoted_lines, "classification", TEXT, CLASSES),
    OddFile("upper.CSV", table("TEXT", "LABEL"), "classification",
            {"text": "TEXT", "label": "LABEL"}, CLASSES),
    OddFile("numbered.csv", _numbered, "classification", TEXT, CLASSES),
    OddFile("rows.jsonl", records(lambda t, c: {"review": t, "sentiment": c}), "classification",
            {"text": "review", "label": "sentiment"}, CLASSES),
    OddFile("rows.json", one_json(lambda rows: rows), "classification", TEXT, CLASSES),
    OddFile("within.json", one_json(lambda rows: {"version": 1, "data": rows}), "classification",
            TEXT, CLASSES),
    OddFile("nested.jsonl", records(lambda t, c: {"doc": {"content": {"text": t}, "kind": c}}),
            "classification", {"text": "doc.content.text", "label": "doc.kind"}, CLASSES),
    OddFile("numbers.csv", table("text", "label", names=("0", "1", "2")), "classification", TEXT,
            ("0", "1", "2")),
    OddFile("floats.csv", _floats, "classification", TEXT, ("0", "1")),
    OddFile("norway.csv", table("text", "label", names=("NO", "yes")), "classification", TEXT,
            ("NO", "yes")),
    OddFile("cased.csv", _cased, "classification", TEXT, said=("data.ignore_case=true",)),
    OddFile("book.xlsx", _excel, "classification", {"text": "Subject", "label": "Category"},
            CLASSES),
    OddFile("saved", _saved, "classification", TEXT, CLASSES),
    OddFile("named.parquet", _parquet, "classification", TEXT, CLASSES),
    OddFile("folders", _folders, "classification", {}, CLASSES),
    OddFile("pairs.jsonl", records(lambda t, c: {"premise": t, "hypothesis": c + " is meant, it "
            "seems to me", "label": c}), "classification",
            {"text": "premise", "pair": "hypothesis", "label": "label"}, CLASSES),
    OddFile("onehot.csv", _one_hot, "multi-label", {"text": "comment"},
            ("login", "money", "urgent")),
    OddFile("toxic.csv", _hot("toxic", "insult", "threat"), "multi-label",
            {"text": "comment", "label": "toxic,insult,threat"}, ("insult", "threat", "toxic")),
    OddFile("spam.csv", _hot("Spam", "Hate", "Y", states=("no", "Yes"), sep=";", id="7", lang="en"),
            "multi-label", {"label": "Spam,Hate,Y"}, ("Hate", "Spam", "Y")),
    OddFile("truth.csv", _hot("rude", "sentiment", "topic", states=("False", "True")),
            "multi-label", {"label": "rude,sentiment,topic"}, ("rude", "sentiment", "topic")),
    OddFile("beside.csv", _beside, "classification", {"text": "text", "label": "category"},
            CLASSES),
    OddFile("genre.tsv", _genres("|"), "multi-label", {"text": "plot", "label": "genre"},
            (*CLASSES, "drama", "war")),
    OddFile("genres.tsv", _genres(", "), "multi-label", {"text": "plot", "label": "genre"},
            (*CLASSES, "drama", "war")),
    OddFile("hotels.tsv", table("text", "category", sep="\t", names=("Hotels, Restaurants",
            "Banks, Insurance", "Transport")), "classification",
            {"text": "text", "label": "category"},
            ("Banks, Insurance", "Hotels, Restaurants", "Transport")),
    OddFile("spaced.csv", _spaced, "classification", TEXT, said=("are different labels; correct",)),
    OddFile("struct.parquet", _struct, "classification",
            {"text": "doc.content.text", "label": "kind"}, CLASSES),
    OddFile("sheets.xlsx", _sheets, "classification", {"text": "Text", "label": "Class"}, CLASSES),
    OddFile("joined.tsv", _joined(";"), "multi-label", {"text": "text", "label": "tags"},
            (*CLASSES, "urgent")),
    OddFile("commas.tsv", _joined(","), "multi-label", {"text": "text", "label": "tags"},
            (*CLASSES, "urgent")),
    OddFile("chats.jsonl", records(_chat), "causal-lm"),
    OddFile("share.jsonl", records(_share), "causal-lm"),
    OddFile("completed.jsonl", records(lambda t, c: {"prompt": t, "completion": c}), "causal-lm"),
    OddFile("alpaca.jsonl", records(lambda t, c: {"instruction": "Which kind of ticket?",
            "input": t, "output": c}), "causal-lm"),
    OddFile("better.jsonl", records(lambda t, c: {"prompt": t, "chosen": c + ", surely",
            "rejected": "no idea"}), "preference"),
    OddFile("tokens.jsonl", records(_tagged), "tagging",
            {"text": "tokens", "label": "ner_tags"}, ("O", "B-TIME", "I-TIME")),
    OddFile("time.conll", _conll, "tagging", {}, ("O", "B-TIME", "I-TIME")),
    OddFile("squad.json", _squad, "question-answering"),
    OddFile("onlyids.csv", _only_ids, refused=("--label", "note")),
    OddFile("oneclass.csv", lambda p: lines(p, [("text", "label"), *((t, "all")
            for t, _ in tickets())]), refused=("1 label",)),
    OddFile("empty.csv", lambda p: p.write_text(""), refused=("empty",)),
    OddFile("letters.csv", lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0"),
            refused=("letters.csv",)),
    OddFile("packed.zip", _zipped, refused=("unzip",)),
    OddFile("prose.txt", lambda p: p.write_text("\n".join(t for t, _ in tickets())),
            refused=("causal-lm(data=text)",)),
)  # fmt: skip
