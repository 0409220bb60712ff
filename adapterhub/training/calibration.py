"""A pass over training rows before the first step, from which an adapter starts.

    eva       A = the first eigenvectors of the covariance of x                  (any LoRA)
    lora-ga   A0, B0 = singular vectors of dL/dW, subtracted from the output    (lora-ga, pissa)

    x: (tokens, d_in), the inputs of a site without padding    A: (rank, d_in), rows of length 1

EVA is a LoRA like any other afterwards; B is zero, so outputs are unchanged. The ranks are those of
the options: EVA's redistribution of ranks (rho > 1 in the paper) is not done.

A pass keeps d_in² numbers for each different input, or d_in d_out for each site, in fp32 on its
device. Paischer et al. 2024, "Parameter Efficient Fine-tuning via Explained Variance Adaptation",
section 3, https://arxiv.org/abs/2410.07170; LoRA-GA: adapterhub/methods/lora_ga.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.parts import PlacedModule
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.backbones.weights import is_sharded
from adapterhub.errors import ConfigError, TrainingError
from adapterhub.loop.batching import Batch, BatchList, StatefulBatches
from adapterhub.loop.engine import LossOfBatch, model_loss
from adapterhub.loop.gradient_checkpointing import recompute
from adapterhub.methods.lora import LoRALayer
from adapterhub.methods.lora_ga import begin_at_gradient
from adapterhub.methods.pissa import PiSSALayer, leading
from adapterhub.patch import Patch
from adapterhub.status import doing
from adapterhub.tasks._forward import on_device
from adapterhub.tasks._losses import model_inputs
from adapterhub.tasks._rows import IGNORED

Init = Literal["eva", "lora-ga"]
ROWS = 256  # rows of a run that are read
_WITH_TEXT = ("encoder", "decoder", "language")  # stacks whose padding the attention mask tells


@dataclass(frozen=True)
class Calibration:
    """What a pass has found.

    Attributes:
        init: eva or lora-ga.
        rows: how many rows were read.
        explained: by site, the share of the variance of its inputs in the directions of A (eva), or
            of the squared norm of its gradient in those of A and B (lora-ga).
    """

    init: Init
    rows: int
    explained: Mapping[str, float]

    def __str__(self) -> str:
        least, most = min(self.explained.values()), max(self.explained.values())
        return (
            f"init={self.init}: {least:.0%} to {most:.0%} of {STARTS[self.init].explains} at "
            f"{len(self.explained)} sites is in the first directions, on {self.rows:,} rows"
        )


def calibrate(
    adapter: Adapter,
    batches: Iterable[Batch],
    init: Init = "eva",
    *,
    loss: LossOfBatch = model_loss,
) -> Calibration:
    """Start a new adapter from batches of training data; outputs do not change.

    Args:
        adapter: an adapter that was attached, is active, and has not been trained.
        batches: inputs of the model, on any device; for lora-ga with labels.
        init: eva or lora-ga.
        loss: computes the loss from the output of the model and the batch.

    Returns:
        The share of the variance, or of the gradient, that the new directions have.

    Raises:
        ConfigError: no module of the adapter can start like this, the model is sharded, or the
            padding of an input is unknown.
        TrainingError: there are no batches, too few tokens, or no loss.
    """
    return _calibrated(adapter, batches, init, loss, checkpointing=False)


def calibrate_run(
    adapter: Adapter, epoch: BatchList, init: Init, loss: LossOfBatch, *, checkpointing: bool
) -> Calibration:
    """Start the adapter of a run from the first rows of its first epoch."""
    try:
        with doing(f"reading rows for init={init}"):
            return _calibrated(adapter, _first(epoch), init, loss, checkpointing)
    finally:
        if isinstance(epoch, StatefulBatches):
            epoch.close()


def _first(epoch: BatchList) -> Iterator[Batch]:
    rows = 0
    for index in range(len(epoch)):
        batch = epoch[index]
        yield batch
        rows += _rows(batch)
        if rows >= ROWS:
            return


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _calibrated(
    adapter: Adapter, batches: Iterable[Batch], init: Init, loss: LossOfBatch, checkpointing: bool
) -> Calibration:
    model, placed = adapter.model, _fitting(adapter, init)
    if any(map(is_sharded, model.parameters())):
        raise ConfigError(
            f"init={init} reads whole inputs and gradients, and the model is sharded",
            hint="train.shard=false, or a method without a start from the data",
        )
    device = next(iter(adapter.tensors().values())).device
    watch = STARTS[init](adapter, placed)
    rows = 0
    with watch.hooks(), evaluation_mode(model), recompute(model, checkpointing) as layers:
        if layers is not None:
            layers.apply()
        for batch in batches:
            moved = on_device(batch, model, device)
            watch.read(model, moved, loss)
            rows += _rows(batch)
    if not rows:
        raise TrainingError("there are no batches to start from", expected="one batch or more")
    return Calibration(init, rows, {p.site.id: watch.begin(p) for p in placed})


def _fitting(adapter: Adapter, init: Init) -> list[PlacedModule]:
    """Return the modules that can start like this.

    Raises:
        ConfigError: there are none, or the adapter is not active.
    """
    start = STARTS[init]
    placed = [
        each
        for each in adapter.placed
        if isinstance(each.module, LoRALayer)
        and isinstance(each.module, PiSSALayer) == start.subtracts
    ]
    if not placed:
        raise ConfigError(
            f"{', '.join(m.name for m in adapter.methods)} has no module for init={init}",
            expected=f"a method with one: {', '.join(start.methods)}",
            hint=f"method={start.methods[0]}",
        )
    if not adapter.active:
        raise ConfigError(
            f"the adapter {adapter.name!r} is not active",
            hint=f"ah.activate(model, {adapter.name!r})",
        )
    return placed


class _Watch:
    """Watches the modules of an adapter during a pass.

    Attributes:
        explains: what the report of a pass is about.
        methods: the methods with modules that can start like this.
        subtracts: whether the initial product is subtracted from the output.
    """

    explains: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]
    subtracts: ClassVar[bool] = False

    def __init__(self, adapter: Adapter, placed: Iterable[PlacedModule]) -> None:
        self.anatomy, self.placed = adapter.anatomy, list(placed)
        self.batch: Batch = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch inside."""
        with Patch() as patch:
            for each in self.placed:
                patch.hook(each.module.register_forward_hook, _Seen(self, each))
            yield

    def seen(self, placed: PlacedModule, x: Tensor, y: Tensor) -> None:
        """Take the input and output of a module: (..., d_in) and (..., d_out)."""
        raise NotImplementedError

    def read(self, model: nn.Module, batch: Batch, loss: LossOfBatch) -> None:
        """Read a batch."""
        raise NotImplementedError

    def begin(self, placed: PlacedModule) -> float:
        """Set the start of a module, and return the share that it explains."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Seen:
    """Calls a watch with what a module has computed."""

    watch: _Watch
    placed: PlacedModule

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.watch.seen(self.placed, inputs[0], output)


@dataclass
class Moments:
    """Sums over the inputs of a site: how many, x, and x xᵀ, (d_in, d_in)."""

    count: int = 0
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0

    def add(self, rows: Tensor) -> None:
        """Add inputs: (tokens, d_in)."""
        rows = rows.detach().float()
        self.count += len(rows)
        self.first = self.first + rows.sum(0)
        self.second = self.second + rows.T @ rows

    def covariance(self) -> Tensor:
        """Return the covariance of the inputs: (d_in, d_in)."""
        assert isinstance(self.first, Tensor)
        mean = self.first / self.count
        covariance: Tensor = self.second / self.count - torch.outer(mean, mean)
        return covariance


class Inputs(_Watch):
    """The second moments of the inputs; sites in a row that read the same tensor share them."""

    explains = "the variance of the inputs"
    methods = ("lora", "rslora", "lora-plus", "dora")

    def __init__(self, adapter: Adapter, placed: Iterable[PlacedModule]) -> None:
        super().__init__(adapter, placed)
        self.moments: dict[str, Moments] = {}
        self.owner: dict[str, str] = {}
        self.latest: tuple[Tensor, str] | None = None

    def read(self, model: nn.Module, batch: Batch, loss: LossOfBatch) -> None:
        """Read a batch without gradients."""
        self.batch = batch
        with torch.no_grad():
            model(**model_inputs(batch))
        self.latest = None

    def seen(self, placed: PlacedModule, x: Tensor, y: Tensor) -> None:
        """Add the inputs that are not padding."""
        site = placed.site
        latest, known = self.latest or (None, "")
        owner = self.owner.setdefault(site.id, known if latest is x else site.id)
        self.latest = (x, owner)
        if owner != site.id:
            return
        if (rows := _unpadded(x, self.batch, site, self.anatomy)) is not None:
            self.moments.setdefault(site.id, Moments()).add(rows)

    def begin(self, placed: PlacedModule) -> float:
        """Set A to the first directions of the inputs."""
        site, parameter = placed.site, placed.module.get_parameter("A")
        moments, rank = self.moments.get(self.owner.get(site.id, site.id)), len(parameter)
        if moments is None:
            raise _unknown_padding(site)
        if moments.count <= rank:
            raise TrainingError(
                f"{moments.count} tokens at {site.id} have no {rank} directions",
                expected="more tokens than the rank",
                hint="more rows, or a lower rank",
            )
        covariance = moments.covariance()
        _, values, directions = leading(covariance, rank)
        with torch.no_grad():
            parameter.copy_(directions)
        return float(values.sum() / covariance.trace())


class Gradients(_Watch):
    """The gradients of the loss with respect to the weights, (d_out, d_in) each."""

    explains = "the first gradient"
    methods = ("lora-ga", "pissa")
    subtracts = True

    def __init__(self, adapter: Adapter, placed: Iterable[PlacedModule]) -> None:
        super().__init__(adapter, placed)
        self.sums: dict[str, Tensor] = {}
        self.calls: list[tuple[str, Tensor, Tensor]] = []
        self.recording = False

    def read(self, model: nn.Module, batch: Batch, loss: LossOfBatch) -> None:
        """Add the gradients of a batch; parameters get none."""
        self.calls, self.recording = [], True
        with torch.enable_grad():
            computed = loss(model(**model_inputs(batch)), batch)
            self.recording = False  # layers may be computed again
            if computed is None:
                raise TrainingError("the model returned no loss", expected="labels in each batch")
            outputs = [y for _, _, y in self.calls]
            found = torch.autograd.grad(computed, outputs, allow_unused=True)
        for (site, x, _), gradient in zip(self.calls, found, strict=True):
            if gradient is not None:
                own = gradient.flatten(0, -2).float().T @ x.detach().flatten(0, -2).float()
                self.sums[site] = self.sums[site] + own if site in self.sums else own

    def seen(self, placed: PlacedModule, x: Tensor, y: Tensor) -> None:
        """Keep a call; padding has no part in the loss, and no gradient."""
        if self.recording:
            self.calls.append((placed.site.id, x, y))

    def begin(self, placed: PlacedModule) -> float:
        """Set A and B to singular vectors of the gradient."""
        gradient = self.sums.get(placed.site.id)
        if gradient is None or not gradient.any():
            raise TrainingError(
                f"the loss has no gradient at {placed.site.id}", expected="sites that it reaches"
            )
        assert isinstance(placed.module, PiSSALayer)
        return begin_at_gradient(placed.module, gradient)


STARTS: Mapping[Init, type[_Watch]] = {"eva": Inputs, "lora-ga": Gradients}


def _unpadded(x: Tensor, batch: Batch, site: Site, anatomy: Anatomy) -> Tensor | None:
    """Return the inputs of a site that are not padding: (tokens, d_in); None if that is unknown.

    x: (batch, tokens, d_in), or flattened, with or without padding.
    """
    x = x.transpose(0, 1) if anatomy.family.batch_dim and x.ndim == 3 else x
    rows = x.flatten(0, -2)
    masks = [mask.bool().flatten(0, -2) for mask in _masks(batch, site, anatomy)]
    if not masks:
        return rows
    for mask in masks:
        if x.ndim == 3 and x.shape[:2] == mask.shape:
            return x[mask]
        if x.shape[0] == 1 or x.ndim == 2:  # the rows of the batch, one after the other
            if len(rows) == mask.numel():
                return rows[mask.flatten()]
            if len(rows) == int(mask.sum()):
                return rows
    return None


def _masks(batch: Batch, site: Site, anatomy: Anatomy) -> Iterator[Tensor]:
    """Yield the masks that may be of a site, the most specific first."""
    if site.stack not in _WITH_TEXT:
        return
    answers = site.stack == "decoder" and anatomy.model.config.is_encoder_decoder
    if answers and site.role not in ("cross.k", "cross.v"):
        labels = batch.get("labels")
        if "decoder_attention_mask" in batch:
            yield batch["decoder_attention_mask"]
        elif labels is not None and labels.ndim == 2 and "decoder_input_ids" not in batch:
            yield labels != IGNORED
    if "attention_mask" in batch:
        yield batch["attention_mask"]


def _unknown_padding(site: Site) -> ConfigError:
    return ConfigError(
        f"which inputs of {site.id} are padding is unknown: they have another shape than the mask",
        hint=f"other sites than {site.role}, or no train.init",
    )
