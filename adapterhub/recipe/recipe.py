"""The recipe: everything that determines a training run, in one dataclass and one YAML file.

`adapterhub recipe` prints one with a comment above each option. The first line of a recipe names
the JSON schema of all methods and tasks. Editors use that file, next to the recipe, for completion
and checks.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from adapterhub.backbones.torch_free_checks import dtype_name
from adapterhub.config.options import (
    OptionNames,
    below,
    comment,
    commented_options,
    from_dict,
    json_schema,
    option,
    options_of,
    options_schema,
    to_dict,
)
from adapterhub.config.yaml import dump_yaml, load_yaml, merge_options, parse_overrides
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.files.atomic import replace_file
from adapterhub.methods.common.base import (
    METHODS,
    described_method,
    described_methods,
    spec_options,
)
from adapterhub.recipe.options import TaskOptions, TrainOptions, check_task_names, parse_mixing
from adapterhub.recipe.output_folder import SCHEMA
from adapterhub.tasks import TASKS, parse_task

SPECS = ("method", "task")
REQUIRED = ("data.train", "output")
_REPLACED = (*SPECS, "mixing")  # specs, which a later layer replaces entirely
# Local paths in `data`; a share of test rows is identified by their number.
DATA_SOURCES = ("train", "eval", "test", "train_target", "eval_target")


@dataclass(frozen=True)
class Recipe:
    """A training run. The same recipe, data and versions give the same adapter."""

    backbone: str = option(
        "", "a Hub id or folder (empty: a local one that suits the task)", resumed="fixed"
    )
    revision: str | None = option(None, "branch, tag or commit of a Hub backbone", resumed="fixed")
    dtype: str | None = option(
        None,
        "precision of the frozen backbone: fp32, bf16, fp16 (null: bf16 if quantized, unless "
        "several times slower here; else the faster of fp32 and bf16, measured)",
        resumed="recorded",
    )
    attention: str | None = option(
        None,
        "attention implementation: eager, sdpa, ... (null: the fastest here, measured)",
        resumed="recorded",
    )
    quantize: str | None = option(
        None, "nf4, fp4, int8, int8-weight or fp8-weight; or dequantize", resumed="recorded"
    )
    family: dict[str, Any] | str | None = option(
        None, "the backbone's row of sites: a YAML file or its content", resumed="fixed"
    )
    new_tokens: tuple[str, ...] = option(
        (), "tokens to add to the backbone's tokenizer", resumed="fixed"
    )
    method: object = option(
        "lora",
        "a spec: lora(rank=16), or a list of them (null: the method of `from`)",
        resumed="fixed",
    )
    from_: str | None = option(
        None, "a trained adapter to start from: a name, folder or Hub id", resumed="fixed"
    )
    on: tuple[str, ...] = option(
        (), "trained adapters under the new one; they stay frozen", resumed="fixed"
    )
    partial: bool = option(
        False,
        "adapt only the layers that have the method's sites, if some lack them",
        resumed="fixed",
    )
    task: object = option(
        None, "a spec: seq2seq(metric=rouge) (null: by the data)", resumed="fixed"
    )
    tasks: dict[str, TaskOptions] = option(
        {},
        "several tasks with one adapter and a head each: {NAME: {task, weight, data}}",
        resumed="fixed",
    )
    mixing: object = option(
        None,
        "the share of the steps of each of `tasks`: size, equal, temperature(t=2) (null: size)",
        resumed="recorded",
    )
    name: str | None = option(
        None, "the adapter's name (null: the output folder's name)", resumed="same"
    )
    output: str = option(
        "", "folder of the run: adapter, recipe, metrics, checkpoints", resumed="same"
    )
    seed: int = option(0, "seed of initialization, sampling and batch order", resumed="fixed")
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        if self.method is None and self.from_ is None:
            raise ConfigError(
                "method is null, and `from` has no adapter",
                hint="--method lora, or --from ADAPTER",
            )
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        parse_mixing(self.mixing)
        if isinstance(self.family, str):  # the run's own recipe has the content
            object.__setattr__(self, "family", load_yaml(self.family))
        if self.tasks:
            self._check_tasks()

    def _check_tasks(self) -> None:
        check_task_names(list(self.tasks))
        if "test" in self.tasks and any(own.data.test for own in self.tasks.values()):
            raise ConfigError(
                "a task called test next to data.test, whose metrics are called test/NAME",
                expected="another name of the task",
            )
        if given := [
            name
            for name in DATA_SOURCES
            if getattr(self.data, name) is not None
            and not (name == "test" and self.data.test_share)
        ]:
            raise ConfigError(
                "data of one task next to `tasks`",
                offenders=[f"data.{name}={getattr(self.data, name)}" for name in given],
                expected="the data of each task: tasks.NAME.data.train; other options of `data` "
                "hold for all tasks",
            )

    @property
    def adapter_name(self) -> str:
        """The adapter's name, by default the name of the output folder, in portable characters.

        It must be valid for a registry, a server's URL and `vllm serve --lora-modules NAME=FOLDER`.
        """
        if self.name is not None:
            return self.name
        plain = re.sub(r"[^\w.-]+|\.{2,}", "-", Path(self.output).absolute().name)
        return plain.strip("-._")[:96] or "adapter"

    def of_task(self, name: str) -> Recipe:
        """Return the recipe of one of `tasks` alone, without options on the mean of all tasks."""
        own = self.tasks[name]
        task = self.task if own.task is None else own.task
        train = replace(self.train, best_metric=None, patience=None)
        return replace(self, task=task, data=own.data, train=train, tasks={}, mixing=None)

    def to_yaml(self) -> str:
        """Return the recipe as YAML, for `read`."""
        return dump_yaml(to_dict(self))


# Names of options elsewhere: in transformers, peft and common scripts. An alias means the same as
# its option, for every value.
ALIASES = {
    "lr": "train.learning_rate",
    "bs": "train.batch_size",
    "train_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "train.eval_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "steps": "train.max_steps",
    "max_seq_length": "train.max_length",
    "max_seq_len": "train.max_length",
    "logging_steps": "train.log_every",
    "save_steps": "train.save_every",
    "eval_steps": "train.eval_every",
    "early_stopping_patience": "train.patience",
    "torch_compile": "train.compile",
    "use_liger_kernel": "train.liger",
    "train_file": "data.train",
    "validation_file": "data.eval",
    "test_file": "data.test",
    "text_column": "data.text",
    "label_column": "data.label",
    "max_train_samples": "data.rows",
    "model_name_or_path": "backbone",
    "base_model": "backbone",
    "model": "backbone",
    "model_revision": "revision",
    "attn_implementation": "attention",
    "adapter_name": "name",
    "output_dir": "output",
}

_LORA = "method='lora({})'"
# Replacements for names whose values differ, or that belong to a method; these names are refused.
MEANINGS = {
    "rank": _LORA.format("rank=8"),
    "r": _LORA.format("rank=8"),
    "lora_r": _LORA.format("rank=8"),
    "lora_rank": _LORA.format("rank=8"),
    "alpha": _LORA.format("alpha=16"),
    "lora_alpha": _LORA.format("alpha=16"),
    "lora_dropout": _LORA.format("dropout=0.1"),
    "sites": _LORA.format("sites=[attn.q, attn.v]"),
    "target_modules": _LORA.format("sites=[attn.q, attn.v]"),
    "lora_target_modules": _LORA.format("sites=[attn.q, attn.v]"),
    "layers": _LORA.format("layers=top 4"),
    "use_dora": "method=dora",
    "use_rslora": "method=rslora",
    "num_virtual_tokens": "method='prompt(length=20)'",
    "prefix_length": "method='prefix(length=30)'",
    "reduction_factor": "method='pfeiffer(size=48)', the width itself",
    "adapter": "method=pfeiffer",
    "peft_type": "method=lora",
    "task_type": "task=classification",
    "template": "task='seq2seq(template={text})'",
    "warmup_ratio": "train.warmup=0.1: a fraction of all steps",
    "warmup_steps": "train.warmup=100: steps, or below 1 a fraction of them",
    "lr_scheduler": "train.schedule=cosine",
    "lr_scheduler_type": "train.schedule=cosine",
    "scheduler": "train.schedule=cosine",
    "optim": "train.optimizer=adamw",
    "adam_beta1": "train.beta1=0.9",
    "adam_beta2": "train.beta2=0.999",
    "adam_epsilon": "train.eps=1e-8",
    "gradient_clipping": "train.max_grad_norm=1",
    "metric": "train.best_metric=accuracy",
    "metric_for_best_model": "train.best_metric=accuracy",
    "early_stopping": "train.patience=3",
    "batch": "train.batch_size=16",
    "max_len": "train.max_length=128",
    "fp16": "train.mixed_precision=fp16",
    "bf16": "train.mixed_precision=bf16",
    "torch_dtype": "dtype=bf16",
    "precision": "dtype=bf16, or train.mixed_precision=bf16",
    "load_in_4bit": "quantize=nf4",
    "load_in_8bit": "quantize=int8",
    "max_eval_samples": "data.eval with fewer rows",
    "validation": "data.eval=FILE",
    "dev": "data.eval=FILE",
    "dataset": "data.train=FILE",
    "dataset_name": "data.train=ID, and data.subset=NAME",
    **dict.fromkeys(
        ("device", "gpu", "gpus", "gpu_id", "cuda", "use_gpu", "num_gpus"),
        "CUDA_VISIBLE_DEVICES=0 before the command: a GPU that is there is used",
    ),
    **dict.fromkeys(("cpu", "use_cpu", "no_cuda"), "CUDA_VISIBLE_DEVICES= before the command"),
    **dict.fromkeys(("stage", "finetuning_type", "method_name"), "task=causal-lm, method=lora"),
    "num_labels": "data.labels=[no, yes]; without it the labels come from the data",
    "cutoff_len": "train.max_length=512",
    "learning_rates": "--sweep lr=1e-4,1e-3",
    "sweep": "--sweep KEY=V,V",
    "do_train": "nothing: a run trains",
    "do_eval": "data.eval=FILE",
    "report_to": "train.tracker=[wandb]",
    "push_to_hub": "adapterhub push RUN hf:OWNER/NAME, after training",
    "deepspeed": "train.shard=true",
    "fsdp": "train.shard=true",
    "verbose": "nothing: what matters is printed",
    "val_set_size": "data.eval=FILE; without it some rows are held out",
    "test_size": "data.test=0.1",
    "val_size": "data.eval=FILE; without it some rows are held out",
    "resume": "--resume",
    "resume_from_checkpoint": "--resume",
    "overwrite_output_dir": "--output with a new folder, or --resume",
    "tokenizer_name": "the backbone's folder, which has its tokenizer",
    "trust_remote_code": "a backbone of transformers itself: no code of others is run",
}

STAGES = "stages"  # the key of several runs in one file
NAMES = OptionNames(Recipe, ALIASES, MEANINGS, texts={"data": "data.train"})


def read(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe. Flags override the file, and words such as `train.epochs=1` override both.

    Raises:
        ConfigError: unknown options (with replacements), values of a wrong type, or a
            required option is missing.
    """
    return _complete(read_draft(path, overrides, flags))


def read_layers(layers: Iterable[Mapping[str, Any]]) -> Recipe:
    """Build a recipe from layers of options under their own names; later ones override.

    Raises:
        ConfigError: as in `read`.
    """
    return _complete(_draft(layered(layers)))


def _complete(recipe: Recipe) -> Recipe:
    """Check that a recipe has all required options."""
    if missing := _missing(recipe):
        raise ConfigError(
            "the recipe is incomplete",
            offenders=[f"{name} is missing" for name in missing],
            hint="adapterhub train FILE --output DIR",
        )
    return recipe


def _missing(recipe: Recipe) -> list[str]:
    """List the missing required options; each of several tasks has its own data."""
    names = [name for name in REQUIRED if not (recipe.tasks and name.startswith("data."))]
    missing = [name for name in names if not attrgetter(name)(recipe)]
    without = [name for name, own in recipe.tasks.items() if not own.data.train]
    return missing + [f"tasks.{name}.data.train" for name in without]


def read_draft(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe in which required options may be missing.

    Raises:
        ConfigError: unknown options, or values of a wrong type.
    """
    layers = (load_yaml(path) if path else {}, flags or {}, parse_overrides(overrides))
    return _draft(layered(map(NAMES.normal_form, layers)))


def layered(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge layers of options under their own names; later ones override."""
    data: dict[str, Any] = {}
    for options in layers:
        # A spec replaces the earlier one entirely: merging two mappings would give two methods.
        kept = {k: v for k, v in data.items() if k not in _REPLACED or k not in options}
        data = merge_options(kept, options)
    return data


def _draft(data: dict[str, Any]) -> Recipe:
    """Build a recipe from options under their own names."""
    _share_data(data)
    if data.get("from") is not None and "method" not in data:
        data["method"] = None  # the task of the adapter
    return from_dict(Recipe, data, suggest=NAMES.suggest)


def _share_data(data: dict[str, Any]) -> None:
    """Give each of several tasks the options of `data` that apply to all of them."""
    tasks, shared = data.get("tasks"), data.get("data")
    if not isinstance(tasks, Mapping) or not isinstance(shared, Mapping):
        return
    own = {name for name in DATA_SOURCES if name != "test"}  # a share of each, or an error
    usual = {name: value for name, value in shared.items() if name not in own}
    data["tasks"] = {
        name: {**task, "data": merge_options(usual, task.get("data") or {})}
        if isinstance(task, Mapping) and isinstance(task.get("data") or {}, Mapping)
        else task
        for name, task in tasks.items()
    }


_GROUPS: dict[str, tuple[type, str]] = {
    "data": (DataOptions, "the data, its format and its columns"),
    "train": (TrainOptions, "how to train"),
}


def commented_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML with all options, including the options of its methods and task.

    Raises:
        ConfigError: a method, task or option is unknown.
    """
    values = to_dict(recipe)
    help_texts = {option.name: option.help for option in options_of(Recipe)}
    lines = ["# adapterhub train FILE", ""]
    lines += commented_options(Recipe, {k: values[k] for k in values if k not in SPECS}, REQUIRED)
    lines += ["", *comment(help_texts["method"]), *below("method", _methods(recipe))]
    lines += ["", *comment(help_texts["task"])]
    lines += _task(recipe.task)
    for group, (cls, text) in _GROUPS.items():
        required = [path.rpartition(".")[2] for path in REQUIRED if path.startswith(f"{group}.")]
        of_group = commented_options(cls, values[group], required)
        lines += ["", *comment(text), *below(group, of_group)]
    return SCHEMA_LINE + "".join(f"{line}\n" for line in lines)


def _task(spec: object) -> list[str]:
    """Return the lines of {name: options}."""
    if spec is None:
        return ["task: null"]
    task = parse_task(spec)
    options = below(task.name, commented_options(type(task), to_dict(task)))
    return [*below("task", [*comment(f"{task.name}: {task.summary}"), *options])]


def _methods(recipe: Recipe) -> Iterator[str]:
    """Yield the lines of {name: options}; of a list of these if a name occurs twice."""
    specs = spec_options(recipe.method or ())  # type: ignore[arg-type]
    twice = len(dict(specs)) < len(specs)
    for name, options in specs:
        method = described_method(name)
        rate = f"its learning rate is {method.learning_rate:g}"
        yield from comment(f"{name}: {method.summary}; {rate}")
        mapping = below(name, commented_options(method.options, options))
        for number, line in enumerate(mapping):
            yield f"{'  ' if number else '- '}{line}" if twice else line


SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA}\n"


def recipe_schema() -> dict[str, Any]:
    """Derive the schema of recipes from the classes of recipes, methods and tasks."""
    schema = json_schema(Recipe)
    several = {"type": "array", "items": {"$ref": "#/$defs/method"}, "minItems": 1}
    described = described_methods()
    method = _spec_schema({name: (m.summary, m.options) for name, m in described.items()})
    task = _spec_schema({name: (cls.summary, cls) for name, cls in TASKS.items()})
    task["anyOf"][-1]["maxProperties"] = 1
    method["anyOf"].append(several)
    schema["properties"]["method"]["$ref"] = "#/$defs/method"
    schema["properties"]["task"]["anyOf"] = [{"$ref": "#/$defs/task"}, {"type": "null"}]
    stage = _stage_schema(schema["properties"])
    schema["properties"][STAGES] = {
        "type": "array",
        "items": {"$ref": "#/$defs/stage"},
        "minItems": 1,
        "description": "runs of which each may start from an earlier one, with options of their "
        "own",
    }
    of_task = schema["properties"]["tasks"]["additionalProperties"]["properties"]
    of_task["task"]["anyOf"] = [{"$ref": "#/$defs/task"}, {"type": "null"}]
    return schema | {"$defs": {"method": method, "task": task, "stage": stage}}


def _stage_schema(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a stage: a name, and the options of a recipe."""
    properties = {name: {"$ref": f"#/properties/{name}"} for name in options if name != "output"}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name"],
        "additionalProperties": False,
    }


def write_schema(folder: Path) -> None:
    """Write the schema next to a recipe."""
    registered = (*METHODS.imported().values(), *TASKS.values())
    replace_file(folder / SCHEMA, _schema_bytes(registered))


@functools.cache
def _schema_bytes(registered: tuple[type, ...]) -> bytes:
    """Serialize the schema as JSON, once for the registered classes."""
    text = json.dumps(recipe_schema(), ensure_ascii=False, separators=(",", ":"))
    return f"{text}\n".encode()


def _spec_schema(choices: Mapping[str, tuple[str, type]]) -> dict[str, Any]:
    """Return the schema of a spec: a name, a call as text, or {name: options}.

    `choices` has the summary and the options of each method or task.
    """
    names = [{"const": name, "description": text} for name, (text, _) in sorted(choices.items())]
    options = {
        name: {"description": text, **_or_null(options_schema(cls))}
        for name, (text, cls) in sorted(choices.items())
    }
    return {
        "anyOf": [
            *names,
            {"type": "string", "pattern": rf"^\s*({'|'.join(sorted(choices))})\s*[(,]"},
            {
                "type": "object",
                "properties": options,
                "additionalProperties": False,
                "minProperties": 1,
            },
        ]
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"type": ["object", "null"]}
