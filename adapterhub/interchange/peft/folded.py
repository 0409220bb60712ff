"""Updates of peft outside of sites, folded into new values of whole weights.

    W' = W + s B A, with DoRA rescaled to its magnitudes
    W' = W - s B0 A0 + s B A, with an initialization that subtracts a part of W

peft changes W in place, by an initialization or by the original weight of an embedding in the file.
So all modules that are tied to an adapted one get the changed W, but not the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.backbones.probe import probe
from adapterhub.backbones.weights import read_weight, storage_problem
from adapterhub.errors import SiteError
from adapterhub.interchange.peft.initializations import subtracted_factors
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.peft.token_rows import TrainedRows
from adapterhub.interchange.peft.updates import Update
from adapterhub.interchange.translation import Translation


@dataclass
class WeightFolder:
    """Folds the updates of one checkpoint into weights.

    `initialization` subtracted a part of the weights, "" if none did; `rows` are trained rows of
    embeddings by path; `tensors` are the other tensors of the checkpoint, and get the new weights.
    """

    initialization: str
    rows: Mapping[str, TrainedRows]
    tensors: dict[str, Tensor]
    finder: ModuleFinder
    translation: Translation

    def fold(self, updates: list[Update]) -> dict[str, Tensor]:
        """Fold updates, and then the rows of embeddings without updates.

        Returns:
            The other tensors of the checkpoint, and the new weights.
        """
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
            if table.shape == weight.shape:  # else the error names the shape
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

        Stacked weights are (matrices, d_out, d_in), or transposed if the module says so.
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
        """Refuse updates of embeddings that the model does not look ids up in.

        A model may read the weight instead, where peft's update has no effect, or compute ids from
        another input, which peft takes for ids.
        """
        embeddings = {
            update.path: module
            for update in updates
            if isinstance(module := self.finder.modules[update.path], nn.Embedding)
        }
        model = self.finder.targets.model
        called: set[nn.Module] = set()
        handles = [
            module.register_forward_hook(lambda module, *_: called.add(module))
            for module in embeddings.values()
        ]
        try:
            if any(module is not model.get_input_embeddings() for module in embeddings.values()):
                probe(model)
            else:
                called.update(embeddings.values())
        finally:
            for handle in handles:
                handle.remove()
        return [
            f"{path}: the model does not look up ids in this {type(module).__name__}, which peft's "
            "update of an embedding does"
            for path, module in embeddings.items()
            if not _looks_up(module) or (module not in called and not self.finder.tied(path))
        ]


def _looks_up(module: nn.Embedding) -> bool:
    plain = type(module).forward is nn.Embedding.forward
    return plain or hasattr(module, "embed_scale")


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
