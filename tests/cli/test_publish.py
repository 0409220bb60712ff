"""`adapterhub publish`."""

from __future__ import annotations

from dataclasses import replace

import pytest

import adapterhub as ah
from adapterhub.files.native import Saved, write_adapter
from tests.kit import registries


def test_the_same_bytes_are_the_same_version(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0)
    registries.write_sample(tmp_path / "other", 1)
    assert typed("publish run --name polite").startswith("published polite@v1 for acme/bert-small")
    assert "polite@v2" in typed("publish ./other --name polite")
    assert "polite@v1" in typed("publish run --name polite")
    assert "polite@v3" in typed("publish run --name polite --license mit")


@pytest.mark.parametrize(
    ("task", "typed_input"), [("classification", '"a text"'), ("image-to-text", '"a text"')]
)
def test_the_next_step_is_printed(adapterhub, tmp_path, task, typed_input):
    registries.write_sample(tmp_path / "made", task=task)
    folder = str(tmp_path / "made")
    code, out, err = adapterhub("publish", folder, "--registry", str(tmp_path / "a place"))
    assert (code, out.count("\n")) == (0, 1)
    option = f"--registry '{tmp_path / 'a place'}'"
    assert err == f"next: adapterhub predict polite@v1 {option} {typed_input}\n"
    code, out, err = adapterhub("publish", folder, "--json")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("score", "condition", "code", "says"),
    [
        (0.76, "accuracy >= best", 0, "may differ from those of polite@v1"),
        (0.75, "accuracy>=best", 0, ""),
        (0.75, "accuracy > best", 2, "accuracy 0.7500 is not > 0.7500 of polite@v1 (best)"),
        (0.71, "accuracy >= best", 2, "accuracy 0.7100 is not >= 0.7500 of polite@v1 (best)"),
        (0.71, "accuracy >= v1", 2, "0.7500 of polite@v1 (v1)"),
        (0.71, "accuracy >= final", 0, "no version of polite has the tag 'final' yet"),
        (0.71, "accuracy >= 0.7", 0, ""),
        (0.71, "accuracy < 0.7", 2, "accuracy 0.7100 is not < 0.7000"),
        (0.71, "f1 > best", 2, "accuracy"),
        (0.71, "accuracy = best", 2, "one of >= > <= <"),
    ],
)
def test_a_tag_is_guarded(adapterhub, tmp_path, score, condition, code, says):
    registries.write_sample(tmp_path / "old", 0, accuracy=0.75)
    registries.write_sample(tmp_path / "new", 1, accuracy=score)
    first = ("publish", str(tmp_path / "old"), "--tag", "best", "--if", "accuracy >= best")
    assert adapterhub(*first)[0] == 0, "nothing has the tag yet"
    found, _, err = adapterhub("publish", str(tmp_path / "new"), "--tag", "best", "--if", condition)
    assert found == code, err
    assert says in err
    versions = {entry.version: entry.tags for entry in ah.search(all_versions=True)}
    assert versions == ({"v1": ("best",)} if code else {"v1": (), "v2": ("best",)})


@pytest.mark.parametrize(("rows", "says"), [("0", None), ("1", "scored on other rows")])
def test_scores_of_the_same_rows_are_compared_without_a_note(tmp_path, rows, says):
    notes: list[str] = []
    for seed, digest in ((0, "0" * 64), (1, rows * 64)):
        folder = registries.write_sample(tmp_path / str(seed), seed, loss=0.5 - seed / 10)
        saved = Saved.at(folder)
        record = {"data": {"eval_sha256": digest}}
        manifest, tensors = saved.read()
        write_adapter(tmp_path / f"{seed}-of", replace(manifest, training=record), tensors)
        ah.publish(
            tmp_path / f"{seed}-of", tags=("best",), only_if="loss < best", note=notes.append
        )
    assert len(notes) == (1 if says is None else 2), notes
    assert says is None or says in notes[-1]
