"""Prompts and prefixes of peft in our terms.

peft keeps the one prompt that a network gave, or the prefixes of all layers side by side. Its
prefix lies in the KV cache, so tokens count their positions behind it. A classifier of peft reads
what stands at the first position, which in an encoder is a virtual token: ours never is.

Where peft counts two submodules (an encoder and a decoder) it lays the prefixes out for two KV
caches, and the self-attention of layer i gets the prefix of layer 2 i, counted round. So it trained
them, and so they are imported; prefixes that differ in all layers cannot be exported to there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.errors import SiteError
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.specs import sites_option
from adapterhub.interchange.translation import Translation
from adapterhub.methods.prefix import Prefix
from adapterhub.methods.prompt import Prompt

TENSOR = "prompt_embeddings"


def import_peft_prompt(
    files: PeftFiles, places: ModuleFinder, draft: Translation
) -> dict[str, Tensor]:
    """Translate a prompt into the draft; returns the other tensors."""
    rest, table = _table(files, draft)
    anatomy, length = draft.anatomy, files.config["num_virtual_tokens"]
    method = Prompt(length=length)
    site = method.site(anatomy)
    if table is not None:
        # In an encoder-decoder the rows of a second prompt are kept, and never used.
        table = table[:length]
        if tuple(table.shape) != (length, site.d_out):
            draft.problems.append(
                f"{TENSOR}: shape {tuple(table.shape)}, this backbone needs {(length, site.d_out)}"
            )
        draft.problems += prompt_problems(anatomy)
        draft.methods.append({method.name: {"length": length, "sites": ["embed"]}})
        draft.tensors[f"{site.id}.{method.name}.prompt"] = table
    return rest


def prompt_problems(anatomy: Anatomy) -> list[str]:
    """Why a prompt does not mean the same here and in peft."""
    if "encoder" in anatomy.stacks and anatomy.head() and _reads_one_position(anatomy):
        return ["the head reads one position: in peft a virtual token's, here one of the text"]
    return []


def _reads_one_position(anatomy: Anatomy) -> bool:
    name = type(anatomy.model).__name__
    return "ForSequenceClassification" in name or "ForMultipleChoice" in name


def _table(files: PeftFiles, draft: Translation) -> tuple[dict[str, Tensor], Tensor | None]:
    rest = dict(files.tensors)
    table = rest.pop(TENSOR, None)
    if table is None or table.ndim != 2:
        draft.problems.append(f"{TENSOR}: missing, or no table")
        return rest, None
    return rest, table.to(torch.float32)


def prefix_sites(anatomy: Anatomy) -> list[Site]:
    """The attentions that a prefix of peft enters: those of the text's own layers, in order."""
    stack = "decoder" if "decoder" in anatomy.stacks else "encoder"
    sites = anatomy.sites.values()
    return [s for s in sites if s.stack == stack and s.role == "attn.kv"]


def prefix_problems(anatomy: Anatomy) -> list[str]:
    """Why a prefix does not mean the same here and in peft."""
    config = anatomy.model.config.get_text_config()
    windows = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    found = ["a prefix in the KV cache leaves a sliding window, ours never does"] if windows else []
    if not prefix_sites(anatomy):
        return [*found, f"prefixes cannot enter the attention of {config.model_type}"]
    try:
        list(Prefix(positions=True, sites=("attn.kv",)).plan(anatomy))
    except SiteError as error:
        found.append(error.problem)
    return found


def import_peft_prefix(
    files: PeftFiles, places: ModuleFinder, draft: Translation
) -> dict[str, Tensor]:
    """Translate a prefix into the draft; returns the other tensors."""
    rest, table = _table(files, draft)
    draft.problems += prefix_problems(draft.anatomy)
    sites, length = prefix_sites(draft.anatomy), files.config["num_virtual_tokens"]
    if table is None or draft.problems:
        return rest
    wanted = (length, sum(2 * site.d_out for site in sites))
    if tuple(table.shape) != wanted:
        draft.problems.append(f"{TENSOR}: shape {tuple(table.shape)}, here it must be {wanted}")
        return rest
    step = files.config["num_transformer_submodules"] or 1
    if step != len(draft.anatomy.stacks):
        draft.problems.append(f"num_transformer_submodules: {step}, not as here")
        return rest
    pairs = table.view(length, len(sites), 2, -1).permute(1, 2, 0, 3)  # (layers, 2, length, d_kv)
    pairs = pairs[[step * number % len(sites) for number in range(len(sites))]]
    options = {"length": length, "positions": True, "sites": sites_option(draft.anatomy, sites)}
    draft.methods.append({Prefix.name: options})
    for site, pair in zip(sites, pairs, strict=True):
        draft.tensors[f"{site.id}.{Prefix.name}.prefix"] = pair.contiguous()
    return rest
