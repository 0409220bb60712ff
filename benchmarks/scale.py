"""Memory and time of large backbones over N GPUs, by FSDP2 or tensor parallel: counted only.

    python benchmarks/scale.py
    python benchmarks/scale.py --tensor-parallel

Backbones with the shapes of Llama 3 are built without weights, so that parameters are counted
exactly, by the library's own methods. Per process, with P parameters in bf16, of which P_layer are
in the largest layer and P_root in none, A trained ones, L layers of width d, T tokens in a batch
and a vocabulary of V:

    weights       2 P / N                shares of all parameters
    gathered      2 (2 P_layer + P_root) two layers, one of them ahead; embedding and head
    training      16 A / N               trained parameters, gradients and both moments, in fp32
    activations   2 L T d + layer        layer inputs, with gradient checkpointing, and one layer
    logits        12.5 T V               fp32, twice, and their gradient (activation_memory.py)

    communication 2 x 2 P (N - 1) / N    each layer gathered for the forward and the backward pass
                  + 4 A (N - 1) / N      gradients reduced
    computation   6 P T or 8 P T         forward, again in the backward pass, and backward; with
                                         gradients of all weights 8

Tensor parallel, with T tokens of all processes, R all-reduces and G gathers of a layer in a step
(benchmarks/tensor_parallel.py, and those of the forward pass once more), each of 2 T d bytes:

    weights       2 P / N
    training      16 A; with all weights 16 A / N
    communication (2 R + G) 2 T d L (N - 1) / N, which waits for what is computed
    computation   6 P T / N or 8 P T / N

What one layer keeps, in bytes for each token, is counted on a layer of a sixteenth of the width.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import adapterhub as ah
from adapterhub.anatomy import anatomy_of
from adapterhub.methods.common.base import parse_methods
from adapterhub.speed.activation_memory import LOGIT_BYTES, saved_bytes

VOCABULARY, HEAD, SCALE = 128_256, 128, 16
SHAPES = {  # width, feed-forward width, layers, attention heads; 8 key-value heads
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
METHODS = ("lora(rank=16)", "pfeiffer", "prefix", "full")
GPUS = (1, 8, 64)
TOKENS = 4096  # in a batch of one process
COLLECTIVES = {"lora(rank=16)": (9, 6), "pfeiffer": (9, 0), "prefix": (9, 1), "full": (9, 0)}
TOGETHER = (2, 8)  # GPUs of one host
LINK = 400e9  # bytes a second that a process receives within a host
FLOPS = 400e12  # a second that a GPU computes, in bf16: 40 % of an H100's peak
BANDWIDTH = 50e9  # bytes a second that a process receives: 400 Gbit/s


@dataclass(frozen=True)
class Counted:
    """What is counted of a backbone with a method.

    Attributes:
        parameters: of the backbone.
        layer: those of one layer.
        trained: those that train.
        width: that of the residual stream.
        layers: their number.
        kept: bytes for each token that the backward pass of one layer keeps.
    """

    parameters: int
    layer: int
    trained: int
    width: int
    layers: int
    kept: float


@dataclass(frozen=True)
class Needed:
    """What one process needs: bytes of memory by part, bytes received and seconds of a step."""

    memory: dict[str, float]
    received: float
    computing: float

    @property
    def total(self) -> float:
        """The memory."""
        return sum(self.memory.values())

    @property
    def seconds(self) -> float:
        """The time of a step: gathering hides behind computing, or the other way around."""
        return max(self.computing, self.received / BANDWIDTH)


def llama(shape: tuple[int, int, int, int], scale: int = 1, layers: int = 0) -> LlamaConfig:
    """Return a config of the shape, with narrower or fewer layers.

    Args:
        shape: width, feed-forward width, layers and heads.
        scale: by what the widths are divided.
        layers: how many there are in place of those of the shape.
    """
    width, inner, depth, heads = shape
    return LlamaConfig(
        hidden_size=width // scale, intermediate_size=inner // scale,
        num_hidden_layers=layers or depth, num_attention_heads=max(heads // scale, 1),
        num_key_value_heads=max(8 // scale, 1), head_dim=HEAD, vocab_size=VOCABULARY // scale,
    )  # fmt: skip


def without_weights(config: LlamaConfig) -> PreTrainedModel:
    """Build a model whose tensors have shapes and no values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def count(shape: tuple[int, int, int, int], method: str) -> Counted:
    """Count a backbone with a method.

    Args:
        shape: width, feed-forward width, layers and heads.
        method: the method's spec.
    """
    model = without_weights(llama(shape))
    (parsed,) = parse_methods(method)
    anatomy = anatomy_of(model)
    layer = model.get_submodule(next(iter(anatomy.layers.values()))[0])
    return Counted(
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in layer.parameters()),
        parsed.count(anatomy),
        shape[0],
        shape[2],
        kept_of_layer(shape, method),
    )


def kept_of_layer(shape: tuple[int, int, int, int], method: str, tokens: int = 24) -> float:
    """Count the bytes for each token that the backward pass keeps of one layer.

    It is the difference of two layers and one, in narrower layers, and grows with the width.

    Args:
        shape: width, feed-forward width, layers and heads.
        method: the method's spec.
        tokens: of the batches that are counted.
    """
    found = []
    for layers in (2, 3):
        model = AutoModelForCausalLM.from_config(llama(shape, SCALE, layers), dtype=torch.bfloat16)
        adapter = ah.attach(model, method, name="counted")
        found.append(saved_bytes(adapter, 1, tokens) - saved_bytes(adapter, 1, tokens // 2))
    return SCALE * (found[1] - found[0]) / (tokens - tokens // 2)


def need(counted: Counted, gpus: int, tokens: int = TOKENS) -> Needed:
    """Return what one of `gpus` processes needs.

    Args:
        counted: what was counted.
        gpus: the number of processes.
        tokens: in a batch of each process.
    """
    root = counted.parameters - counted.layers * counted.layer
    others = (gpus - 1) / gpus
    full = counted.trained >= counted.parameters
    weights = 4 if full else 2  # bytes: trained parameters are in fp32
    memory = {
        "weights": 0 if full else 2 * counted.parameters / gpus,
        "gathered": weights * (2 * counted.layer + root) if gpus > 1 else 0,
        "training": 16 * counted.trained / gpus,
        "activations": tokens * (2 * counted.layers * counted.width + counted.kept),
        "logits": LOGIT_BYTES * tokens * VOCABULARY,
    }
    received = 2 * weights * counted.parameters * others + 4 * counted.trained * others
    operations = (8 if full else 6) * counted.parameters * tokens
    return Needed(memory, received, operations / FLOPS)


def need_together(counted: Counted, method: str, gpus: int, tokens: int = TOKENS) -> Needed:
    """Return what one of `gpus` processes needs that compute each example together.

    Args:
        counted: what was counted.
        method: the method's spec.
        gpus: the number of processes.
        tokens: in a batch of all of them.
    """
    full = counted.trained >= counted.parameters
    memory = {
        "weights": 0 if full else 2 * counted.parameters / gpus,
        "training": 16 * counted.trained / (gpus if full else 1),
        "activations": tokens * (2 * counted.layers * counted.width + counted.kept),
        "logits": LOGIT_BYTES * tokens * VOCABULARY,
    }
    reduced, gathered = COLLECTIVES[method]
    size = 2 * tokens * counted.width * counted.layers
    received = (2 * reduced + gathered) * size * (gpus - 1) / gpus
    operations = (8 if full else 6) * counted.parameters * tokens / gpus
    return Needed(memory, received, operations / FLOPS)


def rows_together() -> Iterator[list[str]]:
    """Yield the rows of the table of tensor parallel processes."""
    for name, shape in SHAPES.items():
        for method in METHODS:
            counted = count(shape, method)
            for gpus in TOGETHER:
                found = need_together(counted, method, gpus)
                seconds = found.computing + found.received / LINK
                yield [
                    name, f"`{method}`", str(gpus), f"{found.total / 1e9:,.0f} GB",
                    f"{found.received / 1e9:,.0f} GB", f"{seconds:,.1f} s",
                ]  # fmt: skip


def rows() -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for name, shape in SHAPES.items():
        for method in METHODS:
            counted = count(shape, method)
            share = f"{counted.trained / 1e6:,.1f} M"
            for gpus in GPUS:
                found = need(counted, gpus)
                yield [
                    name, f"`{method}`", share, str(gpus), f"{found.total / 1e9:,.0f} GB",
                    f"{found.received / 1e9:,.0f} GB" if gpus > 1 else "-",
                    f"{found.seconds:,.1f} s",
                ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tensor-parallel", action="store_true", help="the second table")
    together = parser.parse_args().tensor_parallel
    head = ["backbone", "method", "trained", "GPUs", "memory of each", "received", "a step"]
    head = [name for name in head if not (together and name == "trained")]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows_together() if together else rows():
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
