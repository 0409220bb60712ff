"""Make an adapter of methods for one backbone, beside it: the model is not touched."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter, Home
from adapterhub.adapters.parts import LABEL_FIELDS, AdapterHead, OwnedParameter, PlacedModule
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.newly_initialized import newly_initialized
from adapterhub.backbones.token_embedding import checkpoint_vocabulary_size, token_embedding
from adapterhub.backbones.weights import device_of, offloaded, storage_problems
from adapterhub.errors import AdapterhubError, AttachError, SiteError
from adapterhub.files.manifest import NewToken
from adapterhub.hooks.attention import check_attention
from adapterhub.hooks.new_tokens import NewTokenRows, new_token_rows
from adapterhub.methods._base import METHODS, Method, Placement, Step, Unfrozen


def build_adapter(
    home: Home,
    anatomy: Anatomy,
    methods: tuple[Method, ...],
    name: str,
    tokens: tuple[NewToken, ...],
    serial: int,
) -> Adapter:
    """A new adapter of parsed methods. `serial` sets its modules apart from those of other adapters
    whose names look alike in module names.

    Raises:
        SiteError: a method does not fit the backbone; the error names those that do.
        AttachError: two methods of one kind at one site, or rows of the embedding without a token.
    """
    steps = [
        (part, step)
        for method in methods
        for part in method.parts()
        for step in _plan(method, part, anatomy)
    ]
    fresh = sorted(newly_initialized(anatomy.model) & anatomy.parameters().keys())
    _refuse_offloaded(anatomy, fresh, tokens)
    key = f"{_slug(name)}-{serial}"
    placed = [
        PlacedModule(
            part,
            step.site,
            _moved(step, anatomy),
            f"{key}-{step.site.role.replace('.', '_')}-{part.name}",
        )
        for part, step in steps
        if isinstance(step, Placement)
    ]
    changed = list(_own_copies(_unfrozen(steps, fresh), anatomy))
    adapter = Adapter(
        name, methods, anatomy.model, anatomy, placed, changed, _own_head(anatomy), home
    )
    adapter.vocabulary = _vocabulary(anatomy.model, tokens, key)
    _refuse_duplicates(adapter)
    return adapter


def _unfrozen(
    steps: Iterable[tuple[Method, Step]], fresh: Iterable[str]
) -> list[tuple[Method | None, Unfrozen]]:
    """What methods unfreeze, and what the checkpoint lacked: it was drawn anew, so it trains."""
    chosen: list[tuple[Method | None, Unfrozen]] = [
        (m, s) for m, s in steps if isinstance(s, Unfrozen)
    ]
    taken = {step.path for _, step in chosen}
    return chosen + [(None, Unfrozen(path)) for path in fresh if path not in taken]


def _vocabulary(
    model: PreTrainedModel, tokens: tuple[NewToken, ...], key: str
) -> NewTokenRows | None:
    """The rows of new tokens; rows that were added to the model without a token are refused."""
    table = token_embedding(model)
    if table is None:
        return None
    known = checkpoint_vocabulary_size(model) or len(table)
    if tokens:
        return new_token_rows(model, tokens, known, f"{key}-tokens")
    if len(table) > known:
        raise AttachError(
            f"the embedding has {len(table)} rows, its checkpoint {known}: which tokens are new?",
            hint="attach(..., tokenizer=tokenizer), with the tokenizer that they were added to",
        )
    return None


def _plan(method: Method, part: Method, anatomy: Anatomy) -> list[Step]:
    try:
        steps = list(part.plan(anatomy))
        _refuse_untrainable(part, steps, anatomy)
        return steps
    except SiteError as error:
        if _fits(type(method), anatomy):  # its defaults do: it is the user's options
            raise
        fitting = [name for name, cls in sorted(METHODS.items()) if _fits(cls, anatomy)]
        raise SiteError(
            f"{method.name} does not fit a {anatomy.model.config.model_type} backbone: "
            f"{error.problem}",
            offenders=error.offenders,
            expected=error.expected,
            hint=f"one of the methods that fit: {', '.join(fitting)}",
        ) from error


def _fits(cls: type[Method], anatomy: Anatomy) -> bool:
    try:
        example = cls.example()
        example.count(anatomy)
        for part in (p for p in example.parts() if p.trains_backbone):
            _refuse_untrainable(part, part.plan(anatomy), anatomy)
    except AdapterhubError:
        return False
    return True


def _refuse_untrainable(part: Method, steps: Iterable[Step], anatomy: Anatomy) -> None:
    """Refuse to train parameters that small steps cannot move: codes of quantized weights."""
    paths = [step.path for step in steps if isinstance(step, Unfrozen)]
    if away := offloaded(anatomy.model, paths):
        problem = f"{part.name} trains weights that are offloaded here"
        raise SiteError(problem, offenders=away, expected="weights that stay on a device")
    if wrong := storage_problems(anatomy.parameters(), paths):
        problem = f"{part.name} trains weights that are quantized here"
        raise SiteError(problem, offenders=wrong, expected="weights in fp32, bf16 or fp16")


def _refuse_offloaded(anatomy: Anatomy, fresh: list[str], tokens: tuple[NewToken, ...]) -> None:
    """Refuse to train what accelerate would bring in again at each call, as it was."""
    model = anatomy.model
    heads = [f"{n}.{p}" for n, m in anatomy.head().items() for p, _ in m.named_parameters()]
    table = token_embedding(model) if tokens else None
    rows = [path for path, parameter in model.named_parameters() if parameter is table]
    if away := offloaded(model, [*fresh, *heads, *rows]):
        raise AttachError(
            "the head, what is new in the checkpoint and the table of new tokens train here, and "
            "are offloaded",
            offenders=away,
            expected="modules that stay on a device",
            hint=f"device_map={{..., {away[0].rpartition('.')[0]!r}: DEVICE}}",
        )


def _moved(placement: Placement, anatomy: Anatomy) -> nn.Module:
    """Adapter modules are fp32, on the device of their host, and train where the model does."""
    model = anatomy.model
    host = model.get_submodule(placement.site.host)
    device = device_of(host) or device_of(model)
    placement.module.train(model.training)
    return placement.module.to(device=device, dtype=torch.float32)


def _own_copies(
    unfrozen: Iterable[tuple[Method | None, Unfrozen]], anatomy: Anatomy
) -> Iterable[OwnedParameter]:
    parameters = anatomy.parameters()
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in anatomy.model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, attribute))
    for method, step in unfrozen:
        original = parameters[step.path]
        site, _, parameter_name = anatomy.key(step.path).rpartition(".")
        file_name = f"{site}.{method.name if method else 'fresh'}.{parameter_name}"
        own = nn.Parameter(original.detach().to(torch.float32, copy=True))
        everywhere = tuple(holders[id(original)])
        yield OwnedParameter(method, file_name, own, original, everywhere, step.stage, step.rate)


def _own_head(anatomy: Anatomy) -> AdapterHead | None:
    original = anatomy.head()
    if not original:
        return None
    own = {name: copy.deepcopy(module) for name, module in original.items()}
    for module in own.values():
        module.float().requires_grad_(True)
    config = anatomy.model.config
    labels = {name: copy.deepcopy(getattr(config, name)) for name in LABEL_FIELDS}
    return AdapterHead(own, original, labels, dict(labels))


def check_adapter(adapter: Adapter) -> None:
    """Refuse an adapter that could not do its work.

    Raises:
        AttachError: nothing would train, or attention cannot take its prefix.
    """
    if not adapter.parameters():
        raise AttachError(
            f"nothing would train: {', '.join(m.name for m in adapter.methods)} without a head",
            hint='load_backbone(..., task="classification", labels=[...])',
        )
    if any(p.site.kind == "keyvalue" for p in adapter.placed):
        check_attention(adapter.model)


def _slug(name: str) -> str:
    """An adapter's name as a part of module names, which take no dots."""
    return re.sub(r"[^A-Za-z0-9]", "_", name)


def _refuse_duplicates(adapter: Adapter) -> None:
    names = [name for _, _, name, _ in adapter.owned()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AttachError(
            "two methods of one kind sit at the same sites",
            offenders=twice[:5],
            hint="give them different sites or layers, or attach them as two adapters",
        )
