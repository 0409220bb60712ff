"""Initialization of an adapter by a pass over training rows before the first step.

    eva       A = the first eigenvectors of the covariance of x                  (any LoRA)
    eva-ranks the same, with more of them where they explain more of the variance
    lora-ga   A0, B0 = singular vectors of dL/dW, subtracted from the output    (lora-ga, pissa)
    corda     s B0 A0 = (U_r S_r V_rᵀ) C⁻¹ of W C = U S Vᵀ, subtracted likewise  (pissa, lora-ga)
    loftq     s B A = U_r S_r V_rᵀ of W - Q(W) = U S Vᵀ, of quantized weights     (any LoRA)

    x: (tokens, d_in), the inputs of a site without padding    A: (rank, d_in), rows of length 1
    C: (d_in, d_in), the mean of x xᵀ    Q(W): the quantized weight, W that of the checkpoint

After EVA, the adapter is an ordinary LoRA; B is zero, so outputs are unchanged. With `eva-ranks`,
the sum of the ranks of a method stays the same, and no rank more than doubles (rho = 2). Each next
rank is placed where the next eigenvector explains most of the variance of its site. Each site keeps
at least one rank.

LoftQ reads no rows. It moves the outputs towards those of the unquantized weights, which it loads
again from the folder of the backbone, on the CPU.

A pass keeps d_in² numbers for each different input, or d_in d_out for each site, in fp32 on its
device. Paischer et al. 2024, "Parameter Efficient Fine-tuning via Explained Variance Adaptation",
section 3, https://arxiv.org/abs/2410.07170; LoRA-GA: adapterhub/methods/lora_ga.py; Yang et al.
2024, "CorDA: Context-Oriented Decomposition Adaptation of Large Language Models", section 3.2
(instruction-previewed), https://arxiv.org/abs/2406.05223; Li et al. 2024, "LoftQ:
LoRA-Fine-Tuning-Aware Quantization for Large Language Models", section 3 (one step),
https://arxiv.org/abs/2310.08659.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adapterhub.adapters.adapter import Adapter, PlacedModule
from adapterhub.anatomy.backbone import is_sharded
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import ConfigError, TrainingError, unknown
from adapterhub.interchange.translation import size_options
from adapterhub.loop.engine import (
    Batch,
    BatchList,
    LossOfBatch,
    StatefulBatches,
    model_loss,
    recompute,
)
from adapterhub.methods.common.projections import weight_at
from adapterhub.methods.lora import LoRALayer
from adapterhub.methods.lora_ga import begin_at_gradient
from adapterhub.methods.mica import MinorComponents
from adapterhub.methods.pissa import PiSSALayer, leading
from adapterhub.patch import Patch
from adapterhub.recipe.recipe import Init
from adapterhub.status import MODEL_LOCK, doing
from adapterhub.tasks.common.batches import IGNORED, model_inputs, on_device

ROWS = 256  # rows read per run
_RHO = 2  # maximum rank of a site after eva-ranks, relative to before; 2 in the paper
_DAMPING = 0.01  # stacks whose attention mask gives the padding
_WITH_TEXT = ("encoder", "decoder", "language")  # stacks whose mask gives the padding


@dataclass(frozen=True)
class Calibration:
    """The result of a pass.

    Attributes:
        init: eva, eva-ranks, lora-ga, corda or loftq.
        rows: the number of rows read.
        explained: the explained share, by site. For eva: of the variance of its inputs, in the
            directions of A. For lora-ga: of the squared norm of its gradient, in the directions of
            A and B. For corda: of the squared norm of W C, in the trained components. For loftq: of
            the quantization error.
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
    """Initialize a new adapter from batches of training data; only loftq changes outputs.

    Args:
        adapter: an adapter that was attached, is active, and has not been trained.
        batches: inputs of the model, on any device; with labels for lora-ga, none for loftq.
        init: eva, eva-ranks, lora-ga, corda or loftq.
        loss: computes the loss from the output of the model and the batch.

    Returns:
        The share of the variance, or of the gradient, explained by the new directions.

    Raises:
        ConfigError: no module of the adapter supports this initialization, the model is sharded,
            the padding of an input is unknown, or the model is not quantized or has no folder
            (loftq).
        TrainingError: there are no batches, too few tokens, or no loss.
    """
    return _calibrated(adapter, batches, init, loss, checkpointing=False)


def calibrate_run(
    adapter: Adapter, epoch: BatchList, init: Init, loss: LossOfBatch, *, checkpointing: bool
) -> Calibration:
    """Initialize the adapter of a run from the first rows of its first epoch."""
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
            hint="train.shard=false and train.tensor_parallel=false, or a start without the data",
        )
    device = next(iter(adapter.tensors().values())).device
    watch = STARTS[init](adapter, placed)
    rows = 0
    with watch.hooks(), evaluation_mode(model), recompute(model, checkpointing) as layers:
        if layers is not None:
            layers.apply()
        for batch in batches if watch.reads else ():
            moved = on_device(batch, model, device)
            watch.read(model, moved, loss)
            rows += _rows(batch)
    if watch.reads and not rows:
        raise TrainingError("no batches to initialize from", expected="one batch or more")
    watch.allot(adapter)
    return Calibration(init, rows, {p.site.id: watch.begin(p) for p in placed})


def _fitting(adapter: Adapter, init: Init) -> list[PlacedModule]:
    """Return the modules that support this initialization.

    Raises:
        ConfigError: there are none, the adapter is not active, or the initialization is unknown.
    """
    if init not in STARTS:
        raise unknown("init", init, STARTS)
    start = STARTS[init]
    placed = [each for each in adapter.placed if start.fits(each.module)]
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
        explains: the subject of the pass's report.
        methods: the methods with modules that support this initialization.
        subtracts: whether the initial product is subtracted from the output.
        reads: whether it reads batches.
        allots: whether it changes ranks, so that a resumed run must repeat the initialization.
    """

    explains: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]
    subtracts: ClassVar[bool] = False
    reads: ClassVar[bool] = True
    allots: ClassVar[bool] = False

    def __init__(self, adapter: Adapter, placed: Iterable[PlacedModule]) -> None:
        self.anatomy, self.placed = adapter.anatomy, list(placed)
        self.batch: Batch = {}

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return whether a module supports this initialization; the B of MiCA is not zero."""
        plain = isinstance(module, LoRALayer) and not isinstance(module, MinorComponents)
        return plain and isinstance(module, PiSSALayer) == cls.subtracts

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the modules inside the context."""
        with Patch() as patch:
            for each in self.placed:
                patch.hook(each.module.register_forward_hook, _Seen(self, each))
            yield

    def seen(self, placed: PlacedModule, x: Tensor, y: Tensor) -> None:
        """Process the input and output of a module: (..., d_in) and (..., d_out)."""
        raise NotImplementedError

    def read(self, model: nn.Module, batch: Batch, loss: LossOfBatch) -> None:
        """Read a batch."""
        raise NotImplementedError

    def allot(self, adapter: Adapter) -> None:
        """Change the ranks of the adapter."""

    def begin(self, placed: PlacedModule) -> float:
        """Initialize a module, and return the explained share."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Seen:
    """Passes the inputs and outputs of a module to a watch."""

    watch: _Watch
    placed: PlacedModule

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.watch.seen(self.placed, inputs[0], output)


@dataclass
class Moments:
    """Sums over the inputs of a site: their number, x, and x xᵀ, (d_in, d_in)."""

    count: int = 0
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0

    def add(self, rows: Tensor) -> None:
        """Add inputs: (tokens, d_in)."""
        rows = rows.detach().float()
        self.count += len(rows)
        self.first = self.first + rows.sum(0)
        self.second = self.second + rows.T @ rows

    def second_moments(self) -> Tensor:
        """Return the mean of x xᵀ: (d_in, d_in)."""
        assert isinstance(self.second, Tensor)
        return self.second / self.count

    def covariance(self) -> Tensor:
        """Return the covariance of the inputs: (d_in, d_in)."""
        assert isinstance(self.first, Tensor)
        mean = self.first / self.count
        return self.second_moments() - torch.outer(mean, mean)


class Inputs(_Watch):
    """The second moments of the inputs; consecutive sites that read the same tensor share them."""

    explains: ClassVar[str] = "the variance of the inputs"
    methods: ClassVar[tuple[str, ...]] = ("lora", "rslora", "lora-plus", "lora-fa", "dora")

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
        """Add the inputs other than padding."""
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
        assert isinstance(placed.module, LoRALayer)
        covariance, a = self.moments_of(placed).covariance(), placed.module.A
        _, values, directions = leading(covariance, len(a))
        with torch.no_grad():
            a.copy_(directions)
        return float(values.sum() / covariance.trace())

    def rank(self, placed: PlacedModule) -> int:
        """Return the rank of a module."""
        assert isinstance(placed.module, LoRALayer)
        return len(placed.module.A)

    def moments_of(self, placed: PlacedModule) -> Moments:
        """Return the moments of the inputs of a module.

        Raises:
            ConfigError: the padding of its inputs is unknown.
            TrainingError: there are too few inputs for its rank.
        """
        site, rank = placed.site, self.rank(placed)
        moments = self.moments.get(self.owner.get(site.id, site.id))
        if moments is None:
            raise _unknown_padding(site)
        if moments.count <= rank:
            raise TrainingError(
                f"{moments.count} tokens at {site.id} have no {rank} directions",
                expected="more tokens than the rank",
                hint="more rows, or a lower rank",
            )
        return moments


class AllottedInputs(Inputs):
    """Inputs in whose directions the ranks of a method are divided among its sites."""

    allots: ClassVar[bool] = True

    def allot(self, adapter: Adapter) -> None:
        """Give each method its ranks, and record them in its option."""
        for method in adapter.methods:
            if not (own := [p for p in self.placed if p.method is method]):
                continue
            ranks = self.ranks(own)
            changed: Any = replace(method, **size_options("rank", ranks))  # type: ignore[type-var]
            adapter.methods = tuple(changed if m is method else m for m in adapter.methods)
            for each in own:
                each.method = changed
                _resize(each.module, ranks[each.site.id])
                each.module.scale = changed.scale(ranks[each.site.id])

    def ranks(self, placed: Sequence[PlacedModule]) -> dict[str, int]:
        """Return a rank of at least one by site; the sum of the ranks does not change."""
        ranks = {each.site.id: 1 for each in placed}
        others: list[tuple[float, str]] = []
        for each in placed:
            moments, before = self.moments_of(each), self.rank(each)
            covariance = moments.covariance()
            most = min(_RHO * before, len(covariance), moments.count - 1)
            _, values, _ = leading(covariance, most)
            shares = (values[1:] / covariance.trace()).tolist()
            others += [(share, each.site.id) for share in shares]
        others.sort(key=itemgetter(0), reverse=True)
        for _, site in others[: sum(map(self.rank, placed)) - len(placed)]:
            ranks[site] += 1
        return ranks


def _resize(module: Any, rank: int) -> None:
    """Change the rank of a LoRA, and set its tensors to zero."""
    a, b = module.A.new_zeros(rank, module.A.shape[1]), module.B.new_zeros(len(module.B), rank)
    module.A = nn.Parameter(a) if isinstance(module.A, nn.Parameter) else a
    module.B = nn.Parameter(b)


class Components(Inputs):
    """The components of W C, where C is the matrix of second moments of the inputs."""

    explains: ClassVar[str] = "the outputs of the weights"
    methods: ClassVar[tuple[str, ...]] = ("pissa", "lora-ga")
    subtracts: ClassVar[bool] = True

    def begin(self, placed: PlacedModule) -> float:
        """Initialize with the largest components of W C, times the inverse of C."""
        module, moments = placed.module, self.moments_of(placed)
        assert isinstance(module, PiSSALayer)
        rank, second = len(module.A), moments.second_moments()
        weight = weight_at(placed.site, self.anatomy).to(second)
        # C is singular in directions without inputs.
        damped = second + _DAMPING * second.diagonal().mean() * torch.eye(len(second)).to(second)
        u, s, vh = leading(weight @ damped, rank)
        right = s[:, None] / module.scale * torch.linalg.solve(damped, vh.T).T
        root = right.norm(dim=1).sqrt()  # A and B have equal norms in each component, as in PiSSA
        module.begin(u * root, right / root[:, None])
        return float(s.square().sum() / (weight @ damped).square().sum())


class Gradients(_Watch):
    """The gradients of the loss with respect to the weights, (d_out, d_in) each."""

    explains: ClassVar[str] = "the first gradient"
    methods: ClassVar[tuple[str, ...]] = ("lora-ga", "pissa")
    subtracts: ClassVar[bool] = True

    def __init__(self, adapter: Adapter, placed: Iterable[PlacedModule]) -> None:
        super().__init__(adapter, placed)
        self.sums: dict[str, Tensor] = {}
        self.calls: list[tuple[str, Tensor, Tensor]] = []
        self.recording = False

    def read(self, model: nn.Module, batch: Batch, loss: LossOfBatch) -> None:
        """Add the gradients of a batch; parameters do not receive gradients."""
        self.calls, self.recording = [], True
        with torch.enable_grad():
            computed = loss(model(**model_inputs(batch)), batch)
            self.recording = False  # layers may be recomputed
            if computed is None:
                raise TrainingError("the model returned no loss", expected="labels in each batch")
            outputs = [y for _, _, y in self.calls]
            gradients = torch.autograd.grad(computed, outputs, allow_unused=True)
        for (site, x, _), gradient in zip(self.calls, gradients, strict=True):
            if gradient is not None:
                own = gradient.flatten(0, -2).float().T @ x.detach().flatten(0, -2).float()
                self.sums[site] = self.sums[site] + own if site in self.sums else own

    def seen(self, placed: PlacedModule, x: Tensor, y: Tensor) -> None:
        """Keep a call; padding does not contribute to the loss, and its gradient is zero."""
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


class Quantization(_Watch):
    """The change of the weights by quantization."""

    explains: ClassVar[str] = "what quantization changed"
    methods: ClassVar[tuple[str, ...]] = ("lora", "rslora", "lora-plus")
    reads: ClassVar[bool] = False

    def __init__(self, adapter: Adapter, placed: Iterable[PlacedModule]) -> None:
        super().__init__(adapter, placed)
        folder = adapter.backbone.folder
        if adapter.backbone.quantization is None or folder is None:
            raise ConfigError(
                "init=loftq needs a model that was quantized when it was loaded",
                expected="a backbone of adapterhub.load_backbone with quantize",
                hint="quantize=nf4, or a start from the data: init=eva",
            )
        with MODEL_LOCK, torch.device("cpu"):
            kind = type(adapter.backbone.pretrained)
            self.whole = kind.from_pretrained(folder, trust_remote_code=False)

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return whether a module supports this initialization: its update is s B A alone."""
        return type(module) is LoRALayer

    def begin(self, placed: PlacedModule) -> float:
        """Initialize with the largest components of W - Q(W)."""
        module, site = placed.module, placed.site
        assert isinstance(module, LoRALayer)
        quantized = weight_at(site, self.anatomy)
        whole = read_weight(self.whole.get_submodule(site.host), site.part).detach()
        lost = whole.to(quantized) - quantized
        u, s, vh = leading(lost, len(module.A))
        root = (s / module.scale).sqrt()
        with torch.no_grad():
            module.B.copy_(u * root)
            module.A.copy_(root[:, None] * vh)
        return float(s.square().sum() / lost.square().sum())


STARTS: Mapping[Init, type[_Watch]] = {
    "eva": Inputs, "eva-ranks": AllottedInputs, "lora-ga": Gradients, "corda": Components,
    "loftq": Quantization,
}  # fmt: skip


def _unpadded(x: Tensor, batch: Batch, site: Site, anatomy: Anatomy) -> Tensor | None:
    """Return the inputs of a site without padding: (tokens, d_in); None if padding is unknown.

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
    """Yield the possible masks of a site, the most specific first."""
    if site.stack not in _WITH_TEXT:
        return
    answers = site.stack == "decoder" and anatomy.backbone.is_encoder_decoder
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
