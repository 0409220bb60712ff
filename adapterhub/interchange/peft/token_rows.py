"""Rows of embeddings that peft trained: `trainable_token_indices`.

    X.token_adapter.trainable_tokens_delta    the new values of the rows, in the order of their ids
    X.token_adapter.base_layer.weight         the embedding, if the model was resized

If the input embedding is tied to other modules, peft replaces the rows there too, unless the
checkpoint has other rows for one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.translation import Translation

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

        `original` is the table that they were trained in.
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
    """Collect trained rows by the paths of the modules that peft replaces them in.

    Returns:
        The rows, and the checkpoint without them.
    """
    tensors = {n: t for n, t in files.tensors.items() if _ADAPTER not in n}
    trained = [n.removesuffix(_ROWS) for n in files.tensors if n.endswith(_ROWS)]
    rows: dict[str, TrainedRows] = {}
    for file_path in trained:
        path, ids = finder.find(file_path), _ids(files.config, file_path, finder)
        if path is None or not ids:
            # Those of a tied module may be in the files too.
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
    """Return the ids of the trained rows of one module; [] if the options name none."""
    option: Any = config["trainable_token_indices"] or []
    if isinstance(option, dict):
        return next((ids for name, ids in option.items() if file_path.endswith(name)), [])
    module = finder.modules.get(finder.find(file_path) or "")
    return list(option) if module is finder.targets.model.get_input_embeddings() else []


def _uses(path: str, ids: list[int], config: Mapping[str, Any], finder: ModuleFinder) -> list[str]:
    """Return the paths of the modules that get the rows of one module."""
    model, tied = finder.targets.model, finder.tied(path)
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    is_input = finder.modules[path] is model.get_input_embeddings()
    others = [other for each in tied if (other := _ids(config, each, finder))]
    return [path, *tied] if is_tied and is_input and all(o == ids for o in others) else [path]
