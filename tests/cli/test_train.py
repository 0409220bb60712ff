"""`adapterhub train`: recipes, overrides, dry runs, sweeps, resuming, and what is said."""

import itertools
import json
import os
import re
import signal
from pathlib import Path

import pytest

from adapterhub.cli.train import FLAGS, nested_flags
from adapterhub.config.yaml import parse_mapping
from adapterhub.files.native import Saved
from adapterhub.loop.engine import Engine
from adapterhub.recipe.recipe import NAMES, read, recipe_schema
from tests.kit.compare import problems
from tests.kit.data import json_lines, write_tsv
from tests.kit.processes import fork_command
from tests.kit.runs import forks
from tests.kit.session import refused, succeeded


def test_dry_run_prints_the_plan_and_writes_nothing(train, trained):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    options = ("batch_size=3", "max_length=4", "head_learning_rate=4e-3", "schedule=cosine")
    succeeded(
        train("--method", "mam", "--dry-run", *(f"train.{o}" for o in options)),
        "encoder.0.attn.kv", "encoder.1.ffn", "memory, process", "memory, activations",
        "neg: 32, pos: 32", "with batch size 3, ",
        "prefix 3.00e-02, scaled-parallel 3.00e-04  head 4.00e-03, cosine",
        "64 training examples, by train.max_length=4", "(measured in 6 steps, and an evaluation)",
        " s a step, as measured here and now)",
    )  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def killed_before_the_eighth_step():
    """Return a step of an engine that kills the process in place of the eighth."""
    step, steps = Engine.step, itertools.count(1)

    def counted(self, *arguments):
        if next(steps) > 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    return counted


@forks
def test_resume_after_a_kill_gives_the_same_bytes(train, tmp_path, backbone, data):
    """Of all files of a run; tests/training has other methods, without the command line."""
    words = ("--method", "lora(dropout=0.2)", "train.save_every=2", "train.epochs=3")
    words += ("train.dropout=true", "train.report=true")
    killed, whole = tmp_path / "run", tmp_path / "whole" / "run"  # the name is the adapter's
    command = ["train", "--backbone", backbone, "--train", data[0], "--eval", data[1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", killed_before_the_eighth_step())
        child = fork_command(*command, "train.tensorboard=false", *words, "--output", killed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (killed / "adapter").exists()
    succeeded(train(*words, output=whole))
    code, _, err = train(*words, "--resume", output=killed)
    assert code == 0, err
    assert "resumed after step 6" in err
    adapter = ("adapter.safetensors", "adapter.json", "README.md")
    for file in (*(f"adapter/{name}" for name in adapter), "metrics.jsonl", "predictions.jsonl"):
        assert (whole / file).read_bytes() == (killed / file).read_bytes(), file


def test_new_tokens_are_trained_saved_and_predicted_with(adapterhub, backbone, tmp_path):
    rows = [(f"the {word} was {word}", label) for word, label in (("<x>", "pos"), ("<y>", "neg"))]
    file = write_tsv(tmp_path / "train.tsv", rows * 16)
    words = ["--backbone", backbone, "--train", file, "--eval", file, "--output", tmp_path / "run"]
    more = ("--method", "lora(rank=2)", "new_tokens=[<x>, <y>]", "train.tensorboard=false")
    succeeded(adapterhub("train", *words, *more, "train.batch_size=4", "train.epochs=6"))
    manifest = Saved.at(tmp_path / "run" / "adapter").manifest
    assert [token.content for token in manifest.tokens] == ["<x>", "<y>"]
    assert manifest.training["data"]["sha256"]
    assert manifest.versions.keys() == {"adapterhub", "torch", "transformers"}
    texts = [text for text, _ in rows]
    out = succeeded(adapterhub("predict", tmp_path / "run", *texts, "--json"))
    assert [row["label"] for row in json_lines(out)] == ["pos", "neg"]


def test_the_schema_of_recipes_is_the_committed_one(adapterhub):
    """Editors complete recipes from recipes/schema.json."""
    out = succeeded(adapterhub("train", "--schema"))
    recipes = Path(__file__).parents[2] / "recipes"
    assert json.loads(out) == json.loads((recipes / "schema.json").read_text(encoding="utf-8"))
    files = list(recipes.glob("*.yaml"))
    assert len(files) > 5
    line = "# yaml-language-server: $schema=schema.json\n"
    assert not [path for path in files if not path.read_text(encoding="utf-8").startswith(line)]


def test_flags_of_common_options_and_the_schema_beside_the_recipe(train, tmp_path):
    words = ("--epochs", 1, "--lr", "1e-3", "--batch-size", 8, "--max-length", 16, "--steps", 2)
    succeeded(train(*words, "--name", "mine", "--quiet"))
    recipe = read(tmp_path / "run" / "recipe.yaml")
    options = recipe.train
    assert (options.epochs, options.learning_rate, options.batch_size) == (1, 1e-3, 8)
    assert (options.max_length, options.max_steps, recipe.name) == (16, 2, "mine")
    text = (tmp_path / "run" / "recipe.yaml").read_text()
    schema = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)[1]
    written = json.loads((tmp_path / "run" / schema).read_text(encoding="utf-8"))
    assert written == recipe_schema()
    assert problems(parse_mapping(text, ""), written) == []
    assert str(tmp_path) not in json.dumps(written)


def test_other_names_are_recorded_in_normal_form(train, tmp_path):
    words = ("lr=1e-3", "train.bs=8", "num_train_epochs=1", "--method", "lora(r=2, lora_alpha=4)")
    code, out, err = train(*words, "--quiet")
    assert (code, "accuracy" in out, "train.max_length is" in err) == (0, True, True), err
    assert not [line for line in err.splitlines() if line.startswith(("loading", "step"))]
    text = (tmp_path / "run" / "recipe.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert "  learning_rate: 0.001\n" in text
    assert not re.search(r"\b(lr|bs|num_train_epochs):", text)
    training = Saved.at(tmp_path / "run" / "adapter").manifest.training["recipe"]
    assert training["train"]["batch_size"] == 8
    (method,) = training["method"]
    assert (method["lora"]["rank"], method["lora"]["alpha"]) == (2, 4.0)
    own = ("train.learning_rate=1e-3", "train.batch_size=8", "train.epochs=1")
    succeeded(train(*own, "--method", "lora(rank=2, alpha=4)", "--resume"))


def test_each_flag_is_an_option():
    assert all(NAMES.own_name(path) == path for path in FLAGS.values())
    data = nested_flags({flag.replace("-", "_"): "1" for flag in FLAGS})
    sections = {key: value for key, value in data.items() if isinstance(value, dict)}
    nested = {f"{key}.{name}" for key, value in sections.items() for name in value}
    assert nested | (data.keys() - sections) == set(FLAGS.values())


# What it says from its first line to what to type next, and longer runs


# With a line per step, the last one of the short run is one of the long run, too.
CONSTANT = ("train.schedule=constant", "train.warmup=2", "train.log_every=1")


def test_stages_schedule_and_what_to_type_next_are_said(trained_once):
    run, (out, err) = trained_once[0] / "run", (trained_once[1].stdout, trained_once[1].stderr)
    told = [line.split(" ")[0] for line in err.splitlines() if line.endswith(" ...")]
    assert told == ["reading", "loading", "loading", "encoding", "fitting"]  # a bag of words
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


# `--sweep`


SHORT = ("train.max_steps=2", "train.tensorboard=false", "dtype=fp32")


def test_a_sweep_trains_every_combination_and_ranks_them(train, tmp_path):
    dry = succeeded(train("--sweep", "method=lora,mam", *SHORT, "--dry-run"))
    assert dry.splitlines() == ["2 runs", *(str(tmp_path / "run" / m) for m in ("lora", "mam"))]
    assert not (tmp_path / "run").exists()
    sweep = ("--sweep", "method=lora(rank=2),head", "--sweep", "seed=0,1")
    code, out, err = train(*sweep, *SHORT)
    assert code == 0, err
    names = ["lora-rank=2,seed=0", "lora-rank=2,seed=1", "head,seed=0", "head,seed=1"]
    assert {path.parent.name for path in (tmp_path / "run").glob("*/recipe.yaml")} == set(names)
    assert all(f"run {n} of 4: {name}" in err for n, name in enumerate(names, 1))
    rows = [line.split() for line in out.splitlines()]
    table = [row for row in rows if row[:1] and row[0] in names]
    assert sorted(row[0] for row in table) == sorted(names)
    scores = [float(row[1]) for row in table]
    assert scores == sorted(scores, reverse=True)
    assert f"adapterhub publish {tmp_path / 'run' / table[0][0]}" in out


def test_a_run_of_a_sweep_is_resumed_alone_or_with_all(train, adapterhub, tmp_path):
    assert train("--sweep", "seed=0,1", *SHORT)[0] == 0
    adapter = tmp_path / "run" / "seed=0" / "adapter" / "adapter.safetensors"
    before = adapter.read_bytes()
    refused(train("--sweep", "seed=0,1", *SHORT), "seed=0 exists", "--resume")
    succeeded(train("--sweep", "seed=0,1,2", *SHORT, "--resume"))
    assert adapter.read_bytes() == before
    assert (tmp_path / "run" / "seed=2" / "adapter").is_dir()
    succeeded(adapterhub("train", "--output", tmp_path / "run" / "seed=1", "--resume"))


def test_runs_that_fail_are_listed_after_the_others_are_done(train, tmp_path):
    words = ("--sweep", "method=head,full", "lr=1e30", *SHORT[1:], "--steps", "4")
    refused(train(*words), "of 2 runs failed", "full: training stopped")
    assert not (tmp_path / "run" / "full" / "adapter").exists()
    for folder in (tmp_path / "run" / "full" / "checkpoints").glob("*"):
        assert (folder / "tensors.safetensors").is_file(), "the last good one is kept"
