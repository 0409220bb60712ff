"""Checkpoints of peft and adapters for the fuzzer: exported ones and golden files."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
from forge import new_model, state_of
from mutation import VALUES, mutate_tree
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

import adapterhub as ah
from adapterhub.errors import AdapterhubError

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters" / "bert"
EXPORTED = ("lora(rank=2)", "dora(rank=2)", "ia3", "norms", ["lora", "bitfit"])
OPTIONS = ("adapter_config.json", "head_config.json")
WEIGHTS = ("adapter_model", "adapter", "model_head")
PATTERNS = ["(", "(a+)+$", ".*", "|", "[", "(?i)x", "x" * 500, "all-linear", "", "\\", "{e}"]
NAMED = ("target_modules", "exclude_modules", "layers_pattern", "feedforward_modules")


class Foreign:
    """Valid checkpoints, each with its model and the model's state."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "foreign"
        ours, theirs = new_model(), AutoModel.from_pretrained(GOLDEN / "backbone")
        states = {id(model): state_of(model) for model in (ours, theirs)}
        self.sources: list[tuple[Path, PreTrainedModel]] = []
        for number, method in enumerate(EXPORTED):
            path = folder / f"peft-{number}"
            ah.attach(new_model(), method).export(path)
            self.sources.append((path, ours))
        cases = [path.parent for path in sorted(GOLDEN.glob("*/adapter_config.json"))]
        self.sources += [(path, theirs) for path in cases]
        self.states = states

    def _copy(self, rng: random.Random) -> PreTrainedModel:
        source, model = rng.choice(self.sources)
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(source, self.place)
        return model

    def _load(self, model: PreTrainedModel, rng: random.Random) -> None:
        try:
            head = rng.random() < 0.5
            ah.load(model, self.place, any_backbone=True, allow_pickle=True, head=head).detach()
        finally:
            assert state_of(model) == self.states[id(model)], "the model has changed"

    def read_options(self, rng: random.Random) -> None:
        """Change a configuration as JSON, its regular expressions in particular."""
        model = self._copy(rng)
        path = rng.choice([p for name in OPTIONS if (p := self.place / name).exists()])
        tree = mutate_tree(rng, json.loads(path.read_text(encoding="utf-8")))
        if "peft_type" in tree and rng.random() < 0.3:
            tree[rng.choice(NAMED)] = rng.choice(PATTERNS)
            tree["rank_pattern"] = {rng.choice(PATTERNS): rng.choice(VALUES)}
        path.write_text(json.dumps(tree), encoding="utf-8")
        self._load(model, rng)

    def read_tensors(self, rng: random.Random) -> None:
        """Change one to three tensors."""
        model = self._copy(rng)
        paths = [p for name in WEIGHTS if (p := self.place / f"{name}.safetensors").exists()]
        if not paths:
            raise AdapterhubError("a pickle: torch reads it")
        tensors = load_file(path := rng.choice(paths))
        for _ in range(rng.randint(1, 3)):
            _change(rng, tensors)
        save_file({name: t.contiguous() for name, t in tensors.items()}, path)
        self._load(model, rng)


def _change(rng: random.Random, tensors: dict[str, Tensor]) -> None:
    name = rng.choice(sorted(tensors))
    value, sizes = tensors[name], [rng.choice([1, 2, 3, 16]) for _ in range(rng.randint(0, 3))]
    other = rng.choice(["x", f"{name}.x", f"a.{name}", name[:-1], ".", ".lora_A.weight"])
    kind = rng.randrange(5)
    if kind == 0 and len(tensors) > 1:
        del tensors[name]
    elif kind == 1:
        tensors[other] = value.clone()
    elif kind == 2:
        tensors[name] = torch.randn(sizes)
    elif kind == 3:
        tensors[name] = value.to(rng.choice([torch.int64, torch.float16, torch.bool]))
    else:
        tensors[name] = value.flatten()[: rng.randint(0, value.numel())].clone()
