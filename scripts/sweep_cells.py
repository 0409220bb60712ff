"""One cell of the sweep: a method on a model, attached, run, saved, loaded and detached.

What has to hold, in this order; the first that does not is the cell's result:

    attach      the method is attached, or refused with an error of adapterhub
    start       outputs are the backbone's (equal, or near for methods with a random start)
    gradients   the loss of a forward pass reaches every module that is placed where it passes
    effect      other values of each of these modules change the outputs
    changes     other values of the adapter change the outputs
    cache       a generation step with cached keys, values or states gives the outputs without
    reload      saved and loaded on the same backbone, it gives the same outputs
    detach      the outputs are those of the bare backbone, to the bit
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.errors import AdapterhubError, ConfigError
from adapterhub.methods import METHODS

LENGTH = 9  # tokens of a text
TOLERANCE = 2e-4  # of outputs that are computed in another order
Inputs = dict[str, Any]


class Broken(Exception):
    """An invariant does not hold."""


class Unreached(Exception):
    """The outputs do not depend on what is adapted: of a text, on biases of a vision tower."""


def cell(model: PreTrainedModel, method: str, inputs: Inputs | None) -> str:
    """Return `ok`, `refused: ...`, `wrong: ...` or `error: ...` for a method on a model.

    Args:
        model: a random model, with no adapter.
        method: a method's name.
        inputs: what the model takes; None if nothing is known that it takes: then it is only
            attached and detached.
    """
    try:
        bare = None if inputs is None else outputs(model, inputs)
        adapter = ah.attach(model, METHODS[method].example(), name="sweep")
    except AdapterhubError as error:
        return f"refused: {error.problem}"
    except Exception as error:
        return f"error: {_text(error)}"
    try:
        if inputs is not None and bare is not None:
            _invariants(model, adapter, method, inputs, bare)
    except Unreached:
        bare = None
    except Broken as broken:
        return f"wrong: {broken}"
    except AdapterhubError as error:
        return f"refused in use: {error.problem}"
    except Exception as error:
        return f"error: {_text(error)}"
    finally:
        _detached(model)
    try:  # whatever the inputs reach
        if bare is not None and not same(outputs(model, inputs or {}), bare, 0.0):
            return "wrong: detach"
    except Exception as error:
        return f"error: after detaching: {_text(error)}"
    return "ok" if bare is not None else "ok, not run"


def _detached(model: PreTrainedModel) -> None:
    for name in list(ah.adapters(model)):
        ah.detach(model, name)


def _invariants(
    model: PreTrainedModel, adapter: Any, method: str, inputs: Inputs, bare: Tensor
) -> None:
    near = {"identity": TOLERANCE, "near-identity": 0.5}.get(METHODS[method].start)
    if near is not None and not same(outputs(model, inputs), bare, near):
        raise Broken("start")
    _check_gradients(model, adapter, inputs)
    _redraw(adapter)
    changed = outputs(model, inputs)
    if adapter.count() and same(changed, bare, 0.0):
        raise Broken("changes")
    _check_cache(model, inputs, bare)
    with tempfile.TemporaryDirectory() as folder:
        adapter.save(Path(folder) / "a")
        _detached(model)
        ah.load(model, Path(folder) / "a")
        if not same(outputs(model, inputs), changed, 1e-6):
            raise Broken("reload")


def _check_gradients(model: PreTrainedModel, adapter: Any, inputs: Inputs) -> None:
    """Check that each placed module that the pass reaches learns, and changes the outputs.

    The head is not looked at: it learns whether or not a site does. Of the tensors of the backbone
    that a method trains, one that learns is enough: some biases cancel.
    """
    _redraw(adapter)
    learning = _learning(model, adapter, inputs)
    placed = [each for each in adapter.placed if any(True for _ in each.module.parameters())]
    silent = [each for each in placed if not _ids(each.module.parameters()) & learning]
    if silent:
        reached = _reached(model, adapter, inputs)
        if missed := [each.site.id for each in silent if each.site.id in reached]:
            raise Broken(f"gradients at {_some(missed)}")
    owned = [change.own for change in adapter.changed if change.method is not None]
    if not _ids([*(p for each in placed for p in each.module.parameters()), *owned]) & learning:
        frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
        if placed or (owned and _learning_frozen(model, frozen, inputs)):
            raise Unreached
        if owned:
            raise Broken("gradients")
        return
    _check_effects(model, [each for each in placed if each not in silent], inputs)


def _ids(parameters: Iterable[Tensor]) -> set[int]:
    return set(map(id, parameters))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _learning(model: PreTrainedModel, adapter: Any, inputs: Inputs) -> set[int]:
    """Return the ids of an adapter's parameters at which a loss has gradients, as in training."""
    options = {"use_cache": False} if _has_cache(model) else {}
    adapter.train_mode()
    for part in model.modules():
        if getattr(part, "layerdrop", 0):
            part.layerdrop = 0.0  # else a layer may be left out
    try:
        loss = _floats(model(**inputs, **options))[0].float().pow(2).sum()
        if not loss.requires_grad:
            return set()
        loss.backward()
        return _ids(p for p in adapter.parameters() if p.grad is not None and bool(p.grad.any()))
    finally:
        model.eval().zero_grad()


def _check_effects(model: PreTrainedModel, placed: Sequence[Any], inputs: Inputs) -> None:
    """Change one module after the other: each has to change the outputs, if its host does."""
    before, silent = outputs(model, inputs), []
    for each in placed:
        _redraw(each.module)
        after = outputs(model, inputs)
        if same(after, before, 0.0) and _host_counts(model, each.site, inputs, after):
            silent.append(each.site.id)
        before = after
    if silent:
        raise Broken(f"no effect at {_some(silent)}")


def _host_counts(model: PreTrainedModel, site: Any, inputs: Inputs, before: Tensor) -> bool:
    """Return whether other weights of a site's host change the outputs.

    In a random model what some layers compute may vanish behind them.
    """
    host = model.get_submodule(site.host)
    kept = {name: value.clone() for name, value in host.state_dict().items()}
    own = [p for p in host.parameters() if p.is_floating_point()]
    if not own:
        return True
    _redraw(host)
    try:
        return not same(outputs(model, inputs), before, 0.0)
    finally:
        host.load_state_dict(kept)


def _reached(model: PreTrainedModel, adapter: Any, inputs: Inputs) -> set[str]:
    """Return the sites of an adapter at whose hosts the backbone's own parameters would learn.

    Where they would not, the backbone does not use what it computes there: MRA's attention is zero
    without its CUDA kernel, for each token and for virtual ones.
    """
    sites = {placed.site.id: placed.site for placed in adapter.placed}
    of_site = {
        name: [
            p
            for p in model.get_submodule(site.host).parameters()
            if p.is_floating_point() and not p.requires_grad
        ]
        for name, site in sites.items()
        if site.kind != "embed" or _tokens_mix(model, inputs)
    }
    learning = _learning_frozen(model, [p for own in of_site.values() for p in own], inputs)
    return {name for name, own in of_site.items() if not own or _ids(own) & learning}


def _learning_frozen(
    model: PreTrainedModel, parameters: Sequence[Tensor], inputs: Inputs
) -> set[int]:
    """Return the ids of frozen parameters at which a loss of the bare model has gradients."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        with ah.disabled(model):
            loss = _floats(model(**inputs))[0].float().pow(2).sum()
            if loss.requires_grad:
                loss.backward()
        return _ids(p for p in parameters if p.grad is not None and bool(p.grad.any()))
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False).grad = None


def _tokens_mix(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Return whether a token changes the outputs of others."""
    ids = inputs["input_ids"]
    others = torch.cat([(ids[:, :1] + 1) % 5, ids[:, 1:]], dim=1)
    with ah.disabled(model):
        one, other = (outputs(model, inputs | {"input_ids": each}) for each in (ids, others))
    return one.dim() < 3 or not torch.equal(one[:, 1:], other[:, 1:])


@torch.no_grad()
def _redraw(adapter: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.add_(0.05 * noise.to(parameter.dtype))


def _check_cache(model: PreTrainedModel, inputs: Inputs, bare: Tensor) -> None:
    """Compare a step with a cache with the last position of a whole pass, if the bare model can."""
    text = not set(inputs) - {"input_ids", "attention_mask"}
    if not (text and _has_cache(model) and model.can_generate() and bare.dim() == 3):
        return
    with ah.disabled(model):
        try:
            step = _cached_step(model, inputs)
        except Exception:  # it has no cache, or takes it in another way
            return
        if step is None or not same(step, bare[:, -1], TOLERANCE):
            return
    step = _cached_step(model, inputs)
    if step is None or not same(step, outputs(model, inputs)[:, -1], TOLERANCE):
        raise Broken("cache")


@torch.no_grad()
def _cached_step(model: PreTrainedModel, inputs: Inputs) -> Tensor | None:
    """Return the outputs at the last position, with a cache of the others; None without one."""
    ids, mask = inputs["input_ids"], torch.ones_like(inputs["input_ids"])
    first = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
    for name in ("past_key_values", "cache_params"):
        if (cache := getattr(first, name, None)) is not None:
            last = {"input_ids": ids[:, -1:], "attention_mask": mask, name: cache}
            return _floats(model(**last, use_cache=True))[0][:, -1]
    return None


def _has_cache(model: PreTrainedModel) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters


def same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether two outputs are equal, relative to their size; NaN is equal to NaN."""
    if one.shape != other.shape:
        return False
    if not tolerance:
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    scale = max(float(other.nan_to_num().abs().max()), 1e-3)
    return float((one - other).nan_to_num().abs().max()) <= tolerance * scale


@torch.no_grad()
def outputs(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Return the first output of a model that is a tensor of numbers."""
    torch.manual_seed(0)  # some models draw in evaluation too
    return _floats(model(**inputs))[0].clone()


def _floats(found: Any) -> list[Tensor]:
    values = found.to_tuple() if hasattr(found, "to_tuple") else found
    flat = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    if not flat:
        raise ConfigError("the model returns no tensor")
    return flat


def inputs_for(model: PreTrainedModel) -> Inputs | None:
    """Return inputs that a model runs with: texts, images or sound; None if none of them works."""
    for candidate in _candidates(model):
        try:
            outputs(model, candidate)
        except Exception:  # it needs something else
            continue
        return candidate
    return None


def _candidates(model: PreTrainedModel) -> Iterator[Inputs]:
    names = inspect.signature(model.forward).parameters
    ids = torch.randint(5, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    texts = [text, {"input_ids": ids}]
    if "decoder_input_ids" in names:
        texts.insert(0, text | {"decoder_input_ids": ids})
    if "bbox" in names:
        texts.insert(0, text | {"bbox": torch.zeros((2, LENGTH, 4), dtype=torch.long)})
    images = [torch.randn(2, _channels(model), size, size) for size in _image_sizes(model)]
    if "input_ids" in names:
        yield from texts
        if "pixel_values" in names:
            yield from (text | {"pixel_values": image} for image in images)
    if "pixel_values" in names:
        yield from ({"pixel_values": image} for image in images)
    if "input_values" in names:
        yield {"input_values": torch.randn(2, 4000)}
        yield {"input_values": torch.randn(2, 4000), "decoder_input_ids": ids}
        yield {"input_values": torch.randn(2, 1024, 128)}
    if "input_features" in names:
        bins = getattr(model.config, "num_mel_bins", 80)
        for features in (torch.randn(2, bins, 3000), torch.randn(2, 100, bins)):
            yield {"input_features": features}
            yield {"input_features": features, "decoder_input_ids": ids}


def _channels(model: PreTrainedModel) -> int:
    parts = (model.config, getattr(model.config, "vision_config", None))
    found = (getattr(part, "num_channels", None) for part in parts)
    return next((n for n in found if isinstance(n, int)), 3)


def _image_sizes(model: PreTrainedModel) -> list[int]:
    parts = (model.config, getattr(model.config, "vision_config", None))
    found = (getattr(part, "image_size", None) for part in parts)
    return [*(n for n in found if isinstance(n, int)), 224, 64, 32]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:150]
