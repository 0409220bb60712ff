"""What holds for every method on every architecture.

A cell builds its model once. Each invariant attaches adapters to it and detaches them again, and
then the model is as it was before: bytes, keys, modules, flags, attributes and outputs. The cells
come from the registries, so a new method or architecture is tested because it is there.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.backbones.compare import TOLERANCE
from adapterhub.errors import AttachError, MergeError, SiteError
from adapterhub.merging.merge import blockers
from adapterhub.methods import METHODS
from adapterhub.methods.common.ops import cayley
from tests.kit import matrix, selection, tiny_models
from tests.kit.compare import differences, observed
from tests.kit.data import train
from tests.kit.devices import META, HostUses, uses_of_the_host
from tests.kit.matrix import CELLS, REFUSED, every_cell, example, representatives
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits

INVARIANTS: list[tuple[Callable[[Cell], bool], Callable[[Cell], None]]] = []


class Cell:
    """A method on an architecture, with a model that each invariant leaves as it was."""

    def __init__(self, method: str, architecture: str) -> None:
        self.method, self.architecture = method, architecture
        self.model = tiny_models.usual_model(architecture, **tiny_models.NO_DROPOUT)
        next(self.model.parameters()).requires_grad_(False)
        self.weights = copy.deepcopy(self.model.state_dict())
        self.bare = logits(self.model)
        self.before = moment(self.model)

    def attach(self, name: str = "default", *, scrambled: int | None = 1, on: Any = None) -> Any:
        """Attach the method; by default with noise in its tensors, so that it has an effect."""
        torch.manual_seed(0)
        adapter = ah.attach(on or self.model, example(self.method), name=name)
        if scrambled is not None:
            tiny_models.scramble(adapter, seed=scrambled)
        return adapter

    def check_bare(self) -> None:
        """Check that nothing of an adapter is left."""
        assert differences(self.before, moment(self.model)) == []

    @contextlib.contextmanager
    def checked(self) -> Iterator[Cell]:
        """Detach afterwards and check the model; after a failure, build it again."""
        try:
            yield self
            if find_state(self.model):
                ah.detach(self.model)
            self.check_bare()
        except BaseException:
            self.__init__(self.method, self.architecture)  # type: ignore[misc]
            raise


def moment(model: Any) -> dict[str, Any]:
    """Describe a model, and which objects it is made of."""
    objects = {
        "parameters": [(n, id(p)) for n, p in model.named_parameters()],
        "modules": [(n, id(m), m.training) for n, m in model.named_modules()],
    }
    return observed(model) | {"objects": objects}


def invariant_of(where: Callable[[Cell], bool]) -> Callable[[Any], Any]:
    """Register a check of the cells where a condition holds."""

    def register(check: Callable[[Cell], None]) -> Callable[[Cell], None]:
        INVARIANTS.append((where, check))
        return check

    return register


invariant = invariant_of(lambda cell: True)


@every_cell
def test_a_cell(method: str, architecture: str, subtests: Any) -> None:
    cell, whole = Cell(method, architecture), matrix.runs_whole(method, architecture)
    for check in [check for holds, check in INVARIANTS if holds(cell)]:
        if not (whole or check in OF_EQUATIONS):
            continue
        with subtests.test(check.__name__), cell.checked():
            check(cell)


@invariant
def initial_outputs_and_the_count_match_what_is_declared(cell: Cell) -> None:
    """Before training, outputs are unchanged, nearly unchanged, or those of the paper's start.

    The model keeps its class and signature.
    """
    formula = example(cell.method).count(ah.anatomy_of(cell.model))
    kind, signature = type(cell.model), inspect.signature(cell.model.forward)
    adapter = cell.attach(scrambled=None)
    assert type(cell.model) is kind
    assert inspect.signature(cell.model.forward) == signature
    assert bool(adapter.changed) == METHODS[cell.method].trains_backbone
    assert adapter.count() == formula
    change = (logits(cell.model) - cell.bare).abs().max().item()
    if METHODS[cell.method].start == "identity":
        assert change == 0
    elif METHODS[cell.method].start == "near-identity":
        assert 0 < change < 0.1 * cell.bare.abs().max().item()
    else:
        assert change > 0


# XLNet uses its mask vector in pre-training only, and its segment parameters with token types only.
UNUSED = {"xlnet": (".mask_emb", ".r_s_bias", ".seg_embed")}
STEPS = 5


@invariant
def exactly_the_declared_parameters_train_and_lower_the_loss(cell: Cell) -> None:
    model = cell.model
    adapter = cell.attach(scrambled=None)
    declared = {id(p) for p in adapter.parameters()}
    assert declared
    assert {id(p) for p in model.parameters() if p.requires_grad} == declared
    others = {n: p.detach().clone() for n, p in model.named_parameters() if id(p) not in declared}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    start = {n: t.detach().clone() for n, t in adapter.tensors().items()}
    losses = train(adapter, STEPS)
    assert losses[-1] < losses[0]
    for name, tensor in adapter.tensors().items():
        if name.endswith(UNUSED.get(cell.architecture, ())):
            assert tensor.grad is None, name
            continue
        trains = isinstance(tensor, torch.nn.Parameter)
        assert (tensor.grad is not None) == trains, name
        assert torch.equal(tensor, start[name]) != trains, f"{name}: a wrong change, or none"
    for name, parameter in model.named_parameters():
        if name in others:
            assert parameter.grad is None, name
            assert torch.equal(parameter, others[name]), f"{name} changed"
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@invariant
def an_adapter_has_an_effect_only_while_active(cell: Cell) -> None:
    """Changed tensors change the output, and deactivation restores it."""
    model = cell.model
    adapter = cell.attach(scrambled=None)
    assert set(cell.weights) <= set(model.state_dict()), "the backbone's keys are unchanged"
    if adapter.head:
        for module in adapter.head.own.values():
            assert all(p.requires_grad for p in module.parameters())
    with_start = logits(model)
    tiny_models.scramble(adapter)
    assert not torch.allclose(logits(model), with_start, atol=1e-4)
    ah.activate(model)
    assert torch.equal(logits(model), cell.bare)
    ah.activate(model, adapter.name)
    adapted = logits(model)
    assert not torch.allclose(adapted, with_start, atol=1e-4)
    with contextlib.suppress(ZeroDivisionError), ah.disabled(model):
        assert not adapter.active
        assert torch.equal(logits(model), cell.bare)
        raise ZeroDivisionError
    assert adapter.active
    assert torch.equal(logits(model), adapted)


@invariant_of(lambda cell: cell.architecture in tiny_models.ENCODER_DECODERS)
def a_copy_is_independent(cell: Cell) -> None:
    """A deep copy and a pickle have their own copy of the adapter."""
    model = cell.model
    cell.attach()
    expected = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), expected)
        ah.detach(copied)
        assert not torch.equal(logits(copied), expected)
        assert torch.equal(logits(model), expected)


WITHOUT_CHECKPOINTING = ("albert", "mpnet", "xlnet", "openai-gpt")


@invariant
def gradient_checkpointing_gives_equal_gradients(cell: Cell) -> None:
    gradients = []
    adapter = cell.attach()
    model = copy.deepcopy(cell.model)  # checkpointing stays in a model
    if cell.architecture in WITHOUT_CHECKPOINTING:
        with pytest.raises(ValueError, match="does not support"):
            tiny_models.enable_gradient_checkpointing(model)
        return
    adapter = ah.adapters(model)[adapter.name]
    model.train()
    for checkpointing in (False, True):
        if checkpointing:
            tiny_models.enable_gradient_checkpointing(model)
        model(**tiny_models.labelled_batch(model)).loss.backward()
        tensors = adapter.tensors().items()
        gradients.append({n: t.grad for n, t in tensors if isinstance(t, torch.nn.Parameter)})
        model.zero_grad(set_to_none=True)
    plain, checkpointed = gradients
    for name, gradient in plain.items():
        size = gradient.abs().max().item()
        torch.testing.assert_close(
            checkpointed[name], gradient, atol=1e-6 * max(1, size), rtol=1e-4
        )


# Their head reads the last position, padding included, or every position.
READS_THE_END = ("xlnet", "xglm")


def hidden(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.base_model(input_ids=ids, attention_mask=mask)[0]


@invariant
def padding_does_not_change_a_row(cell: Cell) -> None:
    model = cell.model
    cell.attach()
    short, full = tiny_models.batch(1, 5)["input_ids"], tiny_models.batch(1, 9, seed=3)["input_ids"]
    padded = torch.nn.functional.pad(short, (0, 4), value=tiny_models.PAD)
    ids = torch.cat([padded, full])
    mask = ids.ne(tiny_models.PAD).long()
    if cell.architecture in READS_THE_END:
        together = hidden(model, ids, mask)[mask.bool()]
        alone = [hidden(model, row, torch.ones_like(row))[0] for row in (short, full)]
    else:
        together = logits(model, input_ids=ids, attention_mask=mask)
        alone = [
            logits(model, input_ids=row, attention_mask=torch.ones_like(row))
            for row in (short, full)
        ]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-4)


MERGEABLE = matrix.mergeable()
# fp16 and bf16 are tested on one architecture per weight layout, on all in the full matrix.
HALF_PRECISION = (
    tiny_models.MATRIX if tiny_models.FULL_MATRIX else ("bert", "gpt2", "gpt_neox", "llama", "t5")
)
# GPT's code takes the dtype of its first parameter, the embedding, for the dtype of the model.
EMBEDDINGS_GIVE_DTYPE = {(m, "openai-gpt") for m in ("full", "chosen", "staged", "unfreeze")}
# Experts are selected by comparison: rounding may select another expert, and the logits jump.
SELECT_EXPERTS = ("mixtral",)


def dtypes(cell: Cell) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which a cell is merged."""
    half = cell.method in MERGEABLE and cell.architecture in HALF_PRECISION
    half = half and (cell.method == representatives()[cell.method] or tiny_models.FULL_MATRIX)
    half = half and cell.architecture not in SELECT_EXPERTS
    half = half and (cell.method, cell.architecture) not in EMBEDDINGS_GIVE_DTYPE
    return tuple(TOLERANCE) if half else (torch.float32,)


@invariant
def merging_keeps_outputs_and_is_undone_or_is_refused(cell: Cell) -> None:
    for dtype in dtypes(cell):
        model = cell.model if dtype == torch.float32 else copy.deepcopy(cell.model).to(dtype)
        weights = copy.deepcopy(model.state_dict())
        before = moment(model) if dtype != torch.float32 else cell.before
        adapter = cell.attach(scrambled=None, on=model.train())
        tiny_models.scramble(adapter, std=0.1)
        live = logits(model.eval())
        model.train()
        if cell.method in MERGEABLE and not blockers(adapter):
            made = ah.merge(model)
            assert 0 <= made.difference <= max(made.tolerances.values())
            assert list(model.state_dict()) == list(weights)
            assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
            same = [torch.equal(v, weights[k]) for k, v in model.state_dict().items()]
            assert not all(same)
            difference = (logits(model.eval()).float() - live.float()).abs().max()
            assert difference <= TOLERANCE[dtype] * live.float().abs().max()
            assert ah.unmerge(model.train()) == (adapter,)
        else:
            with pytest.raises(MergeError, match="cannot be merged") as error:
                ah.merge(model)
            offenders = {line.split(" at ")[0] for line in error.value.offenders}
            assert offenders
            assert offenders <= {part.name for part in example(cell.method).parts()}
        assert adapter.active
        assert torch.equal(logits(model.eval()), live)
        model.train()
        adapter.detach()
        assert all(m.training for m in model.modules())
        model.eval()
        assert model is cell.model or differences(before, moment(model)) == []


@invariant_of(lambda cell: cell.architecture == "bert" and cell.method not in MERGEABLE)
def a_refused_merge_is_of_modules_that_are_not_affine(cell: Cell) -> None:
    """A method whose modules are affine but not declared so would be refused without a reason."""
    adapter = cell.attach()
    for placed in (p for p in adapter.placed if p.site.kind == "linear"):
        f = placed.module
        assert not f.affine
        x, y = torch.randn(2, 4, placed.site.d_in), torch.randn(2, 4, placed.site.d_out)
        if not (getattr(f, "reads_weight", False) or f.token_sets):
            middle = f(x.mean(0), y.mean(0))
            assert not torch.allclose(middle, (f(x[0], y[0]) + f(x[1], y[1])) / 2, atol=1e-4)


OF_EQUATIONS = (
    initial_outputs_and_the_count_match_what_is_declared,
    exactly_the_declared_parameters_train_and_lower_the_loss,
    merging_keeps_outputs_and_is_undone_or_is_refused,
    a_refused_merge_is_of_modules_that_are_not_affine,
)


def is_routed(cell: Cell) -> bool:
    return not METHODS[cell.method].trains_backbone


def uses_shared_projections(cell: Cell, *adapters: Any) -> bool:
    """Whether an adapter has modules at projections that do not see one row per example."""
    roles = matrix.SHARED.get(cell.architecture, ())
    return any(p.site.role in roles for a in adapters for p in a.placed)


def batch_with_padding() -> dict[str, torch.Tensor]:
    """Make four rows, two of them padded on the right."""
    ids = tiny_models.batch(4, 9, seed=7)["input_ids"]
    for row, length in ((0, 5), (3, 7)):
        ids[row, length:] = tiny_models.PAD
        ids[row, length - 1] = tiny_models.EOS
    return {"input_ids": ids, "attention_mask": ids.ne(tiny_models.PAD).long()}


@invariant_of(is_routed)
def each_row_of_a_route_equals_its_solo_run(cell: Cell) -> None:
    model = cell.model
    adapters = matrix.attach_two(model, cell.method)
    batch = batch_with_padding()
    rows = ["b", "a", None, "b"]
    solo = {name: matrix.alone(model, name, lambda: logits(model, **batch)) for name in set(rows)}
    ah.activate(model, "b")
    if uses_shared_projections(cell, *adapters):
        with pytest.raises(AttachError, match=r"the batch at .* has 1"), ah.route(model, rows):
            logits(model, **batch)
        return
    with ah.route(model, rows):
        together = logits(model, **batch)
    expected = torch.stack([solo[name][i] for i, name in enumerate(rows)])
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together[0], solo["a"][0], atol=1e-4), "the adapters differ"
    assert torch.equal(logits(model, **batch), solo["b"]), "the earlier activation is restored"


WINDOWED = ("gemma3_text",)
NEW_TOKENS = 8 if tiny_models.FULL_MATRIX else 3 if selection.ALL else 2


def generated(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the logits of some greedy steps: (steps, batch, vocabulary)."""
    options |= {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": tiny_models.PAD,
    }
    mask = ids.ne(tiny_models.PAD).long()
    output = model.generate(
        ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options
    )
    return torch.stack(output.logits)


@functools.cache
def writer(architecture: str) -> tuple[Any, dict[str, Any]]:
    """Return a language model, which each use leaves as it was, and its description."""
    model = tiny_models.language_model(architecture)
    return model, moment(model)


def generates(cell: Cell) -> bool:
    return cell.architecture in tiny_models.GENERATORS and cell.method != "head"


@invariant_of(generates)
def generation_is_independent_of_cache_padding_and_route(cell: Cell) -> None:
    """Neither the KV cache nor left padding nor other rows change the generated logits."""
    model, before = writer(cell.architecture)
    ids = tiny_models.batch(3, 8, seed=5)["input_ids"]
    ids[:, -1] = 9
    ids[0, :3] = tiny_models.PAD
    try:
        check_generation(cell, model, ids)
        ah.detach(model)
        assert differences(before, moment(model)) == []
    except BaseException:
        writer.cache_clear()
        raise


def check_generation(cell: Cell, model: Any, ids: torch.Tensor) -> None:
    """Check the logits of an adapter's texts, the first of which has padding on the left."""
    bare = generated(model, ids)
    adapters = (
        matrix.attach_two(model, cell.method) if is_routed(cell) else (cell.attach("a", on=model),)
    )
    ah.activate(model, "a")
    cached = generated(model, ids)
    assert not torch.allclose(cached, bare, atol=1e-3), "the adapter is not applied"
    again = generated(model, ids, use_cache=False)
    torch.testing.assert_close(again, cached, atol=1e-4, rtol=1e-4)
    windowed = cell.architecture in WINDOWED
    if windowed and any(p.site.kind == "embed" for a in adapters for p in a.placed):
        return  # the sliding window includes the padding between virtual tokens and the row
    if is_routed(cell):
        check_routed_generation(model, ids, bare, cached)
    if cell.architecture in tiny_models.ENCODER_DECODERS:  # padding shifts an encoder's tokens
        ids[0] = ids[0].roll(-3)
        cached = generated(model, ids)
    single = generated(model, ids[:1, ids[0] != tiny_models.PAD])
    torch.testing.assert_close(single[:, 0], cached[:, 0], atol=1e-4, rtol=1e-4)


def check_routed_generation(model: Any, ids: Any, bare: Any, of_a: Any) -> None:
    """Check that rows with a, the bare backbone and b are those of each alone."""
    of_b = matrix.alone(model, "b", lambda: generated(model, ids))
    expected = torch.stack([of_a[:, 0], bare[:, 1], of_b[:, 2]], dim=1)
    with ah.route(model, ["a", None, "b"]):
        for cache in (True, False):
            together = generated(model, ids, use_cache=cache)
            torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-4)
    ah.activate(model, "a")


@functools.cache
def bare_on_meta(architecture: str) -> tuple[str, set[str]]:
    """Return a kind of model that looks at no value by itself, and its uses of the host.

    BART's classifier seeks </s>; Mistral's sliding cache brings an empty tensor.
    """
    usual = "features" if architecture in tiny_models.WITHOUT_CLASSIFIER else "classification"
    try:
        return usual, uses_of_the_host(on_meta(architecture, usual))
    except NotImplementedError:
        return "features", uses_of_the_host(on_meta(architecture, "features"))


ON_META = matrix.EVERY_METHOD_ON[0]


def on_meta(architecture: str, task: str) -> Any:
    """Build a model whose routers look at no value."""
    config: dict[str, Any] = {}
    if architecture == "mixtral":
        config["experts_implementation"] = "batched_mm"
    if architecture == ON_META:
        config["num_hidden_layers"] = 1
    return tiny_models.model(architecture, task, **config).to(META)


def is_on_meta(cell: Cell) -> bool:
    """Whether a cell takes the half of its time that the next invariant needs.

    By default those of each signature on one architecture; with ADAPTERHUB_TESTS=all each method
    on one, and those of each signature where they run by default.
    """
    if tiny_models.FULL_MATRIX or (cell.architecture == ON_META and selection.ALL):
        return True
    if cell.method != representatives()[cell.method]:
        return False
    by_default = selection.ALL and (cell.method, cell.architecture) in matrix.few(CELLS)
    return cell.architecture == ON_META or by_default


@invariant_of(is_on_meta)
def a_pass_stays_on_its_device(cell: Cell) -> None:
    """No tensor of the host, no copy and no wait for a value (tests/kit/devices.py)."""
    task, uses = bare_on_meta(cell.architecture)
    if cell.method == "head" and task == "features":
        return  # the model has no head
    model = on_meta(cell.architecture, task)
    with torch.device(META):
        adapter = ah.attach(model, example(cell.method), name="a")
        matrix.attach_smaller(model, cell.method, name="b")
    assert uses_of_the_host(model) == uses
    shared = {placed.site.role for placed in adapter.placed} & {
        *matrix.SHARED.get(cell.architecture, ())
    }
    if is_routed(cell) and not shared:
        assert uses_of_the_host(model, ["a", None, "b", "a"]) == uses


@long_table(("method", "architecture"), REFUSED, 4)
def test_a_refused_cell_names_the_supported_methods(method: str, architecture: str) -> None:
    model = tiny_models.usual_model(architecture)
    keys, flags = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(REFUSED[method, architecture]) as error:
        ah.attach(model, example(method))
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == flags
    if error.type is SiteError:
        assert method in error.value.problem
        named = error.value.hint.partition(": ")[2].split(", ")
        cells = [m for m, a in REFUSED if a == architecture]
        refused = {m for m in cells if REFUSED[m, architecture] is not AttachError}
        assert set(named) == METHODS.keys() - refused


def test_the_cells_cover_every_method_signature_and_architecture() -> None:
    assert REFUSED.keys() < set(matrix.ALL_CELLS)
    if tiny_models.MATRIX in (tiny_models.CORE, tiny_models.ARCHITECTURES):
        cells = set(CELLS) | REFUSED.keys()
        assert {(m, a) for m in METHODS for a in matrix.EVERY_METHOD_ON} <= cells
        of_each = {(m, a) for m in representatives().values() for a in tiny_models.MATRIX}
        assert of_each <= cells
        assert tiny_models.MATRIX == tiny_models.CORE or cells == set(matrix.ALL_CELLS)
        assert 15 <= len(set(representatives().values())) < len(METHODS)
        writers = {a for _, a in CELLS} & {*tiny_models.GENERATORS}
        assert writers & {*tiny_models.DECODERS}
        assert writers & {*tiny_models.ENCODER_DECODERS}
    if tiny_models.MATRIX == tiny_models.CORE:
        for run in (matrix.few(CELLS), matrix.nightly(CELLS)):
            assert {m for m, _ in run} == {m for m, _ in CELLS}
            assert {a for _, a in run} == {a for _, a in CELLS}
    assert matrix.SMALLER.keys() < METHODS.keys()


def test_mergeable_and_refused_methods_are_known() -> None:
    """No cell is skipped: it works, or it is refused by design."""
    linear = {"lora", "rslora", "lora-plus", "dora", "pissa", "ia3", "norms", "bitfit", "full"}
    assert linear | {"freeze", "unfreeze", "staged", "head"} <= MERGEABLE
    other = {"prefix", "mam", "prompt", "p-tuning", "houlsby", "pfeiffer", "parallel", "compacter"}
    assert not (other | {"scaled-parallel", "scalar-mix"}) & MERGEABLE
    once = ("prefix", "mam", "unipelt", "norms", "staged", "scalar-mix", *matrix.ONLY_IN_ATTENTION)
    expected = {**dict.fromkeys(once, 1), "bitfit": 13, "head": 3}
    assert collections.Counter(method for method, _ in REFUSED) == expected


LEFT: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda model: model.bert.register_forward_hook(lambda *_: None),
    "a byte": lambda model: model.classifier.weight.data[0].add_(1e-6),
    "a flag": lambda model: model.classifier.weight.requires_grad_(False),
    "an attribute": lambda model: setattr(model.bert, "left", True),
}


@pytest.mark.parametrize("left", LEFT)
def test_what_an_invariant_leaves_in_the_model_is_seen(left: str) -> None:
    cell = Cell("lora", "bert")
    with pytest.raises(AssertionError), cell.checked():
        LEFT[left](cell.model)
    with cell.checked():  # it was built again
        pass


def test_uses_of_the_host_and_waits_are_seen() -> None:
    linear, square = torch.nn.Linear(2, 2, device=META), torch.zeros(1, 2, 2, device=META)
    linear.register_forward_hook(lambda *_: torch.zeros(3).to(META))
    for seen, operation in (
        ({"aten::zeros", "aten::_to_copy"}, lambda: linear(torch.zeros(1, 2, device=META))),
        ({"aten::_linalg_check_errors"}, lambda: torch.linalg.solve(square, square)),
        (set(), lambda: cayley(square)),
    ):
        with HostUses() as uses:
            operation()
        assert {use.partition(" ")[0] for use in uses.found} == seen
