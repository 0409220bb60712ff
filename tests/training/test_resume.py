"""What a run may be resumed with, what is recorded, and what is refused; edits of some tokens."""

import dataclasses
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.config.options import from_dict, resumed_as, to_dict
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.files.native import Saved
from adapterhub.loop.engine import NotFinite
from adapterhub.loop.processes import Stopped
from adapterhub.loop.report import Evaluated, Reporter, Timing
from adapterhub.recipe.recipe import Recipe, TaskOptions, TrainOptions, read
from adapterhub.tasks.common.batches import learned
from adapterhub.tasks.common.distillation import TeacherOptions
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.data import sentences, write_tsv
from tests.kit.runs import adapter_bytes
from tests.kit.selection import long_table
from tests.kit.session import refused, succeeded
from tests.kit.task_cases import pairs


def test_every_option_of_a_recipe_declares_what_a_resume_makes_of_it():
    below = {"teacher": TeacherOptions, "data": DataOptions, "train": TrainOptions}
    for above, cls in ({"": Recipe, "tasks.a": TaskOptions} | below).items():
        for field in dataclasses.fields(cls):
            if field.init and field.name not in ("data", "train"):
                name = f"{above}.{field.name}".strip("._")
                kind = resumed_as(Recipe, name.split("."))
                assert kind in ("same", "recorded", "length", "fixed"), name


class Interrupted(Reporter):
    """Sends this process Ctrl-C at the first evaluation."""

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        os.kill(os.getpid(), signal.SIGINT)


WORDS = (
    "method=lora(rank=2)", "train.max_steps=6", "train.eval_every=4", "train.tensorboard=false",
    "train.report=false", "dtype=fp32", "train.batch_size=8", "train.schedule=constant",
)  # fmt: skip


@pytest.fixture(scope="module")
def stopped(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run that was stopped after step 4 of 6, and the same one that was not, in `whole`."""
    folder, rows = tmp_path_factory.mktemp("stopped"), sentences(64)
    files = {
        "train": str(write_tsv(folder / "train.tsv", rows)),
        "eval": str(write_tsv(folder / "dev.tsv", rows[::3])),
    }
    flags = {"backbone": str(backbone), "output": str(folder / "run"), "data": files}
    recipe = read(None, WORDS, flags)
    run(replace(recipe, output=str(folder / "whole")), Reporter())
    with pytest.raises(Stopped):
        run(recipe, Interrupted())
    return recipe


@pytest.fixture
def recipe(stopped: Recipe, tmp_path: Path) -> Recipe:
    """A copy of the stopped run."""
    return replace(stopped, output=str(shutil.copytree(stopped.output, tmp_path / "run")))


def with_words(recipe: Recipe, **changed: Any) -> Recipe:
    """Return a recipe with other options, by name: train__learning_rate."""
    options = to_dict(recipe)
    for name, value in changed.items():
        *above, last = name.split("__")
        at = options[above[0]] if above else options
        at[last] = value
    return from_dict(Recipe, options)


def stretches(recipe: Recipe) -> list[dict[str, Any]]:
    manifest = json.loads((Path(recipe.output) / "adapter" / "adapter.json").read_bytes())
    return manifest["training"].get("stretches", [])


SAME: dict[str, object] = {
    "train__eval_batch_size": 3, "train__save_every": 1, "train__log_every": 1,
    "train__gradient_checkpointing": True, "train__report": True, "train__tensorboard": True,
    "train__frozen_cache": "off", "train__frozen_cache_gb": 0.5, "name": "another",
}  # fmt: skip


@long_table("name", SAME, 3)
def test_what_changes_no_result_may_change(stopped, recipe, name):
    changed = with_words(recipe, **{name: SAME[name]})
    assert resumed_as(Recipe, name.split("__")) == "same"
    run(changed, Reporter(), resume=True)
    assert stretches(changed) == []
    assert adapter_bytes(changed.output) == adapter_bytes(Path(stopped.output).parent / "whole")


RECORDED: dict[str, object] = {
    "train__learning_rate": 1e-4, "train__head_learning_rate": 1e-4, "train__weight_decay": 0.5,
    "train__beta1": 0.5, "train__beta2": 0.9, "train__eps": 1e-3, "train__max_grad_norm": 0.01,
    "train__mixed_precision": "bf16", "train__eval_every": 1, "train__patience": 3,
    "train__length_grouped": False, "train__max_length": 5, "train__dropout": True,
    "train__schedule": "cosine", "data__skip_empty": True, "data__rows": 40, "data__eval_rows": 9,
    "attention": "eager", "data__format": "tsv", "data__header": True, "data__encoding": "utf-8",
}  # fmt: skip


@long_table("name", RECORDED, 4)
def test_what_changes_the_result_is_recorded(stopped, recipe, name):
    changed = with_words(recipe, **{name: RECORDED[name]})
    outcome = run(changed, Reporter(), resume=True)
    assert outcome.result.steps == 6
    (stretch,) = stretches(changed)
    assert stretch["step"] == 4
    dotted = name.replace("__", ".")
    assert dotted.removeprefix("train.") in str(stretch["changed"])
    assert dotted.rpartition(".")[2] in (outcome.folder / "README.md").read_text("utf-8")
    # Options of the optimizer change the tensors.
    numbers = ("learning_rate", "weight", "beta", "eps", "max_grad", "mixed", "dropout")
    whole = Path(stopped.output).parent / "whole"
    differs = adapter_bytes(changed.output) != adapter_bytes(whole)
    assert differs or not any(each in name for each in numbers)


FIXED: dict[str, object] = {
    "method": "lora(rank=4)", "task": "multi-label", "train__best_metric": "macro_f1",
    "train__optimizer": "adamw-8bit", "train__init": "eva", "seed": 9,
    "data__labels": "negative,positive,other", "new_tokens": ["xyz"],
    "train__batch_size": 4, "train__gradient_accumulation": 2,
}  # fmt: skip


@long_table("name", FIXED, 3)
def test_what_makes_another_run_is_refused(recipe, name):
    before = sorted(path.name for path in Path(recipe.output).iterdir())
    with pytest.raises((ConfigError, DataError)) as error:
        run(with_words(recipe, **{name: FIXED[name]}), Reporter(), resume=True)
    assert error.value.hint or error.value.expected
    assert sorted(path.name for path in Path(recipe.output).iterdir()) == before


@pytest.mark.parametrize("which", ["train", "eval"])
def test_a_corrected_row_is_recorded_by_the_digest_of_its_file(recipe, which, tmp_path):
    lines = Path(getattr(recipe.data, which)).read_text("utf-8").splitlines()
    lines[3] = lines[4]
    file = tmp_path / Path(getattr(recipe.data, which)).name
    file.write_text("\n".join(lines) + "\n", "utf-8")
    run(with_words(recipe, **{f"data__{which}": str(file)}), Reporter(), resume=True)
    (stretch,) = stretches(recipe)
    name = {"train": "data.train", "eval": "data.evaluation"}[which]
    assert list(stretch["changed"]) == [name]
    assert f"{name} " in (Path(recipe.output) / "adapter" / "README.md").read_text("utf-8")


def test_a_lower_rate_after_a_divergence_continues_from_the_last_checkpoint(recipe):
    wild = with_words(recipe, train__learning_rate=1e30, train__head_learning_rate=1e30)
    with pytest.raises(NotFinite) as error:
        run(wild, Reporter(), resume=True)
    assert "train.learning_rate" in error.value.hint
    lower = with_words(recipe, train__learning_rate=1e-4)
    assert run(lower, Reporter(), resume=True).result.steps == 6
    assert [each["step"] for each in stretches(lower)] == [4]


def taking(which: str, place: Path, recipe: Recipe, out: Path) -> tuple[object, ...]:
    """Return a command that takes the folder of an adapter."""
    return {
        "predict": ("predict", place, "the movie was good"),
        "eval": ("eval", place, "--data", recipe.data.eval),
        "publish": ("publish", place, "--name", "mine", "--registry", out / "registry"),
        "merge": ("merge", place, "--output", out / "merged"),
        "from": ("train", recipe.data.train, "--from", place, "--backbone", recipe.backbone,
                 "train.max_steps=1", "--output", out / "next", "--quiet"),
    }[which]  # fmt: skip


COMMANDS = ("predict", "eval", "publish", "merge", "from")


@pytest.mark.parametrize("which", COMMANDS)
def test_each_command_takes_a_checkpoint_as_an_adapter(stopped, tmp_path, adapterhub, which):
    """The run itself has stopped: its folder is refused with the name of a checkpoint."""
    manifest = Saved.at(Path(stopped.output) / "checkpoints" / "best" / "adapter").manifest
    assert (manifest.training["steps"], "accuracy" in manifest.metrics) == (4, True)
    place = Path(stopped.output)
    code, _, err = adapterhub(*taking(which, place, stopped, tmp_path))
    refused((code, "", " ".join(err.split())), "is not finished", f"{place}/checkpoints/best")
    for checkpoint in ("best", "last") if which == "predict" else ("last",):
        (out := tmp_path / checkpoint).mkdir()
        succeeded(adapterhub(*taking(which, place / "checkpoints" / checkpoint, stopped, out)))


@long_table(
    "method", ("lora", "prefix(reparametrize=true)", "adalora", "p-tuning", "mam", "full"), 3
)
def test_a_checkpoint_stores_each_tensor_once(stopped, tmp_path, method):
    recipe = with_words(stopped, method=method, output=str(tmp_path / "run"))
    with pytest.raises(Stopped):
        run(recipe, Interrupted())
    last = tmp_path / "run" / "checkpoints" / "last"
    own = load_file(last / "tensors.safetensors")
    adapter = load_file(last / "adapter" / "adapter.safetensors")
    both = own.keys() & adapter.keys()
    assert not [name for name in both if torch.equal(own[name], adapter[name])]
    assert bool(own) == (method in ("prefix(reparametrize=true)", "adalora", "p-tuning"))
    whole = replace(recipe, output=str(tmp_path / "whole"))
    run(whole, Reporter())
    run(recipe, Reporter(), resume=True)
    assert adapter_bytes(recipe.output) == adapter_bytes(whole.output)


@pytest.mark.parametrize("method", ["loreft(rank=2)", "alora(rank=2)"])
def test_recomputed_and_replayed_layers_have_the_places(method, recipe_with, backbones, tmp_path):
    """Runs on pairs of a prompt and a response have the same losses."""
    data = pairs(tmp_path)
    usual = (f"method={method}", "train.epochs=2", "train.report=false", "train.tensorboard=false",
             "train.batch_size=8", "dtype=fp32", "task=causal-lm", f"data.train={data}",
             f"data.eval={data}")  # fmt: skip

    def losses(cache: str, **options: bool) -> list[float]:
        recipe = recipe_with(*usual, f"train.frozen_cache={cache}", folder=backbones("llama"),
                             output=f"{cache}-{len(options)}")  # fmt: skip
        outcome = run(replace(recipe, train=replace(recipe.train, **options)), Reporter())
        return [record["loss"] for record in outcome.result.history]

    expected = losses("off")
    assert expected[-1] < expected[0]
    assert losses("off", gradient_checkpointing=True) == pytest.approx(expected, abs=1e-5)
    assert losses("memory") == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("method", ["loreft", "alora"])
def test_a_pass_without_labels_is_told_where_prompts_end(method):
    model = tiny_models.language_model("llama")
    tiny_models.scramble(ah.attach(model, method))
    ids = tiny_models.batch()["input_ids"]
    labels = ids.clone()
    labels[:, :4] = -100
    with torch.no_grad():
        expected = model(ids, labels=labels).logits
        assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
        with learned({"labels": labels}):
            assert torch.equal(model(ids).logits, expected)
