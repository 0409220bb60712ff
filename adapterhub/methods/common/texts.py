"""Start virtual tokens from a text: its embeddings, or the keys and values computed for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from adapterhub.anatomy.backbone import device_of
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.errors import ConfigError, SiteError

Pair = tuple[Tensor, Tensor]


def token_ids(anatomy: Anatomy, text: str) -> Tensor:
    """Return the ids of a text, with the special tokens that the tokenizer adds: (tokens,).

    Raises:
        ConfigError: the model lacks a recorded tokenizer, or the text is empty.
    """
    snapshot = anatomy.backbone.tokenizer
    if snapshot is None:
        raise ConfigError(
            "a start from a text needs the tokenizer of the backbone",
            expected="a model of ah.load_backbone, which loads both",
            hint="attach(..., tokenizer=tokenizer)",
        )
    ids = snapshot.tokenizer(text)["input_ids"]
    if not ids:
        raise ConfigError(f"the text {text!r:.80} has no tokens", expected="a text with some")
    embedding: Any = anatomy.backbone.input_embedding
    return torch.tensor(ids, device=device_of(embedding))


def keys_and_values(
    anatomy: Anatomy, sites: Iterable[Site], text: str, length: int
) -> dict[Site, Pair]:
    """Return the keys and values of the first tokens of a text, (length, d_k) and (length, d_v).

    Raises:
        ConfigError: the text has fewer tokens.
        SiteError: attentions whose keys and values the backbone keeps in no cache.
    """
    ids = token_ids(anatomy, text)
    if len(ids) < length:
        raise ConfigError(
            f"the text has {len(ids)} tokens, fewer than length={length}", hint=f"length={len(ids)}"
        )
    cache, pairs, without = _cache(anatomy, ids), {}, []
    for site in sites:
        pair = _held(anatomy, site, cache)
        if [tuple(each.shape) for each in pair] == [(len(ids), width) for width in site.d_kv]:
            pairs[site] = (pair[0][:length].clone(), pair[1][:length].clone())
        else:
            without.append(site.id)
    if without:
        raise SiteError(
            "a text starts what a cache of keys and values holds, all tokens in each layer",
            offenders=without,
            expected="self-attention of a decoder, without a sliding window shorter than the text",
            hint="sites=['attn.kv'], or a start without a text",
        )
    return pairs


def _cache(anatomy: Anatomy, ids: Tensor) -> Any:
    """Return the cache of the bare backbone behind a text; None: it has none."""
    from adapterhub.backbones.probe import evaluation_mode  # slow to import

    if anatomy.backbone.is_encoder_decoder:
        return None
    model = anatomy.backbone.pretrained
    with evaluation_mode(model), torch.no_grad():
        output = model.base_model(input_ids=ids[None], use_cache=True)
    return getattr(output, "past_key_values", None)


def _held(anatomy: Anatomy, site: Site, cache: Any) -> list[Tensor]:
    """Return the keys and the values that a cache holds for an attention, (tokens, d) each."""
    host: Any = anatomy.model.get_submodule(site.host)
    number = getattr(host, "layer_idx", site.layer)
    layers = getattr(cache, "layers", ())
    if not site.role.startswith("attn.") or number is None or number >= len(layers):
        return []
    held = (getattr(layers[number], name, None) for name in ("keys", "values"))
    return [each[0].transpose(0, 1).flatten(1).float() for each in held if each is not None]
