"""The matrix method x architecture: cells that run or are refused, and the tables of results."""

import copy
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones import weights
from adapterhub.errors import AttachError, ConfigError, SiteError
from adapterhub.merging.merge import blockers
from adapterhub.methods import METHODS, Method
from adapterhub.methods.alora import ALoRA
from adapterhub.methods.common import site_module
from adapterhub.methods.common.base import Placement, parse_methods
from adapterhub.methods.reft import StateMethod
from adapterhub.tasks import TASKS
from tests.kit import selection, tiny_models
from tests.kit.data import train

# The matrix method x architecture: the cells that run, and those refused by design.
#
# Whether a method works on an architecture depends not on its name, but on its signature: the kinds
# of its sites and what its modules declare. The interactions are every method on three
# architectures, and one method of each signature on all of the core. `make test` runs a fifth of
# them, ADAPTERHUB_TESTS=all two fifths, and ADAPTERHUB_MATRIX=full the product.


# Its attention is built of `einsum`, which no prefix follows.
WITHOUT_KEYS_AND_VALUES = ("xlnet",)
# bitfit trains bias terms.
WITHOUT_BIAS = (
    "modernbert", "llama", "mistral", "qwen3", "olmo", "olmo2", "gemma3_text", "phi3", "mixtral",
    "t5", "mt5", "umt5", "mpt",
)  # fmt: skip
PREFIX_METHODS = ("prefix", "mam", "unipelt")
# Those at the embeddings of tokens.
AT_EMBEDDINGS = ("prompt", "p-tuning", "cpt", "chosen", "invertible", "madx")
# Those that change some tokens of a text.
OF_TEXTS = tuple(m for m in sorted(METHODS) if issubclass(METHODS[m], (ALoRA, StateMethod)))


def _only_in_attention(name: str) -> bool:
    """Return whether a part of a method has all of its sites at projections of attention."""
    sites = [getattr(part, "sites", ()) for part in METHODS[name].example().parts()]
    attention = ("attn.", "cross.")
    return any(isinstance(each, tuple) and each and all(s.startswith(attention) for s in each)
               for each in sites)  # fmt: skip


ONLY_IN_ATTENTION = tuple(filter(_only_in_attention, sorted(METHODS)))
REFUSED: dict[tuple[str, str], type[Exception]] = {
    **{(method, a): SiteError for method in PREFIX_METHODS for a in WITHOUT_KEYS_AND_VALUES},
    **{("bitfit", a): SiteError for a in WITHOUT_BIAS},
    # XLNet's projections of attention are plain tensors, not modules.
    **{(method, "xlnet"): SiteError for method in ONLY_IN_ATTENTION},
    # OLMo's norms have no parameters.
    ("norms", "olmo"): SiteError,
    ("staged", "olmo"): ConfigError,
    # ALBERT's layers share modules.
    ("scalar-mix", "albert"): SiteError,
    # Without a task head, nothing would train.
    **{("head", a): AttachError for a in tiny_models.WITHOUT_CLASSIFIER},
}
ALL_CELLS = [(m, a) for m in sorted(METHODS) for a in tiny_models.ARCHITECTURES]
# An encoder, a decoder and both: every method runs on these.
EVERY_METHOD_ON = ("bert", "llama", "t5")
# Of methods with one signature, those that are used most stand for all.
FIRST = ("lora", "ia3", "pissa", "dora")


# DeBERTa-v2 applies these projections to its relative positions too, which belong to no row.
SHARED = {"deberta-v2": ("attn.q", "attn.k")}
# A second adapter of the same method with other shapes or sites.
SMALLER = {
    "prefix": "prefix(length=4)",
    "mam": "mam(length=3, size=8)",
    "prompt": "prompt(length=5)",
    "p-tuning": "p-tuning(length=3)",
    "cpt": "cpt(length=3, epsilon=2)",
    "lora": "lora(rank=3, sites=['attn.v', 'attn.o', 'attn'])",
    "pfeiffer": "pfeiffer(size=8, layers='top 1')",
    "ia3": "ia3(sites=['attn.v', 'attn'])",
}


def example(method: str) -> Method:
    """Return a method by its name, with options that fit any backbone, or from a spec."""
    if method in METHODS:
        return METHODS[method].example()
    (parsed,) = parse_methods(method)
    return parsed


def attach_smaller(model: Any, method: str, name: str) -> Any:
    """Attach an adapter with other shapes or sites than `example`, where it can be."""
    try:
        return ah.attach(model, SMALLER.get(method) or example(method), name=name)
    except ah.AdapterhubError:
        return ah.attach(model, example(method), name=name)


def attach_two(model: Any, method: str) -> tuple[Any, Any]:
    """Attach `a` and `b` with effects of their own, of different size if the method has one."""
    torch.manual_seed(0)
    first = ah.attach(model, example(method), name="a")
    tiny_models.scramble(first, seed=1)
    second = attach_smaller(model, method, name="b")
    tiny_models.scramble(second, seed=2)
    return first, second


def alone(model: Any, name: str | None, run: Callable[[], Any]) -> Any:
    """Call `run` with one adapter active for all rows; None is the bare backbone."""
    ah.activate(model, *([name] if name else []))
    return run()


def train_save_and_load(model: Any, method: str, folder: Path, steps: int = 8) -> Any:
    """Train an adapter, detach it and load it; return its manifest.

    Without it the model is as it was before, to the byte, and with it as it was after training.
    """
    base, bare = copy.deepcopy(model.state_dict()), tiny_models.logits(model)
    torch.manual_seed(0)
    adapter = ah.attach(model, example(method))
    try:
        losses = train(adapter, steps)
        assert losses[-1] < losses[0]
        trained = adapter.parameters()
        assert {p.dtype for p in trained} == {torch.float32}
        assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in trained}
        live = tiny_models.logits(model)
        assert not torch.equal(live, bare)
        adapter.save(folder)
    finally:
        ah.detach(model)
    check_equal(model.state_dict(), base)
    assert torch.equal(tiny_models.logits(model), bare)
    manifest = ah.load(model, folder).manifest()
    try:
        assert torch.equal(tiny_models.logits(model), live)
    finally:
        ah.detach(model)
    return manifest


def check_equal(after: dict[str, Any], before: dict[str, Any]) -> None:
    """Check that two states of a model are equal, codes of quantized weights included."""
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert type(after[name]) is type(tensor), name
        for one, other in zip(*map(tiny_models.codes, (after[name], tensor)), strict=True):
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name


def _declared(module: Any, site: Any) -> tuple[Any, ...]:
    """Return what the hooks, merging and routing read of a module, in place of its class."""
    bases = [cls for cls in type(module).__mro__ if cls.__module__ == site_module.__name__]
    inner = list(module.modules())
    return (
        site.kind,
        bases[0].__name__,
        *(getattr(module, name, None) for name in (
            "affine", "reads_weight", "source", "positions", "counts_padding",
        )),
        bool(getattr(module, "skipped_positions", 0)),
        "stack" in vars(type(module)),
        isinstance(module, site_module.OutputModule) and module.factors() is not None,
        any(True for _ in module.buffers()),
        any(isinstance(each, site_module.SharedModule) for each in inner),
    )  # fmt: skip


@cache
def signature(method: str) -> frozenset[Any]:
    """Return what decides whether a method works on an architecture.

    The kinds of its sites with the declarations of their modules, and how it trains parameters of
    the backbone, on an encoder-decoder or, where that has none of its sites, on an encoder.
    """
    for architecture in ("t5", "bert"):
        try:
            with attached_once(method, architecture) as adapter:
                return _signature_of(adapter, example(method))
        except SiteError:
            continue
    raise AssertionError(f"{method} fits neither")


def _signature_of(adapter: Adapter, method: Method) -> frozenset[Any]:
    of_modules = {_declared(placed.module, placed.site) for placed in adapter.placed}
    steps = [
        step
        for part in method.parts()
        for step in part.plan(adapter.anatomy)
        if not isinstance(step, Placement)
    ]
    stages = len({step.stage for step in steps})
    of_parameters = {("unfrozen", stages > 1)} if steps else set()
    return frozenset(of_modules | of_parameters)


@contextmanager
def attached_once(method: str, architecture: str = "bert") -> Iterator[Adapter]:
    """Attach a method to a model that all share, for what is asked while tests are collected.

    Each attached model is compared with all others, and no garbage is collected meanwhile.
    """
    adapter = ah.attach(_shared_model(architecture), example(method))
    try:
        yield adapter
    finally:
        adapter.detach()


_shared_model = cache(tiny_models.model)


@cache
def _on_an_encoder(method: str) -> tuple[bool, bool]:
    """Return whether a method can be merged, and whether it reads weights of projections."""
    with (
        patch.object(weights, "_decoded", wraps=weights._decoded) as decoded,
        attached_once(method) as adapter,
    ):
        tiny_models.logits(adapter.model)
        return not blockers(adapter), decoded.called


@cache
def mergeable() -> frozenset[str]:
    """Return the methods that can be merged into the weights."""
    return frozenset(method for method in METHODS if _on_an_encoder(method)[0])


@cache
def reading_weights() -> frozenset[str]:
    """Return the methods that read weights of projections, at their start or in a forward pass."""
    return frozenset(method for method in METHODS if _on_an_encoder(method)[1])


@cache
def representatives() -> dict[str, str]:
    """Return each method's representative: of its signature, the one that fits most backbones."""
    refused = Counter(method for method, _ in REFUSED)
    by_fit = sorted(METHODS, key=lambda name: (refused[name], name not in FIRST, name))
    first: dict[frozenset[Any], str] = {}
    return {method: first.setdefault(signature(method), method) for method in by_fit}


def one_of_each_signature(methods: Iterable[str] | None = None) -> list[str]:
    """Return the methods that stand for all; all of them where the whole product runs."""
    names = sorted(METHODS if methods is None else methods)
    if selection.WHOLE:
        return names
    first: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name != representatives()[name]):
        first.setdefault(representatives()[name], name)
    return sorted(first.values())


def interactions(cells: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the cells of interactions: each method on three, each signature on all of the core."""
    cells = [(m, a) for m, a in cells if a in tiny_models.MATRIX and (m, a) not in REFUSED]
    if tiny_models.MATRIX != tiny_models.CORE:
        return cells
    return [(m, a) for m, a in cells if a in EVERY_METHOD_ON or (m == representatives()[m])]


CELLS = interactions(ALL_CELLS)


def few(cells: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the cells that run by default.

    Every method runs on one of EVERY_METHOD_ON in turn, and one method of each signature on one of
    the others in turn.
    """
    of_method: dict[str, list[str]] = {}
    for method, architecture in cells:
        of_method.setdefault(method, []).append(architecture)
    chosen, turns = [], itertools.count()
    for number, (method, able) in enumerate(of_method.items()):
        always = [a for a in able if a in EVERY_METHOD_ON]
        others = [a for a in able if a not in EVERY_METHOD_ON]
        on = always or able  # a run may be of other architectures: ADAPTERHUB_MATRIX
        chosen.append((method, on[number % len(on)]))
        if always and others and method == representatives()[method]:
            chosen.append((method, others[next(turns) % len(others)]))
    return chosen


def nightly(cells: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the cells of ADAPTERHUB_TESTS=all: every method on two, and what runs by default."""
    cells = list(cells)
    always = {*few(cells)}
    return [cell for cell in cells if cell in always or cell[1] in EVERY_METHOD_ON[:2]]


def runs_whole(method: str, architecture: str) -> bool:
    """Return whether a cell runs all that holds, or what depends on the equations of its method.

    All else depends on the signature, which another method stands for.
    """
    if tiny_models.MATRIX != tiny_models.CORE or method == representatives()[method]:
        return True
    return selection.ALL and (method, architecture) in few(CELLS)


_run = (nightly if selection.ALL else few) if tiny_models.MATRIX == tiny_models.CORE else list
every_cell = pytest.mark.parametrize(("method", "architecture"), _run(CELLS))


# Generate the tables of docs/reference/support.md from the results of `make matrix`.
#
# Each test with the parameters `method` and `architecture`, or `method` and `task`, counts towards
# one cell, and so does each subtest. A run of some cells fills those that a table lacks: a new
# method's, which is blank where nothing ran, and those that failed. A cell is refused by design if
# its test `test_a_refused_cell...` passes; the table lists the "reason" that the test records.


FILE = Path(__file__).parents[2] / "docs/reference/support.md"
ROWS = {"architecture": sorted(tiny_models.ARCHITECTURES), "task": sorted(TASKS)}
_FAILED = "✗"
_results: dict[tuple[str, str, str], Counter[str]] = {}
_reasons: dict[tuple[str, str, str], str] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for rows in ROWS:
        if report.when == "call" and {"method", rows} <= params.keys():
            refused = item.originalname.startswith("test_a_refused_cell")
            cell = (rows, params[rows], params["method"], refused)
            report.user_properties.append(("cell", cell))
    return report


def pytest_runtest_logreport(report):
    properties = dict(report.user_properties)
    if report.when == "call" and "cell" in properties:
        *key, refused = properties["cell"]
        outcome = "refused" if refused and report.passed else report.outcome
        _results.setdefault(tuple(key), Counter())[outcome] += 1
        if "reason" in properties:
            _reasons[tuple(key)] = properties["reason"]


def pytest_sessionfinish(session):
    if not tiny_models.FULL_MATRIX or hasattr(session.config, "workerinput"):
        return
    page = FILE.read_text(encoding="utf-8")
    for rows in ROWS:
        page = with_results(page, rows)
    FILE.write_text(page, encoding="utf-8")


def with_results(page: str, rows: str) -> str:
    """Replace the table of one kind; if some cells did not run, fill those that the table lacks.

    Those are a new method's, and those that failed.
    """
    marked = re.compile(rf"(?<=<!-- {rows}: )(.*? -->\n)(.*?)(?=<!-- /{rows} -->)", re.DOTALL)
    (found,) = marked.finditer(page)
    ran = {(name, method) for kind, name, method in _results if kind == rows}
    if ran >= {(name, method) for name in ROWS[rows] for method in METHODS}:
        new = table(rows, ROWS[rows], {}) + "".join(f"{line}\n" for line in reasons(rows))
    else:
        old, blank, rest = found[2].partition("\n\n")
        head, _, *body = [[c.strip() for c in line.split("|")[1:-1]] for line in old.splitlines()]
        known = {
            (row[0], method): cell
            for row in body
            for method, cell in zip(head[1:], row[1:], strict=True)
            if cell != _FAILED
        }
        new = table(rows, [row[0] for row in body], known).rstrip("\n" * bool(blank)) + blank + rest
    return page[: found.start(2)] + new + page[found.end(2) :]


def table(rows: str, names: Iterable[str], known: dict[tuple[str, str], str]) -> str:
    """Format the cells of one kind as a Markdown table."""
    methods = sorted(METHODS)
    lines = [f"| {rows} | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for name in names:
        counts = {m: _results.get((rows, name, m), Counter()) for m in methods}
        cells = (known.get((name, m)) or cell_text(counts[m]) for m in methods)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def reasons(rows: str) -> list[str]:
    """List the reasons for refusals, one per line, each with its cells."""
    cells: dict[str, list[str]] = {}
    for (kind, name, method), reason in sorted(_reasons.items()):
        if kind == rows:
            cells.setdefault(reason, []).append(f"{method} for {name}")
    lines = [f"- {', '.join(where)}: {reason}" for reason, where in cells.items()]
    return ["", "Refused:", "", *lines] if lines else []


def cell_text(counts: Counter[str]) -> str:
    """Format a cell: ✗ if a test failed, - if refused, else the number of tests that passed."""
    if counts["failed"]:
        return _FAILED
    return "-" if counts["refused"] else str(counts["passed"] or "")
