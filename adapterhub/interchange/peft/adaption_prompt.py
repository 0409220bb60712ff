"""LLaMA-Adapter, ADAPTION_PROMPT in peft.

    decoder.30.attn.kv.llama-adapter.P    model.layers.30.self_attn.adaption_prompt   (1, length, d)
    decoder.30.attn.kv.llama-adapter.g    model.layers.30.self_attn.adaption_gate

peft adapts the topmost layers of Llama, Mistral and GPT-2. On GPT-2 it adds the separate attention
without the output projection, and it adds a bias of that projection twice. Neither is supported
here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site, sites_option
from adapterhub.interchange.peft.export_types import CheckpointPart, ExportSource
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.translation import Translation
from adapterhub.methods.llama_adapter import GatedPrompt, LLaMAAdapter

_MODELS = ("llama", "mistral")
_ATTENTION = "self_attn"
_PROMPT, _GATE = "adaption_prompt", "adaption_gate"


def import_adaption_prompt(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> dict[str, Tensor]:
    """Translate the prompts of a checkpoint; return the other tensors."""
    anatomy, method = translation.anatomy, LLaMAAdapter.name
    sites = {s.host: s for s in anatomy.sites.values() if s.role == "attn.kv"}
    rest: dict[str, Tensor] = {}
    adapted: dict[str, Site] = {}
    for name, tensor in files.tensors.items():
        file_path, _, parameter = name.rpartition(".")
        if parameter not in (_PROMPT, _GATE):
            rest[name] = tensor
            continue
        site = sites.get(finder.find(file_path) or "")
        if site is None:
            translation.problems.append(f"{file_path}: no such attention in this backbone")
            continue
        adapted[site.id] = site
        ours = "P" if parameter == _PROMPT else "g"
        value = tensor.to(torch.float32)
        value = value.squeeze(0) if ours == "P" and value.ndim == 3 else value
        translation.tensors[f"{site.id}.{method}.{ours}"] = value
    translation.problems += _problems(anatomy, adapted.values())
    expected = files.config["adapter_layers"]
    if expected is not None and expected != len(adapted):
        translation.problems.append(f"adapter_layers: {expected}, tensors are in {len(adapted)}")
    options = {
        "length": files.config["adapter_len"],
        "sites": sites_option(anatomy, adapted.values()),
    }
    translation.methods.append({method: options})
    return rest


def _problems(anatomy: Anatomy, sites: Iterable[Site]) -> list[str]:
    """List the reasons why prompts in these attentions compute different results in peft."""
    if anatomy.backbone.model_type not in _MODELS:
        return [f"peft computes adaption prompts as here on {' and '.join(_MODELS)} only"]
    outputs = (anatomy.sites[f"{s.id.removesuffix('kv')}o"] for s in sites)
    problems = [
        f"{site.host}: has a bias, which peft adds twice"
        for site in outputs
        if getattr(anatomy.model.get_submodule(site.host), "bias", None) is not None
    ]
    config = anatomy.backbone.pretrained.config
    if config.num_attention_heads * config.head_dim != config.hidden_size:
        problems.append("head_dim: peft needs heads that are as wide together as a state")
    return problems


def export_adaption_prompt(source: ExportSource) -> CheckpointPart:
    """Return the prompts in peft's form, which are in the topmost layers."""
    parts = [p for p in source.parts if isinstance(p.module, GatedPrompt)]
    problems = _problems(source.anatomy, (part.site for part in parts))
    lengths = {len(p.module.P) for p in parts if isinstance(p.module, GatedPrompt)}
    if len(lengths) > 1:
        problems.append("length: peft has one for all layers")
    stack = parts[0].site.stack
    depth = source.anatomy.depth(stack)
    layers = sorted(part.site.layer or 0 for part in parts)
    if layers != list(range(depth - len(layers), depth)):
        problems.append(f"layers: peft adapts the topmost ones, not {layers} of {depth}")
    tensors: dict[str, Tensor] = {}
    for part in parts:
        module = part.module
        assert isinstance(module, GatedPrompt)
        tensors[f"{part.site.host}.{_PROMPT}"] = module.P.detach()[None]
        tensors[f"{part.site.host}.{_GATE}"] = module.g.detach()
    config = {
        "adapter_len": max(lengths),
        "adapter_layers": len(layers),
        "target_modules": _ATTENTION,
    }
    return CheckpointPart(config=config, tensors=tensors, problems=problems)
