"""Starts from the training data: what they compute, and when a run does."""

import copy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import adapterhub as ah
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import ConfigError, TrainingError
from adapterhub.loop import checkpoint
from adapterhub.loop.report import Reporter
from adapterhub.training import calibration
from adapterhub.training import run as running
from adapterhub.training.run import run
from tests.kit import tiny_models
from tests.kit.runs import Notes, adapter_bytes
from tests.kit.selection import ALL

SITES = {
    "bert": ["attn.q", "attn.v", "ffn.down"],
    "gpt2": ["attn.v", "ffn.up"],
    "llama": ["attn.q", "ffn.down"],
    "t5": ["attn.q", "cross.v", "cross.q"],
}
TASKS = {"bert": "classification", "gpt2": "causal-lm", "llama": "causal-lm", "t5": "seq2seq"}


def attached(architecture: str, method: str = "lora", **options: Any) -> Any:
    torch.manual_seed(0)
    model = tiny_models.model(architecture, TASKS[architecture], **tiny_models.NO_DROPOUT)
    options = {"rank": 4, "sites": SITES[architecture]} | options
    return ah.attach(model, {method: options})


def padded_batch(architecture: str, columns: int = 9) -> dict[str, Tensor]:
    """Four rows, two of them with padding on the right, and labels."""
    ids = torch.full((4, columns), tiny_models.PAD)
    ids[:, :9] = tiny_models.batch(4, 9, seed=7)["input_ids"]
    for row, length in ((0, 5), (3, 7)):
        ids[row, length:] = tiny_models.PAD
    mask = ids.ne(tiny_models.PAD).long()
    labels = torch.arange(4) % 3 if architecture == "bert" else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def assert_trains(adapter: Any, batch: dict[str, Tensor]) -> None:
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        losses.append(adapter.model(**batch).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[1] < losses[0]


def assert_loads(adapter: Any, batch: dict[str, Tensor], folder: Path) -> None:
    """The adapter is the same when it is loaded from a file."""
    adapter.save(folder / "saved")
    again = tiny_models.model("bert", TASKS["bert"], **tiny_models.NO_DROPOUT)
    ah.load(again, folder / "saved")
    found, expected = (tiny_models.logits(model, **batch) for model in (again, adapter.model))
    torch.testing.assert_close(found, expected)


def calibrated(adapter: Any, batch: dict[str, Tensor], init: str, atol: float = 0) -> Any:
    """Calibrate; check that the outputs of the model stay the same."""
    before = tiny_models.logits(adapter.model, **batch)
    found = ah.calibrate(adapter, [batch], init)
    after = tiny_models.logits(adapter.model, **batch)
    torch.testing.assert_close(after, before, atol=atol, rtol=0)
    return found


def inputs_by_hand(model: Any, batch: dict[str, Tensor], placed: Any) -> Tensor:
    """The inputs of a site's host at the tokens that are not padding."""
    seen: list[Tensor] = []
    host = model.get_submodule(placed.site.host)
    with ah.disabled(model), torch.no_grad():
        handle = host.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(**batch)
        handle.remove()
    return seen[0][batch["attention_mask"].bool()]


@pytest.mark.parametrize("architecture", SITES)
def test_eva_begins_at_the_first_directions_of_the_inputs(architecture):
    adapter, batch = attached(architecture), padded_batch(architecture)
    inputs = {p.site.id: inputs_by_hand(adapter.model.eval(), batch, p) for p in adapter.placed}
    found = calibrated(adapter, batch, "eva")
    assert found.explained.keys() == inputs.keys()
    for placed in adapter.placed:
        x = inputs[placed.site.id]
        x = x - x.mean(0)
        _, s, vh = torch.linalg.svd(x, full_matrices=False)
        products = (placed.module.A.detach() * vh[:4]).sum(1).abs()
        torch.testing.assert_close(products, torch.ones(4), atol=1e-3, rtol=0)
        share = float(s[:4].square().sum() / s.square().sum())
        assert found.explained[placed.site.id] == pytest.approx(share, abs=1e-4)
    assert_trains(adapter, batch)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_the_directions_and_ranks_of_eva_are_those_of_peft(architecture):
    peft = pytest.importorskip("peft")
    sites = ["attn.q", "attn.o", "ffn.up", "ffn.down"]  # with inputs of their own
    adapter = attached(architecture, sites=sites)
    batch, hosts = padded_batch(architecture), {p.site.host: p for p in adapter.placed}
    base = tiny_models.model(architecture, TASKS[architecture], **tiny_models.NO_DROPOUT)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=list(hosts), init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=2.0, use_label_mask=False),
        task_type="SEQ_CLS" if architecture == "bert" else "CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(copy.deepcopy(base), config).eval()
    peft.initialize_lora_eva_weights(theirs, [batch], show_progress_bar=False)
    calibrated(adapter, batch, "eva-ranks")
    tensors = {n: t for n, t in theirs.named_parameters() if "lora_A" in n}
    assert len(tensors) == len(hosts)
    ranks = []
    for host, placed in hosts.items():
        (theirs_a,) = (t for n, t in tensors.items() if f".{host}.lora_A" in n)
        ranks.append(len(theirs_a))
        assert len(placed.module.A) == ranks[-1] == placed.module.B.shape[1]
        products = (placed.module.A * theirs_a).sum(1).abs().detach()
        torch.testing.assert_close(products, torch.ones(ranks[-1]), atol=1e-3, rtol=0)
        assert placed.module.scale == 16 / ranks[-1]
    assert sum(ranks) == 4 * len(ranks)
    assert len(set(ranks)) > 1


@pytest.mark.parametrize("method", ["lora", "rslora", "dora", "lora-fa"])
def test_other_ranks_are_those_of_the_method(method, tmp_path):
    adapter, batch = attached("bert", method), padded_batch("bert")
    ah.calibrate(adapter, [batch], "eva-ranks")
    (chosen,) = adapter.methods
    assert chosen.ranks
    for placed, rank in zip(
        adapter.placed, chosen.ranks_by_site(adapter.anatomy).values(), strict=True
    ):
        assert 1 <= rank == len(placed.module.A) <= 8
    assert sum(len(p.module.A) for p in adapter.placed) == 4 * len(adapter.placed)
    assert adapter.count() == chosen.count(adapter.anatomy)
    assert_trains(adapter, batch)
    assert_loads(adapter, batch, tmp_path)


def weight_gradient(model: Any, batch: dict[str, Tensor], site: Any) -> Tensor:
    """The gradient of a site's part of the weight of its host, (d_out, d_in)."""
    host = copy.deepcopy(model.get_submodule(site.host))
    weight: nn.Parameter = model.get_submodule(site.host).weight
    with ah.disabled(model):
        weight.requires_grad_(True)
        (gradient,) = torch.autograd.grad(model(**batch).loss, [weight])
        weight.requires_grad_(False)
    with torch.no_grad():
        host.weight.copy_(gradient)
    return read_weight(host, site.part)


@pytest.mark.parametrize("method", ["lora-ga", "pissa"])
@pytest.mark.parametrize("architecture", SITES)
def test_lora_ga_begins_at_the_singular_vectors_of_the_gradient(architecture, method, tmp_path):
    adapter, batch = attached(architecture, method), padded_batch(architecture)
    model = adapter.model.eval()
    gradients = {p.site.id: weight_gradient(model, batch, p.site) for p in adapter.placed}
    found = calibrated(adapter, batch, "lora-ga", atol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    for placed in adapter.placed:
        gradient = gradients[placed.site.id]
        u, s, vh = torch.linalg.svd(gradient, full_matrices=False)
        size = len(gradient) ** 0.25 / 4
        a, b = placed.module.A.detach(), placed.module.B.detach()
        assert torch.equal(a, placed.module.A0)
        assert torch.equal(b, placed.module.B0)
        for products in ((a * vh[:4]).sum(1), (b * u[:, 4:8]).sum(0)):
            torch.testing.assert_close(products.abs(), torch.full((4,), size), atol=1e-2, rtol=0)
        share = float(s[:8].square().sum() / s.square().sum())
        assert found.explained[placed.site.id] == pytest.approx(share, abs=1e-4)
    assert_trains(adapter, batch)
    if architecture == "bert":
        assert_loads(adapter, batch, tmp_path)


def product_of_corda(weight: Tensor, x: Tensor, rank: int) -> Tensor:
    """The components of W C that are subtracted from W, by peft's damping of C."""
    second = x.T @ x / len(x)
    second = second + 0.01 * second.diagonal().mean() * torch.eye(len(second))
    u, s, vh = torch.linalg.svd(weight @ second)
    return u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank] @ torch.linalg.inv(second)


@pytest.mark.parametrize("architecture", SITES)
def test_corda_begins_at_the_components_of_the_outputs(architecture):
    adapter, batch = attached(architecture, "pissa", alpha=6.0), padded_batch(architecture)
    model = adapter.model.eval()
    inputs = {p.site.id: inputs_by_hand(model, batch, p) for p in adapter.placed}
    found = calibrated(adapter, batch, "corda", atol=1e-5)
    for placed in adapter.placed:
        module = placed.module
        weight = read_weight(model.get_submodule(placed.site.host), placed.site.part)
        expected = product_of_corda(weight, inputs[placed.site.id], 4)
        torch.testing.assert_close(1.5 * module.B0 @ module.A0, expected, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(module.B0.norm(dim=0), module.A0.norm(dim=1))
    assert all(0 < share < 1 for share in found.explained.values())
    assert_trains(adapter, batch)


def test_a_quantized_backbone_is_read_too_and_loftq_begins_at_what_quantization_changed(backbone):
    pytest.importorskip("bitsandbytes")
    options: Any = {"task": "classification", "labels": ["a", "b", "c"]}
    whole = ah.load_backbone(str(backbone), dtype="fp32", **options)[0]
    model = ah.load_backbone(str(backbone), quantize="nf4", **options)[0]
    inputs = tiny_models.batch(8, 9)
    inputs["input_ids"] %= 20
    for init, method in (("eva", "lora(rank=4)"), ("lora-ga", "lora-ga(rank=4)")):
        other = ah.attach(model, method)
        found = ah.calibrate(other, [inputs | {"labels": torch.arange(8) % 3}], init)
        assert all(0 < share <= 1.001 for share in found.explained.values())
        other.detach()
    roles = ["attn.q", "attn.k", "attn.v", "attn.o", "ffn.up", "ffn.down"]
    adapter = ah.attach(model, {"lora": {"rank": 16, "alpha": 8, "sites": roles}})
    distances = []
    for started in (False, True):
        if started:
            found = ah.calibrate(adapter, [], "loftq")
            assert all(0.4 < share < 1 for share in found.explained.values())
        with torch.no_grad():
            expected, states = (m.eval().base_model(**inputs)[0] for m in (whole, model))
        distances.append(float((expected - states.float()).norm()))
    assert distances[1] < 0.7 * distances[0]
    for placed in adapter.placed[:2]:
        original, now = (
            read_weight(each.get_submodule(placed.site.host)).detach() for each in (whole, model)
        )
        left, right = placed.module.factors()
        rest = float((original - now - left @ right).detach().norm())
        smallest = torch.linalg.svdvals(original - now)[16:]
        assert rest == pytest.approx(float(smallest.norm()), rel=1e-3)


@pytest.mark.parametrize(
    ("method", "init", "message"),
    [
        *((m, "eva", f"{m} has no module for init=eva") for m in ("prefix", "pissa", "mica")),
        ("lora", "lora-ga", "lora has no module for init=lora-ga"),
        ("dora", "loftq", "dora has no module for init=loftq"),
        ("lora", "loftq", "quantized"),
        ("lora", "evva", "'evva'"),
    ],
)
def test_another_method_is_refused(method, init, message):
    adapter = ah.attach(tiny_models.model("bert"), method)
    with pytest.raises(ConfigError, match=message) as error:
        ah.calibrate(adapter, [padded_batch("bert")], init)
    if "no module" in message:
        assert error.value.hint in ("method=lora", "method=lora-ga")


def test_what_no_start_can_be_computed_of_is_refused():
    adapter = attached("bert", rank=27)
    with pytest.raises(TrainingError, match=r"tokens at .* have no 27 directions"):
        ah.calibrate(adapter, [{k: v[:2] for k, v in padded_batch("bert").items()}])
    with pytest.raises(TrainingError, match="no batches"):
        ah.calibrate(adapter, [])
    ah.activate(adapter.model)
    with pytest.raises(ConfigError, match="is not active"):
        ah.calibrate(adapter, [padded_batch("bert")])
    virtual = attached("bert")
    prompt = ah.attach(virtual.model, "prompt(length=3)", name="below")
    ah.activate(virtual.model, prompt.name, virtual.name)
    with pytest.raises(ConfigError, match="are padding is unknown"):
        ah.calibrate(virtual, [padded_batch("bert")])


CASES = {
    "eva-ranks": ("method=lora(rank=4)", "train.init=eva-ranks"),
    "recomputed": ("method=lora-ga(rank=4)", "train.gradient_checkpointing=true"),
    "eva": ("method=lora(rank=4)", "train.init=eva"),
    "corda": ("method=pissa(rank=4)", "train.init=corda"),
}


@pytest.mark.parametrize("name", list(CASES) if ALL else list(CASES)[:2])
def test_a_run_reads_once_and_resumed_ends_with_the_same_bytes(name, recipe_with, monkeypatch):
    usual = ("train.max_steps=4", "train.save_every=1", "train.tensorboard=false")
    recipe = partial(recipe_with, *usual, "train.report=false", *CASES[name])
    whole = run(recipe(output="whole"), notes := Notes())
    (note,) = (text for text in notes.notes if text.startswith("init="))
    assert note.endswith("on 64 rows")
    counted = Mock(wraps=running.calibrate_run)
    monkeypatch.setattr(running, "calibrate_run", counted)
    cut = recipe(output="cut")
    with pytest.raises(KeyboardInterrupt):
        run(cut, Notes(stop_after=2))
    parts = run(cut, Reporter(), resume=True)
    assert counted.call_count == (2 if name == "eva-ranks" else 1)  # the ranks have to be known
    assert adapter_bytes(whole.folder.parent) == adapter_bytes(parts.folder.parent)
    last = checkpoint.load_checkpoint(checkpoint.folder_of(Path(cut.output), "last"))
    assert last.run["train"]["init"] == name.replace("recomputed", "lora-ga")


def test_an_adapter_takes_the_place_of_a_start(recipe_with):
    usual = ("train.max_steps=1", "train.tensorboard=false", "train.report=false")
    first = run(recipe_with("method=lora-ga(rank=4)", *usual), notes := Notes())
    assert notes.about("init=lora-ga: ")
    again = partial(recipe_with, *usual, f"from={first.folder}", output="again")
    with pytest.raises(ConfigError, match=r"and from train\.init=lora-ga"):
        run(again("train.init=lora-ga"), Reporter())
    run(again(), notes := Notes())
    assert not notes.about("init=")


def test_large_matrices_have_the_same_directions(monkeypatch):
    matrix = torch.randn(60, 48) @ torch.diag(0.7 ** torch.arange(48.0))
    exact = calibration.leading(matrix, 5)
    draw = torch.get_rng_state()
    monkeypatch.setattr("adapterhub.methods.pissa.EXACT", 10)
    for one, other in zip(calibration.leading(matrix, 5), exact, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    assert torch.equal(torch.get_rng_state(), draw)
