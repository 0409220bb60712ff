"""The equations of the methods that change a projection, each computed a second time by hand.

A row returns W' of W and the tensors of the module: y = W' x + b.
"""

from __future__ import annotations

import cmath
import math

import pytest
import tiny_models
import torch
from one_site import PROJECTIONS, attach_at
from selection import rotate
from torch import Tensor

import adapterhub as ah
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods import METHODS
from adapterhub.methods._projections import ProjectionMethod
from adapterhub.methods.waveft import inverse_haar


def loha(w, m, **options):
    factors = ((m.B1, m.A1), (m.B2, m.A2))
    first, second = (sum(torch.outer(b[:, i], a[i]) for i in range(len(a))) for b, a in factors)
    return w + options["alpha"] / options["rank"] * first * second


def lokr(w, m, **options):
    last = m.G if hasattr(m, "G") else m.B @ m.A
    return w + options["alpha"] / options["rank"] * torch.kron(m.C, last)


def hira(w, m, **options):
    return w * (1 + m.B @ m.A)


def miss(w, m, **options):
    columns = [m.D[:, i % options["rank"]] for i in range(w.shape[1])]
    return w + torch.stack(columns, 1)


def shira(w, m, **options):
    changed = w.clone()
    for place, value in zip(m.S.places.tolist(), m.S.values.tolist(), strict=True):
        changed[place // w.shape[1], place % w.shape[1]] += value
    return changed


def gralora(w, m, **options):
    k, rank = options["pieces"], options["rank"]
    changed, part = w.clone(), rank // k
    rows, columns = w.shape[0] // k, w.shape[1] // k
    scale = options["alpha"] / (rank + options["hybrid"])
    for j in range(k):
        for n in range(k):
            b = m.B[j][:, n * part : (n + 1) * part]
            a = m.A[n][j * part : (j + 1) * part]
            block = slice(j * rows, (j + 1) * rows), slice(n * columns, (n + 1) * columns)
            changed[block] += scale * b @ a
    return changed + scale * m.B0 @ m.A0


def delora(w, m, **options):
    changed = w.clone()
    for a, b in zip(m.A, m.B.T, strict=True):
        changed += m.strength / len(m.A) * torch.outer(b / b.norm(), a / a.norm()) * m.norms
    return changed


def oft(w, m, **options):
    size, rotations = m.block, []
    for upper in m.Q:
        q = torch.zeros(size, size)
        for value, (i, j) in zip(upper, torch.triu_indices(size, size, 1).T, strict=True):
            q[i, j], q[j, i] = value, -value
        eye = torch.eye(size)
        rotations.append((eye + q) @ torch.linalg.inv(eye - q))
    rotation = torch.block_diag(*rotations)
    assert torch.allclose(rotation @ rotation.T, torch.eye(len(rotation)), atol=1e-5)
    return w @ rotation.T


def boft(w, m, **options):
    size, columns = m.block, w.shape[1]
    rotation = torch.eye(columns)
    for factor, blocks in enumerate(m.Q):
        inside = torch.zeros(columns, columns)
        for number, upper in enumerate(blocks):
            q = torch.zeros(size, size)
            for value, (i, j) in zip(upper, torch.triu_indices(size, size, 1).T, strict=True):
                q[i, j], q[j, i] = value, -value
            eye = torch.eye(size)
            # Half blocks, 2^factor apart.
            run, place = divmod(number, 1 << factor)
            half, distance = size // 2, size // 2 * (1 << factor)
            start = run * 2 * distance
            order = [start + 2 * half * place + i for i in range(size)]
            if factor:
                pieces = [*range(0, 2 << factor, 2), *range(1, 2 << factor, 2)]
                mine = pieces[2 * place : 2 * place + 2]
                order = [start + piece * half + i for piece in mine for i in range(half)]
            inside[torch.tensor(order)[:, None], torch.tensor(order)] = (
                eye + q
            ) @ torch.linalg.inv(eye - q)
        rotation = inside @ rotation
    assert torch.allclose(rotation @ rotation.T, torch.eye(columns), atol=1e-4)
    return torch.diag(m.s) @ w @ rotation.T


def hra(w, m, **options):
    for u in m.U:
        w = w @ (torch.eye(len(u)) - 2 * torch.outer(u, u) / u.dot(u))
    return w


def road(w, m, **options):
    angle, scale = m.angle[:, 0, 0], m.scale[:, 0, 0]
    groups = w.view(len(angle), 2, -1, w.shape[1])
    turned = torch.empty_like(groups)
    for g in range(len(angle)):
        for i in range(groups.shape[2]):
            c, s = math.cos(angle[g, i]), math.sin(angle[g, i])
            one, other = groups[g, 0, i], groups[g, 1, i]
            turned[g, 0, i] = scale[g, i] * (c * one - s * other)
            turned[g, 1, i] = scale[g, i] * (s * one + c * other)
    return turned.view_as(w)


def ssf(w, m, **options):
    return torch.diag(m.scale) @ w


def beft(w, m, **options):
    return w


def vera(w, m, **options):
    fixed = m.fixed
    return w + torch.diag(m.b) @ fixed.B @ torch.diag(m.d) @ fixed.A


def randlora(w, m, **options):
    rank, (n, small) = options["rank"], m.g.shape
    rows = [m.l[i, j] * m.g[j] * m.fixed.A[i, :small] for i in range(rank) for j in range(n)]
    columns = [m.fixed.B[:, p, q] for p in range(n) for q in range(rank)]
    delta = sum(torch.outer(b, a) for b, a in zip(columns, rows, strict=True))
    return w + options["alpha"] / rank * (delta if w.shape[1] <= w.shape[0] else delta.T)


def fourierft(w, m, **options):
    rows, columns = w.shape
    u, v = torch.arange(rows), torch.arange(columns)
    changed = w.clone()
    for place, value in zip(m.E.places.tolist(), m.E.values.tolist(), strict=True):
        phase = torch.outer(u * (place // columns) / rows, torch.ones(columns))
        phase = phase + v * (place % columns) / columns
        waves = torch.exp(2 * cmath.pi * 1j * phase.to(torch.complex64)).real
        changed += options["scale"] * value * waves / (rows * columns)
    return changed


def waveft(w, m, **options):
    matrix = torch.zeros_like(w).flatten()
    matrix[m.E.places] = m.E.values
    matrix, changed = matrix.view_as(w), torch.zeros_like(w)
    rows, columns = w.shape[0] // 2, w.shape[1] // 2
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            a, b = i // 2, j // 2
            up, left = (-1) ** (i % 2), (-1) ** (j % 2)
            total = matrix[a, b] + up * matrix[a, columns + b] + left * matrix[rows + a, b]
            changed[i, j] = (total + up * left * matrix[rows + a, columns + b]) / 2
    return w + options["scale"] * changed


def c3a(w, m, **options):
    changed, size = w.clone(), m.k.shape[-1]
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            kernel = m.k[i // size, j // size]
            changed[i, j] += kernel[(j - i) % size] / w.shape[1]
    return changed


def lora_xs(w, m, **options):
    u, s, vh = torch.linalg.svd(w)
    n = options["rank"]
    best = u[:, :n] @ torch.diag(s[:n]) @ vh[:n]
    torch.testing.assert_close(m.B0 @ m.A0, best, atol=1e-4, rtol=1e-4)
    return w + m.B0 @ m.R @ m.A0


def tinylora(w, m, **options):
    core = sum(v * p for v, p in zip(m.numbers.v, m.P, strict=True))
    return w + m.B0 @ core @ m.A0


def adalora(w, m, **options):
    scale = options["alpha"] / (options["rank"] + 1e-5)
    return w + scale * m.B @ torch.diag(m.E) @ m.A


def psoft(w, m, **options):
    q = torch.zeros(len(m.a), len(m.a))
    for value, (i, j) in zip(m.Q, torch.triu_indices(*q.shape, 1).T, strict=True):
        q[i, j], q[j, i] = value, -value
    eye = torch.eye(len(q))
    rotation = torch.diag(m.b) @ (eye + q) @ torch.linalg.inv(eye - q) @ torch.diag(m.a)
    u, s, vh = torch.linalg.svd(w)
    n = options["rank"]
    best = u[:, :n] @ torch.diag(s[:n]) @ vh[:n]
    torch.testing.assert_close(m.B0 @ m.A0, best, atol=1e-4, rtol=1e-4)
    return w + m.B0 @ (rotation - eye) @ m.A0


def svft(w, m, **options):
    middle = torch.zeros(len(m.A0), len(m.A0))
    places = [(i, j) for i in range(len(middle)) for j in range(len(middle)) if abs(i - j) <= 1]
    for value, place in zip(m.M, places, strict=True):
        middle[place] = value
    _, s, _ = torch.linalg.svd(w)
    torch.testing.assert_close(m.B0 @ torch.diag(s) @ m.A0, w, atol=1e-4, rtol=1e-4)
    return w + m.B0 @ middle @ m.A0


def osf(w, m, **options):
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    s[-len(m.S) :] = 0
    return u @ torch.diag(s) @ vh + m.U @ torch.diag(m.S) @ m.V


def deft(w, m, **options):
    q = torch.linalg.qr(m.P).Q
    return w - q @ q.T @ w + options["alpha"] / options["rank"] * q @ m.R


def peanut(w, m, **options):
    hidden = first = torch.relu(w.T @ m.A.T)
    hidden = torch.relu(hidden @ m.E[0].T)
    hidden = torch.relu(hidden @ m.D[0].T) + first
    return w + options["scale"] * (hidden @ m.B.T).T


def glora(w, m, **options):
    a, b = (part.left @ part.right for part in (m.A, m.B))
    return w + w * a + b


def bdlora(w, m, **options):
    blocks = [b @ a for b, a in zip(m.B.chunk(2), m.A.chunk(2), strict=True)]
    return w + options["alpha"] / options["rank"] * torch.cat(blocks)


def mica(w, m, **options):
    u, _, _ = torch.linalg.svd(w, full_matrices=False)
    overlap = (u[:, -options["rank"] :].T @ m.B).abs().diagonal()
    torch.testing.assert_close(overlap, torch.ones(options["rank"]), atol=1e-3, rtol=0)
    return w + options["alpha"] / options["rank"] * m.B @ m.A


def olora(w, m, **options):
    q, r = torch.linalg.qr(w)
    torch.testing.assert_close(m.B0 @ m.A0, q[:, :3] @ r[:3], atol=1e-5, rtol=1e-5)
    return w + options["alpha"] / options["rank"] * (m.B @ m.A - m.B0 @ m.A0)


def kasa(w, m, **options):
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    s[-options["rank"] :] = 0
    kept = u @ torch.diag(s) @ vh
    return kept + options["alpha"] / options["rank"] * m.B @ torch.diag(m.E) @ m.A


def vblora(w, m, **options):
    def block(logits):
        best = sorted(range(len(logits)), key=lambda i: -logits[i])[: options["top"]]
        weights = [math.exp(logits[i]) for i in best]
        return sum(e / sum(weights) * m.bank.v[i] for e, i in zip(weights, best, strict=True))

    a = torch.stack([torch.cat([block(each) for each in row]) for row in m.A])
    columns = [torch.cat([block(m.B[i, j]) for i in range(len(m.B))]) for j in range(len(a))]
    return w + torch.stack(columns, 1) @ a


def unilora(w, m, **options):
    places, rank = m.places.tolist(), options["rank"]
    taken = torch.stack([m.vector.v[i] / places.count(i) ** 0.5 for i in places])
    a, b = taken[: rank * w.shape[1]], taken[rank * w.shape[1] :]
    return w + b.view(-1, rank) @ a.view(rank, -1)


def adamss(w, m, **options):
    rows = [m.B[i] @ m.A[c] @ m.V for i, c in enumerate(m.places.tolist())]
    assert len(set(m.places.tolist())) == options["clusters"]
    change = torch.stack(rows)
    return w + change[:, : w.shape[1]] if w.ndim > 1 else w + change[:, -1]  # of a bias


EQUATIONS = {
    "adalora": (adalora, {"rank": 3, "alpha": 6.0, "target": 2}),
    "loha": (loha, {"rank": 3, "alpha": 6.0}),
    "lokr": (lokr, {"rank": 2, "alpha": 3.0, "factor": 4}),
    "hira": (hira, {"rank": 3}),
    "miss": (miss, {"rank": 5}),
    "shira": (shira, {"rank": 2}),
    "gralora": (gralora, {"rank": 4, "alpha": 3.0, "pieces": 4, "hybrid": 2}),
    "delora": (delora, {"rank": 3, "strength": 4.0}),
    "oft": (oft, {"block": 8, "terms": 0}),
    "boft": (boft, {"block": 8, "factors": 2}),
    "hra": (hra, {"rank": 4}),
    "road": (road, {"group": 8}),
    "ssf": (ssf, {}),
    "vera": (vera, {"rank": 6}),
    "randlora": (randlora, {"rank": 5, "alpha": 2.0}),
    "fourierft": (fourierft, {"coefficients": 9, "scale": 40.0}),
    "waveft": (waveft, {"coefficients": 50, "scale": 3.0}),
    "c3a": (c3a, {"block": 8}),
    "lora-xs": (lora_xs, {"rank": 4}),
    "tinylora": (tinylora, {"rank": 3, "numbers": 5}),
    "psoft": (psoft, {"rank": 4}),
    "svft": (svft, {"band": 1}),
    "beft": (beft, {}),
    "osf": (osf, {"kept": 0.75}),
    "deft": (deft, {"rank": 3, "alpha": 6.0, "basis": "qr"}),
    "peanut": (peanut, {"rank": 5, "depth": 1, "scale": 2.0}),
    "glora": (glora, {"rank": 3}),
    "bdlora": (bdlora, {"rank": 4, "alpha": 6.0, "rows": []}),
    "mica": (mica, {"rank": 3, "alpha": 6.0}),
    "olora": (olora, {"rank": 3, "alpha": 6.0}),
    "kasa": (kasa, {"rank": 3, "alpha": 6.0}),
    "vblora": (vblora, {"rank": 2, "vectors": 6, "block": 8, "top": 3}),
    "unilora": (unilora, {"rank": 2, "numbers": 40}),
    "adamss": (adamss, {"rank": 2, "clusters": 3, "components": 9}),
}
CELLS = [(method, architecture) for method in EQUATIONS for architecture in PROJECTIONS]


def test_all_of_these_methods_are_of_the_base():
    assert all(issubclass(METHODS[name], ProjectionMethod) for name in EQUATIONS)


@rotate(("method", "architecture"), CELLS, parts=3)
def test_the_weight_is_that_of_the_equation(method, architecture):
    equation, options = EQUATIONS[method]
    one = attach_at(architecture, PROJECTIONS[architecture], method, **options)
    fixed = {n: b.clone() for n, b in one.module.named_buffers()}
    tiny_models.scramble(one.adapter)
    with torch.no_grad():
        for name, buffer in one.module.named_buffers():
            buffer.copy_(fixed[name])
        one.adapter.model.eval()
        x = torch.randn(2, 5, one.site.d_in)
        weight: Tensor = equation(one.weight, one.module, **options)
        bias = one.bias
        if method == "road" and bias is not None:
            bias = road(bias[:, None], one.module)[:, 0]
        if method == "ssf" and bias is not None:
            bias = one.module.scale * bias + one.module.shift
        if method == "beft":
            bias = one.module.b if bias is None else bias + one.module.b
        if method == "adamss" and bias is not None:
            bias = adamss(bias, one.module, **options)
        if method == "glora" and bias is not None:
            c = one.module.C.left @ one.module.C.right
            bias = bias * (1 + one.module.D.value) + one.module.E.value + (one.weight @ c)[:, 0]
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(one.output(x), expected, atol=2e-4, rtol=2e-4)


def test_osf_trains_in_directions_that_are_orthogonal_to_the_kept_ones():
    one = attach_at("bert", PROJECTIONS["bert"], "osf", kept=0.75)
    module = one.module
    tiny_models.scramble(one.adapter)
    one.output(torch.randn(2, 3, one.site.d_in)).square().sum().backward()
    assert module.U.grad.abs().max() > 0.1
    assert (module.left_kept.T @ module.U.grad).abs().max() < 1e-4
    assert (module.V.grad @ module.right_kept.T).abs().max() < 1e-4


def test_the_series_of_cayley_is_near_the_exact_rotation():
    outputs = []
    for terms in (0, 12, 5):
        one = attach_at("bert", PROJECTIONS["bert"], "oft", block=8, terms=terms)
        tiny_models.scramble(one.adapter, std=0.05)
        outputs.append(one.output(torch.ones(1, 3, one.site.d_in)))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-6)
    difference = (outputs[2] - outputs[0]).abs().max()
    assert 0 < difference < 0.02


def test_a_kept_matrix_is_that_of_the_parameters():
    """A computed D is kept in `eval()`, and is computed again once a byte of it changes."""
    one = attach_at("bert", PROJECTIONS["bert"], "loha", rank=2)
    module = one.module.eval().requires_grad_(False)
    tiny_models.scramble(one.adapter)
    x, y = torch.randn(3, one.site.d_in), torch.randn(3, one.site.d_out)
    calls = []
    original = type(module).delta
    type(module).delta = lambda self: calls.append(1) or original(self)
    try:
        first = module(x, y)
        assert torch.equal(module(x, y), first)
        assert len(calls) == 1
        module.A2.data[0, 0] += 1  # no version counter shows this
        assert not torch.equal(module(x, y), first)
        assert len(calls) == 2
        module.requires_grad_(True)
        module(x, y).sum().backward()
        assert module.A1.grad is not None
        assert len(calls) == 3
    finally:
        type(module).delta = original


def test_haar_keeps_lengths():
    matrix = torch.randn(6, 10)
    assert inverse_haar(matrix).norm().item() == pytest.approx(matrix.norm().item())


REFUSED = {
    "loha(rank=0)": ConfigError,
    "lokr(factor=0)": ConfigError,
    "delora(strength=0)": ConfigError,
    "oft(block=1)": ConfigError,
    "oft(terms=33)": ConfigError,
    "fourierft(coefficients=0)": ConfigError,
    "hra(rank=3)": SiteError,
    "gralora(rank=6, pieces=4)": SiteError,
    "lora-xs(rank=64)": SiteError,
    "road(variant=3)": ConfigError,
    "adalora(warmup=0.6, final=0.4)": ConfigError,
    "bdlora(rank=6, blocks=4)": SiteError,
    "glora(weights=none, prompt=none, biases=none)": SiteError,
    "kasa(rank=64)": SiteError,
    "mica(rank=64)": SiteError,
    "psoft(rank=1)": ConfigError,
}


@pytest.mark.parametrize("spec", REFUSED)
def test_options_out_of_range_are_refused_by_name(spec):
    model = tiny_models.model("bert")
    with pytest.raises(REFUSED[spec]) as error:
        ah.attach(model, spec)
    assert spec.partition("(")[0] in str(error.value)
    assert not ah.adapters(model)


def test_one_rank_for_each_site():
    adapter = ah.attach(tiny_models.model("bert"), "miss(rank=4, ranks={'attn.v': 2})")
    assert {p.site.role: p.module.D.shape[1] for p in adapter.placed} == {"attn.q": 4, "attn.v": 2}
    assert adapter.count() == 2 * 32 * (4 + 2)
