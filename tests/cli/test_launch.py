"""`adapterhub train` in two processes, whole or sharded by FSDP2 or tensors, as in one."""

import json
import re
import time
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.loop.checkpoint import folder_of, load_checkpoint
from adapterhub.loop.processes import own_device
from adapterhub.loop.sharding import has_shards
from tests.kit import processes, tiny_models
from tests.kit.data import sentences, write_tsv
from tests.kit.session import succeeded

apart = pytest.mark.apart
ACCELERATE = (
    "accelerate.commands.launch", "--num_processes=2", "--num_machines=1", "--mixed_precision=no",
    "--dynamo_backend=no", "--main_process_port=0",
)  # fmt: skip
# Site modules, a prefix, virtual tokens with parameters of the backbone, and a part that grows.
# The encoder-decoder writes texts when it is evaluated.
CORE = [
    ("t5", "pfeiffer"), ("bert", "unfreeze"), ("bert", "mam"), ("nf4", "lora"),
    ("dpo", "lora"), ("lm", "unfreeze"), ("lm", "norms"), ("llama", "lora"),
]  # fmt: skip
METHODS = (
    "lora", "pfeiffer", "prefix", "mam", "ia3", "unfreeze",
    "full", "compacter", "prefix(reparametrize=true)", "p-tuning", "dora", "scalar-mix", "head",
)  # fmt: skip
CASES = CORE
if tiny_models.FULL_MATRIX:
    CASES = [(architecture, method) for architecture in ("bert", "llama") for method in METHODS]
    # The norm behind scalar-mix cancels its gamma, whose gradient is rounding that Adam enlarges.
    left_out = ("full", "unfreeze", "scalar-mix")
    CASES += [("nf4", method) for method in METHODS if method not in left_out]
    CASES += CORE[:1] + [("lm", method) for method in ("full", "freeze", "lora")]
# In bf16 a last bit of a sum that differs is another rounding later.
OPTIONS = {"t5": ("--task", "seq2seq(new_tokens=4)"), "nf4": ("quantize=nf4", "dtype=fp32"),
           "dpo": ("--task", "preference"), "lm": ("--task", "causal-lm")}  # fmt: skip
TRAIN = (
    "train.batch_size=4", "train.schedule=constant", "train.warmup=0", "train.eval_every=epoch",
    "train.log_every=1", "train.frozen_cache=off", "train.tensorboard=false", "train.report=false",
    "train.eval_batch_size=8",  # three batches: the last one is of one process
)  # fmt: skip


def backbone_of(folder, architecture):
    return folder / f"steady-{architecture}"


def output_of(folder, architecture, method):
    return folder / re.sub(r"\W", "-", f"{architecture}-{method}")


def words_of(folder, out, architecture, method, epochs, accumulation, *further):
    rows = folder / ("pairs.jsonl" if architecture == "dpo" else "rows.tsv")
    return (
        "train", "--backbone", backbone_of(folder, architecture), "--method", method,
        "--train", rows, "--eval", rows, *TRAIN, f"train.epochs={epochs}",
        f"train.gradient_accumulation={accumulation}", *OPTIONS.get(architecture, ()),
        "--output", output_of(folder / out, architecture, method), *further,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, backbone):
    """Return a folder with backbones without dropout, and rows whose last step is not full."""
    folder = tmp_path_factory.mktemp("fsdp")
    write_tsv(folder / "rows.tsv", sentences(20))
    texts = [text for text, _ in sentences(20)]
    pairs = [{"prompt": "the", "chosen": t, "rejected": t[::-1]} for t in texts]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    kinds = {"bert": ("bert", "features"), "llama": ("llama", "features"), "t5": ("t5", "seq2seq"),
             "dpo": ("llama", "causal-lm"), "lm": ("llama", "causal-lm")}  # fmt: skip
    backbones = {
        name: tiny_models.model(*kind, **tiny_models.NO_DROPOUT) for name, kind in kinds.items()
    }
    # A block of 4-bit codes has 64 values.
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    backbones["nf4"] = tiny_models.model("llama", "features", **sizes)
    for name, model in backbones.items():
        model.save_pretrained(backbone_of(folder, name))
        AutoTokenizer.from_pretrained(backbone).save_pretrained(backbone_of(folder, name))
    return folder


# One launch for all in the core: site modules, prefixes, and a trained part that grows.
DIVIDED = ["[lora(rank=2), prefix(length=2), unfreeze]"]
if tiny_models.FULL_MATRIX:
    DIVIDED += ["lora", "prefix", "full"]


@apart
@pytest.mark.parametrize("method", DIVIDED)
def test_two_processes_train_like_one_with_gradient_accumulation(method, folder, adapterhub):
    """Launched as a user does. Five batches an epoch: the last step has one for both processes."""
    case = ("bert", method, 3)
    out = succeeded(adapterhub(*words_of(folder, "accumulated", *case, 2)))
    words = words_of(folder, "rows-divided", *case, 1)
    printed = processes.start(*ACCELERATE, "--multi_gpu", "-m", "adapterhub", *words)
    assert printed.count("peak memory") == out.count("peak memory") == 1
    one, two = (output_of(folder / name, *case[:2]) for name in ("accumulated", "rows-divided"))
    processes.same_adapters(one, two)
    states = [load_checkpoint(folder_of(each, "last")).tensors for each in (one, two)]
    torch.testing.assert_close(states[1], states[0], atol=1e-6, rtol=1e-5)
    events = [[(e["event"], e["step"]) for e in processes.lines_of(each)] for each in (one, two)]
    assert events[0] == events[1]
    assert len(processes.evaluations(two)) == 3
    code, _, err = adapterhub(*words, "--resume")
    assert code == 2
    rows = re.search(r"x train.gradient_accumulation: (\d+) in the checkpoint, (\d+) now", err)
    assert int(rows[1]) == 2 * int(rows[2])


@pytest.fixture(scope="module")
def one(folder):
    """Train every case in one process; return the folder of the runs."""
    processes.run_all([words_of(folder, "one", *case, 3, 2) for case in CASES])
    return folder / "one"


@pytest.fixture(scope="module")
def two(folder):
    """Train every case in two processes; return the folder of the runs."""
    commands = [words_of(folder, "two", *case, 3, 1, "train.shard=true") for case in CASES]
    assert processes.in_two(folder, commands).count("peak memory") == len(CASES)
    return folder / "two"


def trained_alike(alone, two, folder, architecture):
    """Compare adapters, losses and evaluations; the fingerprint is that of the whole backbone."""
    processes.same_adapters(alone, two)
    assert processes.losses(two) == pytest.approx(processes.losses(alone), rel=1e-4)
    for here, there in zip(processes.evaluations(two), processes.evaluations(alone), strict=True):
        assert here == pytest.approx(there, rel=1e-4)
    tasks = {"t5": "seq2seq", "dpo": "causal-lm", "lm": "causal-lm"}
    task = tasks.get(architecture, "classification")
    options = {"task": task, "labels": list("ab") if task == "classification" else ()}
    options |= {"quantize": "nf4"} if architecture == "nf4" else {}
    model, _ = ah.load_backbone(str(backbone_of(folder, architecture)), dtype="fp32", **options)
    ah.load(model, two / "adapter")


@apart
@pytest.mark.parametrize(("architecture", "method"), CASES)
def test_two_sharded_processes_train_like_one(architecture, method, folder, one, two):
    alone, sharded = (output_of(each, architecture, method) for each in (one, two))
    assert has_shards(sharded / "checkpoints" / "last")
    assert not has_shards(alone / "checkpoints" / "last")
    assert len(processes.losses(alone)) == 9
    assert len(processes.evaluations(alone)) == 3
    trained_alike(alone, sharded, folder, architecture)


def killed(started, folder):
    """Kill one of two processes when there is a checkpoint; it has written it in part, or whole."""
    last = folder / "checkpoints" / "last" / "progress.json"
    while not last.exists():
        assert not started.done(), started.result().printed[-4000:]
        time.sleep(0.05)
    workers = processes.launched()
    workers[-1].kill()
    return len(workers)


@apart
def test_a_killed_process_is_started_again_and_the_run_ends_as_if_it_had_not(folder, one):
    """By `torchrun --max-restarts`, also without shards; all of a step's processes begin again."""
    case, outs = CORE[-1], {"killed-sharded": ["train.shard=true"], "killed-whole": []}
    commands = [words_of(folder, out, *case, 3, 1, *words) for out, words in outs.items()]
    launcher = ("torch.distributed.run", "--standalone", "--max-restarts=2")
    with processes.launch(folder, commands, *launcher) as started:
        for out in outs:
            assert killed(started, output_of(folder / out, *case)) == 2
    processes.finished(started.result())
    for out in outs:
        processes.same_adapters(output_of(one, *case), output_of(folder / out, *case))


@apart
def test_a_run_is_resumed_by_another_number_of_processes(folder, one):
    """Two sharded processes, then one; and one, then two sharded ones."""
    first, second, shard = CORE[-1], CORE[1], "train.shard=true"
    begun = [words_of(folder, "divided", *first, 2, 1, shard)]
    processes.run_all([words_of(folder, "joined", *second, 2, 2)])
    begun.append(words_of(folder, "joined", *second, 3, 1, shard, "--resume"))
    processes.in_two(folder, begun)
    alone = [words_of(folder, "divided", *first, 3, 2, "train.shard=false", "--resume")]
    processes.run_all(alone)
    processes.same_adapters(output_of(one, *first), output_of(folder / "divided", *first))
    processes.same_adapters(output_of(one, *second), output_of(folder / "joined", *second))


@apart
def test_accelerate_launches_fsdp2(folder, two):
    """As a user of accelerate does, with flags in place of an option of the recipe."""
    case = CORE[-1]
    launcher = (*ACCELERATE, "--use_fsdp", "--fsdp_version=2")
    words = words_of(folder, "accelerate", *case, 3, 1)
    with processes.launch(folder, [words], *launcher) as started:
        processes.finished(started.result())
    run = output_of(folder / "accelerate", *case)
    assert has_shards(run / "checkpoints" / "last")
    processes.same_adapters(output_of(two, *case), run)


# Tensor parallelism: site modules at divided projections, a prefix of own heads, copies of divided
# parameters.
TOGETHER = [("llama", "lora"), ("llama", "unipelt"), ("llama", "full"), ("dpo", "lora")]
plans = pytest.mark.skipif(
    find_spec("transformers.distributed.parallel_utils") is None, reason="no plans that train"
)


@pytest.fixture(scope="module")
def together(folder):
    """Train cases in one process, in two together, and a run of each resumed by the other."""
    on, off = "train.tensor_parallel=true", "train.tensor_parallel=false"
    processes.run_all([words_of(folder, "alone", *case, 2, 1) for case in TOGETHER])
    processes.run_all([words_of(folder, "begun-alone", *TOGETHER[0], 1, 1)])
    commands = [words_of(folder, "together", *case, 2, 1, on) for case in TOGETHER]
    commands.append(words_of(folder, "begun-alone", *TOGETHER[0], 2, 1, on, "--resume"))
    commands.append(words_of(folder, "begun-together", *TOGETHER[0], 1, 1, on))
    assert processes.in_two(folder, commands).count("peak memory") == len(commands)
    processes.run_all([words_of(folder, "begun-together", *TOGETHER[0], 2, 1, off, "--resume")])
    return folder


@apart
@plans
@pytest.mark.parametrize(("architecture", "method"), TOGETHER)
def test_processes_together_train_like_one(architecture, method, together):
    alone, two = (output_of(together / o, architecture, method) for o in ("alone", "together"))
    trained_alike(alone, two, together, architecture)


@apart
@plans
def test_a_run_is_resumed_by_processes_together_and_by_one(together):
    for resumed in ("begun-alone", "begun-together"):
        processes.same_adapters(output_of(together / "alone", *TOGETHER[0]),
                      output_of(together / resumed, *TOGETHER[0]))  # fmt: skip


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
