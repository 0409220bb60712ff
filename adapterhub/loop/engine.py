"""One optimizer step with accelerate: precision, accumulation, clipping, and checks of the result.

`Engine.step` is the whole path from a batch to changed weights: forward pass, backward pass,
clipping, optimizer, schedule.

Optimizers: AdamW, two variants whose state takes less memory, and one for factors.

    adamw             both moments in fp32: 8 bytes per parameter
    adamw-8bit        both in 8 bits, with one scale per 256 values: 2 bytes; tensors with fewer
                      than 4,096 values keep fp32
    paged-adamw-8bit  the same in CUDA managed memory, which may be paged to the host
    riemannian        AdamW, where the gradients of the factors of an update B A are first
                      G_A <- (B^T B + d I)^-1 G_A   and   G_B <- G_B (A A^T + d I)^-1

    A, G_A: (rank, d_in)    B, G_B: (d_out, rank)    d: 0.01

Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", https://arxiv.org/abs/1711.05101;
Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
https://arxiv.org/abs/2110.02861; paged: Dettmers et al. 2023, section 3,
https://arxiv.org/abs/2305.14314; riemannian: Zhang & Pilanci 2024, "Riemannian Preconditioned LoRA
for Fine-Tuning Foundation Models", https://arxiv.org/abs/2402.02347. Most adapters are small: 8-bit
states matter for methods that train whole layers.

Gradient checkpointing: the activations of a layer are recomputed in the backward pass.

transformers checkpoints a layer only while `layer.training` is true. A frozen backbone is in
evaluation mode, which disables its dropout, so the option would silently have no effect. Here the
layer is in training mode for that check alone, and in its own mode while it computes.

Only the input of each layer is kept. It may be moved to host memory until the backward pass needs
it (`torch.autograd.graph.save_on_cpu`).

Inputs that a layer keeps outside autograd's saved tensors are not freed by this: see bitsandbytes'
int8 layers (`adapterhub.backbones.quantized.drop_saved_input`).
"""

from __future__ import annotations

import importlib.util
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
)
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from adapterhub.anatomy.backbone import Backbone, is_sharded, local
from adapterhub.backbones.processor import SOUND_INPUTS
from adapterhub.errors import ConfigError, TrainingError
from adapterhub.loop.processes import (
    any_process,
    everyone_s,
    join_processes,
    process_count,
    readers,
    total,
    without_launcher_sharding,
)
from adapterhub.loop.sharding import clip_gradients, reshard, share_state
from adapterhub.loop.trainee import Trainee, check_whole
from adapterhub.methods.lora import LoRALayer
from adapterhub.recipe.recipe import DEFAULT, RunOptions, TrainOptions, schedule, warmup_steps
from adapterhub.tasks.common.batches import (
    Items,
    batch_labels,
    learned,
    measuring,
    model_inputs,
    on_device,
)

_SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")  # of a layer


class CheckpointedLayers:
    """The layers of one model that are recomputed, from `apply` until `undo`.

    With `offload`, their inputs are kept in host memory.

    Raises:
        ConfigError: the model has no layer that transformers can checkpoint.
    """

    def __init__(self, model: torch.nn.Module, offload: bool = False) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.layers: list[Any] = [
            m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
        ]
        # diffusers models have their own switches.
        self.others: list[Any] = [
            m for m in model.modules() if hasattr(m, "enable_gradient_checkpointing")
        ]
        self.others = [m for m in self.others if m._supports_gradient_checkpointing]
        self.were = [m.is_gradient_checkpointing for m in self.others]
        if not self.layers and not self.others:
            raise ConfigError(
                f"{type(model).__name__} has no layer that supports gradient checkpointing",
                hint="train.gradient_checkpointing=false",
            )
        self.offload = offload
        self.modes = [layer.training for layer in self.layers]
        # Checkpointing enabled by the user, which `undo` restores.
        self.own = [{n: v for n, v in vars(m).items() if n in _SWITCHES} for m in self.layers]

    def apply(self) -> None:
        """Enable it with the current modes of the layers. Call again when modes change."""
        self.modes = [layer.training for layer in self.layers]
        for layer, mode in zip(self.layers, self.modes, strict=True):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = _checkpoint_in_mode(layer, mode, self.offload)
            layer.training = True
        for model in self.others:
            model.enable_gradient_checkpointing()

    def undo(self) -> None:
        """Restore the layers and their modes."""
        for layer, mode, own in zip(self.layers, self.modes, self.own, strict=True):
            layer.training = mode
            for name in _SWITCHES:
                layer.__dict__.pop(name, None)
            layer.__dict__.update(own)
        for model, was in zip(self.others, self.were, strict=True):
            if not was:
                model.disable_gradient_checkpointing()


@contextmanager
def recompute(
    model: torch.nn.Module, enabled: bool, offload: bool = False
) -> Iterator[CheckpointedLayers | None]:
    """Allow gradient checkpointing inside the block, if `enabled`; `apply` turns it on."""
    layers = CheckpointedLayers(model, offload) if enabled else None
    try:
        yield layers
    finally:
        if layers is not None:
            layers.undo()


@contextmanager
def noisy_embeddings(model: torch.nn.Module, alpha: float | None) -> Iterator[None]:
    """Add noise to the embeddings of tokens inside the block, wherever gradients are computed.

    Each value is uniform in +-alpha / sqrt(tokens x width), where padding counts as tokens. If
    alpha is None, nothing changes. Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction
    Finetuning", https://arxiv.org/abs/2310.05914.

    Raises:
        ConfigError: the model lacks a table of tokens.
    """
    if alpha is None:
        yield
        return
    backbone = Backbone.of(model)
    weight = backbone.token_embedding
    # The encoder and the decoder may have modules of their own, with the same weight.
    tables = {
        module
        for module in (backbone.input_embedding, *model.modules())
        if module is backbone.input_embedding
        or (isinstance(module, nn.Embedding) and module.weight is weight)
    }
    if weight is None:
        raise ConfigError(
            f"train.neftune_alpha={alpha:g} adds noise to token embeddings, and the backbone has "
            "no table of tokens",
            hint="leave out train.neftune_alpha",
        )

    def add_noise(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        most = alpha / math.sqrt(output.size(-2) * output.size(-1))
        return output + torch.empty_like(output).uniform_(-most, most)

    handles = [table.register_forward_hook(add_noise) for table in tables if table is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _checkpoint_in_mode(layer: torch.nn.Module, mode: bool, offload: bool) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        with _kept_on_host(inputs) if offload else nullcontext():
            return checkpoint(_call_in_mode, layer, mode, function, *inputs, use_reentrant=False)

    return run


def _kept_on_host(inputs: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a context that moves tensors saved for the backward pass off the GPU.

    Inside `checkpoint`, only its inputs are saved; other tensors have separate hooks.
    """
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    on_gpu = any(tensor.device.type != "cpu" for tensor in tensors)
    context: AbstractContextManager[None] = save_on_cpu(pin_memory=on_gpu)
    return context if on_gpu else nullcontext()


def _call_in_mode(
    layer: torch.nn.Module, mode: bool, function: Callable[..., Any], *inputs: Any
) -> Any:
    layer.training = mode
    try:
        return function(*inputs)
    finally:
        layer.training = True


Batch = Mapping[str, torch.Tensor]

MEGA_BATCH = 50


class BatchList(Protocol):
    """The batches of one epoch. A batch is collated on access, so skipping costs nothing."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


@runtime_checkable
class StatefulBatches(BatchList, Protocol):
    """Batches that are drawn in order from a stream, whose place is kept in checkpoints."""

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a place."""

    def close(self) -> None:
        """Stop reading."""


class LazyBatches:
    """A `BatchList` built from index lists (`batch_order`) and a collate function."""

    def __init__(self, order: Sequence[list[int]], collate: Callable[[list[int]], Batch]) -> None:
        self.order = order
        self.collate = collate

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int, /) -> Batch:
        return self.collate(self.order[index])


def batch_order(
    lengths: Sequence[int], batch_size: int, epoch: int, seed: int, grouped: bool
) -> list[list[int]]:
    """Return the index lists of the batches of one epoch; each example is in exactly one.

    The last batch is smaller if the number of examples is not a multiple of `batch_size`. The order
    depends on the arguments alone; global random states are neither read nor changed.

    `lengths` are in tokens. `grouped` sorts shuffled runs of 50 batches by length before cutting
    them, which saves padding. The full batches are then shuffled again, so that lengths do not
    follow an order.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    if grouped:
        order = _sorted_in_runs(order, np.asarray(lengths), batch_size * MEGA_BATCH)
    batches = [
        order[start : start + batch_size].tolist() for start in range(0, len(order), batch_size)
    ]
    full = len(lengths) // batch_size
    return [batches[i] for i in random.permutation(full)] + batches[full:]


def share(window: range, rank: int, world: int) -> list[int]:
    """Return the batches of one optimizer step for one process.

    Each process gets the same number of batches. If the batches do not divide evenly, the first
    ones are computed twice, and count once.
    """
    rounds = -(-len(window) // world)
    return [window[(rank + i * world) % len(window)] for i in range(rounds)]


def _sorted_in_runs(
    order: np.ndarray[tuple[int], np.dtype[np.int64]],
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    run: int,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    runs = [order[start : start + run] for start in range(0, len(order), run)]
    # A stable sort leaves examples of one length in their shuffled order.
    parts = [part[np.argsort(-lengths[part], kind="stable")] for part in runs]
    return np.concatenate(parts) if parts else order


SMALLEST, BLOCK = 4096, 256
_DAMPING = 1e-2  # for products of factors, one of which is zero at first
Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerRow:
    """The constructor of an optimizer from parameter groups, and the bytes of its state per tensor.

    `make` also receives the model whose tensors are trained.
    """

    make: Callable[[Groups, TrainOptions, nn.Module], torch.optim.Optimizer]
    bytes: Callable[[Tensor], int]


def _common(options: TrainOptions) -> dict[str, Any]:
    return {"betas": (options.beta1, options.beta2), "eps": options.eps}


def _adamw(groups: Groups, options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    fused = all(p.device.type in ("cuda", "cpu") for g in groups for p in g["params"])
    return torch.optim.AdamW(groups, **_common(options), fused=fused)


def _adamw_8bit(
    groups: Groups, options: TrainOptions, model: nn.Module, paged: bool = False
) -> torch.optim.Optimizer:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"train.optimizer={options.optimizer} needs bitsandbytes, which is not installed",
            hint='pip install "adapterhub[quantized]", or train.optimizer=adamw',
        )
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    cls = PagedAdamW8bit if paged and torch.cuda.is_available() else AdamW8bit
    optimizer: torch.optim.Optimizer = cls(groups, **_common(options), min_8bit_size=SMALLEST)
    return optimizer


def _state_bytes_8bit(parameter: Tensor) -> int:
    values = parameter.numel()
    return 8 * values if values < SMALLEST else 2 * (values + 4 * -(-values // BLOCK))


def _riemannian(groups: Groups, options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    layers = [module for module in model.modules() if isinstance(module, LoRALayer)]
    pairs = [(m.A, m.B) for m in layers if {id(m.A), id(m.B)} <= trained]
    if not pairs:
        raise ConfigError(
            "train.optimizer=riemannian needs factors A and B that both train",
            expected="a LoRA or one of its variants",
            hint="method=lora, or train.optimizer=adamw",
        )
    optimizer = _adamw(groups, options, model)
    optimizer.register_step_pre_hook(lambda *_: _precondition(pairs))
    return optimizer


@torch.no_grad()
def _precondition(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Precondition the gradients of factors of B A. A: (rank, d_in), B: (d_out, rank)."""
    for a, b in pairs:
        damping = _DAMPING * torch.eye(len(a)).to(a)
        if a.grad is not None:
            a.grad.copy_(torch.linalg.solve(b.T @ b + damping, a.grad))
        if b.grad is not None:
            b.grad.copy_(torch.linalg.solve(a @ a.T + damping, b.grad.T).T)


def _bytes_fp32(parameter: Tensor) -> int:
    return 8 * parameter.numel()


OPTIMIZERS = {
    "adamw": OptimizerRow(_adamw, _bytes_fp32),
    "adamw-8bit": OptimizerRow(_adamw_8bit, _state_bytes_8bit),
    "paged-adamw-8bit": OptimizerRow(partial(_adamw_8bit, paged=True), _state_bytes_8bit),
    "riemannian": OptimizerRow(_riemannian, _bytes_fp32),
}


class NotFinite(TrainingError):
    """A loss, gradient norm or trained tensor is infinite or NaN."""


LossOfBatch = Callable[[Any, Batch], torch.Tensor | None]
"""Compute the loss of a batch from the model's output and the batch."""


def model_loss(output: Any, batch: Batch) -> torch.Tensor | None:
    """Return the loss that the model computed."""
    loss: torch.Tensor | None = output.loss
    return loss


class Engine:
    """The optimizer, schedule and accelerator of one run, on the device of the trained tensors.

    The loss of a step is the mean over the items (labels, rows) of all its micro-batches in all
    processes: the step is the same for any division of rows. In fp16, a step whose gradient
    overflows is skipped, and the schedule does not advance.

    Raises:
        ConfigError: the device does not support the precision.
        TrainingError: trained tensors are in half precision or missing, or a method takes part in
            the steps of a sharded model.
    """

    scheduler: torch.optim.lr_scheduler.LambdaLR
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        trainee: Trainee,
        options: RunOptions,
        loss: LossOfBatch = model_loss,
        items: Items = batch_labels,
        passes: int = 1,
        on_policy: bool = False,
    ) -> None:
        _check_fp32(trainee)
        self.trainee, self.options, self.loss = trainee, options, loss
        self.items, self.passes = items, passes
        self.on_policy = on_policy  # then a step may have neither a loss nor a gradient
        # If set, computes the loss of a batch without the model's logits; it may return None.
        self.below_head: Callable[[Batch], torch.Tensor | None] | None = None
        self.device = next(iter(trainee.tensors().values())).device
        self.accelerator = _accelerator(options, self.device, trainee.staged)
        self.rank, self.world = readers(options.tensor_parallel)
        self.per_step = options.gradient_accumulation * self.world
        self.model = trainee.model
        self.sharded = any(map(is_sharded, trainee.model.parameters()))
        if self.sharded:
            check_whole(trainee.by_share)
            reshard(trainee.model)
        if self.world > 1 and not self.sharded:  # FSDP2 itself averages gradients
            self.model = self.accelerator.prepare_model(trainee.model)
        self.groups = _decay_groups(trainee.param_groups(options), options.weight_decay)
        self.params = [p for group in self.groups for p in group["params"]]
        self.unread: list[torch.Tensor] = []
        self.measures: list[dict[str, float]] = []
        self.checked = False

    def begin(self, steps: int) -> None:
        """Create the optimizer and a schedule of this number of steps."""
        options = self.options
        self.optimizer = OPTIMIZERS[options.optimizer].make(self.groups, options, self.model)
        multiplier = schedule(options.schedule or DEFAULT, steps, options.warmup)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda number: multiplier(number // self.passes)
        )
        self.prepared = self.accelerator.prepare_optimizer(self.optimizer, device_placement=False)

    def step(self, epoch: BatchList, window: range, done: float) -> tuple[int, int]:
        """Take one step on the batches `window` of an epoch: an optimizer step for each pass.

        `done` is the completed share of the run, including this step.

        Returns:
            The numbers of examples and of tokens, over all processes.

        Raises:
            TrainingError: a batch has no labels, tensors get no gradient, or memory is exhausted.
        """
        with measuring() as measured:
            with self.accelerator.autocast():  # some batches have texts that the model generates
                batches = [epoch[index] for index in share(window, self.rank, self.world)]
            counts = [(len(next(iter(b.values()))), token_count(b)) for b in batches]
            shares = self._shares(batches, window)
            for _ in range(self.passes):
                result = self._pass(deque(batches), shares, done)
        # Both stay on the device: reading them at each step would stall the host.
        self.unread.append(result)
        if measured:
            self.measures.append(self._means(measured))
        examples, tokens = (sum(column) * self.world for column in zip(*counts, strict=True))
        return examples, tokens

    def _pass(self, batches: deque[Batch], shares: Sequence[float], done: float) -> Tensor:
        """Take one optimizer step on batches; return its loss and the norm of the gradient."""
        loss = self._add_penalty()
        for counted in shares:
            moved = on_device(batches.popleft(), self.trainee.model, self.device)
            loss += self._add_gradients(moved, counted, last=not batches)
        due = not self.checked and any_process(any(shares))
        if due and (not self.on_policy or any_process(bool(loss))):
            self._check_gradients()
        norm = self._update(done)
        return torch.stack([loss, norm])

    def _means(self, measured: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the mean of each measure of a step, over all processes."""
        means = {name: float(sum(values)) / len(values) for name, values in measured.items()}
        if self.world == 1:
            return means
        return step_means(everyone_s(means))

    def _shares(self, batches: Sequence[Batch], window: range) -> list[float]:
        """Return each batch's share in this process; the mean over processes of their sums is 1."""
        places = range(self.rank, self.rank + len(batches) * self.world, self.world)
        # Batches that are computed twice count once.
        pairs = zip(batches, places, strict=True)
        items = [self.items(batch) if n < len(window) else 0.0 for batch, n in pairs]
        mean = (total(sum(items)) if self.world > 1 else sum(items)) / self.world
        return [n / mean if n else 0.0 for n in items]

    def _add_penalty(self) -> torch.Tensor:
        """Add the gradients of the penalty, which applies to all batches; return the penalty.

        The gradients are the same in each process, and lose no precision.
        """
        penalty = self.trainee.penalty()
        if penalty is None:
            return torch.zeros((), device=self.device)
        with self._unsynchronized():
            self.accelerator.backward(penalty)
        return penalty.detach()

    def _add_gradients(self, batch: Batch, share: float, *, last: bool) -> torch.Tensor:
        """Add the gradients of a batch, and return its part of the step's loss.

        `share` is the batch's share of the items that the loss averages over; 0 if it has no items.
        """
        try:
            with nullcontext() if last or self.sharded else self._unsynchronized():
                with self.accelerator.autocast():
                    loss = self.loss_of(batch)
                if loss is None:
                    raise TrainingError(
                        "the model returned no loss",
                        expected="labels in each batch",
                        hint=f"the batch has {', '.join(sorted(batch))}",
                    )
                # The mean of zero items is NaN.
                part = (loss if share else loss.nan_to_num()).float() * share
                self.accelerator.backward(part)
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(self.options) from error
        return part.detach()

    def loss_of(self, batch: Batch) -> torch.Tensor | None:
        """Return the loss of a batch on the device of the run; None if it has no labels."""
        with learned(batch):
            loss = self.below_head(batch) if self.below_head is not None else None
            return self.loss(self.model(**model_inputs(batch)), batch) if loss is None else loss

    def _unsynchronized(self) -> AbstractContextManager[None]:
        """Return a context without gradient averaging over the processes."""
        context: AbstractContextManager[None] = self.accelerator.no_sync(self.model)
        return context

    def _update(self, done: float) -> torch.Tensor:
        """Clip the gradients, step optimizer and schedule; return the gradient norm."""
        limit = self.options.max_grad_norm or math.inf
        clip = clip_gradients if self.sharded else self.accelerator.clip_grad_norm_
        norm: torch.Tensor = clip(self.params, limit)
        self.prepared.step()
        if not self.prepared.step_was_skipped:
            self.scheduler.step()
            self.trainee.stepped(done)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def read(self, step: int) -> list[float]:
        """Return the losses since the last call; `step` is the number of the latest step.

        Raises:
            NotFinite: a loss or gradient norm is not finite; the error names the first such step.
        """
        if not self.unread:
            return []
        unread = torch.stack(self.unread)
        if self.world > 1:
            unread = self.accelerator.reduce(unread, "mean")
        self.unread.clear()
        rows = unread.tolist()
        scaler = self.accelerator.scaler
        scaled = scaler is not None and scaler.is_enabled()
        for number, (loss, norm) in enumerate(rows, start=step - len(rows) + 1):
            # With loss scaling, an infinite norm is normal: that step was skipped.
            if not (math.isfinite(loss) and (scaled or math.isfinite(norm))):
                raise self.not_finite(f"step {number} has loss {loss} and gradient norm {norm}")
        return [loss for loss, _ in rows]

    def read_measures(self) -> list[dict[str, float]]:
        """Return the measures of each step since the last call, by name."""
        measures, self.measures = self.measures, []
        return measures

    def finite_tensors(self) -> dict[str, torch.Tensor]:
        """Return the trained tensors, on the CPU if each process has all of them.

        Raises:
            NotFinite: a tensor is not finite.
        """
        tensors = {name: t.detach() for name, t in self.trainee.tensors().items()}
        if not self.sharded:
            tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        bad = [name for name, tensor in tensors.items() if not local(tensor).isfinite().all()]
        if self.sharded:
            bad = sorted(set().union(*everyone_s(bad)))
        if bad:
            raise self.not_finite(f"these tensors are no longer finite: {', '.join(bad)}")
        return tensors

    def not_finite(self, problem: str) -> NotFinite:
        """Build the error for a diverged run."""
        rate = max(group["lr"] for group in self.groups)
        return NotFinite(
            f"training stopped: {problem}",
            expected="finite losses; the last checkpoint, from before this, is kept",
            hint=not_finite_hint(rate, self.options.mixed_precision),
        )

    def rates(self) -> dict[str, float]:
        """Return the learning rate of each group in the latest step."""
        multiplier = self.scheduler.lr_lambdas[0](max(0, self.scheduler.last_epoch - 1))
        return {g["name"]: g["initial_lr"] * multiplier for g in self.optimizer.param_groups}

    def peaks(self) -> dict[str, float]:
        """Return the peak learning rate of each parameter group."""
        return {group["name"]: group["initial_lr"] for group in self.optimizer.param_groups}

    def schedule_text(self, steps: int, peaks: str) -> str:
        """Describe a schedule: the peak rates, the warm-up and the shape."""
        name = self.options.schedule or DEFAULT
        warmup = warmup_steps(name, steps, self.options.warmup)
        rise = f", {warmup:,} step{'s' * (warmup > 1)} of warm-up" if warmup else ""
        return f"{steps:,} steps; learning rate up to {peaks}{rise}, {name}"

    def state(self) -> dict[str, Any]:
        """Return the state of optimizer, schedule and loss scaler, for `load_state`."""
        scaler = self.accelerator.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": {} if scaler is None else scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state`; call `begin` first.

        The learning rates and other settings of the groups stay as they are in this session.
        """
        optimizer = state["optimizer"]
        if self.sharded:
            optimizer = {**optimizer, "state": share_state(optimizer["state"], self.params)}
        settings = [_settings(group) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict({**state["scheduler"], "base_lrs": self.scheduler.base_lrs})
        step, (multiplier, *_) = self.scheduler.last_epoch, self.scheduler.lr_lambdas
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group |= own | {"lr": own["initial_lr"] * multiplier(step)}
        if self.accelerator.scaler is not None and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def _check_gradients(self) -> None:
        """Check at the first step that the loss reaches every trained tensor."""
        self.checked = True
        offenders = list(self._untrained())
        if offenders:
            raise TrainingError(
                "some tensors that should be trained are not",
                expected="a gradient for each trained tensor at the first step",
                hint="check that the forward pass uses each of them, and that none is detached",
                offenders=offenders,
            )

    def _untrained(self) -> Iterator[str]:
        optimized = {id(p) for p in self.params}
        tensors = {k: t for k, t in self.trainee.tensors().items() if t.requires_grad}
        for name, tensor in tensors.items():
            if tensor.grad is None:
                yield f"{name}: no gradient"
            elif id(tensor) not in optimized:
                yield f"{name}: not in the optimizer"
        gradients = [t.grad for t in tensors.values() if t.grad is not None]
        if not tensors:
            yield "no tensor requires a gradient"
        elif len(gradients) == len(tensors) and not any_process(_any_number(gradients)):
            yield "every gradient is zero"


def step_means(measures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each measure over the steps, or processes, that have it."""
    names = dict.fromkeys(name for each in measures for name in each)
    values = {name: [each[name] for each in measures if name in each] for name in names}
    return {name: math.fsum(each) / len(each) for name, each in values.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric settings of a parameter group that follow from the options."""
    names = ("initial_lr", "weight_decay", "betas", "eps")
    return {name: group[name] for name in names if name in group}


def _any_number(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether this process holds any nonzero gradient."""
    return any(bool(local(gradient).any()) for gradient in gradients)


def token_count(batch: Batch) -> int:
    """Count the tokens of a batch without padding; 0 if it has no tokens."""
    tokens = batch.get("attention_mask")
    if tokens is None or tokens.ndim != 2 or not batch.keys().isdisjoint(SOUND_INPUTS):
        return batch["input_ids"].numel() if "input_ids" in batch else 0
    return int(tokens.sum())


def _accelerator(options: RunOptions, device: torch.device, staged: bool) -> Accelerator:
    """Create an accelerator with a new state.

    accelerate keeps one state per process, and would refuse a second run with another precision or
    device.
    """
    AcceleratorState._reset_state()
    if process_count() == 1:
        PartialState._reset_state()
    join_processes()
    # DDP waits for the gradient of every trained tensor, unless it looks for unused ones.
    parallel = DistributedDataParallelKwargs(find_unused_parameters=staged)
    try:
        with without_launcher_sharding():
            return Accelerator(
                mixed_precision=options.mixed_precision,
                cpu=device.type == "cpu",
                kwargs_handlers=[parallel],
                # `accelerate launch` may set a number of steps, which divides each loss.
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            )
    except ValueError as error:
        raise ConfigError(
            f"train.mixed_precision={options.mixed_precision} fails on {device.type}: {error}",
            hint="train.mixed_precision=no, or bf16",
        ) from error


def _decay_groups(groups: list[dict[str, Any]], decay: float) -> list[dict[str, Any]]:
    """Split each group without "weight_decay" into matrices (decayed) and 1-D (not decayed).

    Sharded and whole tensors are in separate groups, since the optimizer cannot update them
    together.
    """
    split: list[dict[str, Any]] = []
    for group in _alike(groups):
        if "weight_decay" in group:
            split.append(group)
            continue
        params = list(group["params"])
        matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
        if matrices:
            split.append({**group, "params": matrices, "weight_decay": decay})
        if vectors:
            split.append({**group, "params": vectors, "weight_decay": 0.0})
    return split


def _alike(groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Split each group into sharded and whole tensors."""
    for group in groups:
        params = list(group["params"])
        for sharded in (False, True):
            if alike := [p for p in params if is_sharded(p) == sharded]:
                yield {**group, "params": alike}


def _check_fp32(trainee: Trainee) -> None:
    tensors = trainee.tensors()
    if not tensors:
        raise TrainingError("there is nothing to train: the method has no tensors")
    half = (torch.float16, torch.bfloat16)
    offenders = [f"{name}: {t.dtype}" for name, t in tensors.items() if t.dtype in half]
    if offenders:
        raise TrainingError(
            "some trained tensors are in half precision, which loses small updates",
            expected="trained tensors in fp32; train.mixed_precision sets the precision of the "
            "computation",
            hint="load the backbone in fp32 if the method trains backbone parameters",
            offenders=offenders,
        )


def not_finite_hint(rate: float, mixed_precision: str) -> str:
    """Return what to change, here or with `--resume`, after a run diverged at a peak rate."""
    words = f"train.learning_rate={rate / 10:g} (the peak was {rate:g})"
    mixed = ", or train.mixed_precision=no" * (mixed_precision != "no")
    return f"{words}{mixed}, or look for broken examples in the data"


def _out_of_memory(options: RunOptions) -> TrainingError:
    size, length = options.batch_size, options.max_length
    ways = [f"train.max_length={length // 2}, if that cuts few texts"]
    ways += ["quantize=nf4, or train.mixed_precision=bf16"]
    if not options.gradient_checkpointing:
        ways.insert(0, "train.gradient_checkpointing=true")
    elif not options.offload_activations:
        ways.insert(0, "train.offload_activations=true")
    if size > 1:
        double = options.gradient_accumulation * 2
        ways.insert(0, f"train.batch_size={size // 2} train.gradient_accumulation={double}")
    return TrainingError(
        f"the device ran out of memory with train.batch_size={size}, train.max_length={length}",
        hint="; ".join(ways),
    )
