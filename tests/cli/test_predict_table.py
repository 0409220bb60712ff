"""`adapterhub predict --input`: Parquet in, Parquet out, and nothing lost by a kill."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adapterhub.inference.open import AdapterSource
from tests.kit.data import sentences
from tests.kit.processes import fork_command
from tests.kit.runs import TABLE_ROWS, train_two, write_table
from tests.kit.session import succeeded


@pytest.fixture(scope="module")
def trained(backbone, tmp_path_factory):
    return train_two(backbone, tmp_path_factory.mktemp("trained"))


PARTS = 120  # that the killed process has to write


def named(trained: dict[str, AdapterSource]) -> list[str]:
    words = ["--route-column", "adapter"]
    for name, source in trained.items():
        words += ["--adapter", f"{name}={source.reference}"]
    return words


def test_one_adapter_into_one_file(adapterhub, trained, tmp_path):
    source, output = write_table(tmp_path / "rows"), tmp_path / "out.parquet"
    words = ("predict", trained["mood"].reference, "--input", source, "--output", output)
    out = succeeded(adapterhub(*words))
    assert out.strip() == f"{TABLE_ROWS} rows in 10 parts: {output}"
    rows = pq.read_table(output).to_pylist()
    texts = [text for text, _ in sentences(TABLE_ROWS)]
    shown = succeeded(adapterhub("predict", trained["mood"].reference, "--json", *texts))
    expected = [json.loads(line) for line in shown.splitlines()]
    assert [json.loads(row["prediction"])["label"] for row in rows] == [
        row["label"] for row in expected
    ]
    assert adapterhub(*words)[0] == 2, "it is there"


def test_a_column_names_the_adapter(adapterhub, trained, tmp_path):
    source, output = write_table(tmp_path / "rows"), tmp_path / "out"
    words = ("predict", *named(trained), "--input", source, "--output", output, "--into", "guess")
    succeeded(adapterhub(*words))
    rows = pq.read_table(sorted(output.glob("part-*.parquet"))[0]).to_pylist()
    assert list(rows[0]) == ["id", "text", "adapter", "guess"]
    sizes = {row["adapter"]: len(json.loads(row["guess"])["scores"]) for row in rows}
    assert sizes == {"mood": 2, "thing": 6}
    code, _, err = adapterhub(*words)
    assert code == 0
    assert "10 of 10 parts are there already" in err


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_and_started_again_it_gives_the_same_rows(adapterhub, trained, tmp_path):
    texts = [text for text, _ in sentences(PARTS)]
    table = pa.table({"text": texts, "adapter": ["mood", "thing"] * (PARTS // 2)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    words = ["predict", *named(trained), "--input", str(tmp_path / "rows.parquet"), "--output"]
    cut, whole = tmp_path / "cut.parquet", tmp_path / "whole.parquet"
    parts = Path(f"{cut}.parts")
    child = fork_command(*words, cut)
    while len(list(parts.glob("part-*.parquet"))) < 20:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it was killed"
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    done = {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*.parquet")}
    assert 20 <= len(done) < PARTS
    assert not cut.exists()
    # What was begun and not written is no part.
    (parts / f".part-{PARTS - 1:06}.parquet.abcd.new").write_bytes(b"PAR1")
    code, _, err = adapterhub(*words, cut)
    assert code == 0, err
    assert f"{len(done)} of {PARTS} parts are there already" in err
    assert adapterhub(*words, whole)[0] == 0
    first, second = (pq.read_table(path).to_pylist() for path in (cut, whole))
    assert [row["text"] for row in first] == texts
    assert first == second
