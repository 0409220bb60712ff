"""The records of a study with a script of its own: added, packed, and read again."""

from __future__ import annotations

from pathlib import Path

from run_records import RunRecords, study_parser


def test_records_are_read_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    records = RunRecords(tmp_path / "new")
    assert records.read() == []
    records.add({"seed": 1})
    first = records.pack().read_bytes()
    records.add({"seed": 2})
    assert records.read() == [{"seed": 1}, {"seed": 2}]
    records.pack()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["records.jsonl.gz"]
    assert records.read() == [{"seed": 1}, {"seed": 2}]
    other = RunRecords(tmp_path / "other")
    other.add({"seed": 1})
    assert other.pack().read_bytes() == first


def test_its_commands_name_one_folder() -> None:
    parser, training = study_parser("what it does")
    training.add_argument("--only")
    options = parser.parse_args(["train", "glue", "--output", "out", "--only", "lora"])
    assert (options.folder, options.seeds, options.only) == (Path("out"), 3, "lora")
    assert parser.parse_args(["table", "out"]).folder == Path("out")
