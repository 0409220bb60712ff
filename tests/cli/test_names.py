"""What is given as a name: long texts, odd characters, and paths with a `=`, in every way in."""

import itertools
import shutil
from pathlib import Path

from adapterhub.cli.train import _one_value_each, nested_flags, recipe_words
from adapterhub.config.user_folders import is_file, is_folder, is_there
from tests.kit.data import json_lines, sentences, write_tsv
from tests.kit.selection import long_table
from tests.kit.session import refused, succeeded

STRANGE = {
    "long": "x" * 300,
    "long in a folder": "./" + "x" * 300,
    "long file": "x" * 300 + ".csv",
    "long path": "a/" * 3000,
    "nul": "nul\0byte",
    "nul in a folder": "./nul\0byte.csv",
    "home of nobody": "~nobody-here/x",
    "assignment": "./a=b/c",
    "address": "https://host.example/" + "y" * 300,
    "pattern": "*" * 300,
    "open bracket": "[x",
    "empty": "",
    "space": " ",
    "surrogate": "./\ud800x",
    "lines": "x\ny.csv",
}


def test_what_no_file_can_be_called_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for test in (is_file, is_folder, is_there):
        assert [name for name, text in STRANGE.items() if test(text)] == []


COMMANDS = (
    "predict RUN --data @",
    "predict RUN --input @ --output new.parquet",
    "predict @ text",
    "predict RUN text --output @",
    "predict RUN text --backbone @",
    "predict RUN text --registry @",
    "eval RUN --data @",
    "train @ --backbone B --output new",
    "train DATA --backbone @ --output new",
    "train DATA --backbone B --output new --from @",
    "train DATA --backbone B --output new --on @",
    "train DATA --backbone B --output new --eval @",
    "train DATA --backbone B --output new --test @",
    "train DATA --backbone B --output new --family @",
    "serve @ --check",
    "serve x=@ --check",
    "serve --config @",
    "publish @",
    "push @ hf:a/b",
    "export @ --output new",
    "merge @ --output new",
    "show @",
    "report @",
    "compare @ RUN",
    "diff @ RUN",
    "import @ --output new",
    "inspect @",
    "combine @ RUN --output new",
    "verify @",
    "pull @",
    "suggest @",
    "recipe @",
    "sign @",
    "list --registry @",
)
_TYPED = [name for name in STRANGE.values() if "\0" not in name and "\ud800" not in name]


@long_table(("line", "name"), itertools.product(COMMANDS, _TYPED), 16, nightly=3)
def test_commands_refuse_strange_names(
    line, name, adapterhub, trained, data, backbone, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    values = {"RUN": trained, "DATA": data[0], "B": backbone}
    words = (w.replace("@", name) if "@" in w else values.get(w, w) for w in line.split())
    code, _, err = adapterhub(*words)
    assert code in (0, 2)
    assert "Traceback" not in err


def test_a_long_text_is_a_text(trained, adapterhub):
    for length in (254, 256, 5000):
        text = ("a good film / " * 400)[:length].strip()
        for texts in ([text], ["good", text]):
            out = succeeded(adapterhub("predict", trained, *texts, "--json"))
            assert [row["text"] for row in json_lines(out)] == texts


def test_a_folder_of_a_sweep_is_an_adapter(trained, adapterhub, tmp_path, monkeypatch):
    """Typed as it is, in a path, and after a name."""
    swept = "learning_rate=1e-3"
    shutil.copytree(trained, tmp_path / "runs" / swept)
    monkeypatch.chdir(tmp_path / "runs")
    succeeded(adapterhub("predict", swept, "good"))
    succeeded(adapterhub("show", swept))
    for name in (swept, f"./{swept}", f"../runs/{swept}", Path(swept).resolve(), f"x={swept}"):
        succeeded(adapterhub("serve", name, "--check"))
    refused(adapterhub("serve", "./learning_rate=9", "--check"), "no such folder")


def test_several_data_files_are_sources_in_their_order():
    """Behind `--train` as well, up to the next flag, override or recipe."""
    lines = {
        "--train a.csv b.tsv#5 r.yaml --on x y --eval c.csv d.csv": (
            "--train a.csv --train b.tsv#5 r.yaml --on x --on y --eval c.csv d.csv"
        ),
        "--train a.csv b.csv --seed 1 --data=c.csv --train d.csv e.csv": (
            "--seed 1 --train d.csv --train e.csv"
        ),
    }
    for typed, repeated in lines.items():
        assert " ".join(_one_value_each(typed.split())) == repeated
    flags = {"train": ("c/*.csv", "a.csv")}
    recipe, overrides = recipe_words(("a.csv", "b.jsonl#5", "r.yaml", "hf:x#3", "seed=1"), flags)
    assert (recipe, overrides) == ("r.yaml", ["seed=1"])
    assert flags["train"] == ["a.csv", "b.jsonl#5", "hf:x#3", "c/*.csv"]
    assert nested_flags(flags)["data"]["train"] == flags["train"]


def test_words_with_an_equals_sign(tmp_path, monkeypatch):
    """A word is an option, unless it is a file, or ends as one of data and has no known key."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "year=2024").mkdir()
    rows = sentences(4)
    write_tsv(tmp_path / "year=2024" / "part.tsv", rows)
    write_tsv(tmp_path / "lr=1.tsv", rows)
    for word, train in {
        "year=2024/part.tsv": "year=2024/part.tsv",
        "year=2024": "year=2024",
        "lr=1.tsv": "lr=1.tsv",
        "year=2025/part.tsv": "year=2025/part.tsv",
        "data/year=2025/part.csv": "data/year=2025/part.csv",
        "data/year=2025": "data/year=2025",
        "train=year=2024/part.tsv": None,
        "data.train=part.csv": None,
        "tasks.a.data.train=part.csv": None,
        "train.learning_rate=1e-3": None,
        "method=lora(rank=4)": None,
    }.items():
        flags = {"train": None}
        recipe, overrides = recipe_words((word,), flags)
        assert (recipe, flags["train"]) == (None, train), word
        assert overrides == ([] if train else [word])
