"""Import of peft's low-rank updates.

peft adds y = W x + s B A x to each target, with s = alpha / rank or alpha / sqrt(rank), and DoRA's
magnitude if enabled. At a site the update becomes a method of ours, one for each alpha. Elsewhere
(DoRA of an embedding, PiSSA of a pooler or an output layer) it is folded into a whole weight, which
the adapter stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.backbone import join, storage_problem
from adapterhub.anatomy.projections import is_table
from adapterhub.anatomy.sites import Anatomy, Site, sites_option
from adapterhub.backbones.probe import probe
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.errors import SiteError
from adapterhub.interchange.peft.experts import held_sites, is_exchanged, unpacked
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.peft.updates import (
    BIAS,
    Update,
    read_updates,
    subtracted_factors,
    subtracted_initialization,
)
from adapterhub.interchange.translation import Translation, size_options
from adapterhub.methods.alora import ALoRA
from adapterhub.methods.bdlora import BDLoRA
from adapterhub.methods.common.base import Method
from adapterhub.methods.dora import DoRA
from adapterhub.methods.kasa import KaSA, smallest_components
from adapterhub.methods.lora import LoRA, LowRank
from adapterhub.methods.mica import MiCA
from adapterhub.methods.olora import OLoRA
from adapterhub.methods.pissa import PiSSA
from adapterhub.methods.rslora import RsLoRA

Values = dict[str, Any]


def import_peft_low_rank(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> dict[str, Tensor]:
    """Translate the updates of a checkpoint.

    Returns the other tensors, including weights with folded updates from outside sites.
    """
    rows, files = read_token_rows(files, finder, translation)
    updates, rest = read_updates(files, finder, translation)
    initialization = subtracted_initialization(files.config, translation)
    anatomy = translation.anatomy
    # An initialization and trained rows change whole weights, which other modules may share.
    plain = not initialization and not rows
    known = anatomy.every() if plain else anatomy.sites.values()
    sites = {path: s for s in known if (path := adapted_module(s))}
    weights = held_sites(anatomy)
    at_sites: list[tuple[Site, Update]] = []
    elsewhere: list[Update] = []
    for update in updates:
        module = finder.modules[update.path]
        site = weights.get((update.path, update.parameter))
        if site is None and not initialization and update.parameter == "weight":
            update = _of_module(update, module)
        if site is None and not update.parameter:
            site = sites.get(update.path)
        table = isinstance(module, nn.Embedding)
        if site is None or (table and "magnitude_vector" in update.tensors):
            elsewhere.append(update)
            continue
        if site.held:
            update, problems = _of_held(update, site, module, initialization)
        else:
            if initialization:
                update = _with_available_rank(update, site.d_in, site.d_out)
            problems = update.shape_problems(site.d_in, site.d_out)
        translation.problems += problems
        at_sites.append((site, update))
    _add_biases(updates, rest, finder, translation)
    translation.problems += _variant_problems(files.config, initialization, at_sites, elsewhere)
    if files.config["alora_invocation_tokens"]:
        outside = elsewhere + [update for site, update in at_sites if site.held]
        translation.problems += _invocation_problems(files.config, initialization, outside)
    if not translation.problems:
        _add_methods(files.config, initialization, translation, at_sites)
        rest = WeightFolder(initialization, rows, rest, finder, translation).fold(elsewhere)
    return rest


def _of_module(update: Update, module: nn.Module) -> Update:
    """Return the update of a parameter as one of its module, if it is the weight of a projection.

    peft assumes that the weight is (d_out, d_in), unlike the weight of a Conv1D or an embedding.
    """
    if not isinstance(module, nn.Linear | Conv1D | nn.Embedding):
        return update
    tensors = dict(update.tensors)
    if not isinstance(module, nn.Linear) and tensors.keys() == {"A", "B"}:
        tensors = {"A": tensors["B"].T.contiguous(), "B": tensors["A"].T.contiguous()}
    return replace(update, tensors=tensors, parameter="")


def _of_held(
    update: Update, site: Site, module: nn.Module, initialization: str
) -> tuple[Update, list[str]]:
    """Return an update with the factors of a weight that its module multiplies by itself.

    Also returns its unsupported features; with any, the update is unchanged.
    """
    assert site.held is not None
    sizes = (site.d_out, site.d_in) if is_exchanged(site, module) else (site.d_in, site.d_out)
    problems = update.shape_problems(*sizes, site.held.experts or 1)
    if initialization:
        origin = f"target_parameters with init_lora_weights {initialization}"
        problems.append(f"{update.file_path}: {origin}")
    if problems:
        return update, problems
    low, high = unpacked(site, module, update.tensors["A"], update.tensors["B"])
    return replace(update, tensors={**update.tensors, "A": low, "B": high}), []


def adapted_module(site: Site) -> str:
    """Return the path of the module whose whole weight belongs to a site; "" otherwise.

    In torch's attention, these are the packed weights and the output projection.
    """
    matrix = site.matrix
    if site.kind != "linear" or site.part or (matrix and matrix.rows is not None):
        return ""
    return join(site.host, matrix.weight.rpartition(".")[0]) if matrix else site.host


def _invocation_problems(
    config: Mapping[str, Any], initialization: str, elsewhere: list[Update]
) -> Iterator[str]:
    """Yield the features that an update with invocation tokens cannot be combined with here."""
    name = "alora_invocation_tokens"
    if config["task_type"] != "CAUSAL_LM":
        yield f"{name}: with task_type {config['task_type']!r} peft applies no update"
    if initialization:
        yield f"{name} with init_lora_weights {initialization}"
    yield from (f"{name} with {each}" for each in ("use_dora", "lora_bias") if config[each])
    yield from (f"{update.file_path}: {name} outside of projections" for update in elsewhere)


def _add_biases(
    updates: list[Update], rest: dict[str, Tensor], finder: ModuleFinder, translation: Translation
) -> None:
    """Add the biases of `lora_bias` to the modules' biases: y = W x + b + s (B A x + b_B)."""
    for update in updates:
        if (added := update.tensors.get(BIAS)) is None:
            continue
        own = read_bias(finder.modules[update.path])
        name = f"{update.file_path}.bias"
        bias = rest.get(f"{update.file_path}.base_layer.bias", own)
        if own is None or bias is None or not own.shape == bias.shape == added.shape:
            shape = "none" if own is None else f"one of shape {tuple(own.shape)}"
            translation.problems.append(
                f"{name}: lora_bias adds a bias {tuple(added.shape)}, this module has {shape}"
            )
            continue
        rest.pop(f"{update.file_path}.base_layer.bias", None)
        rest[name] = bias.detach().float().cpu() + update.scale * added


def _with_available_rank(update: Update, d_in: int, d_out: int) -> Update:
    """Lower the rank to the number of components of a weight, (d_out, d_in), at the same scale."""
    rank = min(update.rank, d_in, d_out)
    if rank == update.rank:
        return update
    return replace(update, rank=rank, alpha=update.scale * rank)


def _add_methods(
    config: Mapping[str, Any],
    initialization: str,
    translation: Translation,
    updates: list[tuple[Site, Update]],
) -> None:
    """Add one method for each alpha, with the tensors at its sites.

    Weights that their modules multiply by themselves have no variants, as in peft.
    """
    chosen, variant = _method(config, initialization)
    plain = RsLoRA if config["use_rslora"] else LoRA
    groups: dict[tuple[type[Method], float], list[tuple[Site, Update]]] = {}
    for site, update in updates:
        method = plain if site.held else chosen
        # Of our methods, only RsLoRA divides alpha by the root of the rank.
        convert = config["use_rslora"] and method is not RsLoRA
        alpha = update.scale * update.rank if convert else update.alpha
        groups.setdefault((method, alpha), []).append((site, update))
    for (method, alpha), group in groups.items():
        options: dict[str, Any] = {
            **size_options("rank", {site.id: update.rank for site, update in group}),
            "alpha": float(alpha),
            "sites": sites_option(translation.anatomy, [site for site, _ in group]),
            **(variant if method is chosen else {}),
        }
        if issubclass(method, LowRank):
            options["dropout"] = float(config["lora_dropout"])
        if method is BDLoRA:
            rows = [site for site, update in group if "A" in update.blocks]
            options["rows"] = sites_option(translation.anatomy, rows) if rows else []
        translation.methods.append({method.name: options})
        for site, update in group:
            tensors = _method_tensors(translation.anatomy, site, update, initialization)
            for name, tensor in tensors.items():
                translation.tensors[f"{site.id}.{method.name}.{name}"] = tensor


_STARTS: Mapping[str, tuple[type[Method], Values]] = {
    "pissa": (PiSSA, {"iterations": 0}), "olora": (OLoRA, {}), "mica": (MiCA, {}),
}  # fmt: skip


def _start_of(config: Mapping[str, Any], initialization: str) -> str:
    return initialization or str(config["init_lora_weights"]).lower()


def _method(config: Mapping[str, Any], initialization: str) -> tuple[type[Method], Values]:
    """Return the method of the updates of a checkpoint, and its specific options."""
    if config["kasa_config"]:
        return KaSA, {}
    if config["use_bdlora"]:
        return BDLoRA, {"blocks": config["use_bdlora"]["nblocks"]}
    if invocation := config["alora_invocation_tokens"]:
        return ALoRA, {"invocation": list(invocation)}
    if config["use_dora"]:
        return DoRA, {}
    if start := _STARTS.get(_start_of(config, initialization)):
        return start
    return RsLoRA if config["use_rslora"] else LoRA, {}


def _variant_problems(
    config: Mapping[str, Any],
    initialization: str,
    updates: list[tuple[Site, Update]],
    elsewhere: list[Update],
) -> Iterator[str]:
    """Yield the features that KaSA and BD-LoRA cannot be combined with here."""
    name = next((n for n in ("kasa_config", "use_bdlora") if config[n]), None)
    if name is None:
        return
    others = ("use_dora", "lora_bias", "alora_invocation_tokens", "kasa_config", "use_bdlora")
    yield from (f"{name} with {each}" for each in others if config[each] and each != name)
    if _start_of(config, initialization) in _STARTS:
        yield f"{name} with init_lora_weights {config['init_lora_weights']}"
    yield from (f"{update.file_path}: {name} outside of projections" for update in elsewhere)
    for _, update in updates if name == "use_bdlora" else ():
        if len(update.blocks) != 1:
            yield f"{update.file_path}: use_bdlora makes neither A nor B block-diagonal, or both"


def _method_tensors(
    anatomy: Anatomy, site: Site, update: Update, initialization: str
) -> dict[str, Tensor]:
    """Rename the tensors of an update, and recompute a subtracted part of W."""
    tensors = {"A": update.tensors["A"], "B": update.tensors["B"]}
    if "magnitude_vector" in update.tensors:
        tensors["magnitude"] = update.tensors["magnitude_vector"]
    host = anatomy.model.get_submodule(site.host)
    if site.held:
        return tensors
    if "diag" in update.tensors:
        left, right = smallest_components(read_weight(host).detach().cpu(), update.rank)
        tensors |= {"E": update.tensors["diag"], "A0": right, "B0": left}
    if initialization:
        weight = read_weight(host).detach()
        left, right = subtracted_factors(initialization, host, weight, update.rank, update.scale)
        tensors |= {"A0": right.contiguous(), "B0": left.contiguous()}
    return tensors


@dataclass
class WeightFolder:
    """Fold the updates of one checkpoint outside sites into new values of whole weights.

        W' = W + s B A, with DoRA rescaled to its magnitudes
        W' = W - s B0 A0 + s B A, with an initialization that subtracts a part of W

    peft changes W in place, by an initialization or by the original weight of an embedding in the
    file. So all modules tied to an adapted one get the changed W, but not the update.

    `initialization` is the one that subtracted a part of the weights, "" if none; `rows` are
    trained rows of embeddings by path; `tensors` are the other tensors of the checkpoint, and get
    the new weights.
    """

    initialization: str
    rows: Mapping[str, TrainedRows]
    tensors: dict[str, Tensor]
    finder: ModuleFinder
    translation: Translation

    def fold(self, updates: list[Update]) -> dict[str, Tensor]:
        """Fold updates, and then the rows of embeddings without updates; return all tensors."""
        problems = self._uses_problems(updates)
        self.translation.problems += problems
        for update in updates if not problems else ():
            try:
                self._fold_parameter(update) if update.parameter else self._fold_weight(update)
            except SiteError as error:
                self.translation.problems.append(f"{update.file_path}: {error.problem}")
        updated = {update.path for update in updates}
        for path in [path for path in self.rows if path not in updated]:
            name = f"{path}.weight"
            weight = self.finder.modules[path].get_parameter("weight").detach()
            table = self.tensors.get(name, weight).float().cpu()
            if table.shape == weight.shape:  # otherwise the error names the shape
                self.tensors[name] = self.rows[path].put_into(table)
        return self.tensors

    def _fold_weight(self, update: Update) -> None:
        """Fold an update into the weight of its module."""
        module = self.finder.modules[update.path]
        weight = _matrix(module)
        saved = self.tensors.pop(f"{update.file_path}.base_layer.weight", None)
        reduced = bool(self.initialization) and not isinstance(module, nn.Embedding)
        if reduced:
            update = replace(update, rank=min(update.rank, *weight.shape))
        d_out, d_in = weight.shape
        problems = update.shape_problems(d_in, d_out)
        shape = tuple(_turned(module, weight).shape)
        if saved is not None and tuple(saved.shape) != shape:
            problems.append(
                f"{update.file_path}: shape {tuple(saved.shape)} in the files, {shape} here; if "
                "tokens were added: model.resize_token_embeddings before loading"
            )
        if problems:
            self.translation.problems += problems
            return
        if saved is not None:
            weight = _turned(module, saved.float())
        elif reduced:
            weight = weight - self._subtracted(update, module, weight)
        if saved is not None or reduced:
            changed = _turned(module, weight).contiguous()
            for path in self.finder.tied(update.path):
                self.tensors.setdefault(f"{path}.weight", changed)
        if rows := self.rows.get(update.path):
            weight = _turned(module, rows.put_into(_turned(module, weight)))
        self._add(f"{update.file_path}.weight", _turned(module, _updated(weight, update)))

    def _subtracted(self, update: Update, module: nn.Module, weight: Tensor) -> Tensor:
        """Return the part of W, (d_out, d_in), that the initialization subtracted."""
        rank, scale = update.rank, update.scale
        left, right = subtracted_factors(self.initialization, module, weight, rank, scale)
        return scale * left @ right

    def _fold_parameter(self, update: Update) -> None:
        """Fold an update into one parameter of its module.

        Stacked weights are (matrices, d_out, d_in), or transposed if the module declares it.
        """
        module = self.finder.modules[update.path]
        name = f"{update.path}.{update.parameter}"
        parameter = getattr(module, update.parameter)
        problem = storage_problem(parameter)
        if self.initialization:
            problem = f"target_parameters with init_lora_weights {self.initialization}"
        if problem or parameter.ndim not in (2, 3):
            problem = problem or f"{parameter.ndim} dimensions, not 2 or 3"
            self.translation.problems.append(f"{name}: {problem}")
            return
        value = parameter.detach().float().cpu()
        transposed = value.ndim == 3 and bool(getattr(module, "is_transposed", False))
        weights = value if value.ndim == 3 else value[None]
        weights = weights.mT if transposed else weights
        matrices, d_out, d_in = weights.shape
        if problems := update.shape_problems(d_in, d_out, matrices):
            self.translation.problems += problems
            return
        a = update.tensors["A"].reshape(matrices, -1, d_in)
        b = update.tensors["B"].reshape(d_out, -1, matrices)
        changed = weights + update.scale * torch.einsum("ore,eri->eoi", b, a)
        changed = changed.mT if transposed else changed
        self._add(name, changed if value.ndim == 3 else changed[0])

    def _add(self, name: str, value: Tensor) -> None:
        self.tensors[name] = value.contiguous()
        self.translation.notes.append(
            f"{name.removesuffix('.weight')} is not a site: its update is stored as a whole weight "
            f"of {value.numel():,} values"
        )

    def _uses_problems(self, updates: list[Update]) -> list[str]:
        """Refuse updates of embeddings where the model does not look up ids.

        A model may read the weight instead, where peft's update has no effect, or compute ids from
        another input, which peft treats as ids.
        """
        embeddings = {
            update.path: module
            for update in updates
            if isinstance(module := self.finder.modules[update.path], nn.Embedding)
        }
        backbone = self.finder.backbone
        called: set[nn.Module] = set()
        handles = [
            module.register_forward_hook(lambda module, *_: called.add(module))
            for module in embeddings.values()
        ]
        try:
            if any(module is not backbone.input_embedding for module in embeddings.values()):
                probe(backbone.pretrained)
            else:
                called.update(embeddings.values())
        finally:
            for handle in handles:
                handle.remove()
        return [
            f"{path}: the model does not look up ids in this {type(module).__name__}, which peft's "
            "update of an embedding does"
            for path, module in embeddings.items()
            if not is_table(module) or (module not in called and not self.finder.tied(path))
        ]


def _updated(weight: Tensor, update: Update) -> Tensor:
    updated = weight + update.scale * update.tensors["B"] @ update.tensors["A"]
    if (magnitude := update.tensors.get("magnitude_vector")) is not None:
        updated = updated * (magnitude / updated.norm(dim=1))[:, None]
    return updated


def _matrix(module: nn.Module) -> Tensor:
    """Return W, (d_out, d_in), on the CPU; an embedding's is (d, vocabulary)."""
    if isinstance(module, nn.Embedding):
        return module.weight.detach().float().cpu().T
    return read_weight(module).detach().cpu()


def _turned(module: nn.Module, matrix: Tensor) -> Tensor:
    """Convert W, (d_out, d_in), to the module's layout, or back."""
    return matrix.T if isinstance(module, nn.Embedding | Conv1D) else matrix


_ADAPTER = ".token_adapter."
_ROWS = f"{_ADAPTER}trainable_tokens_delta"
_ORIGINAL = f"{_ADAPTER}base_layer.weight"


@dataclass(frozen=True)
class TrainedRows:
    """New values of some rows of an embedding: (n, d)."""

    ids: Tensor
    values: Tensor

    def put_into(self, table: Tensor) -> Tensor:
        """Return a table, (vocabulary, d), with the new rows."""
        return table.index_copy(0, self.ids, self.values)

    def problem(self, table: Any, original: Any) -> str:
        """Describe why the rows do not fit a table; "" if they do.

        `original` is the table where they were trained.
        """
        if not isinstance(table, Tensor) or table.ndim != 2:
            return "no table of tokens in this backbone"
        if self.values.shape != (len(self.ids), table.shape[1]):
            width = table.shape[1]
            return f"{tuple(self.values.shape)} values for {len(self.ids)} tokens of width {width}"
        needed = max(int(self.ids.max()) + 1, len(original))
        if needed > len(table) or original.shape != table.shape:
            return (
                f"trained with {needed} tokens, the embedding has {len(table)}; before loading: "
                f"model.resize_token_embeddings({needed}), or to the size of the tokenizer"
            )
        return ""


def read_token_rows(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> tuple[dict[str, TrainedRows], PeftFiles]:
    """Collect rows of embeddings trained by peft, by the paths of their target modules.

        X.token_adapter.trainable_tokens_delta    the new values, in the order of their ids
        X.token_adapter.base_layer.weight         the embedding, if the model was resized

    If the input embedding is tied to other modules, peft replaces the rows there too, unless the
    checkpoint has other rows for one of them.

    Returns:
        The rows, and the checkpoint without them.
    """
    tensors = {n: t for n, t in files.tensors.items() if _ADAPTER not in n}
    trained = [n.removesuffix(_ROWS) for n in files.tensors if n.endswith(_ROWS)]
    rows: dict[str, TrainedRows] = {}
    for file_path in trained:
        path, ids = finder.find(file_path), _ids(files.config, file_path, finder)
        if path is None or not ids:
            # The files may also contain the rows of a tied module.
            if not any(t in trained for t in finder.tied(path or "")):
                translation.problems.append(f"{file_path}: no such module, or no tokens of it")
            continue
        values = files.tensors[f"{file_path}{_ROWS}"].to(torch.float32)
        read = TrainedRows(torch.tensor(ids), values)
        table: Any = getattr(finder.modules[path], "weight", None)
        original: Any = files.tensors.get(f"{file_path}{_ORIGINAL}", table)
        if problem := read.problem(table, original):
            translation.problems.append(f"{file_path}: {problem}")
            continue
        if original is not table:
            tensors |= {f"{each}.weight": original for each in (path, *finder.tied(path))}
        rows |= {each: read for each in _uses(path, ids, files.config, finder)}
        translation.notes.append(
            f"{path}: {len(ids)} trained rows are stored as a whole weight of "
            f"{original.numel():,} values"
        )
    return rows, PeftFiles(files.kind, files.config, tensors)


def _ids(config: Mapping[str, Any], file_path: str, finder: ModuleFinder) -> list[int]:
    """Return the ids of the trained rows of one module; [] if the options do not list any."""
    option: Any = config["trainable_token_indices"] or []
    if isinstance(option, dict):
        return next((ids for name, ids in option.items() if file_path.endswith(name)), [])
    module = finder.modules.get(finder.find(file_path) or "")
    return list(option) if module is finder.backbone.input_embedding else []


def _uses(path: str, ids: list[int], config: Mapping[str, Any], finder: ModuleFinder) -> list[str]:
    """Return the paths of the modules that get the rows of one module."""
    backbone, tied = finder.backbone, finder.tied(path)
    is_tied = getattr(backbone.config, "tie_word_embeddings", False)
    is_input = finder.modules[path] is backbone.input_embedding
    others = [other for each in tied if (other := _ids(config, each, finder))]
    return [path, *tied] if is_tied and is_input and all(o == ids for o in others) else [path]
