"""What all tasks share that give one class to a file, a picture or a sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.config.options import option
from adapterhub.data.examples import check_labels, sorted_labels
from adapterhub.data.labels import name_labels
from adapterhub.data.media import MediaFile, read_media
from adapterhub.data.options import DataOptions
from adapterhub.tasks._base import Encoded, Prediction, one_row_each
from adapterhub.tasks._class_weights import (
    WEIGHTS_HELP,
    ClassWeights,
    WeighsClasses,
    check_weights,
)
from adapterhub.tasks._media import MediaTask
from adapterhub.tasks._rows import Row, Setting
from adapterhub.tasks.classification import (
    CLASS_METRICS,
    class_outcome,
    most_probable,
    score_classes,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MediaClassification(WeighsClasses, MediaTask):
    """One class per file: a subclass decodes the files, and makes batches of them."""

    class_weights: ClassWeights = option(None, WEIGHTS_HELP)

    outcomes = "classes"
    main_metric = "accuracy"
    has_labels = True

    def __post_init__(self) -> None:
        check_weights(self.class_weights)

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read the files of a folder of classes, or those that a table names."""
        files = read_media(source, options, split, self.columns, self.decode, labelled=labelled)
        if not labelled:
            return files
        names = name_labels((str(f.label) for f in files), options.label_names, source)
        return [f.with_label(name) for f, name in zip(files, names, strict=True)]

    def labels(self, train: Sequence[MediaFile]) -> tuple[str, ...]:
        """Return the classes of the training data, sorted."""
        return tuple(sorted_labels(str(example.label) for example in train))

    def check(self, labels: Sequence[str], examples: Sequence[MediaFile]) -> None:
        """Refuse fewer than two classes, and evaluation classes that training lacks."""
        check_labels(labels, (e.label for e in examples))

    # Rows

    def encode(self, examples: Sequence[MediaFile], setting: Setting, *, labelled: bool) -> Encoded:
        """Return rows of files, which `collate` decodes, and the index of each one's class."""
        rows = [self.file_row(example, setting) for example in examples]
        if labelled:
            for row, example in zip(rows, examples, strict=True):
                row["labels"] = setting.labels.index(str(example.label))
        return one_row_each(self, examples, setting, rows)

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Decode the files of a batch, and make model inputs of them."""
        import torch  # slow to import

        batch = self.inputs(rows, setting)
        if rows and "labels" in rows[0]:
            batch["labels"] = torch.tensor([row["labels"] for row in rows])
        return batch

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the shapes of what the model gets, and the class that it learns."""
        facts = self.show_inputs(row, setting)
        label = row.get("labels")
        if label is None:
            return facts
        return facts | {"label": f"{setting.labels[label]} (class {label})"}

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the most probable class, with the softmax over all classes."""
        return most_probable(model, data, batch_size)

    # Metrics

    def metric_names(self, examples: Sequence[MediaFile]) -> tuple[str, ...]:
        """Return accuracy, macro_f1 and matthews."""
        return CLASS_METRICS

    def metrics(
        self, examples: Sequence[MediaFile], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute accuracy, macro_f1 and matthews."""
        return score_classes(examples, predictions)

    def outcome(self, example: MediaFile, prediction: Prediction) -> dict[str, Any]:
        """Return the two classes, and the probability of the predicted one."""
        return class_outcome(self.shown(example), example, prediction)
