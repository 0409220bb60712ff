"""Backbones that the generated pages compute on: configurations on the meta device, no weights."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.quantized import QUANTIZATIONS
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import AdapterhubError
from adapterhub.interchange.peft.exporter import try_peft
from adapterhub.merging.merge import blockers
from adapterhub.merging.vllm import blocking_vllm
from adapterhub.methods import METHODS, Method
from adapterhub.methods.common.base import PlanStep
from adapterhub.methods.common.site_module import skip_init
from adapterhub.status import quiet_loading

SUPPORT = Path(__file__).parents[2] / "docs/reference/support.md"
BERT, QWEN, T5 = "bert-base-uncased", "Qwen3-0.6B", "t5-small"
# Architecture, task and sizes; those of bert-base-uncased and t5-small are the defaults.
NAMED = {
    BERT: ("bert", "classification", {}),
    QWEN: ("qwen3", "causal-lm", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    }),
    T5: ("t5", "seq2seq", {}),
}  # fmt: skip


@cache
def named(name: str, layers: int | None = None) -> PreTrainedModel:
    """Build one of NAMED, or a copy of it with fewer layers."""
    architecture, task, sizes = NAMED[name]
    config = transformers.AutoConfig.for_model(architecture, **sizes)
    if layers is not None:
        depths = {"num_hidden_layers", "num_decoder_layers"}
        fewer = dict.fromkeys((name for name in depths if hasattr(config, name)), layers)
        config = transformers.AutoConfig.for_model(architecture, **{**sizes, **fewer})
    return _on_meta(config, task)


def _on_meta(config: transformers.PreTrainedConfig, task: str) -> PreTrainedModel:
    with torch.device("meta"):
        return getattr(transformers, TASK_MODELS[task].auto).from_config(config).eval()


@cache
def anatomy(model: PreTrainedModel) -> Anatomy:
    """Return the anatomy of one of these models."""
    return anatomy_of(model)


def steps(method: Method, model: PreTrainedModel) -> list[tuple[Method, PlanStep]]:
    """List what a method adds and trains on a model: (the part of the method, the step)."""
    with torch.device(model.device), skip_init():
        return [(part, step) for part in method.parts() for step in part.plan(anatomy(model))]


@contextmanager
def attached(method: Method, model: PreTrainedModel) -> Iterator[Adapter]:
    """Attach a method inside."""
    with torch.device(model.device), skip_init():
        adapter = ah.attach(model, method, name="page")
    try:
        yield adapter
    finally:
        adapter.detach()


def refused_cells() -> dict[str, list[str]]:
    """Return the architectures that refuse each method, of the table that `make matrix` writes."""
    return {
        method: [architecture for architecture, cell in cells.items() if cell == "-"]
        for method, cells in _cells().items()
    }


def tested(name: str) -> int:
    """Return the number of architectures that the table has tests of a method on."""
    return sum(cell.isdigit() for cell in _cells()[name].values())


@cache
def _cells() -> dict[str, dict[str, str]]:
    """Return the cells of the table of architectures: method -> architecture -> text."""
    table = SUPPORT.read_text(encoding="utf-8").partition("<!-- architecture:")[2]
    lines = table.partition("<!-- /architecture")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]
    return {
        method: {row[0]: row[column] for row in rows}
        for column, method in enumerate(header)
        if column
    }


@cache
def refusals(name: str) -> dict[str, list[str]]:
    """Return the architectures that refuse a method, by the reason that the error gives."""
    reasons: dict[str, list[str]] = {}
    for architecture in refused_cells()[name]:
        reasons.setdefault(_reason(METHODS[name].example(), architecture), []).append(architecture)
    return reasons


@cache
def usual(architecture: str) -> PreTrainedModel:
    """Build a classifier of an architecture, or a language model if there is none."""
    config = transformers.AutoConfig.for_model(architecture)
    kinds = ("classification", "causal-lm", "seq2seq")
    return _on_meta(config, next(kind for kind in kinds if TASK_MODELS[kind].classes_for(config)))


def _reason(method: Method, architecture: str) -> str:
    """Return why a method does not fit an architecture, without the architecture's name."""
    model = usual(architecture)
    try:
        steps(method, model)
        with warnings.catch_warnings(), attached(method, model):
            warnings.simplefilter("ignore")
    except AdapterhubError as error:
        lacking = [line.partition(";")[0] for line in error.offenders]
        text = ": ".join([error.problem, ", ".join(lacking)] if lacking else [error.problem])
        return re.sub(rf"this {re.escape(architecture)} backbone", "the backbone", text)
    raise AssertionError(f"{method.name} fits {architecture}; run make matrix")


@cache
def quantized() -> PreTrainedModel:
    """Build a small BERT with random weights in nf4."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
    config = transformers.BertConfig(intermediate_size=128, **sizes)
    scheme = QUANTIZATIONS["nf4"].config(torch.float32, ["classifier"])
    logging.disable(logging.WARNING)  # of kernels that bitsandbytes does not find
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), quiet_loading():
            warnings.simplefilter("ignore")
            transformers.BertForSequenceClassification(config).save_pretrained(folder)
            return transformers.BertForSequenceClassification.from_pretrained(
                folder, quantization_config=scheme
            ).eval()
    finally:
        logging.disable(logging.NOTSET)


@cache
def quantized_refusal(name: str) -> str:
    """Return why a method is refused on a backbone in nf4; "" if it fits."""
    try:
        with attached(METHODS[name].example(), quantized()):
            return ""
    except AdapterhubError as error:
        return error.problem


@dataclass(frozen=True)
class Fit:
    """What other programs do with a method on a backbone; each list is why not.

    `refused` is why the method itself does not fit the backbone, "" if it does; `converted` is
    whether it is converted for vLLM; `warnings` are those of the export to peft.
    """

    refused: str = ""
    merge: tuple[str, ...] = ()
    peft: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    converted: bool = False
    warnings: tuple[str, ...] = ()


@cache
def fit(name: str, backbone: str) -> Fit:
    """Check merging and exporting a method, on a copy of a named backbone with two layers."""
    model = named(backbone, layers=2)
    try:
        vllm, converted = blocking_vllm(model, METHODS[name].example())
        with attached(METHODS[name].example(), model) as adapter:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, problems = try_peft(adapter.export_source())
            return Fit(
                merge=tuple(blockers(adapter)),
                peft=tuple(problems),
                vllm=tuple(vllm),
                converted=converted,
                warnings=tuple(str(each.message) for each in caught),
            )
    except AdapterhubError as error:
        return Fit(refused=error.problem)
