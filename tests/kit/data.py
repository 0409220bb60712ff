"""Small data files: sentences, tables, shards, files as people have them, and their tokenizer."""

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
CLASSES = ("access", "billing", "delivery")
TEXT = {"text": "text", "label": "label"}


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
    write: Callable[[Path], object]
    columns: Mapping[str, Any] = MappingProxyType(TEXT)
    labels: tuple[str, ...] = CLASSES
    task: str = "classification"
    said: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def table(header: str, row: Any = lambda n, t, c: (t, c), sep: str = ",",
          names: Iterable[str] = TOPICS, **form: Any) -> Any:  # fmt: skip
    """Return what writes a row for the number, the text and the class of each ticket."""
    rows = [header.split()] * bool(header)
    rows += [row(n, *ticket) for n, ticket in enumerate(tickets(names))]
    text = "".join(f"{sep.join(map(str, each))}\n" for each in rows)
    return lambda path: path.write_text(text, **{"encoding": "utf-8", **form})


def records(row: Callable[[str, str], Any]) -> Any:
    return lambda path: write_json_lines(path, [row(*ticket) for ticket in tickets()])


def one_json(content: Callable[[list[dict[str, str]]], Any]) -> Any:
    rows = [{"text": text, "label": label} for text, label in tickets()]
    return lambda path: path.write_text(json.dumps(content(rows)), encoding="utf-8")


def frame(row: Callable[[int, str, str], dict[str, Any]], write: str, **form: Any) -> Any:
    """Return what calls a method of a data frame that has a row of each ticket."""

    def written(path: Path) -> None:
        import pandas as pd

        rows = pd.DataFrame([row(n, *ticket) for n, ticket in enumerate(tickets())])
        getattr(rows, write)(path, **form)

    return written


def hot(states: Any, *others: str) -> Any:
    """Three columns of two states, one with empty cells; others have one value each."""
    state = states.__getitem__
    return lambda n, t, c: (
        t, *others, state(c == "billing"), state("box" in t), state("2021" in t) if n % 5 else "",
    )  # fmt: skip


def _genres(sep: str) -> Any:
    return lambda n, t, c: (t, sep.join([c, *["drama"] * (n % 3 == 0), *["war"] * (n % 4 == 0)]))


def _urgent(sep: str) -> Any:
    return lambda n, t, c: (t, sep.join([c, *["urgent"] * ("2021" in t)]))


def _tags(text: str) -> list[tuple[str, str]]:
    return [(word, "B-TIME" if word in WHEN else "O") for word in text.split()]


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


def _paragraph(text: str, topic: str) -> dict[str, Any]:
    answer = {"text": topic, "answer_start": 0}
    asked = {"id": text, "question": "What is it about?", "answers": [answer]}
    return {"context": f"{topic}: {text}", "qas": [asked]}


def _squad(path: Path) -> None:
    paragraphs = [_paragraph(*ticket) for ticket in tickets()]
    path.write_text(json.dumps({"data": [{"title": "x", "paragraphs": paragraphs}]}))


def _features() -> Any:
    import datasets

    names = list(TOPICS)
    rows = {"text": [t for t, _ in tickets()], "label": [names.index(c) for _, c in tickets()]}
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def _folders(path: Path) -> None:
    for number, (text, topic) in enumerate(tickets()):
        (path / topic).mkdir(parents=True, exist_ok=True)
        (path / topic / f"{number}.txt").write_text(text, encoding="utf-8")


def _zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.csv", "text,label\n" + "\n".join(",".join(row) for row in tickets()))


ODD_FILES = (
    OddFile("plain.csv", table("text label")),
    OddFile("betreff.csv", table("Betreff Kategorie", sep=";", encoding="cp1252",
            names=("Prüfung", "Zugang", "Lieferung")), {"text": "Betreff", "label": "Kategorie"},
            ("Lieferung", "Prüfung", "Zugang")),
    OddFile("noheader.tsv", table("", lambda n, t, c: (c, t), "\t"), {"text": "1", "label": "0"}),
    OddFile("utf16.tsv", table("text label", sep="\t", encoding="utf-16")),
    OddFile("marked.csv", table("text label", encoding="utf-8-sig", newline="\r\n")),
    OddFile("pipes.txt", table("text label", sep="|")),
    OddFile("quoted.csv", table("text label",
            lambda n, t, c: (f'"Hello,\nI say ""{t}"".\n"', c))),
    OddFile("upper.CSV", table("TEXT LABEL"), {"text": "TEXT", "label": "LABEL"}),
    OddFile("numbered.csv", table("ticket_id text label", lambda n, t, c: (1000 + n, t, c))),
    OddFile("rows.jsonl", records(lambda t, c: {"review": t, "sentiment": c}),
            {"text": "review", "label": "sentiment"}),
    OddFile("rows.json", one_json(lambda rows: rows)),
    OddFile("within.json", one_json(lambda rows: {"version": 1, "data": rows})),
    OddFile("nested.jsonl", records(lambda t, c: {"doc": {"content": {"text": t}, "kind": c}}),
            {"text": "doc.content.text", "label": "doc.kind"}),
    OddFile("numbers.csv", table("text label", names="012"), labels=("0", "1", "2")),
    OddFile("floats.csv", table("text label", lambda n, t, c: (t, float(c == "billing"))),
            labels=("0", "1")),
    OddFile("norway.csv", table("text label", names=("NO", "yes")), labels=("NO", "yes")),
    OddFile("cased.csv", table("text label", lambda n, t, c: (t, c if n % 7 else c.title())),
            labels=(), said=("data.ignore_case=true",)),
    OddFile("book.xlsx", frame(lambda n, t, c: {"Subject": t, "Category": c}, "to_excel",
            index=False), {"text": "Subject", "label": "Category"}),
    OddFile("saved", lambda path: _features().save_to_disk(str(path))),
    OddFile("named.parquet", lambda path: _features().to_parquet(str(path))),
    OddFile("folders", _folders, {}),
    OddFile("pairs.jsonl", records(lambda t, c: {"premise": t, "hypothesis": c + " is meant, it "
            "seems to me", "label": c}),
            {"text": "premise", "pair": "hypothesis", "label": "label"}),
    OddFile("onehot.csv", table("comment money login urgent", lambda n, t, c: (t,
            *map(int, (c == "billing", c == "access", "box" in t or "2021" in t)))),
            {"text": "comment"}, ("login", "money", "urgent"), "multi-label"),
    OddFile("toxic.csv", table("comment toxic insult threat", hot("01")),
            {"text": "comment", "label": "toxic,insult,threat"}, ("insult", "threat", "toxic"),
            "multi-label"),
    OddFile("spam.csv", table("comment id lang Spam Hate Y", hot(("no", "Yes"), "7", "en"), ";"),
            {"label": "Spam,Hate,Y"}, ("Hate", "Spam", "Y"), "multi-label"),
    OddFile("truth.csv", table("comment rude sentiment topic", hot(("False", "True"))),
            {"label": "rude,sentiment,topic"}, ("rude", "sentiment", "topic"), "multi-label"),
    OddFile("beside.csv", table("text category is_reply verified",
            lambda n, t, c: (t, c, n % 2, int(n % 3 == 0))), {"text": "text", "label": "category"}),
    OddFile("genre.tsv", table("plot genre", _genres("|"), "\t"),
            {"text": "plot", "label": "genre"}, (*CLASSES, "drama", "war"), "multi-label"),
    OddFile("genres.tsv", table("plot genre", _genres(", "), "\t"),
            {"text": "plot", "label": "genre"}, (*CLASSES, "drama", "war"), "multi-label"),
    OddFile("hotels.tsv", table("text category", sep="\t", names=("Hotels, Restaurants",
            "Banks, Insurance", "Transport")), {"text": "text", "label": "category"},
            ("Banks, Insurance", "Hotels, Restaurants", "Transport")),
    OddFile("spaced.csv", table("text label", lambda n, t, c: (
            t, c.replace("ll", " " * (2 + n % 4) + "l"))), labels=(),
            said=("are different labels; correct",)),
    OddFile("struct.parquet", frame(lambda n, t, c: {"doc": {"id": n, "content": {"text": t}},
            "kind": c}, "to_parquet"), {"text": "doc.content.text", "label": "kind"}),
    OddFile("sheets.xlsx", _sheets, {"text": "Text", "label": "Class"}),
    OddFile("joined.tsv", table("text tags", _urgent(";"), "\t"),
            {"text": "text", "label": "tags"}, (*CLASSES, "urgent"), "multi-label"),
    OddFile("commas.tsv", table("text tags", _urgent(","), "\t"),
            {"text": "text", "label": "tags"}, (*CLASSES, "urgent"), "multi-label"),
    OddFile("chats.jsonl", records(lambda t, c: {"messages": [{"role": "user", "content": t},
            {"role": "assistant", "content": c}]}), {}, (), "causal-lm"),
    OddFile("share.jsonl", records(lambda t, c: {"conversations": [{"from": "human", "value": t},
            {"from": "gpt", "value": c}]}), {}, (), "causal-lm"),
    OddFile("completed.jsonl", records(lambda t, c: {"prompt": t, "completion": c}), {}, (),
            "causal-lm"),
    OddFile("alpaca.jsonl", records(lambda t, c: {"instruction": "Which kind of ticket?",
            "input": t, "output": c}), {}, (), "causal-lm"),
    OddFile("better.jsonl", records(lambda t, c: {"prompt": t, "chosen": c + ", surely",
            "rejected": "no idea"}), {}, (), "preference"),
    OddFile("tokens.jsonl", records(lambda t, c: {"tokens": t.split(),
            "ner_tags": [tag for _, tag in _tags(t)]}), {"text": "tokens", "label": "ner_tags"},
            ("O", "B-TIME", "I-TIME"), "tagging"),
    OddFile("time.conll", table("", lambda n, t, c: map("\t".join, [*_tags(t), ""]), "\n"), {},
            ("O", "B-TIME", "I-TIME"), "tagging"),
    OddFile("squad.json", _squad, {}, (), "question-answering"),
    OddFile("onlyids.csv", table("id note", lambda n, t, c: (1000 + n, t)),
            refused=("--label", "note")),
    OddFile("oneclass.csv", table("text label", names=("all",) * 3), refused=("1 label",)),
    OddFile("empty.csv", Path.touch, refused=("empty",)),
    OddFile("letters.csv", lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0"),
            refused=("letters.csv",)),
    OddFile("packed.zip", _zipped, refused=("unzip",)),
    OddFile("prose.txt", table("", lambda n, t, c: (t,)), refused=("causal-lm(data=text)",)),
)  # fmt: skip
