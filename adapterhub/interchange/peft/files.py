"""PEFT's checkpoint format: `adapter_config.json` and `adapter_model.safetensors` in a folder.

The reader is stricter than `peft`: one error lists every option that changes what the adapter
computes and is not supported. Unknown fields are accepted only with a neutral value (null, false,
empty). Options that only affect training are ignored. No field can name code, a path or a loader
option: `auto_mapping` and `tokenizer_kwargs` are never read. `adapter_model.bin` is a pickle: it is
opened only on request, with torch's `weights_only` loader.

Options as of peft 0.21, https://huggingface.co/docs/peft/package_reference/lora and its siblings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import safetensors

from adapterhub.errors import FileError, OutputError, not_fetched
from adapterhub.files import schema
from adapterhub.files.atomic import (
    check_place,
    explained,
    put_in_place,
    staging,
    write_files,
)
from adapterhub.files.schema import canonical_json, shorten, show
from adapterhub.interchange.checkpoint_files import (
    MAX_TENSOR_BYTES,
    TRAINING_ONLY,
    ConfigField,
    config_problems,
    either,
    only,
    optional,
    read_json_object,
    read_tensor_file,
    tensor_problems,
)

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
CARD_FILE = "README.md"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_CONFIG_BYTES = 16 << 20  # rank_pattern may name every module of a large model
_PLACES = (".shira_indices", ".supertuning_indices", ".unilora_indices_A", ".unilora_indices_B")
_PROMPT_KINDS = ("PROMPT_TUNING", "P_TUNING", "CPT", "PREFIX_TUNING", "CARTRIDGE")

# peft's task types by our tasks.
TASK_TYPES = {
    "classification": "SEQ_CLS",
    "multi-label": "SEQ_CLS",
    "regression": "SEQ_CLS",
    "tagging": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "features": "FEATURE_EXTRACTION",
}
PlainKindName = Literal[
    "LOHA", "LOKR", "HIRA", "MISS", "SHIRA", "GRALORA", "DELORA", "OFT", "BOFT", "HRA", "ROAD",
    "VERA", "RANDLORA", "FOURIERFT", "WAVEFT", "C3A", "ADALORA", "SUPERTUNING", "PSOFT", "DEFT",
    "PEANUT", "GLORA", "VBLORA", "UNILORA", "PVERA", "OSF", "TINYLORA", "BEFT",
    "ADAMSS",
]  # fmt: skip
Kind = (
    Literal["LORA", "IA3", "LN_TUNING", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"]
    | Literal["CARTRIDGE", "CPT", "ADAPTION_PROMPT"]
    | PlainKindName
)


@dataclass(frozen=True)
class PeftFiles:
    """A peft checkpoint.

    `config` has every option of its kind, with defaults filled in; `tensors` are named without the
    prefix of peft's wrapper classes (`base_model.model.`). `ends` are the tokens that stop
    generation, if they differ from the backbone's; transformers stores them, peft does not.
    """

    kind: Kind
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    ends: tuple[int, ...] = ()


_text = schema.text(r"(?s).{0,100000}", "a string")
_texts = schema.sequence(_text, 0, 100_000)
_names = optional(either("a string or a list of strings", _text, _texts))
_size = schema.integer(1, 2**31)
_sizes = optional(schema.mapping(_text, _size))
_numbers = optional(schema.mapping(_text, schema.number))
_layer = schema.integer(0, 2**31)
_layers = optional(
    either("a layer number or a list of them", _layer, schema.sequence(_layer, 0, 10_000))
)
_ids = schema.sequence(_layer, 0, 10_000_000)
_ids_by_module = schema.mapping(_text, _ids)
_token_ids = optional(either("token ids, or token ids by module", _ids, _ids_by_module))
_blocks = schema.record(
    {"nblocks": _size},
    {
        **dict.fromkeys(("target_modules_bd_a", "target_modules_bd_b"), optional(_texts)),
        "match_strict": schema.boolean,
    },
)
_unset, _false = only(None, [], {}), only(False, None, [], {})
_COMMON = {
    "peft_type": ConfigField(_text),
    "task_type": ConfigField(optional(_text)),
    "base_model_name_or_path": ConfigField(optional(_text)),
    "revision": ConfigField(optional(_text)),
    "modules_to_save": ConfigField(optional(_texts)),
    "auto_mapping": TRAINING_ONLY,
    "peft_version": TRAINING_ONLY,
    "inference_mode": TRAINING_ONLY,
    "runtime_config": TRAINING_ONLY,
}
_TARGETS = {"target_modules": ConfigField(_names), "exclude_modules": ConfigField(_names)}
_LORA = {
    "r": ConfigField(_size, 8),
    "lora_alpha": ConfigField(schema.number, 8),
    "lora_dropout": ConfigField(schema.number, 0.0),
    "fan_in_fan_out": ConfigField(schema.boolean, False),
    "bias": ConfigField(schema.text("none|all|lora_only", "none, all or lora_only"), "none"),
    "use_rslora": ConfigField(schema.boolean, False),
    "use_dora": ConfigField(schema.boolean, False),
    "init_lora_weights": ConfigField(
        optional(either("true, false or a string", schema.boolean, _text)), True
    ),
    "layers_to_transform": ConfigField(_layers),
    "layers_pattern": ConfigField(_names),
    "rank_pattern": ConfigField(_sizes),
    "alpha_pattern": ConfigField(_numbers),
    "ensure_weight_tying": ConfigField(schema.boolean, False),
    # Read only for initialization or by the backward pass.
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config"), TRAINING_ONLY),
    **dict.fromkeys(("lora_ga_config", "velora_config"), TRAINING_ONLY),
    **dict.fromkeys(("megatron_core", "qalora_group_size"), TRAINING_ONLY),
    **dict.fromkeys(("megatron_config", "layer_replication"), _unset),
    "alora_invocation_tokens": ConfigField(optional(_ids)),
    "trainable_token_indices": ConfigField(_token_ids),
    "target_parameters": ConfigField(optional(_texts)),
    "lora_bias": ConfigField(schema.boolean, False),
    **dict.fromkeys(("arrow_config", "monteclora_config"), _unset),
    "kasa_config": ConfigField(optional(schema.mapping(_text, schema.number))),
    "use_bdlora": ConfigField(optional(_blocks)),
    "use_qalora": _false,
}
_PROMPTS = {
    "num_virtual_tokens": ConfigField(_size),
    "token_dim": ConfigField(optional(_size)),
    "num_transformer_submodules": ConfigField(optional(_size)),
    "num_attention_heads": ConfigField(optional(_size)),
    "num_layers": ConfigField(optional(_size)),
}
_IA3 = {
    "feedforward_modules": ConfigField(_names),
    "fan_in_fan_out": ConfigField(schema.boolean, False),
    "init_ia3_weights": TRAINING_ONLY,
}
_PROMPT_TUNING = (
    *("prompt_tuning_init", "prompt_tuning_init_text"),
    *("tokenizer_name_or_path", "tokenizer_kwargs"),
)
# The files contain the outputs of the reparametrization networks.
_P_TUNING = (
    *("encoder_reparameterization_type", "encoder_hidden_size"),
    *("encoder_num_layers", "encoder_dropout"),
)
_CPT = (
    *("cpt_token_ids", "cpt_mask", "cpt_tokens_type_mask", "tokenizer_name_or_path"),
    *("opt_weighted_loss_type", "opt_loss_decay_factor"),
    *("opt_projection_epsilon", "opt_projection_format_epsilon"),
)
_PREFIX_TUNING = ("init_weights", "encoder_hidden_size", "prefix_projection")
_PLACED = {
    "layers_to_transform": ConfigField(_layers),
    "layers_pattern": ConfigField(_names),
    "bias": only("none"),
    "fan_in_fan_out": ConfigField(schema.boolean, False),
    "init_weights": TRAINING_ONLY,
}
_mini = schema.text("mini", "mini")
_RANKS = {"rank_pattern": ConfigField(_sizes)}
_ALPHAS = {"alpha_pattern": ConfigField(_numbers)}
_DROPPED = dict.fromkeys(("rank_dropout", "module_dropout"), TRAINING_ONLY)
_PLAIN: Mapping[PlainKindName, dict[str, ConfigField]] = {
    "LOHA": {
        "r": ConfigField(_size, 8),
        "alpha": ConfigField(schema.number, 8),
        "use_effective_conv2d": TRAINING_ONLY,
        **_RANKS, **_ALPHAS, **_DROPPED,
    },
    "LOKR": {
        "r": ConfigField(_size, 8),
        "alpha": ConfigField(schema.number, 8),
        "decompose_factor": ConfigField(schema.integer(-1, 2**31), -1),
        "decompose_both": ConfigField(schema.boolean, False),
        "rank_dropout_scale": TRAINING_ONLY,
        "use_effective_conv2d": TRAINING_ONLY,
        **_RANKS, **_ALPHAS, **_DROPPED,
    },
    "HIRA": {
        "r": ConfigField(_size, 32),
        "hira_dropout": TRAINING_ONLY,
        "rank_pattern": TRAINING_ONLY,  # peft 0.21 does not read it
    },
    "MISS": {
        "r": ConfigField(_size, 64),
        "miss_dropout": TRAINING_ONLY,
        "mini_r": ConfigField(schema.integer(0, 2**31), 1),
        "init_weights": ConfigField(
            either("true, false or mini: bat multiplies the weight, too", schema.boolean, _mini),
            True,
        ),
    },
    "SHIRA": {
        "r": ConfigField(_size, 32),
        "mask_type": TRAINING_ONLY,
        "random_seed": TRAINING_ONLY,
    },
    "GRALORA": {
        "r": ConfigField(_size, 32),
        "hybrid_r": ConfigField(schema.integer(0, 2**31), 0),
        "alpha": ConfigField(schema.number, 64),
        "gralora_k": ConfigField(_size, 2),
        "gralora_dropout": TRAINING_ONLY,
    },
    "DELORA": {
        "r": ConfigField(_size, 8),
        "delora_lambda": ConfigField(schema.number, 15),
        "lambda_pattern": ConfigField(_numbers),
        **_RANKS, **_DROPPED,
    },
    "OFT": {
        "r": ConfigField(schema.integer(0, 2**31), 0),
        "oft_block_size": ConfigField(schema.integer(0, 2**31), 32),
        "coft": only(False),
        "eps": TRAINING_ONLY,
        "block_share": ConfigField(schema.boolean, False),
        "use_cayley_neumann": ConfigField(schema.boolean, True),
        "num_cayley_neumann_terms": ConfigField(schema.integer(1, 32), 5),
        **_DROPPED,
    },
    "BOFT": {
        "boft_block_size": ConfigField(schema.integer(0, 2**31), 4),
        "boft_block_num": ConfigField(schema.integer(0, 2**31), 0),
        "boft_n_butterfly_factor": ConfigField(schema.integer(1, 64), 1),
        "boft_dropout": TRAINING_ONLY,
    },
    "HRA": {"r": ConfigField(_size, 8), "apply_GS": only(False)},
    "ROAD": {
        "variant": ConfigField(schema.text("road_[124]", "road_1, road_2 or road_4"), "road_1"),
        "group_size": ConfigField(schema.integer(2, 2**31), 64),
    },
    "VERA": {
        "r": ConfigField(_size, 256),
        "projection_prng_key": ConfigField(schema.integer(0, 2**63), 0),
        "save_projection": ConfigField(schema.boolean, True),
        "vera_dropout": TRAINING_ONLY,
        "d_initial": TRAINING_ONLY,
    },
    "RANDLORA": {
        "r": ConfigField(_size, 32),
        "randlora_alpha": ConfigField(schema.number, 640),
        "projection_prng_key": ConfigField(schema.integer(0, 2**63), 0),
        "save_projection": only(True),  # otherwise drawn in bf16 or fp16, depending on the machine
        "sparse": only(False),
        "very_sparse": only(False),
        "randlora_dropout": TRAINING_ONLY,
    },
    "FOURIERFT": {
        "n_frequency": ConfigField(_size, 1000),
        "scaling": ConfigField(schema.number, 150.0),
        "random_loc_seed": ConfigField(schema.integer(0, 2**63), 777),
        "n_frequency_pattern": ConfigField(_sizes),
        "ifft2_norm": only("backward"),
    },
    "WAVEFT": {
        "n_frequency": ConfigField(_size, 2592),
        "scaling": ConfigField(schema.number, 25.0),
        "wavelet_family": only("db1"),
        "use_idwt": only(True),
        "random_loc_seed": ConfigField(schema.integer(0, 2**63), 777),
        "n_frequency_pattern": ConfigField(_sizes),
        "proportional_parameters": only(False),
    },
    "C3A": {"block_size": ConfigField(_size, 256), "block_size_pattern": ConfigField(_sizes)},
    "PVERA": {
        "r": ConfigField(_size, 256),
        "projection_prng_key": ConfigField(schema.integer(0, 2**63), 0),
        "save_projection": ConfigField(schema.boolean, True),
        "sample_at_inference": only(False),
        **dict.fromkeys(("pvera_dropout", "d_initial", "generator_seed"), TRAINING_ONLY),
    },
    "TINYLORA": {
        "r": ConfigField(_size, 2),
        "u": ConfigField(_size, 64),
        "weight_tying": ConfigField(schema.number, 0.0),
        "projection_seed": ConfigField(schema.integer(0, 2**62), 42),
        "save_projection": ConfigField(schema.boolean, True),
        **dict.fromkeys(("init_v_bound", "tinylora_dropout"), TRAINING_ONLY),
    },
    "BEFT": {},
    "ADAMSS": {  # the tensors determine the ranks
        "r": ConfigField(_size, 100),
        "num_subspaces": ConfigField(schema.integer(1, 64), 5),
        "random_seed": ConfigField(schema.integer(0, 2**63), 0),
        **dict.fromkeys(("subspace_rank", "use_dynamic_rank", "svd_threshold"), TRAINING_ONLY),
        **dict.fromkeys(("init_weights", "use_asa", "asa_target_subspaces"), TRAINING_ONLY),
        **dict.fromkeys(("init_warmup", "final_warmup", "mask_interval"), TRAINING_ONLY),
        **dict.fromkeys(("asa_importance_beta", "asa_uncertainty_beta"), TRAINING_ONLY),
        "asa_schedule_exponent": TRAINING_ONLY,
    },
    "OSF": {  # the tensors determine the rank
        "effective_rank": ConfigField(optional(schema.number)),
        "rank_pattern": ConfigField(_numbers),
        "target_svd_config": TRAINING_ONLY,
    },
    "SUPERTUNING": {
        "sparsity": ConfigField(schema.number, 0.99),
        "select_top": ConfigField(schema.boolean, True),
        "r": _unset,  # Supra: an additional LoRA
        "lora_alpha": TRAINING_ONLY,
        "lora_dropout": TRAINING_ONLY,
        "save_precomputed_indices": ConfigField(schema.boolean, True),
    },
    "PSOFT": {
        "r": ConfigField(_size, 32),
        "psoft_alpha": ConfigField(schema.number, 32),
        "ab_svd_init": only("psoft_init"),
        "psoft_svd": only("full"),
        "psoft_orth": only(True),
        "psoft_mag_a": ConfigField(schema.boolean, True),
        "psoft_mag_b": ConfigField(schema.boolean, True),
        "use_cayley_neumann": ConfigField(schema.boolean, False),
        "num_cayley_neumann_terms": ConfigField(schema.integer(1, 32), 5),
        "cayley_neumann_eps": _unset,
        **dict.fromkeys(("psoft_dropout", "psoft_svd_lowrank_niter", "random_seed"), TRAINING_ONLY),
    },
    "DEFT": {
        "r": ConfigField(_size, 8),
        "decomposition_method": ConfigField(schema.text("relu|qr", "relu or qr"), "relu"),
        "alpha": ConfigField(optional(schema.number)),
        "para": ConfigField(schema.boolean, False),
        **dict.fromkeys(("init_scale", "deft_dropout"), TRAINING_ONLY),
    },
    "PEANUT": {
        "r": ConfigField(_size, 32),
        "depth": ConfigField(schema.integer(0, 64), 0),
        "act_fn": ConfigField(_text, "relu"),
        "scaling": ConfigField(schema.number, 1.0),
    },
    "GLORA": {
        "r": ConfigField(_size, 8),
        "config_A_B": ConfigField(schema.text("lora|vector|constant|none", "a form"), "lora"),
        "config_C": ConfigField(schema.text("lora|vector|none", "a form"), "lora"),
        "config_D_E": ConfigField(schema.text("vector|constant|none", "a form"), "constant"),
    },
    "VBLORA": {
        "r": ConfigField(_size, 4),
        "num_vectors": ConfigField(_size, 256),
        "vector_length": ConfigField(_size, 256),
        "topk": ConfigField(_size, 2),
        "save_only_topk_weights": only(False),
        **dict.fromkeys(("vblora_dropout", "init_vector_bank_bound"), TRAINING_ONLY),
        "init_logits_std": TRAINING_ONLY,
    },
    "UNILORA": {
        "r": ConfigField(_size, 4),
        "theta_d_length": ConfigField(schema.integer(1, 1 << 27), 256),
        "proj_seed": ConfigField(schema.integer(0, 2**63), 42),
        "save_indices": ConfigField(schema.boolean, False),
        **dict.fromkeys(("unilora_dropout", "init_theta_d_bound"), TRAINING_ONLY),
    },
    "ADALORA": {
        **_LORA,
        "init_r": ConfigField(_size, 12),
        "total_step": TRAINING_ONLY,
        "bias": only("none"),
        "lora_bias": only(False),
        **dict.fromkeys(("trainable_token_indices", "target_parameters"), _unset),
        **dict.fromkeys(("kasa_config", "use_bdlora"), _unset),
        # It masks components that are no longer in the file. peft 0.21 does not read the others.
        **dict.fromkeys(("rank_pattern", "alpha_pattern", "use_rslora"), TRAINING_ONLY),
        **dict.fromkeys(("lora_dropout", "init_lora_weights"), TRAINING_ONLY),
        **dict.fromkeys(("target_r", "tinit", "tfinal", "deltaT"), TRAINING_ONLY),
        **dict.fromkeys(("beta1", "beta2", "orth_reg_weight"), TRAINING_ONLY),
    },
}  # fmt: skip
_FIELDS: Mapping[Kind, Mapping[str, ConfigField]] = {
    **{kind: _COMMON | _TARGETS | _PLACED | fields for kind, fields in _PLAIN.items()},
    "LORA": _COMMON | _TARGETS | _LORA,
    "IA3": _COMMON | _TARGETS | _IA3,
    "LN_TUNING": _COMMON | _TARGETS,
    "PROMPT_TUNING": _COMMON | _PROMPTS | dict.fromkeys(_PROMPT_TUNING, TRAINING_ONLY),
    "P_TUNING": _COMMON | _PROMPTS | dict.fromkeys(_P_TUNING, TRAINING_ONLY),
    "PREFIX_TUNING": _COMMON | _PROMPTS | dict.fromkeys(_PREFIX_TUNING, TRAINING_ONLY),
    "CPT": _COMMON | _PROMPTS | dict.fromkeys(_CPT, TRAINING_ONLY),
    "CARTRIDGE": _COMMON
    | _PROMPTS
    | {"num_frozen_tokens": ConfigField(schema.integer(0, 2**31), 1)},
    "ADAPTION_PROMPT": _COMMON
    | {
        "target_modules": TRAINING_ONLY,  # implied by the attentions with tensors
        "adapter_len": ConfigField(_size, required=True),
        "adapter_layers": ConfigField(optional(_size)),
    },
}
KINDS: tuple[Kind, ...] = tuple(_FIELDS)


def is_peft(folder: Path) -> bool:
    """Return whether a folder contains a peft checkpoint, possibly next to a native one."""
    return (folder / CONFIG_FILE).is_file()


def read_peft(
    folder: Path, *, allow_pickle: bool = False, most: int = MAX_TENSOR_BYTES
) -> PeftFiles:
    """Read the peft checkpoint in a folder.

    Raises:
        FileError: a file is missing or damaged, or options are not supported; lists all of them.
    """
    config = read_config(folder)
    tensors = read_tensor_file(
        folder, TENSORS_FILE, PICKLE_FILE, allow_pickle=allow_pickle, most=most, places=_PLACES
    )
    names = [name.removeprefix(_prefix(config["peft_type"])) for name in tensors]
    if len(set(names)) < len(names):
        raise FileError(
            f"duplicate tensors in {folder}: the same name with and without base_model",
            expected="each tensor once",
        )
    return PeftFiles(config["peft_type"], config, dict(zip(names, tensors.values(), strict=True)))


def read_config(folder: Path) -> dict[str, Any]:
    """Read the options in `adapter_config.json`, with defaults filled in.

    Raises:
        FileError: the file is missing or damaged, or options are not supported.
    """
    path = folder / CONFIG_FILE
    config = read_json_object(
        path, MAX_CONFIG_BYTES, expected=f"a peft checkpoint: {CONFIG_FILE} and {TENSORS_FILE}"
    )
    kind = next((k for k in KINDS if k == config.get("peft_type")), None)
    if kind is None:
        raise FileError(
            f"{path} has a peft_type that is not supported: {show(config.get('peft_type'))}",
            expected=f"one of {', '.join(KINDS)}",
        )
    fields = _FIELDS[kind]
    if problems := option_problems(kind, config):
        raise FileError(
            f"{path} has options that are not supported",
            offenders=shorten(problems),
            expected="supported options, or neutral values",
            hint="upgrade adapterhub, or train without these options",
        )
    used = {n: v for n, v in config.items() if n in fields and fields[n] is not TRAINING_ONLY}
    return {**neutral(kind), **used}


def option_problems(kind: Kind, config: Mapping[str, Any], path: str = "") -> list[str]:
    """Return one line for each option of a kind that is not supported."""
    return config_problems(config, _FIELDS[kind], path)


def neutral(kind: Kind) -> dict[str, Any]:
    """Return every option of a kind at its default."""
    return {name: field.default for name, field in _FIELDS[kind].items()}


def _prefix(kind: str) -> str:
    """Return the prefix that peft's wrapper classes add to module paths."""
    return "base_model." if kind in _PROMPT_KINDS else "base_model.model."


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the tensors' shapes by full name from the safetensors header; {} for a pickle.

    Raises:
        FileError: the file is damaged.
    """
    path = folder / TENSORS_FILE
    if not path.is_file():
        return {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        with open(path, "rb") as start:
            reason = not_fetched(start.read(2048)) or error
        raise FileError(f"{path} cannot be read: {reason}") from None


def kind_of_config(data: bytes) -> str | None:
    """Return the kind of model in the bytes of a configuration, a key of TASK_MODELS; or None."""
    tree, _ = schema.parse_object(data, MAX_CONFIG_BYTES)
    recorded = tree.get("task_type")
    return next((kind for kind, name in TASK_TYPES.items() if name == recorded), None)


def peft_bytes(files: PeftFiles) -> dict[str, bytes]:
    """Return the bytes of a checkpoint's two files by name, written and read back.

    Raises:
        OutputError: a value is not finite.
    """
    with TemporaryDirectory() as path:
        folder = Path(path) / "peft"
        write_peft(folder, files)
        return {name: (folder / name).read_bytes() for name in (CONFIG_FILE, TENSORS_FILE)}


def write_peft(
    folder: Path,
    files: PeftFiles,
    *,
    card: str = "",
    overwrite: bool = False,
    template: str | None = None,
) -> None:
    """Write a peft checkpoint and a card atomically, in canonical bytes, and read it back.

    Without a card, a short one is written. `template` is the chat template, which peft does not
    read.

    Raises:
        OutputError: the folder exists or cannot be written, or a value is not finite.
    """
    from safetensors.torch import save  # imports torch, which is slow

    prefix = _prefix(files.kind)
    tensors = {
        prefix + n if "." in n else n: t.detach().cpu().contiguous().clone()
        for n, t in sorted(files.tensors.items())
    }
    if problems := [line for n, t in tensors.items() for line in tensor_problems(n, t, _PLACES)]:
        raise OutputError("the adapter cannot be exported", offenders=shorten(problems))
    payload = {
        # transformers requires this metadata.
        TENSORS_FILE: save(tensors, metadata={"format": "pt"}),
        CONFIG_FILE: canonical_json(_written_config(files)),
        CARD_FILE: (card or f"An adapter in peft's format ({files.kind}).\n").encode(),
    }
    if files.ends:
        payload[GENERATION_FILE] = canonical_json({"eos_token_id": list(files.ends)})
    if template is not None:
        payload[TEMPLATE_FILE] = template.encode()
    with explained(folder):
        check_place(folder, overwrite, {*payload, GENERATION_FILE, TEMPLATE_FILE})
        with staging(folder) as staged:
            write_files(staged, payload)
            written = read_peft(staged).tensors
            if written.keys() != files.tensors.keys() or not all(
                written[n.removeprefix(prefix)].equal(t) for n, t in tensors.items()
            ):
                raise OutputError("the written files differ from the adapter in memory")
            put_in_place(staged, folder, overwrite)


def _written_config(files: PeftFiles) -> dict[str, Any]:
    """Omit options at their defaults: an older peft refuses unknown fields."""
    defaults = neutral(files.kind)
    required = {"r", "lora_alpha", "target_modules", "oft_block_size"}  # by vLLM, and by peft
    config = {
        name: value
        for name, value in files.config.items()
        if value is not None and (name in required or value != defaults.get(name))
    }
    return config | {"peft_type": files.kind, "inference_mode": True}
