"""Class weights: a cross-entropy that weights each label by its class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from adapterhub.config.options import option
from adapterhub.errors import ConfigError, DataError, did_you_mean
from adapterhub.tasks.common.base import Encoded, Task
from adapterhub.tasks.common.batches import IGNORED, Items, Loss

if TYPE_CHECKING:
    from torch import Tensor

ClassWeights = Literal["balanced"] | dict[str, float] | None

WEIGHTS_HELP = (
    "weight of each class in the loss: balanced, or {name: weight} with 1 for the others "
    "(null: all labels alike)"
)


def weights_of(spec: ClassWeights, counts: Mapping[str, int]) -> list[float]:
    r"""Return the weight of each class, in the order of `counts`.

    `balanced` gives class c the weight n / (k n_c), with n labels, k classes and n_c labels of
    class c, so that all classes have the same total (King & Zeng 2001, section 4,
    https://doi.org/10.1093/oxfordjournals.pan.a004868).

    Raises:
        ConfigError: a weight names an unknown class, or all weights are 0.
        DataError: `balanced` was set, and a class has no training label.
    """
    if isinstance(spec, dict):
        if unknown := [name for name in spec if name not in counts]:
            raise ConfigError(
                "class_weights has classes that the data lacks",
                offenders=[f"{name!r}{did_you_mean(name, counts)}" for name in unknown],
                expected=f"some of {', '.join(counts)}",
            )
        weights = [spec.get(name, 1.0) for name in counts]
        if not any(weights):
            raise ConfigError("all class_weights are 0", expected="one or more above 0")
        return weights
    if empty := [name for name, count in counts.items() if not count]:
        raise DataError(
            "class_weights=balanced needs training labels of each class",
            offenders=[f"{name!r} has none" for name in empty],
            hint="leave the class out of --labels, or class_weights={name: weight}",
        )
    total = sum(counts.values())
    return [total / (len(counts) * count) for count in counts.values()]


def weighted_loss(weights: list[float]) -> Loss:
    """Return the cross-entropy with class weights, as in `torch.nn.CrossEntropyLoss(weight)`.

    Its mean is over the weights of the labels: sum(w_y * -log p_y) / sum(w_y).
    """

    def loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        import torch
        import torch.nn.functional as F

        logits = output.logits.flatten(0, -2).float()
        labels = batch["labels"].flatten()
        weight = logits.new_tensor(weights)
        # Labels without weight do not count in a step: any finite loss will do.
        counts = weight[labels[labels != IGNORED]].any()
        weight = torch.where(counts, weight, torch.ones_like(weight))
        return F.cross_entropy(logits, labels, weight=weight, ignore_index=IGNORED)

    return loss


@dataclass(frozen=True)
class WeighsClasses(Task):
    """A task with the option `class_weights`."""

    class_weights: ClassWeights = option(None, WEIGHTS_HELP)

    def __post_init__(self) -> None:
        if isinstance(self.class_weights, dict):
            _check_weights(self.class_weights)

    def loss(self, train: Encoded) -> Loss | None:
        """Return the cross-entropy with class weights, or None without weights."""
        return None if self.class_weights is None else weighted_loss(self._weights(train))

    def loss_items(self, train: Encoded) -> Items:
        """Return a function that sums the class weights of the labels."""
        if self.class_weights is None:
            return super().loss_items(train)
        weights = self._weights(train)
        return lambda batch: sum(weights[i] for i in batch["labels"].flatten().tolist() if i >= 0)

    def _weights(self, train: Encoded) -> list[float]:
        assert self.class_weights is not None
        return weights_of(self.class_weights, self.label_counts(train))


def _check_weights(weights: Mapping[str, float]) -> None:
    """Refuse weights that are negative or not finite."""
    wrong = [f"{k}: {v}" for k, v in weights.items() if not (math.isfinite(v) and v >= 0)]
    if wrong:
        raise ConfigError("invalid class_weights", offenders=wrong, expected="numbers from 0")
