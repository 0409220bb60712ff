"""The backbone of a run, with measured dtype and attention, loaded for one run or several.

bf16 halves the time of matrix products on processors with instructions for it, and multiplies it on
others. torch's fused attention is faster in fp32 and, on a CPU, slower in bf16. Both are therefore
chosen together, by `layer_timing` on the shapes of the run, once per machine. Runs too short to
gain from it keep fp32. A GPU is not measured: it computes in bf16 where it supports it. If bf16 has
another reason, such as a quantized backbone, a processor that is several times slower in bf16 uses
fp32, or a note is given if the recipe requires bf16. Trained parameters and the loss stay in fp32
in all cases.

A run on a shared backbone ends with the same bytes as alone. Its adapter is detached when it ends,
which restores the backbone, and its head is drawn with the same random numbers as after loading.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from adapterhub.adapters.adapter import Adapter, NamedHead
from adapterhub.adapters.attach import detach
from adapterhub.adapters.heads import add_heads, select_head
from adapterhub.adapters.load import bring_foundation
from adapterhub.adapters.route import adapters
from adapterhub.adapters.warm_start import start_from
from adapterhub.anatomy.backbone import DTYPES, Backbone, is_pipeline
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.backbones.layer_timing import (
    EAGER,
    SDPA,
    Kernels,
    LayerShape,
    remembered_times,
    times_in_bf16,
    without_slow_bf16,
)
from adapterhub.backbones.load import load_backbone, load_processor
from adapterhub.backbones.pooling import trained_length
from adapterhub.backbones.probe import probe
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.config.options import to_dict
from adapterhub.data.examples import data_hash
from adapterhub.data.text_stream import TextStream
from adapterhub.errors import ConfigError
from adapterhub.files.native import Foundation
from adapterhub.loop.processes import join_processes, own_device, process_count
from adapterhub.methods.common.base import Method, parse_methods, restore_methods
from adapterhub.recipe.output_folder import RECIPE
from adapterhub.recipe.recipe import Recipe, read, run_options
from adapterhub.registry.local import registry_at
from adapterhub.registry.pull import foundation_of, pull_verified, read_reference
from adapterhub.registry.store import Reference
from adapterhub.speed.frozen_cache import KeptActivations, memory_limit
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Setting, Task, dump_task, parse_task
from adapterhub.tasks.common.base import (
    LostTokens,
    encode_whole,
    longest_row,
    lost_tokens,
)
from adapterhub.tasks.common.batches import limit_of
from adapterhub.tasks.common.packing import Windows
from adapterhub.training.run_data import RunData, check_options, read_data
from adapterhub.training.sources import sourced, truncate_each
from adapterhub.training.stream import ExampleStream, stream_rows
from adapterhub.training.task_mixture import MixedRows, TaskRows, TaskSwitch

LEAST = 128  # tokens: prediction may use longer texts, and short rows are not padded to it


@dataclass(frozen=True)
class FittedRows:
    """The encoded examples of a run.

    Attributes:
        max_length: the longest input, in tokens.
        train: the training rows.
        evaluation: the evaluation rows; none without evaluation data.
        test: the test rows; None without test data.
        lost: the loss by truncation in the training rows.
        notes: sentences about the length and the truncation.
    """

    max_length: int
    train: Encoded
    evaluation: Encoded
    lost: tuple[LostTokens, ...]
    notes: tuple[str, ...]
    test: Encoded | None = None


def fit_rows(
    data: RunData, setting: Setting, chosen: int | None, trained: int | None = None
) -> FittedRows:
    """Encode the examples of a run, with a maximum length that is `chosen` or follows the data.

    The `max_length` of the setting is the limit of the backbone; `trained` is the length that it
    was trained with, if it is recorded.
    """
    fitted = _of_sources(_fitted(data, setting, chosen, trained), data)
    if chosen is None or not data.task.limits(setting):
        return fitted
    reads = limit_of(setting)
    if chosen <= reads or fitted.max_length != reads:
        return fitted
    lowered = f"train.max_length={chosen:,} is lowered to {reads:,}: the backbone reads no more"
    return replace(fitted, notes=(lowered, *fitted.notes))


def _of_sources(fitted: FittedRows, data: RunData) -> FittedRows:
    """Return the rows with the sources that they come from, if there are several."""
    names = tuple(source.name for source in data.sources)
    counts = {name: data.counts(name) for name in ("training", "evaluation", "test")}
    train = fitted.train if data.streams else sourced(fitted.train, names, counts["training"])
    evaluation = sourced(fitted.evaluation, names, counts["evaluation"])
    test = fitted.test and sourced(fitted.test, names, counts["test"])
    return replace(fitted, train=train, evaluation=evaluation, test=test)


def _fitted(data: RunData, setting: Setting, chosen: int | None, trained: int | None) -> FittedRows:
    """Encode the examples as in `fit_rows`, up to the backbone's limit of tokens."""
    if isinstance(data.train, ExampleStream):
        return _streamed_rows(data, data.train, setting, chosen)
    if data.streams:
        return _windows(data, setting, chosen)
    parts = {"training": data.train, "evaluation": data.evaluation, "test": data.test}
    whole = {name: encode_whole(data.task, rows, setting) for name, rows in parts.items() if rows}
    if not data.task.limits(setting):
        return _unlimited(data, whole, setting, chosen)
    longest = max(longest_row(rows) for name, rows in whole.items() if name != "test")
    reads = limit_of(setting)
    most = min(reads, data.task.most_tokens)
    if trained is not None and data.task.cuts_as_trained:
        most = min(most, trained)
    length = default_length(most if data.task.packs else longest, most)
    limited = replace(setting, max_length=min(chosen or length, setting.max_length))
    names = [source.name for source in data.sources]
    encoded = {
        name: truncate_each(rows, data.task, limited, names, data.counts(name))
        for name, rows in whole.items()
    }
    lost = {name: lost_tokens(whole[name], encoded[name]) for name in whole}
    notes = [] if chosen else [_choice(length, longest, reads, split=not lost["training"][0].cut)]
    notes += [line for name, parts in lost.items() for line in _losses(name, parts, reads, data)]
    notes += _remarks(data, whole)
    notes += _beyond(trained, min(longest, limited.max_length))
    return FittedRows(
        max_length=min(chosen or length, reads),
        train=encoded["training"],
        evaluation=encoded.get("evaluation", Encoded(data.task, limited, (), [], ())),
        lost=tuple(lost["training"]),
        notes=tuple(notes),
        test=encoded.get("test"),
    )


def _unlimited(
    data: RunData, whole: dict[str, Encoded], setting: Setting, chosen: int | None
) -> FittedRows:
    """Return rows that no option truncates."""
    nothing = Encoded(data.task, setting, (), [], ())
    ignored = f"train.max_length={chosen} has no effect: {data.task.name} has no longest input"
    notes = (ignored,) * (chosen is not None)
    notes += _remarks(data, whole)
    evaluation, test = whole.get("evaluation", nothing), whole.get("test")
    return FittedRows(LEAST, whole["training"], evaluation, (), notes, test)


def _remarks(data: RunData, whole: dict[str, Encoded]) -> tuple[str, ...]:
    """Return the task's remarks on the training and evaluation rows."""
    remarks = [(name, data.task.remarks(rows)) for name, rows in whole.items()]
    return tuple(f"{name}: {line}" for name, lines in remarks for line in lines)


def _windows(data: RunData, setting: Setting, chosen: int | None) -> FittedRows:
    """Cut streamed text into rows of the maximum length."""
    reads = limit_of(setting)
    length = min(chosen or data.task.most_tokens, reads)
    limited = replace(setting, max_length=length)
    train, evaluation, test = (
        data.task.encode_stream(texts, limited)
        if isinstance(texts, TextStream)
        else Encoded(data.task, limited, (), [], ())
        for texts in (data.train, data.evaluation, data.test)
    )
    rows, held = len(train.rows), len(evaluation.rows)
    evaluation, test = (_with_texts(each, setting) for each in (evaluation, test))
    note = f"the text is packed into {rows:,} rows of {length:,} tokens"
    notes = (note + f", and {held:,} to evaluate on" * bool(held),)
    nothing = LostTokens("texts", "train.max_length", length, rows, 0, 0, 0, length)
    return FittedRows(length, train, evaluation, (nothing,), notes, test if test.rows else None)


def _with_texts(windows: Encoded, setting: Setting) -> Encoded:
    """Return the windows of streamed text with their texts as examples."""
    if not isinstance(windows.rows, Windows):
        return windows
    shown = windows.rows.texts(setting.tokenizer)
    return replace(windows, examples=shown, owners=range(len(windows.rows)))


def _streamed_rows(
    data: RunData, stream: ExampleStream, setting: Setting, chosen: int | None
) -> FittedRows:
    """Return rows that are encoded on access, cut to the maximum length."""
    limited, length = setting, LEAST
    if data.task.limits(setting):
        length = min(chosen or data.task.most_tokens, limit_of(setting))
        limited = replace(setting, max_length=length)
    train = stream_rows(stream, data.task, limited)
    evaluation = Encoded(data.task, limited, (), [], ())
    if data.evaluation:
        evaluation = data.task.encode(data.evaluation, limited, labelled=True)
    test = data.task.encode(data.test, limited, labelled=True) if data.test else None
    note = f"train.max_length is {length:,}: longer texts are cut when they are drawn"
    nothing = LostTokens("texts", "train.max_length", length, len(stream), 0, 0, 0, length)
    notes = (note,) * (chosen is None)
    return FittedRows(length, train, evaluation, (nothing,), notes, test)


def default_length(longest: int, most: int) -> int:
    """Return the maximum length for data: a multiple of 8, at least `LEAST`, at most `most`."""
    return min(max(-(-longest // 8) * 8, LEAST), most)


def _choice(length: int, longest: int, reads: int, split: bool) -> str:
    if longest <= length:
        why = f"no text is cut, the longest has {longest:,} tokens"
    else:
        origin = "the backbone reads" if length == reads else "is chosen by default"
        why = f"the most that {origin}; the longest text has {longest:,} tokens"
        why += ", and is split" * split
    return f"train.max_length is {length:,}: {why}"


def _losses(name: str, lost: list[LostTokens], reads: int, data: RunData) -> Iterator[str]:
    for part in lost:
        if part.cut:
            needed = -(-part.longest // 8) * 8
            fitting = f"{part.option}={needed} keeps all"
            if part.option == "train.max_length" and part.limit >= reads:
                fitting = "the backbone reads no more"
            text = f"{part.sentence(name)}; {fitting}"
            yield f"{text}; {data.task.cut_note}" if data.task.cut_note else text


def _beyond(trained: int | None, longest: int) -> list[str]:
    if trained is None or longest <= trained:
        return []
    return [
        f"the backbone was trained on at most {trained} tokens; texts here have up to {longest:,}: "
        f"compare with train.max_length={trained}"
    ]


def mix_rows(rows: Mapping[str, FittedRows], mixture: Task, switch: TaskSwitch) -> FittedRows:
    """Merge the rows of several tasks into the rows of one run."""
    train = {name: each.train for name, each in rows.items()}
    evaluation = {name: each.evaluation for name, each in rows.items() if each.evaluation.rows}
    test = {name: each.test for name, each in rows.items() if each.test}
    first = next(iter(rows.values()))
    return FittedRows(
        max_length=max(each.max_length for each in rows.values()),
        train=_mixed(train, mixture, switch),
        evaluation=_mixed(evaluation, mixture, switch) if evaluation else first.evaluation,
        lost=(replace(first.lost[0], cut=sum(each.lost[0].cut for each in rows.values())),),
        notes=tuple(f"{name}: {note}" for name, each in rows.items() for note in each.notes),
        test=_mixed(test, mixture, switch) if test else None,
    )


def _mixed(rows: Mapping[str, Encoded], mixture: Task, switch: TaskSwitch) -> MixedRows:
    tagged = {
        name: TaskRows(
            **{each.name: getattr(encoded, each.name) for each in fields(Encoded)},
            name=name,
            switch=switch,
        )
        for name, encoded in rows.items()
    }
    return MixedRows(
        mixture,
        next(iter(rows.values())).setting,
        tuple(example for encoded in rows.values() for example in encoded.examples),
        [row for encoded in rows.values() for row in encoded.rows],
        (),
        tagged,
        switch,
    )


KEPT_ROWS = 4  # encoded data sets


@dataclass(frozen=True)
class Loaded:
    """A backbone that is ready to train, with its processor and its kernels.

    Torch's generator keeps its state after loading. `activations` are outputs of its frozen layers,
    shared by the runs on it.
    """

    model: Any
    processor: Any
    kernels: KernelChoice
    activations: KeptActivations = field(default_factory=KeptActivations, compare=False)

    @property
    def trained_length(self) -> int | None:
        """The length of texts that the backbone was trained with, if it is recorded."""
        origin = Backbone.of(self.model).folder  # pipelines of diffusers do not have one
        return trained_length(Path(origin)) if origin else None


class BackboneLoader:
    """Reads the data of each run, loads its backbone, and encodes its rows."""

    def data(self, recipe: Recipe) -> RunData:
        """Read the data of a recipe, as `read_data` does."""
        return read_data(recipe)

    def backbone(self, recipe: Recipe, data: RunData, kernels: KernelChoice) -> Loaded:
        """Load a backbone with the head of a task; the seed of the recipe draws the head."""
        loaded = _load(recipe, data, kernels)
        if kernels.is_new_dtype(recipe.dtype) and not can_compute(loaded.model):
            loaded = _load(recipe, data, without_bf16(recipe))
        return loaded

    def rows(
        self, data: RunData, setting: Setting, chosen: int | None, trained: int | None
    ) -> FittedRows:
        """Encode the examples of a run, as `fit_rows` does."""
        return fit_rows(data, setting, chosen, trained)

    def release(self, model: nn.Module) -> None:
        """Release the backbone of a finished run."""


@dataclass
class _Kept:
    """A loaded backbone, and whether its head can be drawn again without loading."""

    loaded: Loaded
    draws: bool


@dataclass
class SharedLoader(BackboneLoader):
    """Loads a backbone once for several runs, and reads and encodes equal rows once.

    Use one for all runs: `run(recipe, reporter, loader=loader)`. A backbone that still has adapters
    is loaded again.
    """

    kept: dict[Hashable, _Kept] = field(default_factory=dict)
    encoded: dict[Hashable, FittedRows] = field(default_factory=dict)
    latest: tuple[str, RunData] | None = None

    def data(self, recipe: Recipe) -> RunData:
        """Return the latest run's data if their settings are equal, or read them.

        Raises:
            ConfigError: an option of the recipe does not fit the data.
        """
        options = to_dict(recipe)
        task = None if recipe.task is None else dump_task(parse_task(recipe.task))
        key = str((task, options["data"], options["tasks"], recipe.seed, bool(recipe.backbone)))
        if self.latest is None or self.latest[0] != key:
            self.latest = key, super().data(recipe)
        data = self.latest[1]
        check_options(recipe, data)
        return data

    def backbone(self, recipe: Recipe, data: RunData, kernels: KernelChoice) -> Loaded:
        """Return a backbone loaded by another run, with a new head, or load it."""
        if recipe.new_tokens:  # removed from the tokenizer with the run's adapter
            return super().backbone(recipe, data, kernels)
        key = _backbone_key(recipe, data, kernels)
        kept = self.kept.get(key)
        if kept is not None and kept.draws and not adapters(kept.loaded.model):
            set_seed(recipe.seed)
            Backbone.of(kept.loaded.model).initialize_again()
            return kept.loaded
        self._make_room(key)
        loaded = super().backbone(recipe, data, kernels)
        self.kept[key] = _Kept(loaded, _draws_the_same(loaded.model, recipe.seed))
        return loaded

    def rows(
        self, data: RunData, setting: Setting, chosen: int | None, trained: int | None
    ) -> FittedRows:
        """Return rows encoded by another run, or encode them; they do not depend on the seed."""
        seedless = replace(setting, seed=0, processor=None)
        task = str(dump_task(data.task))
        hashes = (data_hash(data.train), data_hash(data.evaluation), data_hash(data.test))
        key = (id(setting.processor), *hashes, data.sources, task, str(seedless), chosen, trained)
        if key not in self.encoded:
            self.encoded[key] = super().rows(data, setting, chosen, trained)
            for oldest in list(self.encoded)[:-KEPT_ROWS]:
                del self.encoded[oldest]
        rows = self.encoded[key]
        train, evaluation = (_reseeded(each, setting) for each in (rows.train, rows.evaluation))
        test = _reseeded(rows.test, setting) if rows.test else None
        return replace(rows, train=train, evaluation=evaluation, test=test)

    def release(self, model: nn.Module) -> None:
        """Detach the adapter of a finished run, restoring the loaded backbone."""
        if adapters(model):
            detach(model)

    def _make_room(self, key: Hashable) -> None:
        """Drop backbones, unless another one fits into memory in addition to them."""
        self.kept.pop(key, None)
        size = sum(_size(kept.loaded.model) for kept in self.kept.values())
        if own_device().type != "cpu" or len(self.kept) > 1 or 2 * size > memory_limit():
            self.kept.clear()
            self.encoded.clear()


def _backbone_key(recipe: Recipe, data: RunData, kernels: KernelChoice) -> Hashable:
    task = data.task.head, tuple(data.labels), data.task.pooling
    chosen = recipe.quantize, kernels.dtype, kernels.attention
    return recipe.backbone, recipe.revision, repr(recipe.family), *chosen, *task


def _load(recipe: Recipe, data: RunData, kernels: KernelChoice) -> Loaded:
    set_seed(recipe.seed)
    if recipe.train.tensor_parallel:
        join_processes()
    with doing(f"loading {recipe.backbone}"):
        model, processor = load_backbone(
            recipe.backbone,
            task=data.task.head,
            labels=data.labels,
            revision=recipe.revision,
            dtype=kernels.dtype,
            quantize=recipe.quantize,
            attention=kernels.attention,
            new_tokens=recipe.new_tokens,
            pooling=data.task.pooling,
            family=recipe.family,
            tensor_parallel=recipe.train.tensor_parallel,
        )
    make_ready(model, move=not (recipe.train.shard or recipe.train.tensor_parallel))
    return Loaded(Backbone.of(model).module, processor, kernels)


def make_ready(model: PreTrainedModel, *, move: bool = True) -> None:
    """Move a model to this process's device, unless it is sharded there; disable its cache.

    Training and evaluation do not use the cache, and transformers does not detect packed texts with
    it.
    """
    if is_pipeline(model):
        model.to(own_device())
        return
    # Quantized weights stay on their device.
    if move and not getattr(model, "hf_device_map", None):
        model.to(own_device())  # type: ignore[arg-type]
    model.config.use_cache = False


def _draws_the_same(model: nn.Module, seed: int) -> bool:
    """Return whether drawing the head of a newly loaded model again changes nothing."""
    after, before = torch.get_rng_state(), _new_tensors(model)
    set_seed(seed)
    Backbone.of(model).initialize_again()
    drawn = _new_tensors(model)
    same = all(torch.equal(before[name], drawn[name]) for name in before)
    same = same and torch.equal(after, torch.get_rng_state())
    with torch.no_grad():
        for name, tensor in before.items():
            model.state_dict()[name].copy_(tensor)
    torch.set_rng_state(after)
    return same


def _new_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    new = Backbone.of(model).fresh
    return {name: t.clone() for name, t in model.state_dict().items() if name in new}


def _reseeded(encoded: Encoded, setting: Setting) -> Encoded:
    return replace(encoded, setting=replace(encoded.setting, seed=setting.seed))


def _size(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


SHORTEST = 2e12
"""Minimum floating point operations of a run that is worth measuring: about 20 s on two cores."""
_GAIN = 0.9  # maximum share of the time of fp32 and sdpa that another choice must take
_MOST_SCORES = 1 << 30  # bytes of attention scores that eager attention keeps in a step
_SAMPLE = 64  # examples used to estimate the usual length
_INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "d_ff", "n_inner")


@dataclass(frozen=True)
class KernelChoice:
    """The dtype and attention of a backbone, and the reason.

    Attributes:
        dtype: fp32, bf16, fp16, or None: the default of `load_backbone`.
        attention: the attention implementation, or None: the default of transformers.
        note: a sentence about the choice for the user; empty if nothing was chosen.
    """

    dtype: str | None
    attention: str | None
    note: str = ""

    def is_new_dtype(self, in_recipe: str | None) -> bool:
        """Return whether bf16 was chosen here because the recipe leaves the dtype open."""
        return in_recipe is None and self.dtype == "bf16" and bool(self.note)


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
        """Approximate floating point operations of the run."""
        batch = self.shape.rows * self.shape.tokens
        return self.tokens / batch * self.layers * self.shape.work

    @property
    def scores(self) -> int:
        """Approximate bytes of attention scores that eager attention keeps for a backward pass."""
        return 8 * self.layers * self.shape.rows * self.shape.heads * self.longest**2


def kernels_of(recipe: Recipe) -> KernelChoice | None:
    """Return the kernels with which a run to resume was started, if it was started."""
    path = Path(recipe.output) / RECIPE
    if not path.exists():
        return None
    try:
        started = read(path)
    except ConfigError:
        return None
    return KernelChoice(recipe.dtype or started.dtype, recipe.attention or started.attention)


def choose_kernels(recipe: Recipe, data: RunData, methods: Sequence[Method]) -> KernelChoice:
    """Choose dtype and attention implementation if the recipe leaves them open."""
    choice = KernelChoice(recipe.dtype, recipe.attention)
    is_open = not (recipe.dtype and recipe.attention) and recipe.train.mixed_precision == "no"
    if recipe.train.shard:
        return replace(choice, note="" if recipe.quantize else _conversion(recipe))
    device = own_device()
    if device.type == "cpu" and (note := _slowness(recipe)):
        return replace(choice, note=note)
    if not is_open or recipe.quantize or process_count() > 1:
        return choice
    if device.type == "cuda":
        return _on_gpu(choice)
    work = _workload(recipe, data, methods) if device.type == "cpu" else None
    if work is None or work.work < SHORTEST:
        return choice
    return _measured(choice, work)


def _conversion(recipe: Recipe) -> str:
    """Describe the cost of loading in another dtype than the files have, or return ""."""
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
    """Describe the slowness of bf16 on this processor, if the run would compute in it."""
    named = "bf16" in (recipe.dtype, recipe.train.mixed_precision)
    if (not named and (recipe.dtype or not recipe.quantize)) or without_slow_bf16("bf16") == "bf16":
        return ""
    slow = f"this processor takes {times_in_bf16():.0f} times as long in bf16 as in fp32"
    if not named:
        return f"the quantized backbone computes in fp32: {slow}; dtype=bf16 computes in bf16"
    return f"{slow}: dtype=fp32 train.mixed_precision=no"


def can_compute(model: PreTrainedModel) -> bool:
    """Return whether a model can compute in its dtype: some classes create tensors in fp32."""
    try:
        probe(model)
    except RuntimeError:
        return False
    return True


def without_bf16(recipe: Recipe) -> KernelChoice:
    """Return the choice for a backbone whose transformers class does not compute in bf16."""
    note = f"{recipe.backbone} stays in fp32: its class in transformers does not compute in bf16"
    return KernelChoice("fp32", recipe.attention, note)


def _on_gpu(choice: KernelChoice) -> KernelChoice:
    if choice.dtype or not torch.cuda.is_bf16_supported(including_emulation=False):
        return choice
    note = "the frozen backbone is in bf16, which this GPU does fast; dtype=fp32 for full precision"
    return KernelChoice("bf16", choice.attention, note)


def _measured(choice: KernelChoice, work: Workload) -> KernelChoice:
    dtypes = [choice.dtype] if choice.dtype else ["fp32", "bf16"]
    attentions = [choice.attention] if choice.attention else [SDPA, EAGER]
    if choice.attention is None and work.scores > _MOST_SCORES:
        attentions = [SDPA]
    if not {*dtypes} <= {"fp32", "bf16"} or not {*attentions} <= {SDPA, EAGER}:
        return choice
    usual, *others = [Kernels(d, a) for d in dtypes for a in attentions]
    if not others:
        return choice
    times = remembered_times(work.shape, (usual, *others))
    best = min(times, key=times.__getitem__)
    if times[best] > _GAIN * times[usual]:
        best = usual
    attention = choice.attention or (EAGER if best.attention == EAGER else None)
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
    """Return the number of tokens of some training rows."""
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
    """Return the shape of a backbone's layers with a batch, if its config specifies the sizes."""
    config = config.get_text_config()
    width, heads = (getattr(config, n, None) for n in ("hidden_size", "num_attention_heads"))
    if not width or not heads or width % heads or not getattr(config, "num_hidden_layers", None):
        return None
    inner = next((size for name in _INNER if (size := getattr(config, name, None))), 4 * width)
    return LayerShape(rows, tokens, width, inner, heads)


@dataclass(frozen=True)
class StartingPoint:
    """A trained adapter with local, verified files: its name in a recipe, and its methods."""

    reference: str
    found: Foundation
    methods: tuple[Method, ...]

    @property
    def digest(self) -> str:
        """The sha256 of its manifest, which contains the digests of its tensors."""
        return self.found.ref.digest

    def give(self, adapter: Adapter) -> str:
        """Copy its tensors into a new adapter, and return a sentence about its head.

        Raises:
            MismatchError: the backbone, method, sizes or sites differ.
        """
        started = start_from(adapter, self.found.saved)
        text = f"starts from {self.reference}"
        if adapter.head is None:
            return text
        if started.taken:
            return f"{text}, with its head, since the labels are the same"
        return f"{text}, with a newly initialized head: {started.reason}"


def starting_point(recipe: Recipe) -> StartingPoint | None:
    """Find the adapter that a recipe starts from, download it if necessary, and verify it.

    Raises:
        ConfigError: the reference is invalid.
        RegistryError: the reference cannot be resolved.
        FileError: its files are broken, or belong to another library.
    """
    if recipe.from_ is None:
        return None
    adapter = _found(recipe.from_, recipe)
    manifest = adapter.saved.manifest
    methods = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    return StartingPoint(recipe.from_, adapter, methods)


def _found(text: str, recipe: Recipe) -> Foundation:
    """Find and verify an adapter that is named in a recipe."""
    parsed = read_reference(text)
    fetched = pull_verified(parsed, backbone=_backbone_of(parsed, recipe))
    return foundation_of(fetched.reference or parsed, fetched.own())


def _backbone_of(reference: Reference, recipe: Recipe) -> str | None:
    """Return the backbone's fingerprint if a name has adapters for several backbones, else None."""
    if reference.kind != "local":
        return None
    versions = registry_at(None).versions(reference.name)
    if len({entry.fingerprint for entry in versions}) < 2:
        return None
    return fingerprint(recipe.backbone, revision=recipe.revision)


@dataclass(frozen=True)
class RunOrigins:
    """The trained adapters that a run starts from or trains on top of.

    Attributes:
        start: the adapter whose tensors initialize the new one.
        below: the adapters below the new one.
        copied: the adapters that its method is built from.
    """

    start: StartingPoint | None = None
    below: tuple[Foundation, ...] = ()
    copied: tuple[Foundation, ...] = ()

    def attach(self, model: nn.Module) -> list[str]:
        """Attach the adapters below, frozen, and return their names on the model.

        Raises:
            MismatchError: an adapter is for another backbone, or cannot be below others.
        """
        return [bring_foundation(model, each).name for each in self.below]

    def notes(self) -> Iterator[str]:
        """Yield notes for the user to read before the run starts."""
        if self.below:
            yield f"trains on top of {_named(self.below)}, frozen"
        if self.copied:
            yield f"built from copies of {_named(self.copied)}"

    def record(self) -> dict[str, Any]:
        """Return the manifest's record of the adapters that were started from or copied."""
        on = [asdict(each.ref) for each in self.copied]
        return {**self._from(), **({"on": on} if on else {})}

    def identity(self) -> dict[str, Any]:
        """Return the checkpoint's record; a run on other adapters is a different run."""
        on = [each.ref.digest for each in (*self.below, *self.copied)]
        return {**self._from(), **({"on": on} if on else {})}

    def _from(self) -> dict[str, Any]:
        if self.start is None:
            return {}
        ref = self.start.found.ref
        return {"from": {"name": ref.name, "version": ref.version, "digest": ref.digest}}


def run_origins(recipe: Recipe) -> tuple[RunOrigins, tuple[Method, ...]]:
    """Find the adapters that a recipe starts from and trains on; return them with its methods.

    If the recipe has no methods, those of the adapter that it starts from are used. A method that
    is built from trained adapters gets the adapters that the recipe trains on.

    Raises:
        ConfigError: a reference is invalid.
        RegistryError: a reference cannot be resolved.
        FileError: the files of an adapter are broken, or belong to another library.
    """
    start = starting_point(recipe)
    if recipe.method is None and start is not None:
        methods = start.methods
    else:
        methods = parse_methods(recipe.method)  # type: ignore[arg-type]
    adapters = tuple(_found(text, recipe) for text in dict.fromkeys(recipe.on))
    sources = [str(each.saved.folder) for each in adapters]
    for number, method in enumerate(methods if adapters else ()):
        if (built := method.with_sources(sources)) is not None:
            methods = (*methods[:number], built, *methods[number + 1 :])
            return RunOrigins(start, copied=adapters), methods
    return RunOrigins(start, below=adapters), methods


def _named(foundations: Sequence[Foundation]) -> str:
    return ", ".join(f"{each.ref} (sha256 {each.ref.digest[:12]})" for each in foundations)


def check_one_model(data: RunData) -> None:
    """Check that one model can serve the tasks, and that several heads use a single process.

    Raises:
        ConfigError: the tasks need different classes of model, or pool differently, or several
            processes would train several heads.
    """
    tasks = {name: part.task for name, part in data.parts.items()}
    autos = {name: " or ".join(TASK_MODELS[task.head].autos) for name, task in tasks.items()}
    if len(set(autos.values())) > 1:
        raise ConfigError(
            "these tasks need models of different classes",
            offenders=[f"{n}: {tasks[n].name} ({auto})" for n, auto in autos.items()],
            expected="tasks of one class: classification, multi-label and regression go together",
            hint="a text-to-text model, with seq2seq for each task",
        )
    if len({task.pooling for task in tasks.values()}) > 1:
        raise ConfigError(
            "these tasks pool differently",
            offenders=[f"{name}: pooling={task.pooling}" for name, task in tasks.items()],
            expected="the same pooling in all tasks",
        )
    if process_count() > 1 and any(TASK_MODELS[task.head].has_head for task in tasks.values()):
        raise ConfigError(
            "several heads train in one process",
            hint="adapterhub train without accelerate launch or torchrun",
        )


def enter_tasks(adapter: Adapter, data: RunData, seed: int) -> TaskSwitch:
    """Give an adapter the heads of several tasks, and return the switch between them."""
    heads = {
        name: NamedHead(part.task.name, part.task.head, part.labels)
        for name, part in data.parts.items()
    }
    if adapter.head is not None:
        add_heads(adapter, heads, seed)
    adapter.named_heads = heads

    def select(name: str) -> None:
        if adapter.heads:
            select_head(adapter, name)

    return TaskSwitch(next(iter(heads)), select)
