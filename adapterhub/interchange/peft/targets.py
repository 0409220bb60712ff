"""Find the modules that a peft configuration names.

`target_modules` is a regular expression for the whole path, a list of paths or path endings, or
`all-linear`. With a list, `layers_to_transform` selects layers by number: the number follows
`layers_pattern`, or is the first one in the path. `exclude_modules` and `modules_to_save` are never
targets.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import regex
from torch import nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.backbone import CHILD, Backbone
from adapterhub.anatomy.sites import Anatomy
from adapterhub.errors import FileError

# peft's names for the head of a classifier, which "all-linear" does not include.
_HEADS = ("score", "classifier")
SECONDS = 2.0


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by path, without adapter modules."""
    modules = model.named_modules(remove_duplicate=False)
    return {path: m for path, m in modules if f".{CHILD}." not in f".{path}."}


def ends_with(path: str, names: Iterable[str]) -> bool:
    """Return whether a path equals one of these names or ends with it."""
    return any(path == name or path.endswith(f".{name}") for name in names)


class Targets:
    """Match module paths with the names and regular expressions of one configuration.

    The expressions are untrusted: matching can take time exponential in the path's length. All
    matches together are limited to SECONDS.
    """

    def __init__(self, config: Mapping[str, Any], model: nn.Module) -> None:
        self.config, self.model, self.seconds_left = config, model, SECONDS

    def __contains__(self, path: str) -> bool:
        """Return whether the module at a path is a target."""
        targets = self.config["target_modules"]
        if targets is None or self._excluded(path):
            return False
        if isinstance(targets, str):
            if targets.lower() == "all-linear":
                return path in self._all_linear
            return self._match(targets, path, whole=True) is not None
        return path in targets or (ends_with(path, targets) and self._in_layers(path))

    def value_at(self, patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
        """Return the value of the first pattern that matches the end of a path.

        The patterns come from rank_pattern and alpha_pattern.
        """
        for pattern, value in (patterns or {}).items():
            if self._match(rf"(.*\.)?({pattern})$", path):
                return value
        return default

    def parameters_at(self, path: str, module: nn.Module) -> list[str]:
        """Return the parameters of a module listed in `target_parameters`, by name.

        They are in peft's wrapping order.
        """
        targets = self.config.get("target_parameters") or ()
        own = [name for name, _ in module.named_parameters(recurse=False)] if targets else []
        return [name for name in own if ends_with(f"{path}.{name}", targets)]

    def is_feedforward(self, path: str) -> bool:
        """Return whether (IA)^3 rescales the input of the module at a path."""
        names = self.config["feedforward_modules"] or ()
        if isinstance(names, str):
            return self._match(names, path, whole=True) is not None
        return any(path.endswith(name) for name in names)  # peft does not require a dot here

    def _match(self, pattern: str, path: str, whole: bool = False) -> regex.Match[str] | None:
        compiled, start = _compiled(pattern), time.monotonic()
        try:
            match = compiled.fullmatch if whole else compiled.match
            return match(path, timeout=self.seconds_left)
        except TimeoutError:
            raise FileError(
                f"{pattern!r:.200} takes too long on module paths",
                expected=f"regular expressions that take less than {SECONDS} s in total",
            ) from None
        finally:
            self.seconds_left = max(self.seconds_left - (time.monotonic() - start), 1e-3)

    def _excluded(self, path: str) -> bool:
        exclude = self.config["exclude_modules"]
        if isinstance(exclude, str) and exclude:
            return self._match(exclude, path, whole=True) is not None
        if exclude and ends_with(path, exclude):
            return True
        saved = self.config["modules_to_save"] or ()
        return any(self._match(rf"(^|.*\.){name}($|\..*)", path) for name in saved)

    def _in_layers(self, path: str) -> bool:
        layers, patterns = self.config.get("layers_to_transform"), self.config.get("layers_pattern")
        if layers is None or layers == []:
            return True
        patterns = [patterns] if isinstance(patterns, str) else patterns
        number = self._layer_number(path, [p for p in patterns or () if p])
        return number is not None and number in ([layers] if isinstance(layers, int) else layers)

    def _layer_number(self, path: str, patterns: list[str]) -> int | None:
        forms = [rf"(?:^|.*?\.){p}\.(\d+)\." for p in patterns] or [r".*?\.[^.]*\.(\d+)\."]
        match = next((m for form in forms if (m := self._match(form, path))), None)
        return int(match[1]) if match else None

    @cached_property
    def _all_linear(self) -> set[str]:
        output = Backbone.of(self.model).output_embedding
        head = next((m for n in _HEADS if (m := getattr(self.model, n, None)) is not None), None)
        excluded = output if output is not None else head
        return {
            path
            for path, module in modules_of(self.model).items()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not excluded
        }


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> regex.Pattern[str]:
    try:
        re.compile(pattern)  # peft uses re
        return regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise FileError(f"{pattern!r:.200} is not a regular expression: {error}") from None


class ModuleFinder:
    """Find the modules of a checkpoint in a model.

    A module's path can differ between classes around the base model and between versions of
    transformers. Then the base model's path is added or removed. If that fails, the module with the
    only path of the same ending, from the layer number on, is used. `renamed` maps the paths that
    differ; `stored` are the paths of modules that are stacked in this model.
    """

    def __init__(self, anatomy: Anatomy, config: Mapping[str, Any]) -> None:
        self.backbone = anatomy.backbone
        self.targets = Targets(config, anatomy.model)
        self.modules = modules_of(anatomy.model)
        self.base = anatomy.base_path
        self.renamed: dict[str, str] = {}
        self.stored: set[str] = set()

    def find(self, path: str) -> str | None:
        """Return a module's path in the model; None if it is missing or ambiguous."""
        model_path = next((p for p in self._candidates(path) if p in self.modules), None)
        if model_path is not None and model_path != path:
            self.renamed[path] = model_path
        return model_path

    def tied(self, path: str) -> list[str]:
        """Return the other paths of modules with the same weight; empty without a weight."""
        weight = getattr(self.modules.get(path), "weight", None)
        return [
            other
            for other, module in self.modules.items()
            if weight is not None and other != path and getattr(module, "weight", None) is weight
        ]

    def _candidates(self, path: str) -> Iterator[str]:
        yield path
        if self.base:
            yield f"{self.base}.{path}"
            yield path.removeprefix(f"{self.base}.")
        parts = path.split(".")
        if "." in path:
            yield path.partition(".")[2]  # a wrapper with another name for the base model
        for start in range(len(parts)):
            if any(part.isdecimal() for part in parts[start:]):
                tail = ".".join(parts[start:])
                similar = [p for p in self.modules if p.endswith(f".{tail}")]
                if similar:
                    yield from similar if len(similar) == 1 else ()
                    return
