"""The checkpoint format of `adapters` (AdapterHub): a folder with an adapter, and maybe its head.

    adapter_config.json                            the options, a union of several among them
    adapter.safetensors or pytorch_adapter.bin     tensors by the names of the model's modules
    head_config.json                               the head's options
    model_head.safetensors or pytorch_model_head.bin

The reader is strict where `adapters` is not: one error lists every option that changes what the
adapter computes and cannot be expressed here. A field that is not known passes at a neutral value
(null, false, empty). What serves training alone is ignored. The .bin files are pickles: they are
opened only when asked for, and then by torch's `weights_only` loader, which builds tensors and
nothing else. (`adapters` cannot write prefixes as safetensors: its names share memory.)

Options as of adapters 1.3, https://docs.adapterhub.ml/classes/adapter_config.html.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from adapterhub.errors import FileError
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, read_file
from adapterhub.files.schema import shorten, show
from adapterhub.interchange.tensors import read_foreign_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS = ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_CONFIG_FILE = "head_config.json"
HEAD_WEIGHTS = ("model_head.safetensors", "pytorch_model_head.bin")
MAX_CONFIG_BYTES = 1 << 20
# Before a version was written, gelu was the approximation by tanh.
_OLD_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}
_FIXED_SCALE = (1, 1)  # from version 1.1 on LoRA scales by alpha / r, before it did not scale


@dataclass(frozen=True)
class MethodConfig:
    """One method of a checkpoint: `kind` is bottleneck, prefix_tuning or lora, `options` are all of
    its kind."""

    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class AdaptersHead:
    """A head: its options, {} where it is the own head of a class of transformers, its tensors, and
    the numbers of its labels by name."""

    options: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    labels: Mapping[str, int]


@dataclass(frozen=True)
class AdaptersFiles:
    """What a folder of `adapters` holds."""

    name: str
    model_type: str
    model_name: str | None
    parts: tuple[MethodConfig, ...]
    tensors: Mapping[str, Tensor]
    head: AdaptersHead | None


class _Field:
    """One option: how its value is checked, its default, and whether another one is read."""

    def __init__(self, check: schema.Check, default: Any, *, read: bool = True) -> None:
        self.check, self.default, self.read = check, default, read


def _any(path: str, value: object) -> list[str]:
    return []


def _only(value: Any) -> _Field:
    """An option that changes what is computed, and that one value is taken of."""
    return _Field(_any, value, read=False)


def _either(*checks: schema.Check) -> schema.Check:
    def check(path: str, value: object) -> list[str]:
        found = [one(path, value) for one in checks]
        return [] if not all(found) else found[0]

    return check


_word = schema.text(r"[\w.+-]{1,100}", "a name")
_layers = schema.sequence(schema.integer(0, 10_000), 0, 10_000)
_size = schema.integer(1, 2**31)
_labels = schema.mapping(schema.text(r"(?s).{0,1000}", "a label"), schema.integer(0, 2**31))
_false, _true = _Field(schema.boolean, False), _Field(schema.boolean, True)
_TRAINING = _Field(_any, None)
_DROPOUT = _Field(schema.number, 0.0)
_LEAVE_OUT = _Field(_layers, [])
_BOTTLENECK = {
    "mh_adapter": _Field(schema.boolean, None),
    "output_adapter": _Field(schema.boolean, None),
    "cross_adapter": _false,
    "reduction_factor": _Field(_either(schema.number, schema.mapping(_word, schema.number)), None),
    "non_linearity": _Field(_word, None),
    "original_ln_before": _false,
    "original_ln_after": _only(True),
    "ln_before": _only(False),
    "ln_after": _only(False),
    "is_parallel": _false,
    "scaling": _Field(_either(schema.number, schema.text("learned|channel", "a scale")), 1.0),
    "use_gating": _false,
    "residual_before_ln": _Field(_any, True),
    "adapter_residual_before_ln": _TRAINING,  # it orders a sum, without ln_after
    "inv_adapter": _only(None),
    "inv_adapter_reduction_factor": _TRAINING,
    "leave_out": _LEAVE_OUT,
    "dropout": _DROPOUT,
    "phm_layer": _false,
    "phm_dim": _Field(_size, 4),
    "phm_rank": _Field(_size, 1),
    **{name: _Field(_any, True) for name in ("factorized_phm_W", "shared_phm_rule", "phm_bias")},
    **{name: _Field(_any, False) for name in ("shared_W_phm", "factorized_phm_rule")},
    **dict.fromkeys(("phm_c_init", "phm_init_range", "learn_phm"), _TRAINING),
    **dict.fromkeys(("hypercomplex_nonlinearity", "stochastic_depth"), _TRAINING),
}
_PREFIX = {
    "flat": _false,
    "prefix_length": _Field(_size, 30),
    "bottleneck_size": _Field(_size, 512),
    "non_linearity": _Field(_word, "tanh"),
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
    "r": _Field(_size, 8),
    "alpha": _Field(schema.number, 8),
    "dropout": _DROPOUT,
    "attn_matrices": _Field(schema.sequence(schema.text("[qkv]", "q, k or v"), 0, 3), ["q", "v"]),
    "composition_mode": _Field(schema.text("add|scale", "add or scale"), "add"),
    "use_gating": _false,
    "use_dora": _only(False),  # its magnitude scales the bias too, and its norm leaves alpha out
    "vera_d": _only(None),
    "vera_b": _only(None),
    "dtype": _TRAINING,
}
_COMMON = {"architecture": _TRAINING, "init_weights": _TRAINING, "init_weights_seed": _TRAINING}
_FIELDS: Mapping[str, Mapping[str, _Field]] = {
    "bottleneck": _BOTTLENECK | _COMMON,
    "prefix_tuning": _PREFIX | _COMMON,
    "lora": _LORA | _COMMON,
}


def is_adapters(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of `adapters`."""
    weights = any((folder / name).is_file() for name in WEIGHTS)
    return weights and (folder / CONFIG_FILE).is_file()


def read_adapters(folder: Path, *, allow_pickle: bool = False, head: bool = True) -> AdaptersFiles:
    """The checkpoint of `adapters` in a folder; without `head` the files of the head stay closed.

    Raises:
        FileError: a file is missing or broken, or options change the function in a way that is not
            known here; all of them are listed.
    """
    tree = _read_json(folder / CONFIG_FILE)
    problems = schema.text(r"[^.\x00-\x1f]{1,200}", "a name")("name", tree.get("name"))
    problems += _word("model_type", tree.get("model_type"))
    parts = list(_parts(tree, problems))
    if problems:
        raise FileError(
            f"{folder / CONFIG_FILE} has options that cannot be expressed here",
            offenders=shorten(problems),
            expected="options that are known, or at a neutral value",
        )
    return AdaptersFiles(
        name=tree["name"],
        model_type=tree["model_type"],
        model_name=tree.get("model_name") or None,
        parts=tuple(parts),
        tensors=read_foreign_tensors(folder, *WEIGHTS, allow_pickle=allow_pickle),
        head=_read_head(folder, tree["name"], allow_pickle) if head else None,
    )


def read_options(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the two configurations say, unchecked: of the adapter, and of the head ({} if none)."""
    head = folder / HEAD_CONFIG_FILE
    return _read_json(folder / CONFIG_FILE), _read_json(head) if head.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = read_file(path, 0, MAX_CONFIG_BYTES, None)
    except UnreadableError as error:
        raise FileError(f"{path}: {error}", expected="a folder of adapters (AdapterHub)") from None
    tree, offenders = schema.parse_object(data, MAX_CONFIG_BYTES)
    if offenders:
        raise FileError(f"{path} cannot be read", offenders=shorten(offenders))
    return tree


def _parts(tree: Mapping[str, Any], problems: list[str]) -> Iterator[MethodConfig]:
    config = tree.get("config")
    union = isinstance(config, dict) and config.get("architecture") == "union"
    members = config.get("configs") if isinstance(config, dict) and union else [config]
    for number, member in enumerate(members if isinstance(members, list) else [None]):
        where = f"config.configs.{number}" if union else "config"
        kind = member.get("architecture") or "bottleneck" if isinstance(member, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            problems.append(f"{where}: {show(kind)} is not one of {', '.join(_FIELDS)}")
            continue
        found = list(_config_problems(where, member, _FIELDS[kind]))
        problems += found
        if not found:
            defaults = {name: field.default for name, field in _FIELDS[kind].items()}
            yield MethodConfig(kind, _as_trained(tree.get("version"), defaults | member))


def _config_problems(
    where: str, config: Mapping[str, Any], fields: Mapping[str, _Field]
) -> Iterator[str]:
    for name, value in sorted(config.items()):
        field = fields.get(name)
        path = schema.at(where, name)
        if field is None:
            if not (value is None or value is False or value in ("", [], {})):
                yield f"{path}: unknown, and not neutral: {show(value)}"
        elif field.read:
            yield from field.check(path, value)
        elif value != field.default:
            yield f"{path}: {show(value)} changes what is computed, {show(field.default)} is known"
    for name, field in fields.items():
        if field.read and field.default is None and field.check is not _any and name not in config:
            yield f"{schema.at(where, name)}: missing"


def _as_trained(version: object, options: dict[str, Any]) -> dict[str, Any]:
    """The options with the meaning that they had in the version that wrote them."""
    if version is None and options.get("non_linearity") in _OLD_ACTIVATIONS:
        options["non_linearity"] = _OLD_ACTIVATIONS[options["non_linearity"]]
    number = str(version).removeprefix("adapters.").split(".")[:2]
    old = str(version).startswith("adapters.") and all(part.isdecimal() for part in number)
    if "alpha" in options and old and tuple(map(int, number)) < _FIXED_SCALE:
        options["alpha"] = options["r"]
    return options


def _read_head(folder: Path, name: str, allow_pickle: bool) -> AdaptersHead | None:
    if not (folder / HEAD_CONFIG_FILE).is_file():
        return None
    tree = _read_json(folder / HEAD_CONFIG_FILE)
    options = tree.get("config") or {}
    if not isinstance(options, dict) or len(json.dumps(options)) > MAX_CONFIG_BYTES:
        raise FileError(f"{folder / HEAD_CONFIG_FILE}: config is not an object")
    tensors = read_foreign_tensors(folder, *HEAD_WEIGHTS, allow_pickle=allow_pickle)
    own = tree.get("name") or name
    tensors = {n.removeprefix(f"heads.{own}."): t for n, t in tensors.items()}
    labels = options.get("label2id") or tree.get("label2id") or {}
    if problems := _labels("label2id", labels):
        raise FileError(f"{folder / HEAD_CONFIG_FILE} cannot be used", offenders=shorten(problems))
    # The head of a class of transformers is written with the names that its config began with.
    count = (options or tree).get("num_labels")
    return AdaptersHead(options, tensors, labels if len(labels) == count else {})
