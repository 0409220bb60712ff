"""Time training steps of the library `adapters`, in an environment that has it.

    PYTHON benchmarks/speed/adapters_steps.py METHOD ROWS TOKENS STEPS

The last line of the output is the median milliseconds of a step. `steps.py` runs this.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings

import adapters
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

CONFIGS = {"pfeiffer": "seq_bn", "mam": "mam", "prefix": "prefix_tuning", "lora": "lora"}


def main() -> None:
    """Train a few steps and print the median time of one."""
    warnings.simplefilter("ignore")
    method, *numbers = sys.argv[1:]
    rows, tokens, steps = map(int, numbers)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert", hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536, num_labels=2,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    adapters.init(model)
    model.add_adapter("a", config=CONFIGS[method])
    model.train_adapter("a")
    model.set_active_adapters("a")
    model.train()
    ids = torch.randint(1000, 20000, (rows, tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    print(1000 * statistics.median(times[2:]))


if __name__ == "__main__":
    main()
