"""Derive the row of an architecture from the modules of a model."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from adapterhub.anatomy.discovery.layer_lists import layer_lists
from adapterhub.anatomy.discovery.stack_names import named
from adapterhub.anatomy.discovery.stacks import discovered_stack
from adapterhub.anatomy.family import Family
from adapterhub.anatomy.own_modules import own_modules
from adapterhub.anatomy.sites import join
from adapterhub.anatomy.tokens import token_table

_EMBEDDING = re.compile(r"emb|^wte$|^wpe$|^shared$|^project_in$", re.IGNORECASE)


def discover(model: PreTrainedModel) -> Family:
    """Derive the row of a model from its structure; it has no stacks if there are no layers."""
    base = cast(PreTrainedModel, model.base_model)
    lists = layer_lists(base)
    alone = len(lists) == 1
    stacks = [discovered_stack(model, path, layers, alone=alone) for path, layers in lists]
    stacks = named(stacks, by_input=not model.config.is_encoder_decoder)
    row = Family(
        (model.config.model_type,),
        tuple(sorted(stacks, key=lambda stack: stack.name in ("decoder", "language"))),
        tuple(_below(base, [stack.layers for stack in stacks])),
        constants=tuple(_constants(base)),
    )
    return replace(row, positions_from_padding=_counts_from_padding(base, row))


def _below(base: PreTrainedModel, lists: list[str]) -> Iterator[str]:
    """Yield the outermost embedding modules outside the layers."""
    yielded: list[str] = []
    layers = tuple(path.split(".*")[0] + "." for path in lists)
    tokens = token_table(base)
    for path, module in own_modules(base):
        name = path.rpartition(".")[2]
        around = any(layer.startswith(f"{path}.") for layer in layers)
        embeds = module is tokens or _EMBEDDING.search(name)
        if path.startswith((*layers, *yielded)) or around or not embeds:
            continue
        if any(True for _ in module.parameters()):
            yielded.append(f"{path}.")
            yield path


def _constants(base: nn.Module) -> Iterator[str]:
    for path, module in own_modules(base):
        if "Sinusoidal" in type(module).__name__:
            yield from (join(path, name) for name, _ in module.named_parameters(recurse=False))


def _counts_from_padding(base: nn.Module, row: Family) -> bool:
    accepts_positions = any(
        "position_ids" in inspect.signature(base.get_submodule(s.root).forward).parameters
        for s in row.stacks
    )
    name = "create_position_ids_from_input_ids"
    counters = [base.get_submodule(path) for path in row.below]
    return accepts_positions and any(
        hasattr(m, name) or hasattr(sys.modules[type(m).__module__], name) for m in counters
    )
