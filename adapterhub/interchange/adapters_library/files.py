"""The checkpoint format of `adapters` (AdapterHub): a folder with an adapter and possibly a head.

    adapter_config.json                            the options, a union of several among them
    adapter.safetensors or pytorch_adapter.bin     tensors by the names of the model's modules
    head_config.json                               the head's options
    model_head.safetensors or pytorch_model_head.bin

The reader is stricter than `adapters`: one error lists every option that changes what the adapter
computes and is not supported. Unknown fields are accepted only with a neutral value (null, false,
empty). Options that only affect training are ignored. The .bin files are pickles: they are opened
only on request, with torch's `weights_only` loader. (`adapters` cannot write prefixes as
safetensors, because its tensors share memory.)

Options as of adapters 1.3, https://docs.adapterhub.ml/classes/adapter_config.html.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterhub.errors import FileError
from adapterhub.files import schema
from adapterhub.files.schema import shorten, show
from adapterhub.interchange.checkpoint_files import (
    MAX_TENSOR_BYTES,
    TRAINING_ONLY,
    ConfigField,
    any_value,
    config_problems,
    either,
    only,
    optional,
    read_json_object,
    read_tensor_file,
)

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS = ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_CONFIG_FILE = "head_config.json"
HEAD_WEIGHTS = ("model_head.safetensors", "pytorch_model_head.bin")
MAX_CONFIG_BYTES = 1 << 20
# Files without a version use "gelu" for the tanh approximation.
_OLD_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}
_FIRST_SCALED = (1, 1)  # LoRA scales by alpha / r since version 1.1, and did not scale before


@dataclass(frozen=True)
class MethodConfig:
    """One method of a checkpoint.

    `kind` is bottleneck, prefix_tuning, lora or reft; `options` has every option of that kind.
    """

    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class AdaptersHead:
    """A task head.

    `options` is {} for the head of a transformers class; `labels` maps names to class numbers.
    """

    options: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    labels: Mapping[str, int]


@dataclass(frozen=True)
class AdaptersFiles:
    """A checkpoint of `adapters`: one part for each method."""

    name: str
    model_type: str
    model_name: str | None
    parts: tuple[MethodConfig, ...]
    tensors: Mapping[str, Tensor]
    head: AdaptersHead | None


_word = schema.text(r"[\w.+-]{1,100}", "a name")
_layers = schema.sequence(schema.integer(0, 10_000), 0, 10_000)
_size = schema.integer(1, 2**31)
_labels = schema.mapping(schema.text(r"(?s).{0,1000}", "a label"), schema.integer(0, 2**31))
_factor = either(
    "a number, or numbers by layer", schema.number, schema.mapping(_word, schema.number)
)
_scaling = either(
    "a number, 'learned' or 'channel'", schema.number, schema.text("learned|channel", "a scale")
)
_matrices = schema.sequence(schema.text("[qkv]", "q, k or v"), 0, 3)
_false, _true = ConfigField(schema.boolean, False), ConfigField(schema.boolean, True)
_DROPOUT = ConfigField(schema.number, 0.0)
_LEAVE_OUT = ConfigField(_layers, [])
_BOTTLENECK = {
    "mh_adapter": ConfigField(schema.boolean, required=True),
    "output_adapter": ConfigField(schema.boolean, required=True),
    "cross_adapter": _false,
    "reduction_factor": ConfigField(_factor, required=True),
    "non_linearity": ConfigField(_word, required=True),
    "original_ln_before": _false,
    "original_ln_after": only(True),
    "ln_before": only(False),
    "ln_after": only(False),
    "is_parallel": _false,
    "scaling": ConfigField(_scaling, 1.0),
    "use_gating": _false,
    "residual_before_ln": ConfigField(any_value, True),
    "adapter_residual_before_ln": TRAINING_ONLY,  # the order of a sum, without ln_after
    "inv_adapter": only(None, "nice"),
    "inv_adapter_reduction_factor": ConfigField(optional(schema.number), 2),
    "leave_out": _LEAVE_OUT,
    "dropout": _DROPOUT,
    "phm_layer": _false,
    "phm_dim": ConfigField(_size, 4),
    "phm_rank": ConfigField(_size, 1),
    "factorized_phm_W": ConfigField(any_value, True),
    "shared_phm_rule": ConfigField(any_value, True),
    "phm_bias": ConfigField(any_value, True),
    "shared_W_phm": ConfigField(any_value, False),
    "factorized_phm_rule": ConfigField(any_value, False),
    **dict.fromkeys(("phm_c_init", "phm_init_range", "learn_phm"), TRAINING_ONLY),
    **dict.fromkeys(("hypercomplex_nonlinearity", "stochastic_depth"), TRAINING_ONLY),
}
_PREFIX = {
    "flat": _false,
    "prefix_length": ConfigField(_size, 30),
    "bottleneck_size": ConfigField(_size, 512),
    "non_linearity": ConfigField(_word, "tanh"),
    "encoder_prefix": _true,
    "cross_prefix": _true,
    "leave_out": _LEAVE_OUT,
    "dropout": _DROPOUT,
    "use_gating": _false,
    "shared_gating": _true,
}
_LORA = {
    "selfattn_lora": _true,
    "intermediate_lora": _false,
    "output_lora": _false,
    "leave_out": _LEAVE_OUT,
    "r": ConfigField(_size, 8),
    "alpha": ConfigField(schema.number, 8),
    "dropout": _DROPOUT,
    "attn_matrices": ConfigField(_matrices, ["q", "v"]),
    "composition_mode": ConfigField(schema.text("add|scale", "add or scale"), "add"),
    "use_gating": _false,
    "use_dora": only(False),  # scales the bias too, and its norm omits alpha
    "vera_d": only(None),
    "vera_b": only(None),
    "dtype": TRAINING_ONLY,
}
_REFT = {
    "layers": TRAINING_ONLY,  # the layers with tensors
    "prefix_positions": ConfigField(schema.integer(0, 10_000), required=True),
    "suffix_positions": ConfigField(schema.integer(0, 10_000), required=True),
    "r": ConfigField(_size, required=True),
    "orthogonality": ConfigField(schema.boolean, required=True),
    "tied_weights": _false,
    "subtract_projection": _true,
    "dropout": _DROPOUT,
    "non_linearity": only(None),
    "output_reft": only(True),
    "dtype": TRAINING_ONLY,
}
_COMMON = dict.fromkeys(("architecture", "init_weights", "init_weights_seed"), TRAINING_ONLY)
_FIELDS: Mapping[str, Mapping[str, ConfigField]] = {
    "bottleneck": _BOTTLENECK | _COMMON,
    "prefix_tuning": _PREFIX | _COMMON,
    "lora": _LORA | _COMMON,
    "reft": _REFT | _COMMON,
}


def is_adapters(folder: Path) -> bool:
    """Return whether a folder contains a checkpoint of `adapters`."""
    weights = any((folder / name).is_file() for name in WEIGHTS)
    return weights and (folder / CONFIG_FILE).is_file()


def read_adapters(
    folder: Path, *, allow_pickle: bool = False, head: bool = True, most: int = MAX_TENSOR_BYTES
) -> AdaptersFiles:
    """Read the checkpoint of `adapters` in a folder.

    Raises:
        FileError: a file is missing or damaged, or options are not supported; lists all of them.
    """
    tree = _read_json(folder / CONFIG_FILE)
    problems = schema.text(r"[^.\x00-\x1f]{1,200}", "a name")("name", tree.get("name"))
    problems += _word("model_type", tree.get("model_type"))
    parts = list(_parts(tree, problems))
    if problems:
        raise FileError(
            f"{folder / CONFIG_FILE} has options that are not supported",
            offenders=shorten(problems),
            expected="supported options, or neutral values",
        )
    return AdaptersFiles(
        name=tree["name"],
        model_type=tree["model_type"],
        model_name=tree.get("model_name") or None,
        parts=tuple(parts),
        tensors=read_tensor_file(folder, *WEIGHTS, allow_pickle=allow_pickle, most=most),
        head=_read_head(folder, tree["name"], allow_pickle, most) if head else None,
    )


def read_options(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the configurations of the adapter and of its head ({} if none), unchecked."""
    head = folder / HEAD_CONFIG_FILE
    return _read_json(folder / CONFIG_FILE), _read_json(head) if head.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(
        path, MAX_CONFIG_BYTES, expected="a checkpoint of adapters (AdapterHub)"
    )


def _parts(tree: Mapping[str, Any], problems: list[str]) -> Iterator[MethodConfig]:
    """Yield the methods of a configuration; add unsupported options to `problems`."""
    config = tree.get("config")
    is_union = isinstance(config, dict) and config.get("architecture") == "union"
    members = config.get("configs") if isinstance(config, dict) and is_union else [config]
    for number, member in enumerate(members if isinstance(members, list) else [None]):
        path = f"config.configs.{number}" if is_union else "config"
        kind = member.get("architecture") or "bottleneck" if isinstance(member, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            problems.append(f"{path}: {show(kind)} is not one of {', '.join(_FIELDS)}")
            continue
        part_problems = config_problems(member, _FIELDS[kind], path)
        problems += part_problems
        if not part_problems:
            defaults = {name: field.default for name, field in _FIELDS[kind].items()}
            yield MethodConfig(kind, _as_trained(tree, defaults | member))


def _as_trained(tree: Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Adapt options to their meaning in the version and the model class that wrote them.

    Since `adapters` 0.1, only its own classes (GPT2AdapterModel) undo an invertible adapter in
    front of the output layer. The classes of transformers (GPT2LMHeadModel) keep its change there.
    """
    version, model_class = tree.get("version"), str(tree.get("model_class") or "AdapterModel")
    if options.get("inv_adapter"):
        own = model_class.endswith("AdapterModel")
        options["inv_adapter_undone"] = own or not str(version).startswith("adapters.")
    if version is None and options.get("non_linearity") in _OLD_ACTIVATIONS:
        options["non_linearity"] = _OLD_ACTIVATIONS[options["non_linearity"]]
    number = str(version).removeprefix("adapters.").split(".")[:2]
    has_number = str(version).startswith("adapters.") and all(part.isdecimal() for part in number)
    if "alpha" in options and has_number and tuple(map(int, number)) < _FIRST_SCALED:
        options["alpha"] = options["r"]
    return options


def _read_head(folder: Path, name: str, allow_pickle: bool, most: int) -> AdaptersHead | None:
    if not (folder / HEAD_CONFIG_FILE).is_file():
        return None
    tree = _read_json(folder / HEAD_CONFIG_FILE)
    options = tree.get("config") or {}
    if not isinstance(options, dict) or len(json.dumps(options)) > MAX_CONFIG_BYTES:
        raise FileError(f"{folder / HEAD_CONFIG_FILE}: config is not an object")
    tensors = read_tensor_file(folder, *HEAD_WEIGHTS, allow_pickle=allow_pickle, most=most)
    prefix = f"heads.{tree.get('name') or name}."
    tensors = {n.removeprefix(prefix): t for n, t in tensors.items()}
    labels = options.get("label2id") or tree.get("label2id") or {}
    if problems := _labels("label2id", labels):
        raise FileError(f"{folder / HEAD_CONFIG_FILE} cannot be used", offenders=shorten(problems))
    # For the head of a transformers class, the names may be the config's initial ones.
    count = (options or tree).get("num_labels")
    return AdaptersHead(options, tensors, labels if len(labels) == count else {})
