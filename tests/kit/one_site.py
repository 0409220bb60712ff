"""One method at one site of a tiny model, to compare with the method's equation by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import adapterhub as ah
from adapterhub.anatomy.sites import Site
from adapterhub.backbones.weights import read_bias, read_weight
from tests.kit import tiny_models

# A plain projection, a slice of a fused one, and one without bias.
PROJECTIONS = {
    "bert": "encoder.1.attn.q",
    "gpt2": "decoder.1.attn.v",
    "llama": "decoder.0.ffn.down",
}


class OneSite(NamedTuple):
    """A method's module at a projection: host is the projection, W its weight, b its bias."""

    adapter: Any
    site: Site
    module: Any
    host: nn.Module
    weight: Tensor
    bias: Tensor | None

    def output(self, x: Tensor) -> Tensor:
        """Compute the host's output with the adapter, in the features of the site."""
        y: Tensor = self.host(x)
        return y if self.site.part is None else self.site.part.read(y)


def attach_at(architecture: str, site_id: str, method: str, **options: Any) -> OneSite:
    """Attach a method at one projection."""
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, {method: {"sites": [site_id], **options}})
    (placed,) = adapter.placed
    host = model.get_submodule(placed.site.host)
    weight, bias = read_weight(host, placed.site.part), read_bias(host, placed.site.part)
    return OneSite(adapter, placed.site, placed.module, host, weight, bias)


def trained_names(architecture: str, method: Any) -> set[str]:
    """Return the names of the backbone parameters that a method trains."""
    adapter = ah.attach(tiny_models.model(architecture), method)
    return {changed.name for changed in adapter.changed}


def attention_tensors(model: nn.Module, attention: nn.Module) -> dict[str, Tensor]:
    """Run a batch through a BERT; return query, key, value and output of one self-attention."""
    tensors: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        return lambda module, args, y: tensors.update({name: y, "x": args[0]})

    handles = [
        getattr(attention, name).register_forward_hook(record(name))
        for name in ("query", "key", "value")
    ]
    handles.append(
        attention.register_forward_hook(lambda module, args, y: tensors.update(output=y[0]))
    )
    with torch.no_grad():
        model(**tiny_models.batch())
    for handle in handles:
        handle.remove()
    return tensors
