"""The dtype of the frozen backbone and its attention implementation: measured, not guessed.

bf16 halves the time of matrix products on processors with instructions for it, and multiplies it on
others; torch's fused attention is the faster one in fp32 and, on a CPU, the slower one in bf16. So
both are chosen together, by `layer_timing` on the shapes of the run, once per machine. Runs too
short to gain from it keep fp32. A GPU is not measured: it computes in bf16 where it supports it.
What is bf16 for another reason, such as a quantized backbone, is fp32 on a processor that takes
several times as long in bf16, or a note if the recipe asks for bf16.

What trains stays in fp32 in all cases, and so does the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.layer_timing import (
    EAGER,
    SDPA,
    Kernels,
    LayerShape,
    remembered_times,
    times_in_bf16,
    without_slow_bf16,
)
from adapterhub.backbones.load import load_processor
from adapterhub.backbones.probe import probe
from adapterhub.backbones.weights import DTYPES
from adapterhub.data.text_stream import TextStream
from adapterhub.loop.processes import own_device, process_count
from adapterhub.methods._base import Method
from adapterhub.recipe.defaults import run_options
from adapterhub.recipe.recipe import Recipe
from adapterhub.tasks import Setting
from adapterhub.tasks._lengths import encode_whole
from adapterhub.training.lengths import default_length
from adapterhub.training.run_data import RunData

SHORTEST = 2e12
"""Floating point operations of a run that is worth a measurement: about 20 s on two cores."""
_GAIN = 0.9  # another choice than fp32 and sdpa must take at most this share of their time
_MOST_SCORES = 1 << 30  # bytes of attention scores that eager attention keeps in a step
_SAMPLE = 64  # examples that tell the usual length
_INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "d_ff", "n_inner")


@dataclass(frozen=True)
class KernelChoice:
    """What a backbone is loaded with, and why.

    Attributes:
        dtype: fp32, bf16, fp16, or None: the default of `load_backbone`.
        attention: the attention implementation, or None: that of transformers.
        note: the choice in words, for the user; empty if nothing was chosen.
    """

    dtype: str | None
    attention: str | None
    note: str = ""

    def is_new_dtype(self, given: str | None) -> bool:
        """Return whether bf16 was chosen here, where the recipe leaves the dtype open."""
        return given is None and self.dtype == "bf16" and bool(self.note)


@dataclass(frozen=True)
class Workload:
    """The size of a run.

    Attributes:
        shape: a layer and a batch of the usual length.
        layers: the number of layers.
        tokens: the number of tokens of the whole run.
        longest: the number of tokens of the longest row of the sample.
    """

    shape: LayerShape
    layers: int
    tokens: float
    longest: int

    @property
    def work(self) -> float:
        """Floating point operations of the run, about."""
        batch = self.shape.rows * self.shape.tokens
        return self.tokens / batch * self.layers * self.shape.work

    @property
    def scores(self) -> int:
        """Bytes of attention scores that eager attention keeps for a backward pass, about."""
        return 8 * self.layers * self.shape.rows * self.shape.heads * self.longest**2


def choose_kernels(recipe: Recipe, data: RunData, methods: Sequence[Method]) -> KernelChoice:
    """Choose dtype and attention implementation, where the recipe leaves them open."""
    given = KernelChoice(recipe.dtype, recipe.attention)
    is_open = not (recipe.dtype and recipe.attention) and recipe.train.mixed_precision == "no"
    if recipe.train.shard:
        return replace(given, note="" if recipe.quantize else _conversion(recipe))
    device = own_device()
    if device.type == "cpu" and (note := _slowness(recipe)):
        return replace(given, note=note)
    if not is_open or recipe.quantize or process_count() > 1:
        return given
    if device.type == "cuda":
        return _on_gpu(given)
    work = _workload(recipe, data, methods) if device.type == "cpu" else None
    if work is None or work.work < SHORTEST:
        return given
    return _measured(given, work)


def _conversion(recipe: Recipe) -> str:
    """Return what loading in another dtype than that of the files costs each process, or ""."""
    folder, _ = find_backbone(recipe.backbone, recipe.revision)
    try:
        stored = AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype
    except (OSError, ValueError, KeyError):
        return ""  # loading the model raises the right error
    name, loaded = next((n for n, d in DTYPES.items() if d == stored), None), recipe.dtype or "fp32"
    if name in (None, loaded):
        return ""
    return (
        f"each process converts the whole backbone from {name} to {loaded}; with dtype={name} it "
        "reads its share alone"
    )


def _slowness(recipe: Recipe) -> str:
    """Say that this processor is slow in bf16, and what follows, if the run would compute in it."""
    asked = "bf16" in (recipe.dtype, recipe.train.mixed_precision)
    if (not asked and (recipe.dtype or not recipe.quantize)) or without_slow_bf16("bf16") == "bf16":
        return ""
    slow = f"this processor takes {times_in_bf16():.0f} times as long in bf16 as in fp32"
    if not asked:
        return f"the quantized backbone computes in fp32: {slow}; dtype=bf16 computes in bf16"
    return f"{slow}: dtype=fp32 train.mixed_precision=no"


def can_compute(model: PreTrainedModel) -> bool:
    """Return whether a model computes in its dtype: some classes create tensors in fp32."""
    try:
        probe(model)
    except RuntimeError:
        return False
    return True


def without_bf16(recipe: Recipe) -> KernelChoice:
    """Return the choice for a backbone whose class of transformers does not compute in bf16."""
    note = f"{recipe.backbone} stays in fp32: its class in transformers does not compute in bf16"
    return KernelChoice("fp32", recipe.attention, note)


def _on_gpu(given: KernelChoice) -> KernelChoice:
    if given.dtype or not torch.cuda.is_bf16_supported(including_emulation=False):
        return given
    note = "the frozen backbone is in bf16, which this GPU does fast; dtype=fp32 for full precision"
    return KernelChoice("bf16", given.attention, note)


def _measured(given: KernelChoice, work: Workload) -> KernelChoice:
    dtypes = [given.dtype] if given.dtype else ["fp32", "bf16"]
    attentions = [given.attention] if given.attention else [SDPA, EAGER]
    if given.attention is None and work.scores > _MOST_SCORES:
        attentions = [SDPA]
    if not {*dtypes} <= {"fp32", "bf16"} or not {*attentions} <= {SDPA, EAGER}:
        return given
    usual, *others = [Kernels(d, a) for d in dtypes for a in attentions]
    if not others:
        return given
    times = remembered_times(work.shape, (usual, *others))
    best = min(times, key=times.__getitem__)
    if times[best] > _GAIN * times[usual]:
        best = usual
    attention = given.attention or (EAGER if best.attention == EAGER else None)
    return KernelChoice(best.dtype, attention, _note(times, best, usual, work.shape))


def _note(times: dict[Kernels, float], best: Kernels, usual: Kernels, shape: LayerShape) -> str:
    where = f"on {shape.rows} x {shape.tokens} tokens on this processor"
    if best == usual:
        return f"{usual.dtype} with {usual.attention} attention is fastest {where}"
    words = [f"dtype={usual.dtype}"] * (best.dtype != usual.dtype)
    words += [f"attention={usual.attention}"] * (best.attention != usual.attention)
    return (
        f"the frozen backbone is in {best.dtype} with {best.attention} attention: "
        f"{times[usual] / times[best]:.1f} times as fast as {usual.dtype} with {usual.attention} "
        f"{where}; {' '.join(words)} for the usual"
    )


def _workload(recipe: Recipe, data: RunData, methods: Sequence[Method]) -> Workload | None:
    """Estimate the size of a run from some of its examples; None if the sizes are unknown."""
    if data.task.decodes:
        return None
    folder, _ = find_backbone(recipe.backbone, recipe.revision)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    lengths = _lengths(recipe, data, config)
    train = replace(recipe.train, batch_size=recipe.train.batch_size or data.batch_size)
    options = run_options(train, methods, len(data.train))
    usual = sum(lengths) / len(lengths)
    shape = layer_shape(config, options.batch_size, 1 << max(3, round(usual - 1).bit_length()))
    if shape is None:
        return None
    rows: float = len(data.train) * options.epochs
    if options.max_steps is not None:
        rows = options.max_steps * options.batch_size * options.gradient_accumulation
    layers = int(config.get_text_config().num_hidden_layers)
    return Workload(shape, layers, rows * usual, max(lengths))


def _lengths(recipe: Recipe, data: RunData, config: PreTrainedConfig) -> list[int]:
    """Return the number of tokens of some rows of the training data."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    most = recipe.train.max_length or min(most, data.task.most_tokens)
    if data.task.packs or isinstance(data.train, TextStream):
        return [default_length(most, most)]
    tokens = recipe.revision, recipe.new_tokens
    tokenizer = load_processor(recipe.backbone, data.task.head, *tokens)
    setting = Setting(tokenizer, most, data.labels, recipe.seed)
    rows = encode_whole(data.task, data.some(_SAMPLE), setting)
    return [min(length, most) for length in rows.lengths]


def layer_shape(config: PreTrainedConfig, rows: int, tokens: int) -> LayerShape | None:
    """Return the shape of a backbone's layers with a batch, if its config names the sizes."""
    config = config.get_text_config()
    width, heads = (getattr(config, n, None) for n in ("hidden_size", "num_attention_heads"))
    if not width or not heads or width % heads or not getattr(config, "num_hidden_layers", None):
        return None
    inner = next((size for name in _INNER if (size := getattr(config, name, None))), 4 * width)
    return LayerShape(rows, tokens, width, inner, heads)
