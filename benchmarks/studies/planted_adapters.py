"""Copy a registry, and plant adapters in it that can help with no task.

    python benchmarks/studies/planted_adapters.py registry PLANTED --count 20
    adapterhub suggest --registry PLANTED --backbone ID --train my.tsv

A planted adapter has the numbers of a trained one, shuffled within each tensor: the same size and
scale, and nothing learned. `adapterhub suggest` should not prefer one to the bare backbone.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

import adapterhub as ah

BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
TRAINED = "sst2-lora"


def plant(registry: Path, trained: str, count: int) -> None:
    """Publish shuffled copies of a trained adapter.

    Args:
        registry: the registry that has it and gets them.
        trained: its name.
        count: how many.
    """
    model, _ = ah.load_backbone(BACKBONE, task="classification", labels=["0", "1"])
    for number in range(1, count + 1):
        adapter = ah.load(model, trained, name=f"planted-{number:02}", registry=registry)
        draw = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for tensor in adapter.parameters():
                order = torch.randperm(tensor.numel(), generator=draw)
                tensor.copy_(tensor.flatten()[order].view_as(tensor))
        folder = registry.parent / f"{registry.name}-planted"
        adapter.save(folder)
        adapter.detach()
        ah.publish(folder, registry=registry)
        shutil.rmtree(folder)


def main() -> None:
    """Copy the registry, and plant the adapters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("registry", type=Path)
    parser.add_argument("planted", type=Path)
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    shutil.copytree(options.registry, options.planted)
    plant(options.planted, TRAINED, options.count)


if __name__ == "__main__":
    main()
