"""What tensor parallelism sends: collectives of each layer in a training step, for each method.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py

Counts on two random Llamas that differ by one layer. All of them have the size of the activations
of a batch: `all-reduce` adds the shares of the processes, `gather` joins them.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import adapterhub as ah

ROWS = (
    ("lora", "lora(sites=[attn.q, attn.v])"),
    ("lora, all projections", "lora(sites=[attn.*, ffn.*])"),
    ("dora", "dora(sites=[attn.q, attn.v])"),
    ("pfeiffer", "pfeiffer"),
    ("parallel", "parallel"),
    ("ia3", "ia3"),
    ("prefix", "prefix"),
    ("full", "full"),
)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
IDS = torch.arange(16)[None]


def main() -> None:
    """Count, and print a table."""
    warnings.simplefilter("ignore", UserWarning)  # of the hooks that count
    dist.init_process_group("gloo")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = [(name, per_layer(method)) for name, method in ROWS]
    if dist.get_rank() == 0:
        print(f"{'':24}{'all-reduce':>12}{'gather':>8}")
        for name, count in rows:
            print(f"{name:24}{count['all_reduce']:>12}{count['all_gather_into_tensor']:>8}")
    dist.destroy_process_group()


def per_layer(method: str) -> Counter[str]:
    """Count the collectives that one more layer needs."""
    return collectives(method, 3) - collectives(method, 2)


def collectives(method: str, layers: int) -> Counter[str]:
    """Count the collectives of a step: forward pass, loss and backward pass.

    Args:
        method: a method.
        layers: the layers of the model.
    """
    model = divided(layers)
    ah.attach(model, method)
    counted = CommDebugMode()
    with counted:
        model(input_ids=IDS, labels=IDS).loss.backward()
    counts = counted.get_comm_counts().items()
    return Counter({str(name).rpartition(".")[2]: count for name, count in counts})


def divided(layers: int) -> PreTrainedModel:
    """Load a random Llama divided over the processes."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        config = LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, **SIZES)
        AutoModelForCausalLM.from_config(config).save_pretrained(Path(folder[0]))
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto")


if __name__ == "__main__":
    main()
