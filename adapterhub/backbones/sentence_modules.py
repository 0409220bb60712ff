"""The modules of sentence-transformers around a transformer, as listed in `modules.json`.

The vector of a text is made from its token states by these steps:

    prompt      added before each text; its tokens are pooled or not
    Pooling     one method, or several concatenated
    Dense       with any activation of torch.nn; also LayerNorm, Normalize, Dropout
    truncate    keep only the first numbers

Vectors equal those of `SentenceTransformer.encode`. Any other module is refused by name: ignoring
it would silently change the vectors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.pooling import NAMES, POOLS, json_or_none, transformer_options
from adapterhub.backbones.processor import tokenizer_of
from adapterhub.backbones.torch_free_checks import VECTOR_POOLINGS
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import BackboneError, MismatchError, counted

WITHOUT = "none"
"""Replaces the digest of modules for the transformer and its pooling alone."""

FLAGS = {  # in the order that sentence-transformers concatenates them
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Poolings by their flags in versions before 6."""
_INPUT = "sentence_embedding"
_HARMLESS = {  # options for loading a transformer that do not change vectors
    "attn_implementation", "cache_dir", "device_map", "dtype", "local_files_only", "padding_side",
    "revision", "token", "torch_dtype", "trust_remote_code", "use_safetensors", "model_max_length",
}  # fmt: skip
_ONE, _WEIGHTS, _PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"


def _mean_sqrt(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9).sqrt()


_BY_MASK = {**POOLS, "mean_sqrt_len_tokens": _mean_sqrt}
_WEIGHTED = "weightedmean"


def _weighted_mean(states: Tensor, mask: Tensor, whole: Tensor) -> Tensor:
    """Weight each token by its position, counted from the first token that is not padding."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device).unsqueeze(0)
    weights = (places - whole.long().argmax(1, keepdim=True)) * mask
    weights = weights.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def pool_vectors(pooling: str, states: Tensor, mask: Tensor, skip: Tensor | None = None) -> Tensor:
    """Return the pooled vectors of texts, (batch, d); several poolings are concatenated.

    Args:
        pooling: a pooling, or several joined by +.
        states: the token states, (batch, tokens, d).
        mask: (batch, tokens), false at padding.
        skip: the number of leading tokens of each text to leave out, (batch,).
    """
    kept = mask
    if skip is not None:
        kept = mask & (mask.long().cumsum(1) > skip.to(mask.device).unsqueeze(1))
    return torch.cat(
        [
            _weighted_mean(states, kept, mask)
            if name == _WEIGHTED
            else _BY_MASK[name](states, kept)
            for name in pooling.split("+")
        ],
        dim=-1,
    )


class VectorStep(nn.Module):
    """A module after the pooling; `kind` is its name in sentence-transformers, "" for none."""

    kind = ""

    def options(self) -> dict[str, Any]:
        """Return the options of the module in the form of its configuration file."""
        return {}


class DenseStep(VectorStep):
    """A linear layer and an activation, with or without a residual."""

    kind = "Dense"

    def __init__(self, options: Mapping[str, Any], activation: nn.Module) -> None:
        super().__init__()
        sizes = options["in_features"], options["out_features"]
        self.linear = nn.Linear(*sizes, bias=options.get("bias", True))
        self.activation = activation
        self.adds = bool(options.get("use_residual", False))
        if self.adds and sizes[0] != sizes[1]:
            self.residual = nn.Linear(*sizes, bias=False)

    def extra_repr(self) -> str:
        """Return a description of the options that are not modules."""
        return f"adds={self.adds}"

    def options(self) -> dict[str, Any]:
        """Return the options of the module in the form of its configuration file."""
        activation = type(self.activation)
        return {
            "in_features": self.linear.in_features,
            "out_features": self.linear.out_features,
            "bias": self.linear.bias is not None,
            "activation_function": f"{activation.__module__}.{activation.__qualname__}",
            **({"use_residual": True} if self.adds else {}),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed vectors of `x`, (batch, d)."""
        y: Tensor = self.activation(self.linear(x))
        if not self.adds:
            return y
        return y + (self.residual(x) if hasattr(self, "residual") else x)


def dense_step(linear: nn.Linear) -> DenseStep:
    """Wrap a linear layer, sharing its parameters, as a module of sentence-transformers."""
    sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
    step = DenseStep({**sizes, "bias": linear.bias is not None}, nn.Identity())
    step.linear = linear
    return step


class NormStep(VectorStep):
    """A layer norm."""

    kind = "LayerNorm"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def options(self) -> dict[str, Any]:
        """Return the options of the module in the form of its configuration file."""
        return {"dimension": self.norm.normalized_shape[0]}

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized vectors, (batch, d)."""
        y: Tensor = self.norm(x)
        return y


class LengthStep(VectorStep):
    """Scales vectors to length 1."""

    kind = "Normalize"

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors, (batch, d), with length 1."""
        return F.normalize(x, dim=-1)


class FirstStep(VectorStep):
    """Keeps the first numbers of vectors."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return the first numbers of each vector, (batch, size)."""
        return x[..., : self.size]


@dataclass(frozen=True, eq=False)
class SentenceModules:
    """The computation around a transformer that makes the vector of a text.

    Attributes:
        pooling: the pooling of token states, see `pool_vectors`.
        normalize: whether the final vectors are scaled to length 1.
        pools_prompt: whether the tokens of a prompt are pooled.
        lower: whether texts are lower-cased before a tokenizer reads them.
        steps: the frozen modules after the pooling.
        shown: a description of all modules.
        prompts: the prompts by name.
        default_prompt: the name of the prompt that is added before each text.
        similarity: the similarity function of vectors, such as cosine.
        truncate: the number of values of a vector to keep, None for all.
        recorded: whether the folder lists modules at all.
    """

    pooling: str = "mean"
    normalize: bool = True
    pools_prompt: bool = True
    lower: bool = False
    steps: tuple[VectorStep, ...] = ()
    shown: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    truncate: int | None = None
    recorded: bool = False

    @property
    def prompt(self) -> str:
        """The prompt that is added before each text."""
        return self.prompts.get(self.default_prompt or "", "")

    @property
    def digest(self) -> str | None:
        """The identity of everything that task options do not cover; None if there is nothing.

        A prefix of a digest of the steps and their weights.
        """
        if not self.steps and self.pools_prompt and not self.lower:
            return None
        whole = hashlib.sha256(repr((self.pools_prompt, self.lower)).encode())
        for step in self.steps:
            whole.update(repr(step).encode())
            for name, tensor in sorted(step.state_dict().items()):
                whole.update(name.encode())
                whole.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return whole.hexdigest()[:16]

    @property
    def alone(self) -> SentenceModules:
        """The transformer and its pooling alone."""
        return replace(
            self, pools_prompt=True, lower=False, steps=(), truncate=None,
            shown=tuple(n for n in self.shown if n.startswith(("Transformer", "Pooling"))),
        )  # fmt: skip

    def check_sizes(self, pooling: str, hidden: int) -> None:
        """Refuse a pooling whose vectors do not fit the next module.

        Raises:
            MismatchError: the vectors have another size.
        """
        size = hidden * len(pooling.split("+"))
        first = next((s for s in self.steps if not isinstance(s, LengthStep | FirstStep)), None)
        reads = size
        if isinstance(first, DenseStep):
            reads = first.linear.in_features
        elif isinstance(first, NormStep):
            reads = first.norm.normalized_shape[0]
        if reads != size:
            raise MismatchError(
                f"pooling={pooling} gives vectors of {size} numbers",
                offenders=[name for name in self.shown if name.startswith(("Dense", "LayerNorm"))],
                expected=f"{reads} numbers, which the encoder's next module reads",
                hint=f"pooling={self.pooling}, as it was trained",
            )

    def vectors(
        self,
        states: Tensor,
        mask: Tensor,
        *,
        pooling: str,
        normalize: bool,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Return the vectors of texts, (batch, d), in fp32; arguments as in `pool_vectors`."""
        vectors = pool_vectors(pooling, states.float(), mask.bool(), skip)
        for step in self.steps:
            vectors = step.to(vectors.device)(vectors)
        return F.normalize(vectors, dim=-1) if normalize else vectors

    def text(self, text: str) -> str:
        """Return a text as it is passed to a tokenizer."""
        return "".join(map(str.lower, text)) if self.lower else text

    def skipped(self, prompt: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> int:
        """Return the number of tokens of each text with a prompt that are not pooled."""
        if self.pools_prompt or not prompt:
            return 0
        ids = tokenizer(self.text(prompt), truncation=True, max_length=limit)["input_ids"]
        return len(ids) - (bool(ids) and ids[-1] in tokenizer.all_special_ids)


def model_folder(model: nn.Module) -> Path | None:
    """Return the folder that a model was loaded from, if known."""
    backbone = Backbone.of(model)
    for place in (backbone.folder, backbone.source):
        if place and is_folder(place):
            return Path(place)
    return None


_LOADED = "_adapterhub_sentence_modules"
_KNOWN: dict[str, SentenceModules] = {}  # by the digest that tasks record


def modules_of_model(model: nn.Module, recorded: str | None = None) -> SentenceModules:
    """Return the modules that a backbone was trained with around its token states.

    `recorded` is the digest of the modules that an adapter was trained with, `WITHOUT`, or None for
    the modules of the backbone.

    Raises:
        BackboneError: a module is not supported, or its files are broken.
        MismatchError: the modules of the backbone differ from the recorded ones.
    """
    if recorded == WITHOUT:
        try:
            return modules_of_model(model).alone
        except BackboneError:
            return SentenceModules()
    modules: SentenceModules | None = getattr(model, _LOADED, None)
    if modules is None:
        folder = model_folder(model)
        modules = SentenceModules() if folder is None else read_modules(folder)
        if modules.lower and _lowers(tokenizer_of(Backbone.of(model).processor)):
            modules = replace(modules, lower=False)
        setattr(model, _LOADED, modules)
    digest = modules.digest
    if digest is not None:
        _KNOWN[digest] = modules
    if recorded is not None and digest != recorded:
        raise MismatchError(
            "the adapter was trained on a sentence encoder with other modules behind its states",
            offenders=[
                f"trained over the modules {recorded}",
                f"this backbone has {digest or 'none'}: {', '.join(modules.shown) or 'no modules'}",
            ],
            expected="the folder of the backbone that it was trained on, with all of its modules",
            hint="--backbone FOLDER; in Python load_backbone(FOLDER)",
        )
    return modules


def known_modules(digest: str | None) -> SentenceModules:
    """Return modules that `modules_of_model` found in this process, else the pooling alone."""
    return _KNOWN.get(str(digest), SentenceModules())


def _lowers(tokenizer: Any) -> bool:
    """Return whether a tokenizer lower-cases texts itself."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    return normalizer is not None and normalizer.normalize_str("A") == "a"


def read_modules(folder: Path) -> SentenceModules:
    """Read the modules of a backbone from its files.

    Raises:
        BackboneError: a module is not supported, or its files are broken.
    """
    if not (folder / "modules.json").exists():
        return SentenceModules()
    listed = json_or_none(folder / "modules.json")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise BackboneError(
            f"{folder / 'modules.json'} cannot be read",
            expected="the list of modules that sentence-transformers writes",
        )
    problems = [*_problems_of_options(folder)]
    read, places = _Found(), [_place(folder, each, problems) for each in listed]
    for number, (kind, place) in enumerate(places):
        if number == 0 and kind != "Transformer":
            problems.append(f"{kind}: the first module is not a Transformer")
        elif number:
            problems += read.add(kind, place)
    if not read.pooling:
        problems += [] if problems else ["no Pooling"]
    if problems:
        raise BackboneError(
            f"{folder.name} is an encoder of sentence-transformers with modules that are not "
            "supported",
            offenders=problems,
            expected="Transformer, Pooling, Dense, LayerNorm, Normalize, Dropout",
            hint="embedding(modules=none), or ah.embed(..., modules='none'): vectors of the "
            "transformer and a pooling alone, which are other ones",
        )
    own = json_or_none(folder / "config_sentence_transformers.json")
    return read.complete(own if isinstance(own, dict) else {}, transformer_options(folder))


def _place(folder: Path, module: Mapping[str, Any], problems: list[str]) -> tuple[str, Path]:
    """Return the class of a module, and its folder."""
    whole, path = str(module.get("type", "")), module.get("path", "")
    package, _, kind = whole.rpartition(".")
    inside = isinstance(path, str) and path not in (".", "..") and Path(path).name == path
    if not inside:
        problems.append(f"{kind}: its folder is {path!r}")
    if package.partition(".")[0] != "sentence_transformers" or "sparse" in package:
        problems.append(f"{whole}: code of its own, which is not run")
    return kind, folder / (path if inside else "")


def _problems_of_options(folder: Path) -> Iterator[str]:
    """Yield the unsupported changes that the options of the transformer make."""
    options = transformer_options(folder)
    task = options.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        yield f"Transformer: transformer_task={task}"
    ways = options.get("modality_config")
    if isinstance(ways, dict):
        own = ways.get("text")
        way = {"method": "forward", "method_output_name": "last_hidden_state"}
        if own != way or "message" in ways:
            yield f"Transformer: modality_config is {json.dumps(ways)[:200]}"
    if options.get("processing_kwargs"):
        yield f"Transformer: processing_kwargs={json.dumps(options['processing_kwargs'])[:200]}"
    for name in ("model", "config", "tokenizer", "processor"):
        for end in ("args", "kwargs"):
            values = options.get(f"{name}_{end}")
            for option, value in values.items() if isinstance(values, dict) else ():
                if option not in _HARMLESS:
                    yield f"Transformer: {name}_{end} has {option}={value!r}"
    if options.get("tokenizer_name_or_path"):
        yield "Transformer: tokenizer_name_or_path, a tokenizer of another place"
    own = json_or_none(folder / "config_sentence_transformers.json")
    kind = own.get("model_type", "SentenceTransformer") if isinstance(own, dict) else ""
    if kind not in ("", "SentenceTransformer"):
        yield f"{kind}: not a SentenceTransformer"


@dataclass
class _Found:
    """The modules that were read so far."""

    pooling: str = ""
    pools_prompt: bool = True
    steps: list[VectorStep] = field(default_factory=list)
    shown: list[str] = field(default_factory=lambda: ["Transformer"])

    def add(self, kind: str, folder: Path) -> list[str]:
        """Add a module of a class, and return its problems."""
        read = {"Pooling": self._pool, "Dense": self._dense, "LayerNorm": self._norm}.get(kind)
        options = json_or_none(folder / _ONE)
        options = options if isinstance(options, dict) else {}
        places = [options.get(f"module_{way}_name") or _INPUT for way in ("input", "output")]
        try:
            if kind == "Normalize" and places == [_INPUT, _INPUT] and self.pooling:
                self.steps.append(LengthStep())
                self.shown.append(kind)
            elif kind == "Dropout" and self.pooling:
                self.shown.append(kind)
            elif read is None:
                return [kind]
            elif places != [_INPUT, _INPUT] or bool(self.pooling) == (kind == "Pooling"):
                return [f"{kind}: in another place than behind one Pooling"]
            else:
                read(options, folder)
        except _Unsupported as error:
            return [f"{kind}: {error}"]
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            return [f"{kind}: {folder.name} cannot be read ({type(error).__name__}: {error})"[:300]]
        return []

    def _pool(self, options: Mapping[str, Any], folder: Path) -> None:
        mode = options.get("pooling_mode")
        if mode is None:
            mode = [name for flag, name in FLAGS.items() if options.get(flag)] or "mean"
        modes = [mode] if isinstance(mode, str) else list(mode)
        flags = {str(name) for name, on in options.items() if on and str(name) != "pooling_mode"}
        others = {name for name in flags if name.startswith("pooling_mode_")} - {*FLAGS}
        names = [NAMES.get(each, each) for each in modes]
        if others or not names or not {*names} <= {*VECTOR_POOLINGS}:
            raise _Unsupported(f"pooling_mode={sorted(others) or mode}")
        self.pooling = "+".join(names)
        self.pools_prompt = bool(options.get("include_prompt", True))
        self.shown.append(f"Pooling({self.pooling})")

    def _dense(self, options: Mapping[str, Any], folder: Path) -> None:
        path = options.get("activation_function", "torch.nn.modules.activation.Tanh")
        package, _, name = str(path).rpartition(".")
        kind = getattr(nn, name, None)
        if not package.startswith("torch.nn") or not isinstance(kind, type):
            raise _Unsupported(f"activation_function={path}")
        step = DenseStep(options, kind())
        step.load_state_dict(_weights(folder), strict=True)
        self._keep(step)
        linear = step.linear
        self.shown.append(f"Dense({linear.in_features} to {linear.out_features}, {name})")

    def _norm(self, options: Mapping[str, Any], folder: Path) -> None:
        step = NormStep(int(options["dimension"]))
        step.load_state_dict(_weights(folder), strict=True)
        self._keep(step)
        self.shown.append(f"LayerNorm({options['dimension']})")

    def _keep(self, step: VectorStep) -> None:
        self.steps.append(step.float().eval().requires_grad_(False))

    def complete(self, own: Mapping[str, Any], options: Mapping[str, Any]) -> SentenceModules:
        """Return all modules, with the prompts and options of the model."""
        size = own.get("truncate_dim")
        truncate = size if isinstance(size, int) and size > 0 else None
        steps, normalize = list(self.steps), False
        if truncate:
            steps.append(FirstStep(truncate))
            self.shown.append(f"the first {counted(truncate, 'number')}")
        elif steps and isinstance(steps[-1], LengthStep):
            steps.pop()
            normalize = True
        prompts = own.get("prompts")
        texts = prompts.items() if isinstance(prompts, dict) else ()
        default = own.get("default_prompt_name")
        return SentenceModules(
            self.pooling,
            normalize,
            self.pools_prompt,
            bool(options.get("do_lower_case")),
            tuple(steps),
            tuple(self.shown),
            {str(name): text for name, text in texts if isinstance(text, str)},
            default if isinstance(default, str) else None,
            str(own.get("similarity_fn_name") or "cosine"),
            truncate,
            recorded=True,
        )


class _Unsupported(Exception):
    """The reason that a module is not supported."""


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a module; a pickle is read without running code."""
    if (folder / _WEIGHTS).exists():
        return load_file(folder / _WEIGHTS)
    if not (folder / _PICKLE).exists():
        raise _Unsupported(f"{folder.name} has neither {_WEIGHTS} nor {_PICKLE}")
    tensors = torch.load(folder / _PICKLE, map_location="cpu", weights_only=True)
    return dict(tensors)
