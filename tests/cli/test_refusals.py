"""What commands refuse, and what to type instead: one error, exit code 2, no output."""

import errno
import os
import re
import shlex
import shutil
import sys

import pytest

from tests.kit.data import sentences, write_tsv
from tests.kit.session import refused, succeeded

# `run` is the folder of a trained classifier, B a backbone; beside it are data and these files.
FILES = {
    "bad.yaml": "backbon: x\n",
    "r.yaml": "seed: 3\n",
    "r.json": '{"method": "lora", "seed": 3}',
    "no-rows.tsv": "text\tlabel\n",
    "empty.tsv": "\n",
    "one-class.tsv": "text\tlabel\ngood\tpos\ngreat\tpos\n",
    "no-label.tsv": "text\tlabel\ngood\tpos\nbad\t\n",
    "other.tsv": "text\tlabel\ngood\tpos\nbad\tmixed\n",
    "sentence.tsv": "sentence\tlabel\ngood\tpos\nbad\tneg\n",
    "data/study.yaml": "bench: {}\n",
}
SHORT = {
    "TRAIN": "train --backbone B --train train.tsv --eval dev.tsv --output new",
    "BENCH": "bench --backbone B --train train.tsv --output new",
    "SUGGEST": "suggest --backbone B --train train.tsv",
    "TABLE": "predict run --input x.parquet",
    "COMBINE": "combine run run --backbone B --output new",
    "CONVERT": "convert run --backbone B --output new",
}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trian", "'train'"),
        ("train", ("data.train is missing", "output is missing", "adapterhub train FILE")),
        ("TRAIN train.epohcs=2", ("train.epohcs", "epochs")),
        ("TRAIN trian.epochs=2", ("trian", "train")),
        ("TRAIN train.epochs=two", ("train.epochs", "int")),
        ("TRAIN dtype=fp8", ("fp8", "bf16")),
        ("TRAIN --method lroa", ("'lroa'", "'lora'", "adapterhub methods")),
        ("TRAIN --method 'lora(rnak=4)'", ("lora.rnak", "rank")),
        ("TRAIN --method 'lora(rank=)'", ("invalid method spec", "lora(rank=16)")),
        ("TRAIN --method '{lora: {sites: [attn.qq]}}'", ("attn.qq", "attn.q")),
        ("TRAIN --method '{lora: {sites: [cross.q]}}'", ("cross.q", "inspect")),
        ("TRAIN --method 'lora(layers=\"top four\")'", ("top four", "top 4")),
        ("TRAIN --method 'freeze(top=9)'", ("top 9", "between 1 and 2")),
        ("TRAIN --method lora --quantize dequantize", "is not quantized"),
        ("TRAIN --quantize nf3", "did you mean 'nf4'"),
        ("TRAIN --task clasification", ("'clasification'", "'classification'")),
        ("TRAIN --task regression", "not a number"),
        ("TRAIN --text txet", ("'txet'", "'text'")),
        ("TRAIN --train nowhere.tsv", "nowhere.tsv"),
        ("TRAIN --train no-rows.tsv", "no rows"),
        ("TRAIN --train empty.tsv", "empty"),
        ("TRAIN --train one-class.tsv", "two or more classes"),
        ("TRAIN --train no-label.tsv", "label is empty"),
        ("TRAIN --eval other.tsv", ("'mixed'", "training data lacks")),
        ("TRAIN --retain dev.tsv", "the head that is trained"),
        ("train bad.yaml", ("backbon", "'backbone'")),
        ("train r.yaml r.json", "more than one recipe"),
        ("train train.tvs --backbone B", "did you mean 'train.tsv'"),
        ("TRAIN --backbone ./nowhere", ("./nowhere", "a folder, or a Hub id")),
        ("TRAIN --learning-rate 1", "no such flag: --learning-rate; type --lr VALUE"),
        ("TRAIN --LR 1", "--lr"),
        ("TRAIN --schedule cosine", "type train.schedule=VALUE"),
        ("TRAIN --lora-r 8", "try method='lora(rank=8)'"),
        ("TRAIN --bach-size 8", ("Did you mean", "'--batch-size'")),
        ("TRAIN --epochs many", "'many' is not a valid integer"),
        ("TRAIN --test 1.5", ("data.test is 1.5", "between 0 and 1", "--test 0.1")),
        ("TRAIN --test 0.1 data.stream=true --steps 2 --task classification",
         ("data.test=0.1", "data.stream=true", "--test FILE")),
        ("TRAIN --sweep method=lora,lara --steps 2", ("lara", "lora")),
        ("TRAIN --sweep seed=0,1 --show 2", "--show"),
        ("predict", "ADAPTER"),
        ("predict data a", "no adapter"),
        ("predict run missing.csv", "no such file: missing.csv"),
        ("predict run dev.tsv train.tsv", "2 files"),
        ("predict run a --output new", ("--output new is of", ".parquet")),
        ("predict run a --output out.csv --json", "--json with --output"),
        ("predict run a --stream", "--stream: classification does not generate"),
        ("predict run a --beams 2 --temperature 1", "--temperature, --beams: "),
        ("predict run a --top-p 2", "top_p is 2"),
        ("predict run a --input x.parquet", ("--input with", "--data")),
        ("predict run a --engine ray", "--engine without --input"),
        ("predict --input x.parquet --all", "--input with --all"),
        ("predict --input x.parquet --output new", ("no adapter is named", "--route-column")),
        ("predict --input x.parquet --output new --route-column c", "--adapter NAME="),
        ("predict --input x.parquet --output new --route-column c --adapter a",
         ("- a", "--adapter NAME=")),
        ("TABLE", "--output"),
        ("TABLE --output new", "no files at"),
        ("TABLE --output new --workers 2", ("--workers without Ray", "--engine ray")),
        ("TABLE --output new --adapter a=b", "--adapter without --route-column"),
        ("eval run --data sentence.tsv", ("'text'", "'sentence'")),
        ("eval run --data dev.tsv --against-backbone", "no trained head for classification"),
        ("eval --data dev.tsv --backbone B", "nothing to evaluate"),
        ("eval --data dev.tsv --backbone B --task classification", "needs a trained head"),
        ("export", "adapterhub export ADAPTER --output DIR"),
        ("export --check tgi --method lora --backbone B", "one of peft, vllm"),
        ("import data --output new", "no adapter in a known format"),
        ("merge run --output new --requantize", "not quantized"),
        ("compare run", "nothing to compare"),
        ("report no", "no run in"),
        ("report run data", "is a study"),
        ("COMBINE --weights 0.5,x", "0.5,x"),
        ("COMBINE --weights 1", "1 weights for 2 adapters"),
        ("COMBINE --density 2", "density 2.0"),
        ("COMBINE --head other", "--head other is not combined"),
        ("CONVERT --energy 2", "--energy 2.0"),
        ("CONVERT --rank 0", "--rank"),
        ("resize run --backbone B --output new", "--rank R, or --energy 0.99"),
        ("resize run --backbone B --rank 2", "--output DIR"),
        ("report run --output no/x", "error: "),
        ("inspect acme/nothing-here", "no backbone 'acme/nothing-here'"),
        ("bench --backbone x", ("--train is missing", "--output")),
        ("BENCH --methods lara", ("lara", "lora")),
        ("BENCH --rows many", ("--rows", "100,500")),
        ("BENCH --lr 1e-3", "--lr"),
        ("BENCH train.learning_rate=1", "a study chooses"),
        ("BENCH --workers 2", ("--workers", "--engine ray")),
        ("BENCH --shard 3/2", "K/N"),
        ("BENCH --shard 1/2 --budget 1h", "--steps N"),
        ("suggest", "adapterhub suggest FILE"),
        ("suggest --train x.tsv", "no such file: 'x.tsv'"),
        ("SUGGEST --task tagging", "tagging"),
        ("SUGGEST nobody", "nobody"),
        ("options lorra", "did you mean 'lora'"),
        ("options train.epohcs", "'train.epochs'"),
        ("options target_modules", "sites=[attn.q, attn.v]"),
        ("options warmup_ratio", "train.warmup=0.1"),
        ("options qlora", "--method lora --quantize nf4"),
        ("recipe lora prefix", ("method: lora, prefix", "composes")),
        ("recipe seq2seq tagging", "task: seq2seq, tagging"),
        ("recipe lorra", "method or task 'lorra'; did you mean 'lora'"),
        ("recipe train.epohcs=3", ("train.epohcs", "epochs")),
        ("serve run --host 0.0.0.0", "no tokens"),
        ("serve run --device tpu", "unknown device 'tpu'"),
        ("serve run --deadline soon", "'soon' is not a time"),
        ("serve run --config missing.yaml", "no such file"),
        ("serve a/b", "could be a folder"),
        ("token create shop --expires soon --file new", "'soon' is not a time"),
        ("token create 'two words' --file new", "a name"),
        ("token create a --role root --file new", ()),
        ("pull some/polite", "hf:some/polite"),
        ("pull polite", "adapterhub list"),
        ("delete polite", "does not name one version"),
        ("lock one two --name ours", "--name takes a single REFERENCE"),
        ("publish nothing", "no such folder: 'nothing'"),
        ("push nothing polite", "hf:owner/name"),
        ("sync", "adapterhub lock"),
        ("tag polite --remove", "--remove takes a TAG"),
        ("yank polite --reason x", "polite@v1"),
        ("key show dev.tsv", "dev.tsv"),
        ("key show missing", "missing"),
        ("key new run/recipe.yaml", "never replaced"),
    ],
)  # fmt: skip
def test_a_command_refuses(
    line, expected, trained, data, backbone, adapterhub, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    # A backbone of the Hub is asked for again and again where there is no network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "data").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    for name, words in SHORT.items():
        line = line.replace(name, words)
    words = (backbone if word == "B" else word for word in shlex.split(line))
    refused(adapterhub(*words), *((expected,) if isinstance(expected, str) else expected))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["import", "verify", "publish", "show", "diff"])
def test_a_missing_folder_is_told_by_its_name(command, adapterhub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {"import": ("--output", "x"), "diff": ("./nothing",)}
    result = adapterhub(command, "./nothing", *words.get(command, ()))
    refused(result, "nothing")
    assert "nothing is missing" not in result[2]


@pytest.mark.parametrize(
    ("line", "library", "extra"),
    [("bench --backbone x --train y --output z --engine ray", "ray", "ray"),
     ("serve polite", "uvicorn", "serve")],
)  # fmt: skip
def test_a_library_that_is_missing_is_told_with_its_extra(
    line, library, extra, adapterhub, monkeypatch
):
    monkeypatch.setitem(sys.modules, library, None)
    refused(adapterhub(*line.split()), f'pip install "adapterhub[{extra}]"')


# Bad input to `adapterhub train`: one error, exit code 2, no partial output.


def test_an_output_folder_that_exists(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    refused(train(), "exists", "--resume")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("")
    refused(train(output=tmp_path / "file" / "run"), "cannot be written")
    refused(train(output=tmp_path / "file"), "is a file")


def test_a_full_disk_while_saving(train, tmp_path, monkeypatch):
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused(train("train.epochs=1"), "No space left")
    assert not (tmp_path / "run").exists()


def test_a_resume_of_another_run(train, trained):
    other = train("--resume", "train.batch_size=7")
    refused(other, "train.gradient_accumulation: 16 in the checkpoint, 7 now")
    refused(train("--resume", "train.epochs=2", "--method", "pfeiffer"), "method")


@pytest.mark.parametrize("words", [(), ("--label", "label")])
@pytest.mark.parametrize(("ending", "task"), [("png", "image"), ("JPG", "image"), ("wav", "audio")])
def test_a_folder_of_files_has_a_task(words, ending, task, adapterhub, backbone, tmp_path):
    for name in ("cat/1", "cat/2", "dog/1", "dog/2"):
        path = tmp_path / "files" / f"{name}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    where = ("--train", tmp_path / "files", "--output", tmp_path / "run")
    said = {"image": "is not an image", "audio": "is not audio"}[task]
    expected = f"--task {task}-classification" if words else said
    refused(adapterhub("train", "--backbone", backbone, *where, *words), expected)


def test_a_backbone_that_moved_is_told_on_resume(
    adapterhub, train, backbone, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(backbone, tmp_path / "models" / "bert")
    words = ("--backbone", "models/bert", "train.max_steps=2", "train.schedule=constant")
    succeeded(train(*words))
    (tmp_path / "models").rename(tmp_path / "moved")
    resume = ("train", "--resume", "--output", tmp_path / "run", "train.max_steps=4")
    refused(adapterhub(*resume), "the folder does not exist", "--backbone FOLDER")
    succeeded(adapterhub(*resume, "--backbone", "moved/bert"))


_TEXTS = [f"{'good' if n % 2 else 'bad'} film number {n}, seen twice" for n in range(40)]
_COLUMNS = {
    "numbers": ([round(n * 0.37 % 5, 2) for n in range(40)], "--task regression --label KEY"),
    "ids": ([*range(40)], "--label COLUMN"),
    "dates": ([f"2024-01-{1 + n % 28:02d}" for n in range(40)], "--label COLUMN"),
    "hex": ([f"{n * 7919:08x}-{n:04x}" for n in range(40)], "--label COLUMN"),
    "answers": ([f"it is {text}" for text in _TEXTS], "--task causal-lm --text KEY --label KEY"),
}
_NAMED = {
    "numbers": [("text", "price"), ("review", "label"), ("text", "stars")],
    "ids": [("text", "id"), ("text", "idx"), ("review", "row_id")],
    "dates": [("text", "date"), ("text", "created_at")],
    "hex": [("text", "uuid"), ("review", "guid")],
    "answers": [("question", "answer"), ("Question", "Reply")],
}


@pytest.mark.parametrize(
    ("kind", "columns"), [(kind, each) for kind in _NAMED for each in _NAMED[kind]], ids=str
)
def test_a_table_without_classes_names_the_task_that_fits(
    adapterhub, tmp_path, monkeypatch, kind, columns
):
    monkeypatch.chdir(tmp_path)
    values, words = _COLUMNS[kind]
    rows = [",".join(columns), *(f'"{t}",{v}' if kind != "answers" else f'"{t}","{v}"'
                                 for t, v in zip(_TEXTS, values, strict=True))]  # fmt: skip
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    code, _, err = adapterhub("train", "rows.csv")
    assert code == 2
    hint = err[err.index("try: ") :]
    assert re.search(re.escape(words).replace("KEY", r"\S+"), hint), hint
    assert not re.search(r"--label (id|idx|row_id|date|created_at|uuid|guid)\b", hint)


_STARTS = {
    "a PNG": b"\x89PNG\r\n\x1a\n\0\0",
    "a JPEG": b"\xff\xd8\xff\xe0\0",
    "a GIF": b"GIF89a\1\0",
    "an audio file": b"RIFF\0\0\0\0WAVEfmt ",
    "an image": b"RIFF\0\0\0\0WEBPVP8 ",
    "a zip": b"PK\x03\x04\0",
    "a PDF": b"%PDF-1.7\n",
    "a pickle": b"\x80\x04\x95\0",
    "tensors": b'\x10\0\0\0\0\0\0\0{"a": {}}',
    "a database": b"SQLite format 3\0",
}


_ENDINGS = (".csv", ".jsonl", "")


@pytest.mark.parametrize(
    ("what", "name"), [(what, f"rows{_ENDINGS[n % 3]}") for n, what in enumerate(_STARTS)]
)
def test_bytes_that_are_no_text_are_named(adapterhub, tmp_path, monkeypatch, what, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(_STARTS[what] + bytes(range(256)))
    result = adapterhub("train", name)
    refused(result, what)
    assert "iconv" not in result[2]


@pytest.mark.parametrize("output", ["/proc/x/y", "/sys/x", "/dev/null/x"])
def test_an_output_where_nothing_can_be_written(adapterhub, tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    write_tsv(tmp_path / "rows.tsv", sentences(20))
    code, _, err = adapterhub("train", "rows.tsv", "--output", output, "--steps", "1")
    assert code == 2
    assert "another --output" in err or "writable" in err
