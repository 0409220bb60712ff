"""PEFT's checkpoint format: `adapter_config.json` and `adapter_model.safetensors` in a folder.

The reader is strict where `peft` is not: one error lists every option that changes what the adapter
computes and cannot be expressed here. A field that it does not know passes at a neutral value
(null, false, empty), as a later peft writes it where it means nothing; otherwise it is refused.
What serves training alone is ignored. No field can name code, a path or a loader's option:
`auto_mapping` and `tokenizer_kwargs` are never read. `adapter_model.bin` is a pickle: it is opened
only when asked for, and then by torch's `weights_only` loader, which builds tensors and nothing
else.

Options as of peft 0.21, https://huggingface.co/docs/peft/package_reference/lora and its siblings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from adapterhub.errors import FileError, OutputError
from adapterhub.files import schema
from adapterhub.files.atomic import (
    UnreadableError,
    check_place,
    explained,
    put_in_place,
    read_file,
    staging,
    write_files,
)
from adapterhub.files.schema import canonical_json, shorten, show
from adapterhub.interchange.tensors import read_foreign_tensors, tensor_problems

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
CARD_FILE = "README.md"
MAX_CONFIG_BYTES = 16 << 20  # rank_pattern may name every module of a large model
_PROMPT_KINDS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")

# The kinds of model that peft names, by our names.
TASK_TYPES = {
    "classification": "SEQ_CLS",
    "regression": "SEQ_CLS",
    "tagging": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "features": "FEATURE_EXTRACTION",
}
Kind = Literal["LORA", "IA3", "LN_TUNING", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"]


@dataclass(frozen=True)
class PeftFiles:
    """What a folder of peft holds: `config` with every option of its kind, neutral where the file
    says nothing, and `tensors` by their names without the prefix that peft's own classes give."""

    kind: Kind
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class _Field:
    """One option: how its value is checked, its neutral value, and whether another one is read."""

    def __init__(self, check: schema.Check, neutral: Any, *, read: bool = True) -> None:
        self.check, self.neutral, self.read = check, neutral, read


def _any(path: str, value: object) -> list[str]:
    return []


def _optional(check: schema.Check) -> schema.Check:
    return lambda path, value: [] if value is None else check(path, value)


def _either(*checks: schema.Check) -> schema.Check:
    def check(path: str, value: object) -> list[str]:
        found = [one(path, value) for one in checks]
        return [] if not all(found) else [f"{path}: {show(value)} is of a wrong kind"]

    return check


_text = schema.text(r"(?s).{0,100000}", "a string")
_texts = schema.sequence(_text, 0, 100_000)
_names = _optional(_either(_text, _texts))
_size = schema.integer(1, 2**31)
_sizes = _optional(schema.mapping(_text, _size))
_numbers = _optional(schema.mapping(_text, schema.number))
_layers = _optional(
    _either(schema.integer(0, 2**31), schema.sequence(schema.integer(0, 2**31), 0, 10_000))
)


def _unread(neutral: Any = None) -> _Field:
    """An option that changes what is computed, and that only its neutral value is taken of."""
    return _Field(_any, neutral, read=False)


_TRAINING = _Field(_any, None)  # an option that says nothing of what is computed
_COMMON = {
    "peft_type": _Field(_text, None),
    "task_type": _Field(_optional(_text), None),
    "base_model_name_or_path": _Field(_optional(_text), None),
    "revision": _Field(_optional(_text), None),
    "modules_to_save": _Field(_optional(_texts), None),
    "auto_mapping": _TRAINING,
    "peft_version": _TRAINING,
    "inference_mode": _TRAINING,
    "runtime_config": _TRAINING,
}
_TARGETS = {"target_modules": _Field(_names, None), "exclude_modules": _Field(_names, None)}
_LORA = {
    "r": _Field(_size, 8),
    "lora_alpha": _Field(schema.number, 8),
    "lora_dropout": _Field(schema.number, 0.0),
    "fan_in_fan_out": _Field(schema.boolean, False),
    "bias": _Field(schema.text("none|all|lora_only", "none, all or lora_only"), "none"),
    "use_rslora": _Field(schema.boolean, False),
    "use_dora": _Field(schema.boolean, False),
    "init_lora_weights": _Field(_optional(_either(schema.boolean, _text)), True),
    "layers_to_transform": _Field(_layers, None),
    "layers_pattern": _Field(_names, None),
    "rank_pattern": _Field(_sizes, None),
    "alpha_pattern": _Field(_numbers, None),
    "ensure_weight_tying": _Field(schema.boolean, False),
    # Read only by an initialization, or by a gradient.
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config"), _TRAINING),
    **dict.fromkeys(("megatron_core", "qalora_group_size", "velora_config"), _TRAINING),
    **dict.fromkeys(("megatron_config", "alora_invocation_tokens", "layer_replication"), _unread()),
    **dict.fromkeys(
        ("trainable_token_indices", "target_parameters", "monteclora_config"), _unread()
    ),
    **dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config"), _unread()),
    **dict.fromkeys(("use_qalora", "lora_bias"), _unread(False)),
}
_PROMPTS = {
    "num_virtual_tokens": _Field(_size, None),
    "token_dim": _Field(_optional(_size), None),
    "num_transformer_submodules": _Field(_optional(_size), None),
    "num_attention_heads": _Field(_optional(_size), None),
    "num_layers": _Field(_optional(_size), None),
}
_FIELDS: Mapping[Kind, Mapping[str, _Field]] = {
    "LORA": _COMMON | _TARGETS | _LORA,
    "IA3": _COMMON
    | _TARGETS
    | {
        "feedforward_modules": _Field(_names, None),
        "fan_in_fan_out": _Field(schema.boolean, False),
        "init_ia3_weights": _TRAINING,
    },
    "LN_TUNING": _COMMON | _TARGETS,
    "PROMPT_TUNING": _COMMON
    | _PROMPTS
    | dict.fromkeys(
        (
            "prompt_tuning_init",
            "prompt_tuning_init_text",
            "tokenizer_name_or_path",
            "tokenizer_kwargs",
        ),
        _TRAINING,
    ),
    # The files hold what the networks give.
    "P_TUNING": _COMMON
    | _PROMPTS
    | dict.fromkeys(
        (
            *("encoder_reparameterization_type", "encoder_hidden_size"),
            *("encoder_num_layers", "encoder_dropout"),
        ),
        _TRAINING,
    ),
    "PREFIX_TUNING": _COMMON
    | _PROMPTS
    | dict.fromkeys(("init_weights", "encoder_hidden_size", "prefix_projection"), _TRAINING),
}
KINDS: tuple[Kind, ...] = tuple(_FIELDS)


def is_peft(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of peft (it may hold one of ours besides)."""
    return (folder / CONFIG_FILE).is_file()


def read_peft(folder: Path, *, allow_pickle: bool = False) -> PeftFiles:
    """The checkpoint of peft in a folder.

    `allow_pickle` opens `adapter_model.bin` where there is no safetensors file.

    Raises:
        FileError: a file is missing or broken, or options change the function in a way that is not
            known here; all of them are listed.
    """
    config = read_config(folder)
    tensors = read_foreign_tensors(folder, TENSORS_FILE, PICKLE_FILE, allow_pickle=allow_pickle)
    names = [name.removeprefix(_prefix(config["peft_type"])) for name in tensors]
    if len(set(names)) < len(names):
        raise FileError(
            f"the tensors in {folder} cannot be used: two have one name, with and without "
            "base_model",
            expected="each tensor once",
        )
    return PeftFiles(config["peft_type"], config, dict(zip(names, tensors.values(), strict=True)))


def read_config(folder: Path) -> dict[str, Any]:
    """The options in `adapter_config.json`, strictly."""
    source = folder / CONFIG_FILE
    try:
        data = read_file(source, 0, MAX_CONFIG_BYTES, None)
    except UnreadableError as error:
        raise FileError(
            f"{source}: {error}", expected=f"a folder of peft: {CONFIG_FILE} and {TENSORS_FILE}"
        ) from None
    tree, offenders = schema.parse_object(data, MAX_CONFIG_BYTES)
    if offenders:
        raise FileError(f"{source} cannot be read", offenders=shorten(offenders))
    kind = next((k for k in KINDS if k == tree.get("peft_type")), None)
    if kind is None:
        raise FileError(
            f"{source} is of a kind that cannot be imported: {show(tree.get('peft_type'))}",
            expected=f"peft_type one of {', '.join(KINDS)}",
        )
    fields = _FIELDS[kind]
    if problems := _config_problems(tree, fields):
        raise FileError(
            f"{source} has options that cannot be expressed here",
            offenders=shorten(problems),
            expected="options that are known, or at a neutral value",
            hint="a newer adapterhub may know them, or train without them",
        )
    known = {n: v for n, v in tree.items() if n in fields and fields[n] is not _TRAINING}
    return {**neutral(kind), **known}


def neutral(kind: Kind) -> dict[str, Any]:
    """Every option of a kind at its neutral value."""
    return {name: field.neutral for name, field in _FIELDS[kind].items()}


def _config_problems(tree: Mapping[str, Any], fields: Mapping[str, _Field]) -> list[str]:
    problems = []
    for name, value in sorted(tree.items()):
        field = fields.get(name)
        if field is None:
            if not (value is None or value is False or value in ("", [], {})):
                problems.append(f"{show(name)}: unknown, and not neutral: {show(value)}")
        elif field.read:
            problems += field.check(name, value)
        elif not (value in (field.neutral, None) or value in ([], {})):
            problems.append(f"{name}: {show(value)} changes what is computed")
    return problems


def _prefix(kind: str) -> str:
    """What peft's wrappers of a model put before its names."""
    return "base_model." if kind in _PROMPT_KINDS else "base_model.model."


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors by their full names, from the header alone; {} for a pickle.

    Raises:
        FileError: the file is broken.
    """
    path = folder / TENSORS_FILE
    if not path.is_file():
        return {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise FileError(f"{path} cannot be read: {error}") from None


def write_peft(folder: Path, files: PeftFiles, *, card: str = "", overwrite: bool = False) -> None:
    """Write peft's two files and a card, in one step and in canonical bytes, and read them back.

    Raises:
        OutputError: the folder exists (unless `overwrite`) or cannot be written, or a number is not
            finite.
    """
    prefix = _prefix(files.kind)
    numbers = {
        prefix + n if "." in n else n: t.detach().cpu().contiguous().clone()
        for n, t in sorted(files.tensors.items())
    }
    if problems := [line for n, t in numbers.items() for line in tensor_problems(n, t)]:
        raise OutputError("the adapter cannot be exported", offenders=shorten(problems))
    # An older peft takes no field that it does not know, so what says nothing is left out.
    silent = neutral(files.kind)
    needed = {"r", "lora_alpha", "target_modules"}  # vLLM asks for these
    config = {k: v for k, v in files.config.items() if k in needed or v != silent.get(k)}
    config = {k: v for k, v in config.items() if v is not None} | {"peft_type": files.kind}
    payload = {
        # The metadata is what transformers looks for.
        TENSORS_FILE: safetensors.torch.save(numbers, metadata={"format": "pt"}),
        CONFIG_FILE: canonical_json(config | {"inference_mode": True}),
        CARD_FILE: (card or f"An adapter in the format of peft ({files.kind}).\n").encode(),
    }
    with explained(folder):
        check_place(folder, overwrite, payload.keys())
        with staging(folder) as staged:
            write_files(staged, payload)
            read = read_peft(staged)
            if read.tensors.keys() != files.tensors.keys() or not all(
                torch.equal(read.tensors[n.removeprefix(prefix)], t) for n, t in numbers.items()
            ):
                raise OutputError("the files that were written are not the adapter in memory")
            put_in_place(staged, folder, overwrite)
