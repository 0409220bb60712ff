"""Comparisons: of all that can be observed of a model, and of data with a schema."""

import hashlib
import json
import signal
from typing import Any

import torch
from jsonschema import Draft202012Validator

from adapterhub.adapters.model_methods import STRUCTURE_LOCK
from adapterhub.adapters.state import find_state
from adapterhub.anatomy.backbone import CHILD, Backbone
from adapterhub.hooks.composition import current_entry
from adapterhub.hooks.slot import Slot
from adapterhub.methods.common.site_module import init_is_skipped
from tests.kit import tiny_models


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors."""
    return float((one - other).detach().abs().max())


# All that can be observed of a model, its tokenizer and its adapters, to compare two moments.


TEXT = "the movie <a> was <b> good <c><d> <own>"


def bytes_of(tensor: torch.Tensor) -> str:
    """Hash the bytes of a tensor, with its type and shape."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def batch_of(model: Any) -> dict[str, torch.Tensor]:
    """Make a batch of ids that the embedding has, without new tokens."""
    batch = tiny_models.batch()
    rows = model.get_input_embeddings().weight.shape[0]
    words = batch["input_ids"] % (rows - tiny_models.WORDS.start) + tiny_models.WORDS.start
    words[:, -1] = tiny_models.EOS
    decoder = {"decoder_input_ids": words} if model.config.is_encoder_decoder else {}
    return batch | {"input_ids": words} | decoder


def observed_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Describe a tokenizer: its serialization, tokens, template and what it makes of a text."""
    if tokenizer is None:
        return {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ignored = ("_tokenizer", "tokens_trie", "deprecation_warnings")
    attributes = {k: repr(v) for k, v in vars(tokenizer).items() if k not in ignored}
    trie = getattr(tokenizer, "tokens_trie", None)
    return {
        "attributes": attributes,
        "trie": None if trie is None else (json.dumps(trie.data), sorted(trie._tokens)),
        "ids": tokenizer.convert_tokens_to_ids(TEXT.split()),
        "pieces": tokenizer(TEXT)["input_ids"],
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "added": {i: repr(t) for i, t in tokenizer.added_tokens_decoder.items()},
        "special": (tokenizer.all_special_tokens, tokenizer.special_tokens_map),
        "size": len(tokenizer),
        "backend": backend and (backend.to_str(), backend.encode_special_tokens),
    }


def _named_hooks(module: torch.nn.Module) -> dict[str, list[str]]:
    hooks = {}
    for name, value in vars(module).items():
        if name.endswith("_hooks") and value:
            hooks[name] = [hook.__qualname__ for hook in value.values()]
        elif name.startswith(("_forward_hooks_", "_forward_pre_hooks_")) and value:
            hooks[name] = [str(len(value))]
    return hooks


def _attributes(module: torch.nn.Module) -> dict[str, str]:
    hidden = ("_parameters", "_modules", "_buffers", "generation_config")
    return {
        name: repr(value)
        if isinstance(value, bool | int | float | str | None)
        else f"{type(value).__name__} {len(value) if isinstance(value, list | dict) else ''}"
        for name, value in sorted(vars(module).items())
        if name not in hidden and "_hooks" not in name
    }


def _slots(model: torch.nn.Module) -> dict[str, Any]:
    return {
        path: (list(slot.sites), slot.active.keys, list(slot._modules), len(slot.patch.undoing))
        for path, slot in model.named_modules()
        if isinstance(slot, Slot)
    }


def observed_state(model: Any) -> dict[str, Any]:
    """Describe the adapters of a model, and what is active."""
    state = find_state(model)
    if state is None:
        return {}
    replacing = state.passes.replacing
    return {
        "adapters": {
            name: (a.active, a.labels, {n: bytes_of(t) for n, t in a.tensors().items()})
            for name, a in state.adapters.items()
        },
        "own": {
            f"{name} {c.name}": (c.active, bytes_of(c.original), c.own is c.original)
            for name, a in state.adapters.items()
            for c in a.changed
        },
        "wide": {
            n: list(a.new_tokens.originals) for n, a in state.adapters.items() if a.new_tokens
        },
        "active": repr(state.activation.compositions),
        "replacing": replacing and repr(replacing.compositions),
        "routes": [repr(route.compositions) for route in state.routes],
        "entry": current_entry(state.scope),
        "labels": len(state.passes.labels.undoing),
        "patch": len(state.patch.undoing),
    }


def observed(model: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Describe the state of a model, with its outputs, and of everything that it changes."""
    tensors = model.state_dict(keep_vars=True)
    ids = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    with torch.no_grad():
        outputs = model(**batch_of(model))
    return {
        "tensors": {n: (bytes_of(t), t.requires_grad, ids[id(t)]) for n, t in tensors.items()},
        "outputs": {n: bytes_of(t) for n, t in outputs.items() if isinstance(t, torch.Tensor)},
        "modules": {n: type(m).__qualname__ for n, m in model.named_modules()},
        "hooks": {n: h for n, m in model.named_modules() if (h := _named_hooks(m))},
        "attributes": {
            n: _attributes(m) for n, m in model.named_modules() if CHILD not in n.split(".")
        },
        "config": repr(model.config.to_dict()),
        "slots": _slots(model),
        "state": observed_state(model),
        "tokenizer": observed_tokenizer(tokenizer),
        "recorded": (s := Backbone.of(model).tokenizer) and s.size,
        "locked": STRUCTURE_LOCK._is_owned(),
        "skips": init_is_skipped(),
        "inference": torch.is_inference_mode_enabled(),
        "handler": signal.getsignal(signal.SIGINT),
    }


def differences(some: Any, other: Any, path: str = "") -> list[str]:
    """List where two descriptions differ."""
    if isinstance(some, dict) and isinstance(other, dict):
        names = [*some, *(name for name in other if name not in some)]
        found = [
            line for n in names for line in differences(some.get(n), other.get(n), f"{path}/{n}")
        ]
        order = list(some) != list(other) and not found
        return found + ([f"{path}: the order of {list(other)}"] if order else [])
    return [] if some == other else [f"{path}: {some!r:.300} -> {other!r:.300}"]


def problems(data: Any, schema: Any) -> list[str]:
    """List where data does not fit a JSON schema."""
    return [found.message for found in Draft202012Validator(schema).iter_errors(data)]
