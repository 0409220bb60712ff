"""Translate prompts and prefixes between peft and our methods.

peft stores the prompt produced by a reparametrization network, or the prefixes of all layers side
by side. Its prefix is stored in the KV cache, so positions of tokens start after it. A classifier
of peft reads the first position, which in an encoder is a virtual token; ours never reads one. peft
puts a prompt in front of padding, and does not pass token ids that let a backbone find the padding,
so imported prompts have `padding: count`.

Where peft counts two submodules (an encoder and a decoder) it lays the prefixes out for two KV
caches, and the self-attention of layer i gets the prefix of layer 2 i (modulo the number of
layers). Such prefixes are imported as trained. They can be exported if layers that share one in
peft have equal prefixes, as imported ones do.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site, sites_option
from adapterhub.errors import SiteError, warn_user
from adapterhub.interchange.peft.export_types import CheckpointPart, ExportSource
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.translation import Translation
from adapterhub.methods.cartridge import Cartridge
from adapterhub.methods.prefix import PartlyFrozenKeyValues, Prefix, PrefixKeyValues
from adapterhub.methods.prompt import Prompt, VirtualTokens

TENSOR = "prompt_embeddings"
_PREFIXES = (PrefixKeyValues, PartlyFrozenKeyValues)


def import_peft_prompt(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> dict[str, Tensor]:
    """Translate a prompt; return the other tensors."""
    rest, table = _table(files, translation)
    anatomy, length = translation.anatomy, files.config["num_virtual_tokens"]
    method = Prompt(length=length)
    site = method.site(anatomy)
    if table is not None:
        # An encoder-decoder has rows of a second prompt, which peft never uses.
        table = table[:length]
        shape, expected = tuple(table.shape), (length, site.d_out)
        if shape != expected:
            translation.problems.append(f"{TENSOR}: shape {shape}, this backbone needs {expected}")
        translation.problems += _task_type_problems(files.config["task_type"])
        translation.problems += prompt_problems(anatomy)
        options = {"length": length, "sites": ["embed"], "counts_padding": True}
        translation.methods.append({method.name: options})
        translation.tensors[f"{site.id}.{method.name}.prompt"] = table
    return rest


def import_peft_prefix(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> dict[str, Tensor]:
    """Translate a prefix, or a cartridge; return the other tensors."""
    rest, table = _table(files, translation)
    anatomy = translation.anatomy
    translation.problems += _task_type_problems(files.config["task_type"])
    translation.problems += prefix_problems(anatomy)
    sites, length = prefix_sites(anatomy), files.config["num_virtual_tokens"]
    if table is None or translation.problems:
        return rest
    shape, expected = tuple(table.shape), (length, sum(2 * site.d_out for site in sites))
    if shape != expected:
        translation.problems.append(f"{TENSOR}: shape {shape}, this backbone needs {expected}")
        return rest
    submodules = files.config["num_transformer_submodules"] or 1
    if submodules != len(anatomy.stacks):
        translation.problems.append(
            f"num_transformer_submodules: {submodules}, this backbone has {len(anatomy.stacks)}"
        )
        return rest
    pairs = table.view(length, len(sites), 2, -1).permute(1, 2, 0, 3)  # (layers, 2, length, d_kv)
    pairs = pairs[_source_layers(len(sites), submodules)]
    cartridge = files.kind == "CARTRIDGE"
    method = Cartridge.name if cartridge else Prefix.name
    frozen = files.config["num_frozen_tokens"] if cartridge else 0
    if frozen >= length:
        translation.problems.append(f"num_frozen_tokens: {frozen} of {length}, none trains")
        return rest
    options = {"length": length, "positions": True, "sites": sites_option(anatomy, sites)}
    translation.methods.append({method: options | ({"frozen": frozen} if cartridge else {})})
    for site, pair in zip(sites, pairs, strict=True):
        name = f"{site.id}.{method}"
        translation.tensors[f"{name}.prefix"] = pair[:, frozen:].contiguous()
        if frozen:
            translation.tensors[f"{name}.first"] = pair[:, :frozen].contiguous()
    return rest


def _table(files: PeftFiles, translation: Translation) -> tuple[dict[str, Tensor], Tensor | None]:
    """Split the tensors into the others and the table of virtual tokens."""
    rest = dict(files.tensors)
    table = rest.pop(TENSOR, None)
    if table is None or table.ndim != 2:
        translation.problems.append(f"{TENSOR}: missing, or not a matrix")
        return rest, None
    return rest, table.to(torch.float32)


def _task_type_problems(task_type: str | None) -> list[str]:
    """Refuse virtual tokens that peft loads but never uses."""
    return [] if task_type else ["task_type: none, and then peft ignores virtual tokens"]


def _model_problems(source: ExportSource) -> list[str]:
    """Refuse models for which peft would ignore virtual tokens."""
    name = type(source.anatomy.model).__name__
    problem = f"peft has no task type for {name}, and without one it ignores virtual tokens"
    return [] if source.task_type else [problem]


def prompt_problems(anatomy: Anatomy) -> list[str]:
    """List the reasons why a prompt computes different results here than in peft."""
    if "encoder" in anatomy.stacks and anatomy.head() and _reads_one_position(anatomy):
        return ["the head reads one position: in peft a virtual token, here a token of the text"]
    return []


def padding_problems(anatomy: Anatomy) -> list[str]:
    """List the reasons why a prompt that skips padding differs from peft.

    Only reasons about padding on the right are listed: a batch may lack padding on the left.
    """
    if "encoder" in anatomy.stacks or not anatomy.head() or not _reads_one_position(anatomy):
        return []
    return [
        "the head reads the last token of a text: in peft the last position, which may be padding, "
        "as with prompt(counts_padding=true)"
    ]


def _reads_one_position(anatomy: Anatomy) -> bool:
    name = type(anatomy.model).__name__
    return "ForSequenceClassification" in name or "ForMultipleChoice" in name


def prefix_sites(anatomy: Anatomy) -> list[Site]:
    """Return the attentions that peft's prefixes enter: the last stack's self-attentions."""
    last = list(anatomy.stacks)[-1:]
    return [s for s in anatomy.sites.values() if s.stack in last and s.role == "attn.kv"]


def prefix_problems(anatomy: Anatomy) -> list[str]:
    """List the reasons why a prefix computes different results here than in peft."""
    config = anatomy.backbone.text_config
    problems = []
    local = "local" in (getattr(config, "attention_layers", None) or ())  # GPT-Neo
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", 1)
    if windowed or local:
        problems.append("a prefix in the KV cache leaves a sliding window, ours never does")
    if not prefix_sites(anatomy):
        return [*problems, f"prefixes cannot enter the attention of {anatomy.backbone.model_type}"]
    if any(site.d_values is not None for site in prefix_sites(anatomy)):
        problems.append(f"keys and values of {config.model_type} differ in size, and peft's do not")
    widths = {site.d_out for site in prefix_sites(anatomy)}
    if not hasattr(config, "num_key_value_heads") and widths != {config.hidden_size}:
        problems.append(
            f"peft gives a prefix the {config.num_attention_heads} heads of the queries, "
            f"the keys of {config.model_type} have fewer"
        )
    base = anatomy.model.get_submodule(anatomy.base_path)
    if "past_key_values" not in inspect.signature(base.forward).parameters:
        problems.append(f"peft needs a KV cache for prefixes, and {config.model_type} has none")
    if len(prefix_sites(anatomy)) != config.num_hidden_layers:
        problems.append(
            f"peft needs a prefix for each of the {config.num_hidden_layers} layers, "
            f"{config.model_type} has {len(prefix_sites(anatomy))} self-attentions"
        )
    try:
        list(Prefix(positions=True, sites=("attn.kv",)).plan(anatomy))
    except SiteError as error:
        problems.append(error.problem)
    return problems


def export_prompt(source: ExportSource) -> CheckpointPart:
    """Return the prompt as peft's table; several prompts are joined."""
    prompts = [p.module.prompt for p in source.parts if isinstance(p.module, VirtualTokens)]
    table = torch.cat([prompt.detach() for prompt in prompts])
    options = _prompt_options(source.anatomy, table)
    problems = _model_problems(source) + prompt_problems(source.anatomy)
    if not all(isinstance(p.method, Prompt) and p.method.counts_padding for p in source.parts):
        problems += padding_problems(source.anatomy)
        warn_user(
            "with padding on the left, peft computes other outputs: it puts a prompt in front of "
            "the padding, as with prompt(counts_padding=true)",
            stacklevel=2,
        )
    return CheckpointPart(
        config=options | {"prompt_tuning_init": "RANDOM"},
        tensors={TENSOR: table},
        problems=problems,
    )


def export_prefix(source: ExportSource) -> CheckpointPart:
    """Return the prefixes as peft's table, (length, layers * 2 * d_kv), or a cartridge's."""
    parts = [p for p in source.parts if isinstance(p.module, _PREFIXES)]
    prefixes = {p.site.id: p.module() for p in parts}
    site_ids = [site.id for site in prefix_sites(source.anatomy)]
    problems = _model_problems(source) + prefix_problems(source.anatomy)
    if set(prefixes) != set(site_ids) or len(prefixes) < len(parts):
        problems.append("prefix: peft needs exactly one in every self-attention of the last stack")
    if not all(isinstance(p.method, Prefix) and p.method.positions is True for p in parts):
        problems.append(
            "prefix: in peft, positions of tokens start after it, as with prefix(positions=true)"
        )
    submodules = len(source.anatomy.stacks)
    if submodules > 1 and source.task_type != "SEQ_2_SEQ_LM":
        problems.append("prefix: peft has none for encoder-decoders other than language models")
    if problems:
        return CheckpointPart(problems=problems)
    own = torch.stack([prefixes[i].detach() for i in site_ids])  # (layers, 2, length, d_kv)
    order = _source_layers(len(own), submodules)
    pairs = torch.zeros_like(own)  # not read by any layer in peft
    pairs[order] = own
    if len(set(order)) < len(order) and (own.is_meta or not torch.equal(pairs[order], own)):
        problem = "prefix: after an encoder, peft gives layer i that of layer 2 i"
        return CheckpointPart(problems=[problem])
    options = _prompt_options(source.anatomy, pairs[0, 0])
    frozen = {p.module.first.shape[1] for p in parts if isinstance(p.module, PartlyFrozenKeyValues)}
    if len(frozen) > 1:
        return CheckpointPart(problems=["frozen: peft has one number of frozen tokens"])
    more = {"num_frozen_tokens": max(frozen)} if frozen else {"prefix_projection": False}
    return CheckpointPart(
        config=options | more | {"num_transformer_submodules": submodules},
        tensors={TENSOR: pairs.permute(2, 0, 1, 3).reshape(pairs.shape[2], -1)},
    )


def _source_layers(count: int, submodules: int) -> list[int]:
    """Return the number of the prefix that peft gives each of `count` layers."""
    return [submodules * number % count for number in range(count)]


def _prompt_options(anatomy: Anatomy, table: Tensor) -> dict[str, Any]:
    """Return peft's options for virtual tokens of shape (length, width)."""
    config = anatomy.backbone.text_config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {
        "num_virtual_tokens": len(table),
        "token_dim": table.shape[1],
        "num_transformer_submodules": 1,
        "num_attention_heads": heads,
        "num_layers": config.num_hidden_layers,
    }
