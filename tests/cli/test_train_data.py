"""What is trained on: files of any form, bare words, and what is predicted with it."""

import json

import pytest

from adapterhub.recipe.recipe import read
from tests.kit.data import json_lines, sentences, write_json_lines, write_tsv
from tests.kit.selection import long_table
from tests.kit.session import refused, succeeded

FAST = ("train.epochs=1", "train.tensorboard=false")


@pytest.fixture
def learn(adapterhub, backbone, tmp_path):
    """Train on a file and return what was printed; the run is in tmp_path/run."""

    def learn(file, *words):
        where = ("--train", file, "--output", tmp_path / "run", *FAST)
        code, out, err = adapterhub("train", "--backbone", backbone, *where, *words)
        assert code == 0, err
        return out + err

    return learn


def reviews(path, encoding="cp1252"):
    """Write a file as a spreadsheet with German settings does."""
    rows = [f"{t}, caf\u00e9;{i % 7};{label}\r\n" for i, (t, label) in enumerate(sentences(64))]
    path.write_bytes(("review;nr;sentiment\r\n" + "".join(rows)).encode(encoding))
    return path


def record(folder):
    """The manifest of an adapter."""
    return json.loads((folder / "run" / "adapter" / "adapter.json").read_text())


def test_a_spreadsheet_is_trained_on_without_options_and_other_files_are_predicted(
    learn, adapterhub, tmp_path
):
    """Columns that do not fit are shown."""
    run, printed = tmp_path / "run", learn(reviews(tmp_path / "reviews.csv"))
    for line in (
        "reviews.csv: semicolon-separated, cp1252, 64 rows; columns: review, nr, sentiment",
        "not UTF-8: read as cp1252, which gives 'caf\u00e9'; data.encoding=NAME if that is wrong",
        "guessed: --text review --label sentiment",
        "no evaluation data: 12 of 64 rows are held out, those of 8 of 42 different texts, "
        "in the same shares of each label",
    ):
        assert line in printed.splitlines()
        assert len(line) <= 115
    data = record(tmp_path)["training"]["recipe"]["data"]
    assert (data["text"], data["label"]) == ("review", "sentiment")
    # Earlier versions read these with defaults of their own.
    assert not {"header", "encoding", "delimiter", "skip_empty", "eval_rows"} & data.keys()
    assert str(tmp_path) not in json.dumps(record(tmp_path))
    texts = [text for text, _ in sentences(8)]
    others = {
        "utf8.csv": "review,other\n" + "".join(f"{text},x\n" for text in texts),
        "plain.csv": "".join(f"{text}\n" for text in texts),
        "lines.tsv": "sentiment\treview\n" + "".join(f"pos\t{text}\n" for text in texts),
    }
    for name, content in others.items():
        (tmp_path / name).write_text(content)
        code, out, err = adapterhub("predict", run, "--data", tmp_path / name, "--json")
        assert code == 0, err
        assert [row["text"] for row in json_lines(out)] == texts
        assert err.startswith(f"{name}: ")
    code, out, err = adapterhub("eval", run, "--data", tmp_path / "lines.tsv", "--json")
    assert json.loads(out)["examples"] == 8, err
    code, out, err = adapterhub("eval", run, "--data", reviews(tmp_path / "b.csv", "utf-16"))
    assert code == 0, err
    assert "UTF-16" in err
    (tmp_path / "a.csv").write_text("comment,sentiment\ngood,pos\n")
    words = ("predict", run, "--data", tmp_path / "a.csv")
    refused(adapterhub(*words), "'review'", "'comment', 'sentiment'", "--text COLUMN")
    succeeded(adapterhub(*words, "--text", "comment"))
    (tmp_path / "b.csv").write_text("review\ngood\n")
    refused(adapterhub("eval", run, "--data", tmp_path / "b.csv"), "'sentiment'", "'review'")
    # The form of new data can be given.
    (tmp_path / "c.csv").write_bytes("the film|abc\nsch\u00f6n|def\n".encode("cp850"))
    file = ("--data", tmp_path / "c.csv")
    words = ("--text", "0", "--encoding", "cp850", "--delimiter", "|", "--no-header", "--json")
    out = succeeded(adapterhub("predict", run, *file, *words))
    assert [row["text"] for row in json_lines(out)] == ["the film", "sch\u00f6n"]
    refused(adapterhub("eval", run, *file, "--label", "1", *words), "'abc': 1 time")
    refused(adapterhub("predict", run, *file, "--delimiter", "||"), "one character")


def test_a_template_over_columns_travels_with_the_adapter(learn, adapterhub, tmp_path):
    """And without evaluation it has the last tensors."""
    rows = [
        {"title": f"title {i}", "body": text if i % 4 else "", "label": label}
        for i, (text, label) in enumerate(sentences(64))
    ]
    file = write_json_lines(tmp_path / "posts.jsonl", rows)
    printed = learn(file, "--text", "{title}. {body}", "--eval", "none")
    assert "16 of 64 rows have no 'body': it is left out there" in printed
    assert "no evaluation: the adapter has the tensors of the last step" in printed
    assert "accuracy" not in printed
    assert record(tmp_path)["metrics"] == {}
    out = succeeded(adapterhub("predict", tmp_path / "run", "--data", file, "--json"))
    texts = [row["text"] for row in json_lines(out)]
    assert texts[:2] == ["title 0.", f"title 1. {rows[1]['body']}"]
    out = succeeded(adapterhub("predict", tmp_path / "run", "a title. a text", "--json"))
    assert json_lines(out)[0]["text"] == "a title. a text"


def test_columns_in_doubt_are_shown_with_what_to_type(adapterhub, backbone, tmp_path):
    file = tmp_path / "cola.tsv"
    file.write_text("".join(f"gj0{i % 5}\t{i % 2}\t\tThis is sentence {i}.\n" for i in range(40)))
    words = ("--backbone", backbone, "--train", file, "--output", tmp_path / "run")
    result = adapterhub("train", *words, *FAST)
    refused(result, "- 3: This is sentence 0.", "--text 3 --label 1")
    succeeded(adapterhub("train", *words, *FAST, "--text", "3", "--label", "1"))
    (tmp_path / "new.tsv").write_text("One text of five words\nAnother text of five words\n")
    out = succeeded(adapterhub("predict", tmp_path / "run", "--data", tmp_path / "new.tsv"))
    assert len(out.splitlines()) == 2
    file = reviews(tmp_path / "reviews.csv")  # the plan of a run prints the notes once
    words = ("--backbone", backbone, "--train", file, "--output", tmp_path / "planned")
    for extra in ((), ("--eval", "none")):
        code, out, err = adapterhub("train", *words, *extra, "--dry-run")
        assert code == 0, err
        assert "guessed: --text review --label sentiment" in err
        assert (out + err).count("guessed:") == 1


# What is given bare: a file of data, a recipe by its content, both, or something mistyped


RECIPE = {"method": "lora(rank=2)", "seed": 3, "train": {"max_steps": 2, "batch_size": 8}}
STEPS = ("--steps", "2", "--batch-size", "8")


@pytest.fixture
def here(tmp_path, monkeypatch, backbone, data, adapterhub):
    """A folder with data and recipes; the function trains there with the tiny backbone."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.csv", "mine.txt"):
        (tmp_path / name).write_text(data[0].read_text())
    for name in ("r.yaml", "r.txt", "r.json"):
        (tmp_path / name).write_text(json.dumps(RECIPE))
    rows = [dict(zip(("text", "label"), line.split("\t"), strict=True))
            for line in data[0].read_text().splitlines()[1:]]  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps({"data": rows}))
    (tmp_path / "train.json").write_text(json.dumps({"train": rows}))
    columns = {name: [row[name] for row in rows] for name in ("text", "label")}
    (tmp_path / "columns.json").write_text(json.dumps(columns))
    (tmp_path / "whole.yaml").write_text(json.dumps(RECIPE | {"data": "mine.csv"}))
    return lambda *words: adapterhub("train", *words, "--backbone", backbone, "--quiet")


@long_table(
    ("words", "output"),
    [
        (("mine.txt", *STEPS), "runs/mine"),
        (("--data", "mine.csv", *STEPS), "runs/mine"),
        (("data=mine.csv", *STEPS), "runs/mine"),
        (("mine.csv", "--data=mine.csv", *STEPS), "runs/mine"),
        (("r.yaml", "mine.csv"), "runs/mine"),
        (("mine.csv", "r.txt"), "runs/mine"),
        (("r.json", "mine.csv", "--output", "out"), "out"),
        (("r.json", "mine.csv", "output=out"), "out"),
        (("whole.yaml",), "runs/mine"),
        (("data.json", *STEPS), "runs/data"),
        (("train.json", *STEPS), "runs/train"),
        (("columns.json", *STEPS), "runs/columns"),
    ],
    parts=3,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_data_and_recipes_are_told_apart_by_content(words, output, here, tmp_path):
    succeeded(here(*words))
    recipe = read(tmp_path / output / "recipe.yaml")
    assert (recipe.train.max_steps, recipe.task) == (2, "classification")
    assert recipe.seed == (3 if any(word.startswith(("r.", "whole")) for word in words) else 0)


def test_each_run_has_a_folder_of_its_own_and_the_newest_is_resumed(here, tmp_path):
    for _ in range(2):
        assert here("mine.csv", *STEPS)[0] == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine", "mine-2"}
    assert here("mine.csv", "--resume", "--steps", "2", "--batch-size", "8")[0] == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine", "mine-2"}


@pytest.mark.parametrize("flag", ["--from", "--on"])
def test_the_backbone_of_a_trained_adapter_is_taken(
    flag, here, trained, adapterhub, tmp_path, backbone
):
    code, _, err = adapterhub("train", "mine.csv", flag, "run", *STEPS, "--quiet")
    assert code == 0, err
    assert f"backbone: {backbone} (run)" in err
    assert read(tmp_path / "runs/mine/recipe.yaml").backbone == str(backbone)


def test_sources_are_listed_with_their_share_and_scores(adapterhub, backbone, tmp_path):
    rows = sentences(60)
    parts = {"news.tsv": rows[:40], "notes.tsv": rows[40:]}
    files = [write_tsv(tmp_path / name, part) for name, part in parts.items()]
    words = ("train", *files, "--backbone", backbone, "--output", tmp_path / "run", "mixing=equal",
             "--test", "0.2", *FAST, "train.report=false")  # fmt: skip
    out = succeeded(adapterhub(*words, "--dry-run"))
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    assert lines["source"] == ["source", "rows", "evaluated", "share"]
    assert (lines["news"][-1], lines["notes"][-1]) == ("50.0%", "50.0%")
    out = succeeded(adapterhub(*words))
    tables = [each.splitlines() for each in out.split("  source ")[1:]]
    for (head, _, *lines), first, score in zip(
        tables, ("rows", "tested"), ("accuracy", "test/accuracy"), strict=True
    ):
        assert head.split()[0] == first
        for line, source in zip(lines, ("news", "notes"), strict=False):
            name, *cells = line.split()
            shown = dict(zip(head.split(), cells, strict=True))
            assert (name, shown.get("share", "50.0%")) == (source, "50.0%")
            assert 0 <= float(shown[score]) <= 1
            assert len(line) <= 80
