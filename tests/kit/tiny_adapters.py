"""Adapters on tiny models: at one site, on top of others, of a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.anatomy.sites import Site
from adapterhub.backbones.weights import read_bias, read_weight
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer

# One method at one site of a tiny model, to compare with the method's equation by hand.


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


# Adapters on top of others, on tiny models.


def outputs(model: PreTrainedModel, rows: int = 3) -> Tensor:
    """Return the first output of a model, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        first: Tensor = model(**tiny_models.batch(rows))[0]
    return first.clone()


def save_alone(
    folder: Path, method: Any = "pfeiffer(size=4)", architecture: str = "bert", seed: int = 1
) -> Path:
    """Save an adapter of the bare backbone, with arbitrary values, named like its folder."""
    adapter = ah.attach(tiny_models.model(architecture), method, name=folder.name)
    tiny_models.scramble(adapter, seed=seed)
    adapter.save(folder)
    return folder


def attach_on(
    references: list[Any], method: Any = "lora(rank=2)", name: str = "task", seed: int = 2
) -> Adapter:
    """Attach an adapter with arbitrary values on top of others, on a new model."""
    model = tiny_models.model("bert")
    names = [ah.load(model, each, frozen=True).name for each in references]
    adapter = ah.attach(model, method, name=name, on=names)
    tiny_models.scramble(adapter, seed=seed)
    return adapter


def save_on(folder: Path, references: list[Any], method: Any = "lora(rank=2)") -> Tensor:
    """Save an adapter on top of others, named like its folder, and return its outputs."""
    adapter = attach_on(references, method, folder.name)
    adapter.save(folder)
    return outputs(adapter.model)


# Tiny language models on disk, and adapters of them with noise in each tensor.


def write_language_model(folder: Path, architecture: str, seed: int = 0) -> None:
    """Save a language model, with biases that are not zero, and its tokenizer."""
    model = tiny_models.model(architecture, "causal-lm", seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    word_tokenizer("<s>").save_pretrained(folder)


def write_noisy(folder: Path, backbone: Path, spec: object, seed: int = 0) -> Path:
    """Save an adapter."""
    model, _ = ah.load_backbone(str(backbone), task="causal-lm")
    torch.manual_seed(seed)
    adapter = ah.attach(model, spec, name="noisy")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            if tensor.requires_grad:
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    adapter.save(folder)
    return folder


def text_logits(model: torch.nn.Module) -> Tensor:
    """Compute the logits of two texts."""
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25).view(2, 10)).logits


def with_adapters(methods, architecture="bert"):
    """Build a model with adapters, by name, that have an effect."""
    model = tiny_models.model(architecture)
    for name, method in methods.items():
        tiny_models.scramble(ah.attach(model, method, name=name), seed=len(name) + ord(name[0]))
    return model


def loss_and_gradients(adapter: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the loss of a batch, and the gradients."""
    torch.manual_seed(0)  # of the head's dropout
    loss = adapter.model(**batch).loss
    gradients = torch.autograd.grad(loss, list(adapter.parameters()), allow_unused=True)
    return [loss.detach(), *(torch.zeros(()) if g is None else g for g in gradients)]
