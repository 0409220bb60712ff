"""`adapterhub train` in several processes, started by `accelerate launch` as a user does."""

import re

import pytest
import torch
from transformers import AutoTokenizer

from adapterhub.loop.checkpoint import folder_of, load_checkpoint
from adapterhub.loop.processes import own_device
from tests.kit import tiny_models
from tests.kit.data import sentences, write_tsv
from tests.kit.processes import evaluations, lines_of, same_adapters, start
from tests.kit.session import succeeded

# One launch for all in the core: site modules, prefixes, and a trained part that grows.
TOGETHER = "[lora(rank=2), prefix(length=2), unfreeze]"
METHODS = ("lora", "prefix", "full") if tiny_models.MATRIX == tiny_models.ARCHITECTURES else ()
LAUNCH = [
    "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", "-m", "adapterhub",
]  # fmt: skip


@pytest.fixture
def steady(backbone, tmp_path):
    """The tiny backbone without dropout, which is random in another way in each process."""
    folder = tmp_path / "steady-bert"
    tiny_models.model("bert", "features", **tiny_models.NO_DROPOUT).save_pretrained(folder)
    AutoTokenizer.from_pretrained(backbone).save_pretrained(folder)
    return folder


@pytest.mark.apart
@pytest.mark.parametrize("method", [TOGETHER, *METHODS])
def test_two_processes_train_like_one_with_gradient_accumulation(
    method, steady, adapterhub, tmp_path
):
    # Five batches an epoch: the last step of each has one for both processes.
    file = write_tsv(tmp_path / "rows.tsv", sentences(20))
    words = (
        "train", "--backbone", steady, "--method", method, "--train", file, "--eval", file,
        "train.epochs=3", "train.batch_size=4", "train.log_every=1", "train.tensorboard=false",
    )  # fmt: skip
    alone = ("--output", tmp_path / "one", "train.gradient_accumulation=2")
    out = succeeded(adapterhub(*words, *alone))
    printed = start(*LAUNCH, *words, "--output", tmp_path / "two")
    assert printed.count("peak memory") == out.count("peak memory") == 1
    folders = one, two = tmp_path / "one", tmp_path / "two"
    same_adapters(one, two)
    states = [load_checkpoint(folder_of(folder, "last")).tensors for folder in folders]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, atol=1e-6, rtol=1e-5, msg=name)
    events = [[(line["event"], line["step"]) for line in lines_of(folder)] for folder in folders]
    assert events[0] == events[1]
    assert len(evaluations(two)) == 3
    code, _, err = adapterhub(*words, "--output", two, "--resume")
    assert code == 2
    rows = re.search(r"x train.gradient_accumulation: (\d+) in the checkpoint, (\d+) now", err)
    assert rows is not None
    assert int(rows[1]) == 2 * int(rows[2])


@pytest.mark.parametrize("flag", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launcher_that_shards_otherwise_is_refused(flag, train, tmp_path, monkeypatch):
    monkeypatch.setenv(flag, "true")
    code, _, err = train()
    assert code == 2
    assert flag.removeprefix("ACCELERATE_USE_").lower() in err.lower()
    assert "--use_fsdp --fsdp_version 2" in err
    assert not (tmp_path / "run").exists()


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert own_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device() == torch.device("cuda", 1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert own_device() == torch.device("cpu")
