"""The teacher of a run: an adapter on the same backbone, or a separate model, both frozen.

An adapter of the same backbone is attached next to the trained one, and a route sends the
teacher's pass through it: there is one model in memory. The backbone itself is its own teacher with
no adapter. Another model must have the same tokens; its embedding may be padded to another size.

Logits have one number for each position and entry of the vocabulary, and a divergence takes several
tensors of that size. They are computed for a few positions at a time, with their gradient: if the
head of a language model is frozen, neither the student's nor the teacher's logits ever exist as a
whole. Otherwise the logits of a batch do, as in other losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.route import disabled, route
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.find import is_gguf
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.backbones.quantized import size_of
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import BackboneError, ConfigError
from adapterhub.files.run_folder import backbone_of_adapter
from adapterhub.loop.engine import Batch, BatchList, Engine, LazyBatches
from adapterhub.loop.processes import own_device, process_count
from adapterhub.recipe.recipe import Recipe
from adapterhub.registry.local import registry_at
from adapterhub.registry.pull import Fetched, pull_verified, read_reference
from adapterhub.registry.store import is_remote
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Task
from adapterhub.tasks.common.batches import (
    IGNORED,
    OF_LOSS,
    Passed,
    each_batch,
    limit_of,
    model_inputs,
)
from adapterhub.tasks.common.distillation import TeacherOptions, divergences
from adapterhub.tasks.common.language_models import (
    few_tokens,
    plain_head,
    states_below,
    targets_of,
    whole_output,
)
from adapterhub.tasks.common.on_policy import sample_completions

SAMPLED = f"{OF_LOSS}sampled"  # in a batch: its responses are the student's
_LOGITS = 1 << 23  # computed at a time: 32 MiB in fp32
_DRAWS = 0x7EAC  # separates these draws from others with the same seed


@dataclass(frozen=True)
class Teacher:
    """A frozen model, and the adapter that its passes go through.

    Attributes:
        model: the student's own model, or another one.
        shared: whether it is the student's.
        adapter: the teacher on a shared model; None for the backbone without an adapter.
        record: the entry about it in the trained adapter.
        note: a sentence about it for the user.
    """

    model: Any
    shared: bool
    adapter: Adapter | None
    record: dict[str, Any]
    note: str

    @contextmanager
    def passing(self, rows: int) -> Iterator[None]:
        """Send the passes of a batch through the teacher, without gradients."""
        through: AbstractContextManager[Any] = nullcontext()
        if self.shared:
            name = self.adapter and self.adapter.name
            through = route(self.model, [name] * rows) if name else disabled(self.model)
        # Dropout of the frozen backbone is of the student alone.
        with torch.no_grad(), evaluation_mode(self.model), through:
            yield


@dataclass(frozen=True)
class FoundTeacher:
    """A teacher whose files are here: the fetched adapter, or None for a model.

    `fingerprint` identifies the model, or the backbone that the adapter was trained on; None if
    another library's adapter lacks it.
    """

    name: str
    adapter: Fetched | None
    fingerprint: str | None


def find_teacher(recipe: Recipe) -> FoundTeacher:
    """Find the teacher of a recipe, and download and verify it if necessary.

    Raises:
        BackboneError: it is neither an adapter nor a model.
        RegistryError: the adapter was not found.
        FileError: its files are broken.
    """
    name = str(recipe.teacher.model)
    if _is_model(name):
        try:
            return FoundTeacher(name, None, fingerprint(name))
        except BackboneError as error:
            raise BackboneError(
                f"no teacher {name!r}: neither a trained adapter nor a model ({error.problem})",
                expected="a run or adapter folder, a name in the registry, hf:OWNER/ADAPTER, or a "
                "model: a folder or a Hub id",
                hint="adapterhub list, or adapterhub backbones",
            ) from error
    reference = read_reference(name)
    in_registry = reference.kind == "local"
    own = fingerprint(recipe.backbone, revision=recipe.revision) if in_registry else None
    fetched = pull_verified(reference, backbone=own)
    trained_on = fetched.saved.manifest.backbone.fingerprint if fetched.saved else None
    return FoundTeacher(name, fetched, trained_on)


def _is_model(name: str) -> bool:
    """Return whether a teacher's name denotes a model, not an adapter."""
    if is_folder(name):
        return (Path(name) / "config.json").is_file()
    if is_gguf(name):
        return True
    return not (is_remote(name) or "@" in name) and ("/" in name or not registry_at(None).has(name))


def bring_teacher(
    source: FoundTeacher, recipe: Recipe, student: Any, processor: Any, task: Task, labels: Any
) -> Teacher:
    """Attach a teacher to the student's model, or load it as a separate model.

    `processor` is the student's, `labels` its classes. No adapter is attached for the student yet,
    except those below it.

    Raises:
        BackboneError: the model cannot be loaded.
        ConfigError: its tokens, its labels or its head differ from the student's.
        MismatchError: the adapter does not fit its backbone.
    """
    name, fetched = source.name, source.adapter
    own = fingerprint(recipe.backbone, revision=recipe.revision)
    same = source.fingerprint in (None, own)
    text = f"{name} (sha256 {fetched.digest[:12]})" if fetched and fetched.digest else name
    if same and (fetched is not None or not task.has_labels):
        note = f"the teacher is {text}, on the same backbone, without a second model"
        if fetched is None:
            note = "the teacher is the backbone with the adapter off, without a second model"
        model, shared = student, True
    else:
        backbone, revision = name, None
        if fetched is not None:
            backbone, revision = backbone_of_adapter(fetched.folder, fetched.own().manifest)
        model, tokens = _loaded(recipe, backbone, revision, student, task, labels)
        _check_tokens(name, tokens, recipe.backbone, processor)
        if fetched is None and (fresh := Backbone.of(model).fresh):
            raise ConfigError(
                f"the teacher {name} lacks a trained head for {task.name}",
                offenders=sorted(fresh),
                expected="a model that was trained for the task, or a trained adapter",
                hint="train an adapter on it first, and give that: --teacher RUN",
            )
        shared = False
        on = f", on {backbone}" * (fetched is not None)
        note = f"the teacher is {text}{on}, frozen: {_sizes(model)}"
    adapter = None if fetched is None else _frozen(model, fetched)
    if adapter is not None:
        _check_labels(name, adapter.labels, labels)
    return Teacher(model, shared, adapter, _record(source), note)


def _record(source: FoundTeacher) -> dict[str, Any]:
    """Return the record of a teacher in the adapters that learn from it, without local paths."""
    fetched = source.adapter
    if fetched is None:
        return {"name": Path(source.name).name, "fingerprint": source.fingerprint}
    reference, saved = fetched.reference, fetched.saved
    record = {"name": saved.manifest.name if saved else fetched.folder.name}
    if reference is not None and reference.kind != "folder":
        record = {"name": reference.name, "version": str(reference.version)}
    return record | {"digest": fetched.digest, "fingerprint": source.fingerprint}


def _frozen(model: Any, fetched: Fetched) -> Adapter:
    """Attach an adapter whose parameters do not train."""
    name = f"teacher@{(fetched.digest or 'imported')[:8]}"
    adapter = load_folder(model, fetched.source, name=name)
    for parameter in adapter.parameters():
        parameter.requires_grad_(False)
    return adapter


def _loaded(
    recipe: Recipe, backbone: str, revision: str | None, student: Any, task: Task, labels: Any
) -> tuple[Any, Any]:
    """Load another model, frozen, on the device of the run; return it and its processor."""
    with doing(f"loading the teacher, {backbone}"):
        loaded, processor = load_backbone(
            backbone,
            task=task.head,
            labels=labels,
            revision=revision,
            dtype=recipe.teacher.dtype or Backbone.of(student).dtype,
            quantize=recipe.teacher.quantize,
            pooling=task.pooling,
        )
    model: Any = loaded
    if not getattr(model, "hf_device_map", None):
        model.to(own_device())
    model.config.use_cache = False
    return model.requires_grad_(False).eval(), processor


def _sizes(model: Any) -> str:
    """Describe the size of a model: its parameters, and their dtype."""
    count, dtype = sum(map(size_of, model.parameters())), str(model.dtype).removeprefix("torch.")
    return f"{count:,} more parameters in memory, in {dtype}"


def _check_labels(name: str, own: Sequence[str], labels: Sequence[str]) -> None:
    """Check that a teacher and the data have the same classes in the same order.

    Raises:
        ConfigError: they differ.
    """
    if tuple(own) == tuple(labels):
        return
    raise ConfigError(
        f"the teacher {name} has other labels than the data",
        offenders=[f"the teacher: {', '.join(own) or 'none'}", f"the data: {', '.join(labels)}"],
        expected="the same labels, in the same order",
        hint=f"--labels {','.join(own)}" if sorted(own) == sorted(labels) else "",
    )


def _check_tokens(name: str, theirs: Any, backbone: str, ours: Any) -> None:
    """Check that two models have the same tokens with the same ids.

    Raises:
        ConfigError: they differ, or a model has no tokens to compare.
    """
    vocabularies: list[Mapping[str, int]] = [
        getattr(getattr(each, "tokenizer", each), "get_vocab", dict)() for each in (theirs, ours)
    ]
    both, counts = (
        set(vocabularies[0].items()) ^ set(vocabularies[1].items()),
        [*map(len, vocabularies)],
    )
    if not both and all(counts):
        return
    differing = [repr(token) for token, _ in sorted(both, key=lambda pair: pair[::-1])[:3]]
    raise ConfigError(
        f"the teacher {name} has other tokens than {backbone}: probabilities cannot be compared",
        offenders=[
            f"{name}: {counts[0]:,} tokens",
            f"{backbone}: {counts[1]:,} tokens",
            *[f"the first that differ: {', '.join(differing)}"] * bool(differing),
        ],
        expected="models with one tokenizer; only the padding of their embeddings may differ",
        hint="a larger model of the same family as the backbone, or an adapter on the backbone",
    )


@dataclass(frozen=True)
class Scores:
    """The logits of some positions, computed for a part of them at a time.

    `below` are logits (n, vocabulary), or with a frozen `head` its inputs (n, d).
    """

    below: Tensor
    head: nn.Linear | None = None

    def logits(self, below: Tensor) -> Tensor:
        """Return the logits of a part of `below`."""
        logits: Tensor = below if self.head is None else self.head(below)
        return logits

    @property
    def width(self) -> int:
        """The size of the vocabulary."""
        return self.below.shape[-1] if self.head is None else self.head.weight.shape[0]


def distillation_loss(
    student: Scores, teacher: Scores, targets: Tensor | None, options: TeacherOptions
) -> Tensor:
    """Return the sum of the losses of positions, with a gradient for the student's scores.

    `targets` (n,) are the labels of the cross-entropy; None leaves it out.
    """

    def loss(below: Tensor, part: slice) -> Tensor:
        logits = student.logits(below)
        with torch.no_grad():
            wanted = teacher.logits(teacher.below[part])
        total = divergences(logits, wanted, options).sum()
        if targets is not None and options.sft_weight:
            cross = F.cross_entropy(logits.float(), targets[part], reduction="sum")
            total = total + options.sft_weight * cross
        return total

    size, count = max(_LOGITS // student.width, 1), len(student.below)
    parts = [slice(begin, begin + size) for begin in range(0, count, size)]
    apply: Any = _LossInParts.apply
    whole: Tensor = apply(student.below, loss, parts)
    return whole


class _LossInParts(torch.autograd.Function):
    """A sum of losses over parts of a tensor, whose gradient is computed with it."""

    @staticmethod
    def forward(
        ctx: Any, below: Tensor, loss: Callable[[Tensor, slice], Tensor], parts: list[slice]
    ) -> Tensor:
        """Compute both. below: (n, d) -> ()."""
        total = below.new_zeros((), dtype=torch.float32)
        if not ctx.needs_input_grad[0]:
            for part in parts:
                total += loss(below[part], part)
            return total
        gradient = torch.empty_like(below)
        for part in parts:
            with torch.enable_grad():
                piece = below[part].detach().requires_grad_()
                value = loss(piece, part)
            (gradient[part],) = torch.autograd.grad(value, piece)
            total += value.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        """Scale the gradient."""
        (gradient,) = ctx.saved_tensors
        return gradient * outer.to(gradient.dtype), None, None


@dataclass(frozen=True)
class Distillation:
    """The loss of a student, and of its teacher on the same batches.

    Attributes:
        teacher: the teacher.
        adapter: the student.
        options: the options of the teacher.
        task: the task of both.
        heads: the frozen heads of student and teacher, whose logits are computed in parts; None
            for logits that the model returns.
    """

    teacher: Teacher
    adapter: Adapter
    options: TeacherOptions
    task: Task
    heads: tuple[nn.Linear | None, nn.Linear | None]

    def loss(self, engine: Engine, batch: Batch) -> Tensor:
        """Return the mean loss of the labelled positions of a batch."""
        sums, count = self._sums(engine.model, batch, training=True)
        return sums / max(count, 1)

    def _sums(self, model: Any, batch: Batch, *, training: bool) -> tuple[Tensor, int]:
        """Return the summed loss of a batch, or without `training` its divergence, and positions.

        The teacher comes first: a route may exchange parameters, which the student's graph needs.
        """
        rows = len(next(iter(batch.values())))
        with self.teacher.passing(rows):
            theirs, _ = self._scores(self.teacher.model, self.heads[1], batch)
        ours, targets = self._scores(model, self.heads[0], batch)
        cross = targets if training and SAMPLED not in batch else None
        return distillation_loss(ours, theirs, cross, self.options), len(targets)

    def _scores(self, model: Any, head: nn.Linear | None, batch: Batch) -> tuple[Scores, Tensor]:
        """Return a model's scores of the labelled positions, and the labels there."""
        labels = batch["labels"]
        targets = targets_of(batch, self.task.predicts_next) if labels.dim() > 1 else labels
        learned = targets != IGNORED
        if head is not None:
            below = states_below(Backbone.of(model).pretrained, head, batch)
        else:
            inputs = model_inputs(batch)
            if not self.adapter.backbone.pretrained.config.is_encoder_decoder:
                inputs.pop("labels")  # the model would compute its own loss
            below = model(**inputs).logits
        if labels.dim() > 1:
            below = below[:, -labels.shape[1] :]  # virtual tokens come first
        return Scores(below[learned], head), targets[learned]

    def divergence(self, rows: Encoded, batch_size: int) -> float:
        """Return the mean divergence of the labelled positions of rows, in nats."""
        model: Any = self.adapter.model
        run = partial(self._sums, model, training=False)

        def read(passed: Passed) -> tuple[float, int]:
            return float(passed.output[0]), int(passed.output[1])

        sums = each_batch(model, rows, batch_size, read, run=run)
        return sum(total for total, _ in sums) / max(sum(count for _, count in sums), 1)

    def batches(self, batches: BatchList, rows: Encoded, epoch: int) -> BatchList:
        """Return the batches of an epoch, a share of them with responses of the student."""
        if not self.options.on_policy or not isinstance(batches, LazyBatches):
            return batches
        return LazyBatches(batches.order, partial(self._drawn, rows, epoch))

    def _drawn(self, rows: Encoded, epoch: int, indices: list[int]) -> dict[str, Tensor]:
        """Return a batch; the student answers its prompts if the draw for it says so.

        The draw and the samples depend on seed, epoch and rows, and the student's weights.
        """
        key = (rows.setting.seed, epoch, _DRAWS, *indices)
        if np.random.default_rng(key).random() >= self.options.on_policy:
            return rows.batch(indices, epoch)
        most = limit_of(rows.setting)
        room = max(most - getattr(rows.task, "new_tokens", 0), most // 2, 1)
        examples = [rows.examples[rows.owners[index]] for index in indices]
        setting = replace(rows.setting, max_length=room)
        prompts = rows.task.encode(examples, setting, labelled=False)
        completions = sample_completions(self.adapter.backbone.pretrained, prompts, key)
        batch = rows.task.collate([each.row for each in completions], rows.setting)
        return batch | {SAMPLED: torch.ones(len(completions), dtype=torch.bool)}


def distill(
    options: TeacherOptions, teacher: Teacher, adapter: Adapter, train: Encoded
) -> Distillation:
    """Return the loss of a run with a teacher.

    Raises:
        ConfigError: the task computes its own loss.
    """
    task = train.task
    if task.loss(train) is not None:
        own = "class_weights" if hasattr(task, "class_weights") else "its loss"
        raise ConfigError(
            f"{task.name} has its own loss ({own}), which a teacher would replace",
            hint=f"leave out {own if own == 'class_weights' else '--teacher'}",
        )
    row = dict(few_tokens(train.batch([0]))) if train.rows else {}
    labels = row.get("labels")
    if labels is None or labels.dim() < 2 or process_count() > 1:
        return Distillation(teacher, adapter, options, task, (None, None))
    model = adapter.backbone.pretrained
    moved = {name: tensor.to(model.device) for name, tensor in row.items()}
    ours = _plain(model, moved)
    with teacher.passing(1):
        theirs = _plain(Backbone.of(teacher.model).pretrained, moved)
        weight = None if theirs is None else theirs.weight.detach().clone()
    # Logits are computed after the pass, when a route no longer exchanges the head's weight.
    if theirs is not None and weight is not None and teacher.shared:
        kept = ours is not None and torch.equal(theirs.weight, weight)
        theirs = theirs if kept else None
    return Distillation(teacher, adapter, options, task, (ours, theirs))


def _plain(model: Any, row: Mapping[str, Tensor]) -> nn.Linear | None:
    """Return the head of a model if it is frozen and its output is the model's logits."""
    head = plain_head(model)
    if head is None or any(parameter.requires_grad for parameter in head.parameters()):
        return None
    with evaluation_mode(model), torch.no_grad():
        return None if whole_output(model, head, row) is None else head
