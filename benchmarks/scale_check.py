"""Check the count of benchmarks/scale.py: what two sharded processes hold, and what they receive.

    torchrun --nproc-per-node 2 benchmarks/scale_check.py

A small Llama trains one batch in two processes. Printed are the bytes of parameters that the first
process holds and the bytes that it receives in a step, beside the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from scale import Counted, need
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

import adapterhub as ah
from adapterhub.anatomy.backbone import local
from adapterhub.loop.sharding import shard

CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=2048,
)  # fmt: skip
METHODS = ("lora(rank=16)", "pfeiffer", "prefix", "full")


class Received(TorchDispatchMode):
    """Counts the bytes that this process receives of the others inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Add the bytes of a collective operation, but for this process's own share."""
        others = (dist.get_world_size() - 1) / dist.get_world_size()
        if func is torch.ops.c10d._allgather_base_.default:
            self.bytes += others * args[0].nbytes
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.bytes += others * args[1].nbytes
        return func(*args, **(kwargs or {}))


def step(method: str) -> tuple[float, float, float, float]:
    """Return the bytes held and received, each counted and found.

    Args:
        method: what trains.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    adapter = ah.attach(model, method, name="checked")
    layer = sum(p.numel() for n, p in model.named_parameters() if ".layers.0." in n)
    own = sum(p.numel() for n, p in model.named_parameters() if "adapterhub" in n)
    backbone = sum(p.numel() for p in model.parameters()) - own
    shard(adapter)
    counted = Counted(backbone, layer, adapter.count(), 256, 6, 0.0)
    found = need(counted, dist.get_world_size())
    held = sum(local(p).nbytes for p in model.parameters())
    expected = found.memory["weights"] + found.memory["training"] / 4
    ids = torch.randint(2048, (2, 16))
    with Received() as received:
        model(input_ids=ids, labels=ids).loss.backward()
    return expected, held, found.received, received.bytes


def main() -> None:
    """Print a row for each method."""
    dist.init_process_group("gloo")
    for method in METHODS:
        expected, held, counted, received = (x / 1e6 for x in step(method))
        if dist.get_rank() == 0:
            print(f"{method:14} held {held:6.2f} MB, counted {expected:6.2f}; "
                  f"received {received:6.2f} MB, counted {counted:6.2f}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
