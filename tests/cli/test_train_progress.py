"""`adapterhub train`: what it says from its first line to what to type next, and longer runs."""

import re

import pytest

from tests.kit.session import refused

# With a line per step, the last one of the short run is one of the long run, too.
CONSTANT = ("train.schedule=constant", "train.warmup=2", "train.log_every=1")


def test_stages_schedule_and_what_to_type_next_are_said(trained_once):
    run, (out, err) = trained_once[0] / "run", (trained_once[1].stdout, trained_once[1].stderr)
    told = [line for line in err.splitlines() if line.endswith(" ...")]
    stages = ["reading", "loading", "loading", "encoding", "fitting"]  # a bag of words, to compare
    assert [line.split(" ")[0] for line in told] == stages
    assert re.search(r"^\d+ steps; learning rate up to 1\.0e-03 \(head 5\.0e-03\)", err, re.M)
    assert re.search(r"ex/s \S+ tok/s", err)
    assert re.search(r"^best +epoch \d of 2 \(accuracy \d\.\d{4}\)$", out, re.M)
    assert f'next         adapterhub predict {run} "a text"' in out
    assert f"adapterhub publish {run}" in out


def test_a_run_is_lengthened_from_its_folder_alone(train, adapterhub, tmp_path):
    """The whole adapter equals that of a run that was long from the start, to the bit."""
    assert train(*CONSTANT, "train.epochs=2", output=tmp_path / "whole")[0] == 0
    assert train(*CONSTANT, "train.epochs=1")[0] == 0
    run = tmp_path / "run"
    code, _, err = adapterhub("train", "--resume", "--output", run, "train.epochs=2")
    assert code == 0, err
    assert "resumed after step" in err
    names = ["metrics.jsonl"]
    names += [f"{at}adapter/adapter.safetensors" for at in ("", "checkpoints/last/")]
    assert all((run / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)
    recipes = [(f / "recipe.yaml").read_text() for f in (run, tmp_path / "whole")]
    assert recipes[0].replace(str(run), "") == recipes[1].replace(str(tmp_path / "whole"), "")


def test_a_schedule_that_has_decayed_is_not_lengthened(trained, adapterhub):
    before = (trained / "recipe.yaml").read_bytes()
    refused(
        adapterhub("train", "--resume", "--output", trained, "train.epochs=4"),
        "its linear schedule lowered the learning rate towards step",
        "adapterhub merge",
    )
    assert (trained / "recipe.yaml").read_bytes() == before


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_bars_need_a_terminal(trained, adapterhub, data, command):
    code, out, err = adapterhub(command, trained, "--data", data[1])
    few = "22 evaluation rows: the scores are uncertain; evaluate on more\n" * (command == "eval")
    assert (code, err) == (0, f"dev.tsv: tab-separated, 22 rows; columns: text, label\n{few}")
    assert out
