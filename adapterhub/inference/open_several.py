"""Open several trained adapters at once: those of one backbone share one model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapterhub.adapters.activate import activate
from adapterhub.adapters.load import load_folder
from adapterhub.backbones.pooling import max_positions
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import MismatchError
from adapterhub.files.heads import with_head
from adapterhub.files.manifest import FAMILY, Manifest
from adapterhub.files.native import read_manifest
from adapterhub.files.run_folder import backbone_of_adapter
from adapterhub.inference.open import Predictor, load_bare_backbone
from adapterhub.inference.record import TrainingRecord, training_record
from adapterhub.registry.published_files import digest_of
from adapterhub.registry.pull import pull_verified
from adapterhub.tasks import Prediction, Setting
from adapterhub.training.loading import make_ready


@dataclass(frozen=True)
class AdapterSource:
    """Which adapter to open.

    Attributes:
        reference: a reference to an adapter, or the folder of an adapter or a run.
        head: which of several heads.
        digest: the sha256 that its manifest must have; "" for any.
        task: the task, if the adapter records none.
    """

    reference: str
    head: str | None = None
    digest: str = ""
    task: str | None = None


@dataclass(frozen=True)
class OpenedAdapters:
    """Adapters that are ready to predict, by name.

    Attributes:
        predictors: the model, the task and the setting of each.
        attached: the name of each on its model.
    """

    predictors: Mapping[str, Predictor]
    attached: Mapping[str, str]

    def predict(self, name: str, examples: Sequence[Any], batch_size: int = 64) -> list[Prediction]:
        """Return one prediction per example.

        Args:
            name: the adapter.
            examples: what its task read.
            batch_size: rows per forward pass.
        """
        activate(self.predictors[name].model, self.attached[name])
        return self.predictors[name].predict(examples, batch_size)


def open_several(
    sources: Mapping[str, AdapterSource],
    backbone: str | None = None,
    registry: str | None = None,
) -> OpenedAdapters:
    """Load adapters; those with the same backbone, class of model and tokenizer share one model.

    Args:
        sources: the adapters, by the names that rows use.
        backbone: where to load the backbone from, if not from the ids in the manifests.
        registry: the folder of the local registry, if not the default one.

    Raises:
        MismatchError: an adapter is not the one whose digest is given, or is for another backbone.
        RegistryError: a reference cannot be resolved.
        FileError: the files of an adapter are broken.
        BackboneError: a backbone cannot be loaded.
    """
    loaded: dict[Hashable, tuple[Any, Any]] = {}
    predictors: dict[str, Predictor] = {}
    attached: dict[str, str] = {}
    for number, (name, source) in enumerate(sources.items()):
        fetched = pull_verified(source.reference, registry=registry)
        if source.digest and digest_of(fetched.folder) != source.digest:
            raise MismatchError(
                f"{source.reference} is another adapter here than where the job was started",
                expected="the same version in the registry, or folder, of every machine",
                hint="a reference with a version, such as sst2@v3",
            )
        digest = source.digest or fetched.digest
        manifest = with_head(read_manifest(fetched.folder, digest), source.head)
        record = training_record(manifest, source.task)
        location = backbone_of_adapter(fetched.folder, manifest, backbone)
        # Tokens, rows of sites and adapters below belong to one model; nothing else is added to it.
        alone = number if manifest.tokens or fetched.on or FAMILY in manifest.training else None
        key = (location, _model_class(manifest, record), alone)
        if key not in loaded:
            loaded[key] = load_bare_backbone(
                fetched.folder, backbone, head=source.head, task=source.task
            )
            make_ready(loaded[key][0])
        model, tokenizer = loaded[key]
        adapter = load_folder(
            model,
            fetched.folder,
            name=f"adapter-{number}",
            sha256=digest,
            head=source.head or True,
            on=fetched.on,
        )
        positions = max_positions(model)
        limit = min(record.max_length, positions)
        setting = Setting(tokenizer, limit, adapter.labels, record.seed, positions)
        predictors[name] = Predictor(model, record.task.for_model(model), setting)
        attached[name] = adapter.name
    return OpenedAdapters(predictors, attached)


def _model_class(manifest: Manifest, record: TrainingRecord) -> Hashable:
    """Return what the model of an adapter must be besides its backbone: class, pooling, weights."""
    recipe = manifest.training.get("recipe", {})
    stored = recipe.get("dtype"), recipe.get("quantize")
    return TASK_MODELS[record.kind].auto, record.task.pooling, *stored
