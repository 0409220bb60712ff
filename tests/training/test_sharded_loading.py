"""What a process holds in its memory of a backbone that is sharded: its share, and never the whole.

Memory is what the process has of its own (RssAnon): files that are mapped are shared, and can be
dropped.
"""

import ctypes
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers

from adapterhub.recipe.recipe import read
from tests.kit import data, processes

SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 99}
LAYERS, MB = 16, 1 << 20
M_MMAP_THRESHOLD = -3  # of malloc.h
pytestmark = pytest.mark.apart


def private():
    """Return the memory that belongs to this process alone, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def measure(path):
    """Prepare a run in this process, and print how much memory that took at its peak, and after."""
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    from adapterhub.loop.processes import join_processes
    from adapterhub.training.run import prepare
    from adapterhub.training.run_data import placed

    # Freed memory goes back to the system, as that of large tensors does.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    join_processes()
    recipe = placed(read(path))
    before, seen, ended = private(), [], threading.Event()

    def watch():
        while not ended.is_set():
            seen.append(private())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    prepared = prepare(recipe)
    ended.set()
    watcher.join()
    print(json.dumps({"peak": max(seen) - before, "after": private() - before}))
    assert prepared.options.shard


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Return a folder with a Llama of 200 MB in bf16, and rows."""
    folder = tmp_path_factory.mktemp("large")
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=LAYERS, pad_token_id=1)
    model = transformers.LlamaModel(config).to(torch.bfloat16)
    model.save_pretrained(folder / "llama")
    data.word_tokenizer().save_pretrained(folder / "llama")
    data.write_tsv(folder / "rows.tsv", data.sentences(40))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(("method", "share"), [("lora", 0.5), ("full", 1.0)])
def test_a_process_reads_its_share_of_the_backbone(method, share, large):
    """Of `full`, the share is one of copies in fp32, twice as large."""
    size = sum(file.stat().st_size for file in (large / "llama").glob("*.safetensors"))
    assert size > 150 * MB
    recipe = large / f"{method}.yaml"
    rows, tokens = large / "rows.tsv", {"dtype": "bf16", "method": method}
    recipe.write_text(json.dumps(tokens | {
        "backbone": str(large / "llama"), "data": {"train": str(rows)},
        "output": str(large / "run"), "train": {"shard": True},
    }))  # fmt: skip
    ended = processes.run(__file__, recipe, processes=2)
    assert ended.returncode == 0, ended.printed[:6000]
    measured = [*map(json.loads, re.findall(r'{"peak".*?}', ended.printed))]
    assert len(measured) == 2
    layers = 2 * size / LAYERS * (2 if method == "full" else 1)
    for each in measured:  # a process may use memory again that it has freed before
        assert 0.95 * share * size < each["peak"] < share * size + layers + 40 * MB, (size, each)


if __name__ == "__main__":
    measure(sys.argv[1])
