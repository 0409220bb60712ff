"""Adapters on tiny models: at one site with its equation, on top of others, of a language model."""

import cmath
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.anatomy.sites import Site
from adapterhub.backbones.weights import read_bias, read_weight
from tests.kit import tiny_models
from tests.kit.compare import difference
from tests.kit.data import word_tokenizer

# One method at one site of a tiny model, to compare with the method's equation by hand.


# A plain projection, a slice of a fused one, and one without bias.
PROJECTIONS = {
    "bert": "encoder.1.attn.q",
    "gpt2": "decoder.1.attn.v",
    "llama": "decoder.0.ffn.down",
}


class OneSite(NamedTuple):
    """A method's module at a projection: host is the projection, W its weight, b its bias."""

    adapter: Any
    site: Site
    module: Any
    host: nn.Module
    weight: Tensor
    bias: Tensor | None

    def output(self, x: Tensor) -> Tensor:
        """Compute the host's output with the adapter, in the features of the site."""
        y: Tensor = self.host(x)
        return y if self.site.part is None else self.site.part.read(y)


def attach_at(architecture: str, site_id: str, method: str, **options: Any) -> OneSite:
    """Attach a method at one projection."""
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, {method: {"sites": [site_id], **options}})
    (placed,) = adapter.placed
    host = model.get_submodule(placed.site.host)
    weight, bias = read_weight(host, placed.site.part), read_bias(host, placed.site.part)
    return OneSite(adapter, placed.site, placed.module, host, weight, bias)


def trained_names(architecture: str, method: Any) -> set[str]:
    """Return the names of the backbone parameters that a method trains."""
    adapter = ah.attach(tiny_models.model(architecture), method)
    return {changed.name for changed in adapter.changed}


def attention_tensors(model: nn.Module, attention: nn.Module) -> dict[str, Tensor]:
    """Run a batch through a BERT; return query, key, value and output of one self-attention."""
    tensors: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        return lambda module, args, y: tensors.update({name: y, "x": args[0]})

    handles = [
        getattr(attention, name).register_forward_hook(record(name))
        for name in ("query", "key", "value")
    ]
    handles.append(
        attention.register_forward_hook(lambda module, args, y: tensors.update(output=y[0]))
    )
    with torch.no_grad():
        model(**tiny_models.batch())
    for handle in handles:
        handle.remove()
    return tensors


# An adapter of any module, from its start to its files.


def check_life(
    model: Any,
    run: Any,
    spec: Any,
    folder: Path,
    *,
    again: Any = None,
    start: float = 1e-6,
    merged: float | None = 5e-6,
    loaded: float = 5e-6,
    batch: Any = None,
    std: float = 0.1,
    effect: float = 1e-3,
    **options: Any,
) -> Adapter:
    """Attach, change, save, merge, detach and load an adapter, and compare outputs at each step.

    Args:
        run: computes the outputs of a model.
        again: builds the model once more, to load the files; by default they go to the first.
        start: how far the outputs of a new adapter may be from those of the model.
        merged: how far those of merged weights may be from the adapter's; None: do not merge.
        loaded: the same of the loaded adapter.
        batch: a batch with which merging compares.
        std: of the noise that stands for training.
        effect: how far from those of the model the outputs of the adapter are at least.
        options: of `attach`.
    """
    bare = run(model)
    adapter = ah.attach(model, spec, **{"name": "a"} | options)
    assert difference(run(model), bare) <= start
    tiny_models.scramble_parameters(adapter, std=std)
    adapted = run(model)
    assert difference(adapted, bare) > effect
    adapter.save(folder)
    if merged is not None:
        done = ah.merge(model, batch=batch)
        assert batch is None or done.difference <= merged
        assert difference(run(model), adapted) <= merged
        ah.unmerge(model)
    adapter.detach()
    assert torch.equal(run(model), bare)
    other = again() if again else model
    ah.load(other, folder)
    assert difference(run(other), adapted) <= loaded
    ah.detach(other)
    return adapter


def check_rows(
    model: Any, rows: list[str | None], run: Callable[[], Tensor], rtol: float = 1e-4
) -> None:
    """Check that each row of a route has the outputs of its adapter alone; run: of all rows."""
    alone = []
    with torch.no_grad():
        for number, name in enumerate(rows):
            ah.activate(model, *filter(None, [name]))
            alone.append(run()[number])
        with ah.route(model, rows):
            together = run()
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=rtol)


# Adapters on top of others, on tiny models.


def outputs(model: PreTrainedModel, rows: int = 3) -> Tensor:
    """Return the first output of a model, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        first: Tensor = model(**tiny_models.batch(rows))[0]
    return first.clone()


def save_alone(
    folder: Path, method: Any = "pfeiffer(size=4)", architecture: str = "bert", seed: int = 1
) -> Path:
    """Save an adapter of the bare backbone, with arbitrary values, named like its folder."""
    adapter = ah.attach(tiny_models.model(architecture), method, name=folder.name)
    tiny_models.scramble(adapter, seed=seed)
    adapter.save(folder)
    return folder


def attach_on(
    references: list[Any], method: Any = "lora(rank=2)", name: str = "task", seed: int = 2
) -> Adapter:
    """Attach an adapter with arbitrary values on top of others, on a new model."""
    model = tiny_models.model("bert")
    names = [ah.load(model, each, frozen=True).name for each in references]
    adapter = ah.attach(model, method, name=name, on=names)
    tiny_models.scramble(adapter, seed=seed)
    return adapter


def save_on(folder: Path, references: list[Any], method: Any = "lora(rank=2)") -> Tensor:
    """Save an adapter on top of others, named like its folder, and return its outputs."""
    adapter = attach_on(references, method, folder.name)
    adapter.save(folder)
    return outputs(adapter.model)


# Tiny language models on disk, and adapters of them with noise in each tensor.


def write_language_model(folder: Path, architecture: str, seed: int = 0) -> None:
    """Save a language model, with biases that are not zero, and its tokenizer."""
    model = tiny_models.model(architecture, "causal-lm", seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    word_tokenizer("<s>").save_pretrained(folder)


def write_noisy(folder: Path, backbone: Path, spec: object, seed: int = 0) -> Path:
    """Save an adapter."""
    model, _ = ah.load_backbone(str(backbone), task="causal-lm")
    torch.manual_seed(seed)
    adapter = ah.attach(model, spec, name="noisy")
    tiny_models.scramble_parameters(adapter, seed)
    adapter.save(folder)
    return folder


def text_logits(model: torch.nn.Module) -> Tensor:
    """Compute the logits of two texts."""
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25).view(2, 10)).logits


def with_adapters(methods, architecture="bert"):
    """Build a model with adapters, by name, that have an effect."""
    model = tiny_models.model(architecture)
    for name, method in methods.items():
        tiny_models.scramble(ah.attach(model, method, name=name), seed=len(name) + ord(name[0]))
    return model


def loss_and_gradients(adapter: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the loss of a batch, and the gradients."""
    torch.manual_seed(0)  # of the head's dropout
    loss = adapter.model(**batch).loss
    gradients = torch.autograd.grad(loss, list(adapter.parameters()), allow_unused=True)
    return [loss.detach(), *(torch.zeros(()) if g is None else g for g in gradients)]


# The equations of the methods that change a projection, each computed a second time by hand.
#
# A row returns W' of W, the tensors of the module and the options: y = W' x + b.


def lora(w, m, rank, alpha):
    return w + alpha / rank * m.B @ m.A


def loha(w, m, rank, alpha):
    factors = ((m.B1, m.A1), (m.B2, m.A2))
    first, second = (sum(torch.outer(b[:, i], a[i]) for i in range(len(a))) for b, a in factors)
    return w + alpha / rank * first * second


def shira(w, m, rank):
    changed = w.clone()
    for place, value in zip(m.S.places.tolist(), m.S.values.tolist(), strict=True):
        changed[place // w.shape[1], place % w.shape[1]] += value
    return changed


def gralora(w, m, rank, alpha, pieces, hybrid):
    changed, part, scale = w.clone(), rank // pieces, alpha / (rank + hybrid)
    rows, columns = w.shape[0] // pieces, w.shape[1] // pieces
    for j, n in product(range(pieces), repeat=2):
        b, a = m.B[j][:, n * part : (n + 1) * part], m.A[n][j * part : (j + 1) * part]
        block = slice(j * rows, (j + 1) * rows), slice(n * columns, (n + 1) * columns)
        changed[block] += scale * b @ a
    return changed + scale * m.B0 @ m.A0


def delora(w, m, rank, strength):
    changed = w.clone()
    for a, b in zip(m.A, m.B.T, strict=True):
        changed += m.strength / len(m.A) * torch.outer(b / b.norm(), a / a.norm()) * m.norms
    return changed


def rotation_of(upper, size):
    """Return the rotation (I + Q) (I - Q)^-1 of the numbers above the diagonal of Q."""
    q = torch.zeros(size, size)
    for value, (i, j) in zip(upper, torch.triu_indices(size, size, 1).T, strict=True):
        q[i, j], q[j, i] = value, -value
    eye = torch.eye(size)
    return (eye + q) @ torch.linalg.inv(eye - q)


def oft(w, m, block, terms):
    rotation = torch.block_diag(*(rotation_of(upper, m.block) for upper in m.Q))
    assert torch.allclose(rotation @ rotation.T, torch.eye(len(rotation)), atol=1e-5)
    return w @ rotation.T


def boft(w, m, block, factors):
    size, columns = m.block, w.shape[1]
    rotation = torch.eye(columns)
    for factor, blocks in enumerate(m.Q):
        inside = torch.zeros(columns, columns)
        for number, upper in enumerate(blocks):
            # Half blocks, 2^factor apart.
            run, place = divmod(number, 1 << factor)
            half, distance = size // 2, size // 2 * (1 << factor)
            start = run * 2 * distance
            order = [start + 2 * half * place + i for i in range(size)]
            if factor:
                pieces = [*range(0, 2 << factor, 2), *range(1, 2 << factor, 2)]
                mine = pieces[2 * place : 2 * place + 2]
                order = [start + piece * half + i for piece in mine for i in range(half)]
            inside[torch.tensor(order)[:, None], torch.tensor(order)] = rotation_of(upper, size)
        rotation = inside @ rotation
    assert torch.allclose(rotation @ rotation.T, torch.eye(columns), atol=1e-4)
    return torch.diag(m.s) @ w @ rotation.T


def hra(w, m, rank):
    for u in m.U:
        w = w @ (torch.eye(len(u)) - 2 * torch.outer(u, u) / u.dot(u))
    return w


def road(w, m, group=8):
    one, other = w.view(len(m.angle), 2, -1, w.shape[1]).unbind(1)
    angle, scale = m.angle[:, 0, 0, :, None], m.scale[:, 0, 0, :, None]
    c, s = scale * angle.cos(), scale * angle.sin()
    return torch.stack([c * one - s * other, s * one + c * other], 1).view_as(w)


def randlora(w, m, rank, alpha):
    n, small = m.g.shape
    rows = [m.l[i, j] * m.g[j] * m.fixed.A[i, :small] for i in range(rank) for j in range(n)]
    columns = [m.fixed.B[: max(w.shape), p, q] for p in range(n) for q in range(rank)]
    delta = sum(torch.outer(b, a) for b, a in zip(columns, rows, strict=True))
    return w + alpha / rank * (delta if w.shape[1] <= w.shape[0] else delta.T)


def fourierft(w, m, coefficients, scale):
    rows, columns = w.shape
    u, v = torch.arange(rows), torch.arange(columns)
    changed = w.clone()
    for place, value in zip(m.E.places.tolist(), m.E.values.tolist(), strict=True):
        phase = torch.outer(u * (place // columns) / rows, torch.ones(columns))
        phase = phase + v * (place % columns) / columns
        waves = torch.exp(2 * cmath.pi * 1j * phase.to(torch.complex64)).real
        changed += scale * value * waves / (rows * columns)
    return changed


def waveft(w, m, coefficients, scale):
    matrix = torch.zeros_like(w).flatten()
    matrix[m.E.places] = m.E.values
    matrix, changed = matrix.view_as(w), torch.zeros_like(w)
    rows, columns = w.shape[0] // 2, w.shape[1] // 2
    for i, j in product(*map(range, w.shape)):
        a, b, up, left = i // 2, j // 2, (-1) ** (i % 2), (-1) ** (j % 2)
        total = matrix[a, b] + up * matrix[a, columns + b] + left * matrix[rows + a, b]
        changed[i, j] = (total + up * left * matrix[rows + a, columns + b]) / 2
    return w + scale * changed


def c3a(w, m, block):
    changed, size = w.clone(), m.k.shape[-1]
    for i, j in product(*map(range, w.shape)):
        changed[i, j] += m.k[i // size, j // size][(j - i) % size] / w.shape[1]
    return changed


def best_of_rank(w, m, rank):
    """Return the components that a module has kept, after a look whether they are the largest."""
    u, s, vh = torch.linalg.svd(w)
    best = u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank]
    torch.testing.assert_close(m.B0 @ m.A0, best, atol=1e-4, rtol=1e-4)
    return m.B0, m.A0


def lora_xs(w, m, rank):
    b, a = best_of_rank(w, m, rank)
    return w + b @ m.R @ a


def psoft(w, m, rank):
    b, a = best_of_rank(w, m, rank)
    rotation = torch.diag(m.b) @ rotation_of(m.Q, len(m.a)) @ torch.diag(m.a)
    return w + b @ (rotation - torch.eye(len(m.a))) @ a


def svft(w, m, band):
    middle = torch.zeros(len(m.A0), len(m.A0))
    places = [(i, j) for i, j in product(range(len(middle)), repeat=2) if abs(i - j) <= band]
    for value, place in zip(m.M, places, strict=True):
        middle[place] = value
    _, s, _ = torch.linalg.svd(w)
    torch.testing.assert_close(m.B0 @ torch.diag(s) @ m.A0, w, atol=1e-4, rtol=1e-4)
    return w + m.B0 @ middle @ m.A0


def without_smallest(w, count):
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    s[-count:] = 0
    return u @ torch.diag(s) @ vh


def deft(w, m, rank, alpha, basis):
    q = torch.linalg.qr(m.P).Q
    return w - q @ q.T @ w + alpha / rank * q @ m.R


def peanut(w, m, rank, depth, scale):
    hidden = first = torch.relu(w.T @ m.A.T)
    hidden = torch.relu(hidden @ m.E[0].T)
    hidden = torch.relu(hidden @ m.D[0].T) + first
    return w + scale * (hidden @ m.B.T).T


def bdlora(w, m, rank, alpha, rows):
    blocks = [b @ a for b, a in zip(m.B.chunk(2), m.A.chunk(2), strict=True)]
    return w + alpha / rank * torch.cat(blocks)


def mica(w, m, rank, alpha):
    u, _, _ = torch.linalg.svd(w, full_matrices=False)
    overlap = (u[:, -rank:].T @ m.B).abs().diagonal()
    torch.testing.assert_close(overlap, torch.ones(rank), atol=1e-3, rtol=0)
    return w + alpha / rank * m.B @ m.A


def olora(w, m, rank, alpha):
    q, r = torch.linalg.qr(w)
    torch.testing.assert_close(m.B0 @ m.A0, q[:, :rank] @ r[:rank], atol=1e-5, rtol=1e-5)
    return w + alpha / rank * (m.B @ m.A - m.B0 @ m.A0)


def vblora(w, m, rank, vectors, block, top):
    def mixed(logits):
        best = sorted(range(len(logits)), key=lambda i: -logits[i])[:top]
        weights = [math.exp(logits[i]) for i in best]
        return sum(e / sum(weights) * m.bank.v[i] for e, i in zip(weights, best, strict=True))

    a = torch.stack([torch.cat([mixed(each) for each in row]) for row in m.A])
    columns = [torch.cat([mixed(m.B[i, j]) for i in range(len(m.B))]) for j in range(len(a))]
    return w + torch.stack(columns, 1) @ a


def unilora(w, m, rank, numbers):
    places = m.places.tolist()
    taken = torch.stack([m.vector.v[i] / places.count(i) ** 0.5 for i in places])
    a, b = taken[: rank * w.shape[1]], taken[rank * w.shape[1] :]
    return w + b.view(-1, rank) @ a.view(rank, -1)


def adamss(w, m, rank, clusters, components):
    rows = [m.B[i] @ m.A[c] @ m.V for i, c in enumerate(m.places.tolist())]
    assert len(set(m.places.tolist())) == clusters
    change = torch.stack(rows)
    return w + change[:, : w.shape[1]] if w.ndim > 1 else w + change[:, -1]  # of a bias


EQUATIONS = {
    "lora": (lora, {"rank": 3, "alpha": 6.0}),
    "rslora": (lambda w, m, rank, alpha: w + alpha / rank**0.5 * m.B @ m.A,
               {"rank": 4, "alpha": 6.0}),
    "lora-plus": (lora, {"rank": 3, "alpha": 6.0}),
    "lora-fa": (lora, {"rank": 3, "alpha": 6.0}),
    "adalora": (lambda w, m, rank, alpha, target: (
        w + alpha / (rank + 1e-5) * m.B @ torch.diag(m.E) @ m.A),
        {"rank": 3, "alpha": 6.0, "target": 2}),
    "loha": (loha, {"rank": 3, "alpha": 6.0}),
    "lokr": (lambda w, m, rank, alpha, factor: (
        w + alpha / rank * torch.kron(m.C, m.G if hasattr(m, "G") else m.B @ m.A)),
        {"rank": 2, "alpha": 3.0, "factor": 4}),
    "hira": (lambda w, m, rank: w * (1 + m.B @ m.A), {"rank": 3}),
    "miss": (lambda w, m, rank: w + m.D[:, [i % rank for i in range(w.shape[1])]], {"rank": 5}),
    "shira": (shira, {"rank": 2}),
    "gralora": (gralora, {"rank": 4, "alpha": 3.0, "pieces": 4, "hybrid": 2}),
    "delora": (delora, {"rank": 3, "strength": 4.0}),
    "oft": (oft, {"block": 8, "terms": 0}),
    "boft": (boft, {"block": 8, "factors": 2}),
    "hra": (hra, {"rank": 4}),
    "road": (road, {"group": 8}),
    "ssf": (lambda w, m: torch.diag(m.scale) @ w, {}),
    "vera": (lambda w, m, rank: (
        w + torch.diag(m.b) @ m.fixed.B @ torch.diag(m.d) @ m.fixed.A), {"rank": 6}),
    "randlora": (randlora, {"rank": 5, "alpha": 2.0}),
    "fourierft": (fourierft, {"coefficients": 9, "scale": 40.0}),
    "waveft": (waveft, {"coefficients": 50, "scale": 3.0}),
    "c3a": (c3a, {"block": 8}),
    "lora-xs": (lora_xs, {"rank": 4}),
    "tinylora": (lambda w, m, rank, numbers: (
        w + m.B0 @ sum(v * p for v, p in zip(m.numbers.v, m.P, strict=True)) @ m.A0),
        {"rank": 3, "numbers": 5}),
    "psoft": (psoft, {"rank": 4}),
    "svft": (svft, {"band": 1}),
    "beft": (lambda w, m: w, {}),
    "osf": (lambda w, m, kept: (
        without_smallest(w, len(m.S)) + m.U @ torch.diag(m.S) @ m.V), {"kept": 0.75}),
    "deft": (deft, {"rank": 3, "alpha": 6.0, "basis": "qr"}),
    "peanut": (peanut, {"rank": 5, "depth": 1, "scale": 2.0}),
    "glora": (lambda w, m, rank: w + w * (m.A.left @ m.A.right) + m.B.left @ m.B.right,
              {"rank": 3}),
    "bdlora": (bdlora, {"rank": 4, "alpha": 6.0, "rows": []}),
    "mica": (mica, {"rank": 3, "alpha": 6.0}),
    "olora": (olora, {"rank": 3, "alpha": 6.0}),
    "kasa": (lambda w, m, rank, alpha: (
        without_smallest(w, rank) + alpha / rank * m.B @ torch.diag(m.E) @ m.A),
        {"rank": 3, "alpha": 6.0}),
    "vblora": (vblora, {"rank": 2, "vectors": 6, "block": 8, "top": 3}),
    "unilora": (unilora, {"rank": 2, "numbers": 40}),
    "adamss": (adamss, {"rank": 2, "clusters": 3, "components": 9}),
}  # fmt: skip
