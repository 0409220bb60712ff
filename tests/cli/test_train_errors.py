"""Bad input to `adapterhub train`: one error, exit code 2, no partial output."""

from __future__ import annotations

import errno
import os
import re
import shutil

import pytest

from tests.kit.session import refused, succeeded


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
    command = ("train", "--backbone", backbone, "--train", tmp_path / "files", "--output",
               tmp_path / "run", *words)  # fmt: skip
    code, _, err = adapterhub(*command)
    assert code == 2
    said = {"image": "is not an image", "audio": "is not audio"}
    assert (f"--task {task}-classification" if words else said[task]) in err


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
    "numbers": [("text", "score"), ("text", "price"), ("review", "label"), ("text", "stars")],
    "ids": [("text", "id"), ("text", "idx"), ("review", "row_id")],
    "dates": [("text", "date"), ("text", "created_at")],
    "hex": [("text", "uuid"), ("review", "guid")],
    "answers": [("question", "answer"), ("query", "answer"), ("Question", "Reply")],
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


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.jsonl", "rows.txt", "rows"])
@pytest.mark.parametrize("what", _STARTS)
def test_bytes_that_are_no_text_are_named(adapterhub, tmp_path, monkeypatch, what, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(_STARTS[what] + bytes(range(256)))
    code, _, err = adapterhub("train", name)
    assert code == 2
    assert what in err
    assert "iconv" not in err


@pytest.mark.parametrize("output", ["/proc/x", "/proc/x/y", "/sys/x", "/dev/null/x"])
def test_an_output_where_nothing_can_be_written(adapterhub, tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{text},{n % 2}\n" for n, text in enumerate(_TEXTS)).replace(", seen", " seen")
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    code, _, err = adapterhub("train", "rows.csv", "--output", output, "--steps", "1")
    assert code == 2
    assert "another --output" in err or "writable" in err
