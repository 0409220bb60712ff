"""The differential against peft: each kind of checkpoint, and the table of results."""

import copy
import platform
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import adapterhub as ah
from adapterhub.anatomy.build import anatomy_of
from adapterhub.errors import AdapterhubError
from tests.kit import tiny_models

# The differential against peft: each kind of checkpoint on each model, in each direction.
#
# An adapter with random tensors is saved by peft and loaded here (import), exported again and
# loaded by peft (back), and a similar adapter of ours is exported and loaded by peft (export). The
# logits of both libraries are compared without a mask, with right padding and with left padding.


TOLERANCE = 2e-4  # of logits up to 10; PiSSA subtracts two large products
LENGTH = 3
TASK_TYPES = {
    "classification": "SEQ_CLS",
    "tagging": "TOKEN_CLS",
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
}
Spec = Mapping[str, Any] | list[Any] | str | Callable[[PreTrainedModel], Any]


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint: peft's configuration for a model, and our method, if there is one."""

    config: Callable[[PreTrainedModel], peft.PeftConfig]
    spec: Spec | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of one comparison.

    `word` is equal, refused, wrong, peft (it cannot make or use such an adapter), or none (we have
    no such method).
    """

    word: str
    reason: str = ""


def layer_projections(model: PreTrainedModel) -> list[str]:
    """Return the last path components of the linear modules in numbered layers."""
    linear = (nn.Linear, Conv1D)
    paths = [path for path, m in model.named_modules() if isinstance(m, linear)]
    return sorted({path.rpartition(".")[2] for path in paths if re.search(r"\.\d+\.", path)})


def whole_projections(model: PreTrainedModel) -> list[str]:
    """Return the roles of all projections, those that share a module only once."""
    sites = anatomy_of(model).sites.values()
    return sorted({site.role for site in sites if site.kind == "linear" and not site.part})


def biased(model: PreTrainedModel) -> list[str]:
    """Return the roles of projections that have a bias; `attn.o` if there are none."""
    hosts = {s.role: model.get_submodule(s.host) for s in anatomy_of(model).sites.values()}
    roles = whole_projections(model)
    return [r for r in roles if getattr(hosts[r], "bias", None) is not None] or ["attn.o"]


def some_projections(model: PreTrainedModel) -> list[str]:
    """Return every second of these names."""
    return layer_projections(model)[::2]


def heads_that_peft_saves(model: PreTrainedModel) -> list[str]:
    """Return modules that peft saves whole and would adapt too, which it then refuses."""
    names = {name for name, _ in model.named_children()} & {"classifier", "pre_classifier"}
    is_refused = "pre_classifier" in names or model.differential_task == "tagging"
    return sorted(names) if is_refused else []


def last_layer(model: PreTrainedModel) -> str:
    """Return an expression for the projections of layers 1, 3, ..."""
    return rf".*\.[13]\..*\b({'|'.join(layer_projections(model)[1::2] or some_projections(model))})"


def patterns(model: PreTrainedModel) -> dict[str, Any]:
    """Return ranks and alphas by name and by expression."""
    first, *_, last = names = layer_projections(model)
    ranks = {last: 2, rf".*\.1\..*{first}": 3}
    return {"target_modules": names, "rank_pattern": ranks, "alpha_pattern": {rf"1\..*{last}": 5}}


def norms(model: PreTrainedModel) -> list[str]:
    """Return the paths of all modules whose weight is a vector."""
    weights = {path: getattr(m, "weight", None) for path, m in model.named_modules()}
    return [path for path, w in weights.items() if isinstance(w, Tensor) and w.ndim == 1]


def a_norm(model: PreTrainedModel) -> dict[str, Any]:
    """Return the options for one whole module next to the updates."""
    saved = (norms(model) or layer_projections(model))[-1:]
    return {"target_modules": some_projections(model), "modules_to_save": saved}


def of(kind: type[peft.PeftConfig], **options: Any) -> Callable[..., Any]:
    """Return a function that makes a configuration; options may be functions of the model."""

    def config(model: PreTrainedModel) -> peft.PeftConfig:
        values = {n: value(model) if callable(value) else value for n, value in options.items()}
        more = values.pop("more", {})
        return kind(task_type=TASK_TYPES[model.differential_task], **(values | more))

    return config


def low_rank(**options: Any) -> Callable[..., Any]:
    """Return a function that makes a LoRA configuration."""
    usual = {"r": 4, "lora_alpha": 6, "target_modules": some_projections}
    return of(peft.LoraConfig, **(usual | options))


def virtual(kind: type[peft.PeftConfig], **options: Any) -> Callable[..., Any]:
    """Return a function that makes a configuration of virtual tokens.

    It has the sizes that peft does not find in every configuration.
    """

    def width(model: PreTrainedModel) -> int:
        if kind is peft.PrefixTuningConfig:
            return model.config.hidden_size
        return model.get_input_embeddings().weight.shape[1]

    return of(
        kind, num_virtual_tokens=LENGTH, token_dim=width,
        num_layers=lambda model: model.config.num_hidden_layers,
        num_attention_heads=lambda model: model.config.num_attention_heads, **options,
    )  # fmt: skip


def prefix(model: PreTrainedModel, network: str) -> str:
    """Return a prefix in the self-attentions of the last stack."""
    sites = f"{list(anatomy_of(model).stacks)[-1]}.attn.kv"
    return f"prefix(length={LENGTH}, positions=true, sites=['{sites}'], reparametrize={network})"


KINDS: dict[str, Kind] = {
    "lora: names": Kind(low_rank(), "lora"),
    "lora: all-linear": Kind(
        low_rank(target_modules="all-linear", exclude_modules=heads_that_peft_saves),
        lambda model: {"lora": {"rank": 3, "sites": whole_projections(model)}},
    ),
    "lora: regex": Kind(
        low_rank(target_modules=last_layer), {"lora": {"rank": 3, "sites": ["*.1.attn.[qo]"]}}
    ),
    "lora: patterns": Kind(
        low_rank(more=patterns), {"lora": {"rank": 4, "ranks": {"attn.q": 2}, "alpha": 5}}
    ),
    "lora: layers": Kind(low_rank(layers_to_transform=[1]), "lora(layers='top 1')"),
    "lora: bias=lora_only": Kind(
        low_rank(bias="lora_only"),
        lambda model: [{"lora": {"sites": biased(model)}}, {"bitfit": {"sites": biased(model)}}],
    ),
    "lora: bias=all": Kind(low_rank(bias="all"), ["lora", "bitfit"]),
    "lora: rslora": Kind(low_rank(use_rslora=True), "rslora(rank=5)"),
    "lora: dora": Kind(low_rank(use_dora=True), "dora"),
    "lora: pissa": Kind(low_rank(init_lora_weights="pissa"), "pissa(rank=3)"),
    "lora: olora": Kind(low_rank(init_lora_weights="olora")),
    "lora: modules_to_save": Kind(low_rank(more=a_norm), ["lora", "norms"]),
    "lora: embeddings saved": Kind(
        low_rank(modules_to_save=lambda m: [path_of(m, m.get_input_embeddings())]),
        ["lora", "chosen"],
    ),
    "ia3": Kind(
        of(peft.IA3Config, target_modules=layer_projections, feedforward_modules=some_projections),
        "ia3",
    ),
    "norms": Kind(of(peft.LNTuningConfig, target_modules=norms), "norms"),
    "prompt": Kind(virtual(peft.PromptTuningConfig), "prompt(length=3, counts_padding=true)"),
    "p-tuning": Kind(
        virtual(peft.PromptEncoderConfig, encoder_hidden_size=7),
        "p-tuning(length=3, counts_padding=true)",
    ),
    "prefix": Kind(virtual(peft.PrefixTuningConfig), lambda m: prefix(m, "false")),
    "prefix: projection": Kind(
        virtual(peft.PrefixTuningConfig, prefix_projection=True, encoder_hidden_size=7),
        lambda m: prefix(m, "true"),
    ),
}


def whole_paths(model: PreTrainedModel) -> list[str]:
    """Return the paths of every second projection that is one site, all of one layer."""
    sites = anatomy_of(model).sites.values()
    paths = [s.host for s in sites if s.kind == "linear" and not s.part and s.layer is not None]
    return paths[::2]


def at_wholes(method: str, **options: Any) -> Callable[[PreTrainedModel], Any]:
    """Return a function that makes a spec with the sites of `whole_paths`."""

    def spec(model: PreTrainedModel) -> Any:
        hosts, sites = whole_paths(model), anatomy_of(model).sites.values()
        sites = [s.id for s in sites if s.kind == "linear" and s.host in hosts and not s.part]
        return {method: {"sites": sites, **options}}

    return spec


def ranks(model: PreTrainedModel) -> dict[str, int]:
    """Return another rank for the last of the adapted modules."""
    return {re.escape(whole_paths(model)[-1]): 2}


def halves(model: PreTrainedModel) -> peft.BdLoraConfig:
    """Return blocks in the A of the first half of the modules, and in the B of the others."""
    paths = whole_paths(model)
    first, second = paths[: len(paths) // 2], paths[len(paths) // 2 :]
    return peft.BdLoraConfig(
        target_modules_bd_a=first, target_modules_bd_b=second, nblocks=2, match_strict=True
    )


# Kinds that differ from ours by names (interchange/peft/plain.py), for every second whole
# projection: the options of the configuration of that name, and those of our method.
_PLAIN: dict[str, tuple[dict[str, Any], ...]] = {
    "loha": (dict(r=4, rank_pattern=ranks), dict(rank=3)),
    "lokr": (dict(r=2, rank_pattern=ranks), dict(rank=3)),
    "lokr: both": (dict(r=1, decompose_both=True, decompose_factor=4),),
    "hira": (dict(r=4), dict(rank=3)),
    "miss": (dict(r=6), dict(rank=5)),
    "miss: mini": (dict(r=8, init_weights="mini", mini_r=4),),
    "miss: bat": (dict(r=8, init_weights="bat"),),
    "shira": (dict(r=3), dict(rank=3)),
    "gralora": (dict(r=4, alpha=6, gralora_k=2, hybrid_r=2), dict(rank=4, pieces=4)),
    "delora": (dict(r=4, rank_pattern=ranks), dict(rank=3)),
    "oft": (dict(oft_block_size=8), dict(block=16)),
    "oft: exact": (dict(oft_block_size=8, use_cayley_neumann=False), dict(block=8, terms=0)),
    "oft: shared": (dict(oft_block_size=8, block_share=True, num_cayley_neumann_terms=3),
                    dict(block=8, share=True, terms=6)),
    "boft": (dict(boft_block_size=8), dict(block=16, factors=1)),
    "hra": (dict(r=4), dict(rank=4)),
    "road": (dict(group_size=8, variant="road_1"), dict(group=16, variant=2)),
    "road: 4": (dict(group_size=4, variant="road_4"), dict(group=4, variant=4)),
    "vera": (dict(r=6), dict(rank=6, stored=True)),
    "vera: without matrices": (dict(r=6, save_projection=False, projection_prng_key=5),),
    "randlora": (dict(r=6, randlora_alpha=6), dict(rank=6, alpha=6.0, stored=True)),
    "randlora: without matrices": (dict(r=6, randlora_alpha=6, save_projection=False),),
    "fourierft": (dict(n_frequency=40, scaling=20.0),),
    "waveft": (dict(n_frequency=40, scaling=2.0),),
    "c3a": (dict(block_size=8), dict(block=8)),
    "pvera": (dict(r=6),),
    "pvera: without matrices": (dict(r=6, save_projection=False),),
    "tinylora": (dict(r=3, u=5, weight_tying=0.5),),
    "tinylora: without matrices": (dict(r=3, u=5, save_projection=False),),
    "beft": ({}, {}),
    "osf": (dict(effective_rank=0.75), dict(kept=0.25)),
    "supertuning": (dict(sparsity=0.9),),
    "supertuning: smallest": (
        dict(sparsity=0.8, select_top=False, save_precomputed_indices=False),),
    "psoft": (dict(r=4), dict(rank=5)),
    "psoft: series": (dict(r=4, use_cayley_neumann=True, psoft_mag_a=False),
                      dict(rank=4, terms=6)),
    "deft": (dict(r=4, alpha=6), dict(rank=3)),
    "deft: qr": (dict(r=4, decomposition_method="qr"), dict(rank=3, basis="qr", alpha=4.0)),
    "deft: para": (dict(r=2, para=True), dict(rank=3, writes=False)),
    "peanut": (dict(r=4, depth=2, scaling=0.5), dict(rank=3, depth=1, activation="silu")),
    "glora": (dict(r=4), dict(rank=3)),
    "glora: vectors": (dict(r=4, config_A_B="vector", config_C="vector", config_D_E="vector"),
                       dict(rank=3, weights="constant", prompt="none", biases="vector")),
    "vblora": (dict(r=3, num_vectors=12, vector_length=8, topk=3),
               dict(rank=2, vectors=9, block=16)),
    "adamss": (dict(r=9, num_subspaces=3, subspace_rank=2),
               dict(rank=2, clusters=3, components=20)),
    "unilora": (dict(r=3, theta_d_length=50), dict(rank=2, numbers=40)),
    "unilora: indices": (dict(r=3, theta_d_length=50, save_indices=True, proj_seed=3),),
    "adalora": (dict(init_r=5, lora_alpha=6, total_step=9), dict(rank=3, target=2)),
}  # fmt: skip
# LORA checkpoints that are another method of ours.
_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "olora": (dict(r=4, lora_alpha=6, init_lora_weights="olora"), dict(rank=3)),
    "mica": (dict(r=4, lora_alpha=6, init_lora_weights="mica"), dict(rank=3)),
    "kasa": (dict(r=4, lora_alpha=6, kasa_config=peft.KasaConfig()), dict(rank=3)),
    "bdlora": (dict(r=4, lora_alpha=6, use_bdlora=halves), dict(rank=4)),
}


def _kind(name: str, options: dict[str, Any], *ours: dict[str, Any]) -> Kind:
    method = name.partition(":")[0]
    cls = peft.PEFT_TYPE_TO_CONFIG_MAPPING.get(method.upper(), peft.LoraConfig)
    config = of(cls, **({"target_modules": whole_paths} | options))
    return Kind(config, *(at_wholes(method, **each) for each in ours))


PLAIN_KINDS = {name: _kind(name, *row) for name, row in _PLAIN.items()}
VARIANT_KINDS = {name: _kind(name, *row) for name, row in _VARIANTS.items()}
ALL_KINDS = KINDS | PLAIN_KINDS | VARIANT_KINDS


def path_of(model: PreTrainedModel, module: nn.Module) -> str:
    """Return the path of a module."""
    return next(path for path, m in model.named_modules() if m is module)


def tasks(architecture: str) -> tuple[str, ...]:
    """Return the tasks of an architecture: a classifier, and a language model or a tagger."""
    found = ["classification"] * (architecture not in tiny_models.WITHOUT_CLASSIFIER)
    kinds = {**dict.fromkeys(tiny_models.ENCODER_DECODERS, "seq2seq"),
             **dict.fromkeys(tiny_models.DECODERS, "causal-lm")}  # fmt: skip
    return (*found, kinds.get(architecture, "tagging"))


@lru_cache(maxsize=4)
def _prototype(architecture: str, task: str) -> PreTrainedModel:
    model = tiny_models.model(architecture, task)
    model.differential_task = task
    return model


def new_model(architecture: str, task: str) -> PreTrainedModel:
    """Return a new copy of the tiny model."""
    return copy.deepcopy(_prototype(architecture, task))


def batch(side: str, task: str) -> dict[str, Tensor]:
    """Return three texts; with a side, the second and third are padded there."""
    inputs, targets = (tiny_models.padded_batch(MASKS[side], length) for length in (9, 6))
    if task == "seq2seq":
        inputs |= {f"decoder_{name}": value for name, value in targets.items()}
    return inputs


def logits(model: nn.Module, side: str, task: str) -> Tensor:
    """Return the logits of texts, or of tokens that are not padding."""
    inputs = batch(side, task)
    with torch.no_grad():
        values = model.eval()(**inputs).logits
    if task == "classification":
        return values
    name = "decoder_" if task == "seq2seq" else ""
    ids = inputs[f"{name}input_ids"]
    values = values[:, -ids.shape[1] :]  # peft returns the logits of virtual tokens too
    return values[inputs.get(f"{name}attention_mask", torch.ones_like(ids)).bool()]


Cell = tuple[str, str]


@dataclass
class Differential:
    """The comparisons of one kind of checkpoint on one model; `folder` is for the files."""

    kind: str
    architecture: str
    task: str
    folder: Path

    def run(self) -> dict[Cell, Outcome]:
        """Return the outcome of each direction and mask."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about many valid checkpoints
            outcomes = self._imported() | self._exported()
        assert outcomes.keys() == {(d, side) for d in DIRECTIONS for side in MASKS}
        return outcomes

    def _new(self) -> PreTrainedModel:
        return new_model(self.architecture, self.task)

    def _imported(self) -> dict[Cell, Outcome]:
        """Import a checkpoint of peft and export it again, if peft can save and use it."""
        both = DIRECTIONS[:2]
        try:
            reference = self._reference()
        except Exception as error:
            return _all(both, Outcome("peft", _line(error)))
        if all(isinstance(value, Outcome) for value in reference.values()):
            return {(d, side): value for d in both for side, value in reference.items()}
        ours = self._new()
        try:
            adapter = ah.load(ours, self.folder / "theirs")
        except Exception as error:
            return _all(both, _failure(error))
        found = {("import", s): self._compared(ours, s, value) for s, value in reference.items()}
        return found | self._read_by_peft(adapter, "back", reference)

    def _reference(self) -> dict[str, Tensor | Outcome]:
        """Save a checkpoint of peft, and return the logits of peft with it for each mask."""
        torch.manual_seed(5)
        model = peft.get_peft_model(self._new(), ALL_KINDS[self.kind].config(self._new()))
        tiny_models.add_noise((p for p in model.parameters() if p.requires_grad), 0.3, seed=11)
        model.save_pretrained(self.folder / "theirs")
        model = peft.PeftModel.from_pretrained(self._new(), self.folder / "theirs")
        reference: dict[str, Tensor | Outcome] = {}
        for side in MASKS:
            try:
                reference[side] = logits(model, side, self.task)
            except Exception as error:
                reference[side] = Outcome("peft", _line(error))
        return reference

    def _exported(self) -> dict[Cell, Outcome]:
        """Export an adapter of ours."""
        spec, ours = ALL_KINDS[self.kind].spec, self._new()
        if spec is None:
            return _all(("export",), Outcome("none"))
        try:
            adapter = ah.attach(ours, spec(ours) if callable(spec) else spec)
            tiny_models.scramble_parameters(adapter, std=0.2)
            expected = {side: logits(ours, side, self.task) for side in MASKS}
        except Exception as error:
            return _all(("export",), _failure(error))
        return self._read_by_peft(adapter, "export", expected)

    def _read_by_peft(
        self, adapter: ah.Adapter, direction: str, expected: Mapping[str, Any]
    ) -> dict[Cell, Outcome]:
        """Export an adapter, and compare the logits of peft with it."""
        try:
            adapter.export(self.folder / direction)
        except Exception as error:
            return _all((direction,), _failure(error))
        try:
            model = peft.PeftModel.from_pretrained(self._new(), self.folder / direction)
        except Exception as error:
            return _all((direction,), Outcome("wrong", f"peft raises {_line(error)}"))
        return {(direction, s): self._compared(model, s, value) for s, value in expected.items()}

    def _compared(self, model: nn.Module, side: str, expected: Tensor | Outcome) -> Outcome:
        """Compare the logits of a model with those of the other library."""
        if isinstance(expected, Outcome):
            return expected
        try:
            found = logits(model, side, self.task)
        except Exception as error:
            return _failure(error)
        if torch.allclose(logits(self._new(), side, self.task), expected, atol=1e-2):
            return Outcome("wrong", "the adapter has no effect")
        difference = (found - expected).abs().max().item()
        if difference < TOLERANCE * max(1.0, expected.abs().max().item() / 10):
            return Outcome("equal")
        return Outcome("wrong", f"logits differ by {difference:.2g}")


def _all(directions: tuple[str, ...], outcome: Outcome) -> dict[Cell, Outcome]:
    return {(direction, side): outcome for direction in directions for side in MASKS}


def _failure(error: Exception) -> Outcome:
    """Return the outcome of an error: only those of adapterhub refuse."""
    word = "refused" if isinstance(error, AdapterhubError) else "wrong"
    return Outcome(word, _line(error))


def _line(error: Exception) -> str:
    """Return the first line of an error, with its first offender."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, AdapterhubError):
        return ": ".join([text, *error.offenders[:1]])
    return f"{type(error).__name__}: {text}"


# Generate the table of docs/guides/interchange.md from the results of `make interchange`.


FILE = Path(__file__).parents[2] / "docs/guides/interchange.md"
PROPERTY = "differential"
DIRECTIONS = ("import", "back", "export")
MASKS = {"none": None, "right": "right", "left": "left"}
WORDS = ("equal", "refused", "peft", "none", "wrong")
MARKERS = re.compile(r"(<!-- peft: .*? -->\n).*?(<!-- /peft -->)", re.DOTALL)
_ORDER = {name: number for number, name in enumerate(DIRECTIONS)}
_results: dict[tuple[str, ...], tuple[str, str]] = {}


def pytest_runtest_logreport(report):
    for name, cell in report.user_properties if report.when == "call" else ():
        if name == PROPERTY:
            *key, word, reason = cell
            _results[tuple(key)] = (word, reason)


def pytest_sessionfinish(session):
    if not _results or not tiny_models.FULL_MATRIX or hasattr(session.config, "workerinput"):
        return
    models = [(a, task) for a in tiny_models.ARCHITECTURES for task in tasks(a)]
    cells = {(k, *m, d, side) for k in KINDS for m in models for d in DIRECTIONS for side in MASKS}
    if _results.keys() == cells:
        page = FILE.read_text(encoding="utf-8")
        assert len(MARKERS.findall(page)) == 1
        page = MARKERS.sub(lambda match: f"{match[1]}{text(KINDS)}{match[2]}", page)
        FILE.write_text(page, encoding="utf-8")


def text(kinds: Iterable[str]) -> str:
    """Format the counts by kind and direction, and the reasons for refusals."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("peft", "transformers", "torch"))
    lines = [
        f"`make interchange`, Python {platform.python_version()}, {versions}: {len(_results):,} "
        "comparisons. Each cell: equal / refused by adapterhub / refused or failing in peft / "
        "no such method here / wrong.",
        "",
        f"| kind | {' | '.join(DIRECTIONS)} |",
        "|---" * (len(DIRECTIONS) + 1) + "|",
    ]
    for kind in kinds:
        counts = [_counts(kind, direction) for direction in DIRECTIONS]
        cells = [" / ".join(str(count[word]) for word in WORDS) for count in counts]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    for word, title in (
        ("refused", "Refused by adapterhub"),
        ("peft", "Refused or failing in peft"),
    ):
        lines += ["", f"{title}:", "", *_reasons(word)]
    return "\n".join(lines) + "\n"


def _counts(kind: str, direction: str) -> Counter[str]:
    return Counter(
        word for (k, _, _, d, _), (word, _) in _results.items() if (k, d) == (kind, direction)
    )


def _reasons(expected: str) -> list[str]:
    """List each reason once, with its kinds, directions and architectures."""
    found: dict[str, list[set[str]]] = {}
    for (kind, architecture, _, direction, _), (word, reason) in _results.items():
        if word == expected:
            places = found.setdefault(_general(reason, architecture), [set(), set(), set()])
            for names, name in zip(places, (kind, direction, architecture), strict=True):
                names.add(name)
    return sorted(f"- {text} ({'; '.join(map(_listed, places))})" for text, places in found.items())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names, key=lambda name: (_ORDER.get(name, 0), name)))


def _general(reason: str, architecture: str) -> str:
    """Shorten a reason, and replace what differs between architectures."""
    for name in {architecture, architecture.replace("_", "-"), architecture.replace("-", "_")}:
        reason = re.sub(rf"\b{re.escape(name)}\b", "MODEL", reason)
    for pattern, text in (
        (r"^the peft checkpoint .*? on this MODEL backbone: ", ""),
        (r"^the adapter cannot be exported to peft: ", ""),
        (r"^[\w-]+ does not fit a MODEL backbone: ", ""),
        (r"^this MODEL backbone has no such site( in layers '.*?')?", "no such site"),
        (r"^\S*adapter_config.json", "adapter_config.json"),
        (r"(?<!['\w.])\w+(\.\w+)+(?!['\w.])", "MODULE"),
        (r"MODULE(, MODULE)+", "MODULE"),
        (r"\b[A-Z]\w+For[A-Z]\w+", "CLASS"),
        (r"\(\d+\)|\d+x\d+", "N"),
        (r"'(encoder|decoder)\.attn\.kv'", "'attn.kv'"),
        (r"; did you mean .*| Please .*| This might .*", ""),
    ):
        reason = re.sub(pattern, text, reason)
    return reason


def documented_counts() -> dict[str, list[list[int]]]:
    """Read the table: for each kind, the counts of each direction."""
    found = MARKERS.search(FILE.read_text(encoding="utf-8"))
    assert found
    rows = re.findall(r"^\| (.+?) \| (\d.*) \|$", found[0], re.MULTILINE)
    return {
        kind: [[int(count) for count in cell.split(" / ")] for cell in cells.split(" | ")]
        for kind, cells in rows
    }
