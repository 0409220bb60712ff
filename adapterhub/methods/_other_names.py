"""Names that methods and their options have elsewhere: in peft, adapters and common scripts.

An alias of an option means the same as the option, for every value, and is accepted by each method
that has the option. The other names are refused, and the error prints what to type instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from adapterhub.config.option_names import OptionNames
from adapterhub.config.options import from_dict
from adapterhub.errors import ConfigError, unknown

T = TypeVar("T")

_ALIASES = {
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "length": "num_virtual_tokens prefix_length prompt_length",
    "size": "bottleneck_size bottleneck_dim adapter_size",
    "activation": "non_linearity",
    "middle": "encoder_hidden_size",
    "reparametrize": "prefix_projection",
    "block": "oft_block_size boft_block_size",
    "coefficients": "n_frequency",
    "pieces": "gralora_k",
    "hybrid": "hybrid_r",
    "factor": "decompose_factor",
    "strength": "delora_lambda",
    "group": "group_size",
}
ALIASES = {alias: option for option, names in _ALIASES.items() for alias in names.split()}

# For each name: the option that it is about ("" for none), and what to type. {sites} are the
# default sites of the method.
_MEANINGS = {
    "target_modules": ("sites", "sites=[{sites}]"),
    "modules": ("sites", "sites=[{sites}]"),
    "feedforward_modules": ("sites", "sites=[{sites}]"),
    "rank_pattern": ("ranks", "ranks={{attn.q: 4}}"),
    "layers_to_transform": ("layers", "layers=[0, 5]"),
    "leave_out": ("layers", "layers=[0, 5], the layers to adapt"),
    "scaling": ("scale", "scale=4"),
    "reduction_factor": ("size", "size=48, the width itself: that of the backbone / the factor"),
    "modules_to_save": ("", "no option: the task head trains with each adapter"),
    "task_type": ("", "task=classification, beside the method"),
    "inference_mode": ("", "no option: activate(model) without names is the bare backbone"),
    "bias": ("", "the method bitfit, also composed: [lora, bitfit]"),
    "use_rslora": ("rank", "the method rslora"),
    "use_dora": ("rank", "the method dora"),
    "init_lora_weights": ("rank", "the method pissa, for pissa"),
    "lr": ("", "train.learning_rate=1e-3, beside the method"),
    "learning_rate": ("", "train.learning_rate=1e-3, beside the method"),
    "epochs": ("", "train.epochs=3, beside the method"),
    "quantize": ("", "quantize=nf4, beside the method"),
}

_MEANT = {
    "adapter adapters bottleneck": (
        "pfeiffer and houlsby are sequential adapters, parallel is beside the layer"
    ),
    "seq-bn": "pfeiffer is this adapter",
    "double-seq-bn": "houlsby is this adapter",
    "par-bn": "parallel is this adapter",
    "qlora": "QLoRA is --method lora --quantize nf4 (in Python: load_backbone(quantize='nf4'))",
    "peft": "peft is a library; its usual method is lora",
    "sft": "any method does supervised fine-tuning: lora, with task=causal-lm",
    "dpo ipo orpo": "preferences are a task: --task preference, with lora or any other method",
    "lora+ loraplus": "lora-plus is this method",
    "prefix-tuning": "prefix is this method",
    "prompt-tuning soft-prompt": "prompt is this method",
    "ptuning": "p-tuning is this method",
    "p-tuning-v2": "prefix is this method",
    "(ia)3": "ia3 is this method",
    "ln-tuning layernorm": "norms is this method",
    "bias": "bitfit is this method",
    "linear linear-probe probe": "head is this method: a classifier on the frozen backbone",
    "finetune fine-tune fine-tuning full-finetuning full-fine-tuning ft": "full trains all weights",
    "none": "full trains all weights, head only a classifier on the frozen backbone",
    "fusion": "adapterfusion is this method",
    "bone": "miss is this method",
    "oftv2": "oft is this method",
    "mam-adapter": "mam is this method",
    "ulmfit": "unfreeze is this method",
    "elmo": "scalar-mix is this method",
}
METHOD_MEANINGS = {name: text for names, text in _MEANT.items() for name in names.split()}


@lru_cache(maxsize=256)
def option_names(cls: type[Any]) -> OptionNames:
    """Return the names of a method's options, with those of other libraries."""
    own = OptionNames(cls, {}, {})
    sites = ", ".join(getattr(cls, "sites", ()))
    meanings = {
        name: text.format(sites=sites)
        for name, (option, text) in _MEANINGS.items()
        if not option or own.own_name(option)
    }
    aliases = {alias: option for alias, option in ALIASES.items() if own.own_name(option)}
    return OptionNames(cls, aliases, meanings)


def read_method_options(cls: type[T], name: str, options: Mapping[str, Any]) -> T:
    """Build a dataclass of a method's options; names of other libraries are accepted.

    Raises:
        ConfigError: unknown options, with what to type instead, or invalid values.
    """
    kind: Any = cls  # mypy does not take a type variable for hashable
    names = option_names(kind)
    return from_dict(cls, names.normal_form(options), where=name, suggest=names.suggest)


def unknown_method(name: str, methods: Iterable[str]) -> ConfigError:
    """Build the error for an unknown method: what the name means, or the nearest."""
    meaning = METHOD_MEANINGS.get(name.lower().replace("_", "-"), "")
    if meaning:
        return ConfigError(f"unknown method {name!r}: {meaning}", hint="adapterhub methods")
    return unknown("method", name, sorted(methods), hint="adapterhub methods")
