"""Which modules of a model a configuration of peft names.

`target_modules` is a regular expression for the whole path, a list of paths or ends of paths, or
`all-linear`. With a list, `layers_to_transform` keeps some layers, whose number follows
`layers_pattern`, or is the first number in the path. `exclude_modules` and `modules_to_save` are
never targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adapterhub.backbones.anatomy import CHILD, Anatomy
from adapterhub.errors import FileError

# What peft calls the head of a classifier, and so leaves out of "all-linear".
_HEADS = ("score", "classifier")


def modules_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of a model by path, without those of adapters."""
    named = model.named_modules(remove_duplicate=False)
    return {path: m for path, m in named if f".{CHILD}." not in f".{path}."}


def is_target(config: Mapping[str, Any], model: PreTrainedModel, path: str) -> bool:
    """Whether the configuration names the module at a path."""
    targets = config["target_modules"]
    if targets is None or _excluded(config, path):
        return False
    if isinstance(targets, str):
        if targets.lower() == "all-linear":
            return path in _all_linear(model)
        return bool(_compiled(targets).fullmatch(path))
    if path in targets:
        return True
    return ends_with(path, targets) and _in_layers(config, path)


def ends_with(path: str, names: Iterable[str]) -> bool:
    """Whether a path is, or ends with, one of these names."""
    return any(path == name or path.endswith(f".{name}") for name in names)


def value_at(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """The value of the first pattern that a path ends with, as rank_pattern and alpha_pattern."""
    for pattern, value in (patterns or {}).items():
        if _compiled(rf"(.*\.)?({pattern})$").match(path):
            return value
    return default


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise FileError(f"{pattern!r} is not a regular expression: {error}") from None


def _excluded(config: Mapping[str, Any], path: str) -> bool:
    exclude = config["exclude_modules"]
    if isinstance(exclude, str) and exclude:
        return bool(_compiled(exclude).fullmatch(path))
    if exclude and ends_with(path, exclude):
        return True
    saved = config["modules_to_save"] or ()
    return any(_compiled(rf"(^|.*\.){name}($|\..*)").match(path) for name in saved)


def _in_layers(config: Mapping[str, Any], path: str) -> bool:
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    if layers is None or layers == []:
        return True
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = _layer_number(path, [p for p in patterns or () if p])
    return found is not None and found in ([layers] if isinstance(layers, int) else layers)


def _layer_number(path: str, patterns: list[str]) -> int | None:
    forms = [rf"(?:^|.*?\.){p}\.(\d+)\." for p in patterns] or [r".*?\.[^.]*\.(\d+)\."]
    match = next((m for form in forms if (m := _compiled(form).match(path))), None)
    return int(match[1]) if match else None


def _all_linear(model: PreTrainedModel) -> set[str]:
    output = model.get_output_embeddings()
    head = next((m for n in _HEADS if (m := getattr(model, n, None)) is not None), None)
    left_out = (output,) if output is not None else (head,)
    return {
        path
        for path, module in modules_of(model).items()
        if isinstance(module, (nn.Linear, Conv1D)) and not any(module is m for m in left_out)
    }


class Places:
    """Finds the modules that a checkpoint names in a model.

    A module may be called otherwise here: by another class around the base model, or in another
    version of transformers. Then the base model's path is put before or taken off, or, where that
    does not help, the one module is taken whose path ends alike from a layer's number on.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self.modules = modules_of(anatomy.model)
        self.base = anatomy.base_path
        self.renamed: dict[str, str] = {}

    def find(self, path: str) -> str | None:
        """The path in the model; None if there is no such module, or more than one."""
        found = next((p for p in self._candidates(path) if p in self.modules), None)
        if found is not None and found != path:
            self.renamed[path] = found
        return found

    def _candidates(self, path: str) -> Iterator[str]:
        yield path
        if self.base:
            yield f"{self.base}.{path}"
            yield path.removeprefix(f"{self.base}.")
        parts = path.split(".")
        yield path.partition(".")[2]  # a wrapper with another name for the base model
        for start in range(len(parts)):
            if any(part.isdecimal() for part in parts[start:]):
                tail = ".".join(parts[start:])
                alike = [p for p in self.modules if p.endswith(f".{tail}")]
                if alike:
                    yield from alike if len(alike) == 1 else ()
                    return
