"""Networks that are not of transformers: each kind of module that an adapter can be at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Everything(nn.Module):
    """A network of all kinds of hosts; its head is `fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.conv = nn.Conv1d(16, 32, 3, padding=1)
        self.depthwise = nn.Conv1d(32, 32, 3, padding="same", groups=32, padding_mode="reflect")
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(32)
        self.fc = nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.depthwise(self.conv(self.table(ids).transpose(1, 2))).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.fc(self.norm(x).mean(1))
        return scores


class Around(nn.Module):
    """One module, `host`, with a projection behind it."""

    def __init__(self, host: nn.Module, width: int) -> None:
        super().__init__()
        self.host = host
        self.last = nn.Linear(width, 3)
        self.attends = isinstance(host, nn.MultiheadAttention)
        self.convolves = not self.attends and not isinstance(host, nn.Linear | nn.Embedding)

    def forward(self, x: Tensor) -> Tensor:
        y = self.host(x, x, x)[0] if self.attends else self.host(x)
        if self.convolves:
            y = y.flatten(2).mean(2)  # (batch, channels, ...)
        scores: Tensor = self.last(y)
        return scores


def _conv(dims: int, *args: Any, **options: Any) -> nn.Module:
    module: nn.Module = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*args, **options)
    return module


# name -> the module, the width of its output, and its input
KINDS: dict[str, tuple[Any, int, Any]] = {
    "linear": (lambda: nn.Linear(8, 6), 6, (4, 8)),
    "linear, no bias": (lambda: nn.Linear(8, 6, bias=False), 6, (4, 8)),
    "linear, 3 dimensions": (lambda: nn.Linear(8, 6), 6, (4, 5, 8)),
    "conv1d": (lambda: _conv(1, 6, 8, 3), 8, (4, 6, 9)),
    "conv1d, causal": (lambda: _conv(1, 6, 8, 3, padding=2), 8, (4, 6, 9)),
    "conv1d, circular": (
        lambda: _conv(1, 6, 8, 3, padding=1, padding_mode="circular"), 8, (4, 6, 9),
    ),
    "conv1d, no bias": (lambda: _conv(1, 6, 8, 3, bias=False), 8, (4, 6, 9)),
    "conv2d": (lambda: _conv(2, 6, 8, 3), 8, (4, 6, 7, 7)),
    "conv2d, 1x1": (lambda: _conv(2, 6, 8, 1), 8, (4, 6, 7, 7)),
    "conv2d, strided": (lambda: _conv(2, 6, 8, 3, stride=2, padding=1), 8, (4, 6, 7, 7)),
    "conv2d, dilated": (lambda: _conv(2, 6, 8, (3, 1), dilation=(2, 1)), 8, (4, 6, 7, 7)),
    "conv2d, patches": (lambda: _conv(2, 3, 8, 4, stride=4), 8, (4, 3, 8, 8)),
    "conv2d, same": (lambda: _conv(2, 6, 8, 3, padding="same", bias=False), 8, (4, 6, 7, 7)),
    "conv3d": (lambda: _conv(3, 2, 4, 2), 4, (4, 2, 5, 5, 5)),
    "conv3d, strided": (lambda: _conv(3, 2, 4, (1, 3, 3), stride=2), 4, (4, 2, 5, 5, 5)),
    "embedding": (lambda: nn.Embedding(20, 6), 6, 20),
    "embedding, padded": (lambda: nn.Embedding(20, 6, padding_idx=0), 6, 20),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 8, (4, 5, 8)),
    "attention, no bias": (
        lambda: nn.MultiheadAttention(8, 2, bias=False, batch_first=True), 8, (4, 5, 8),
    ),
    "attention, tokens first": (lambda: nn.MultiheadAttention(8, 2), 8, (5, 4, 8)),
    "conv1d, grouped": (lambda: _conv(1, 6, 8, 3, groups=2), 8, (4, 6, 9)),
    "conv2d, depthwise": (lambda: _conv(2, 6, 12, 3, groups=6, padding=1), 12, (4, 6, 7, 7)),
}  # fmt: skip
# peft pads with zeros, and does not dilate: its update is none of the weight, or no update at all.
OTHERWISE = ("conv1d, circular", "conv2d, dilated")
GROUPED = ("conv1d, grouped", "conv2d, depthwise")


def network(kind: str) -> tuple[nn.Module, Tensor]:
    """Return a network around a module of a kind, and a batch for it."""
    make, width, shape = KINDS[kind]
    torch.manual_seed(0)
    module = Around(make(), width).eval()
    x = torch.randint(0, shape, (4, 5)) if isinstance(shape, int) else torch.randn(shape)
    return module, x
