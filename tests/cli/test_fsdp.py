"""`adapterhub train` with FSDP2 or tensor parallelism, in two processes, as in one."""

import json
import re
import time
from importlib.util import find_spec

import pytest
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.loop.sharding import has_shards
from tests.kit import tiny_models
from tests.kit.data import sentences, write_tsv
from tests.kit.processes import (
    evaluations,
    finished,
    in_two,
    launch,
    launched,
    losses,
    run_all,
    same_adapters,
)

pytestmark = pytest.mark.apart
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
    backbones = {
        "bert": tiny_models.model("bert", "features", **tiny_models.NO_DROPOUT),
        "llama": tiny_models.model("llama", "features", **tiny_models.NO_DROPOUT),
        "t5": tiny_models.model("t5", "seq2seq", **tiny_models.NO_DROPOUT),
        "dpo": tiny_models.model("llama", "causal-lm", **tiny_models.NO_DROPOUT),
        "lm": tiny_models.model("llama", "causal-lm", **tiny_models.NO_DROPOUT),
        # A block of 4-bit codes has 64 values.
        "nf4": tiny_models.model("llama", "features", hidden_size=64, intermediate_size=128),
    }
    for name, model in backbones.items():
        to = backbone_of(folder, name)
        model.save_pretrained(to)
        AutoTokenizer.from_pretrained(backbone).save_pretrained(to)
    return folder


@pytest.fixture(scope="module")
def one(folder):
    """Train every case in one process; return the folder of the runs."""
    run_all([words_of(folder, "one", *case, 3, 2) for case in CASES])
    return folder / "one"


@pytest.fixture(scope="module")
def two(folder):
    """Train every case in two processes; return the folder of the runs."""
    shard = "train.shard=true"
    printed = in_two(folder, [words_of(folder, "two", *case, 3, 1, shard) for case in CASES])
    assert printed.count("peak memory") == len(CASES)
    return folder / "two"


def trained_alike(alone, two, folder, architecture):
    """Compare adapters, losses and evaluations; the fingerprint is that of the whole backbone."""
    same_adapters(alone, two)
    assert losses(two) == pytest.approx(losses(alone), rel=1e-4)
    for here, there in zip(evaluations(two), evaluations(alone), strict=True):
        assert here == pytest.approx(there, rel=1e-4)
    tasks = {"t5": "seq2seq", "dpo": "causal-lm", "lm": "causal-lm"}
    task = tasks.get(architecture, "classification")
    model, _ = ah.load_backbone(
        str(backbone_of(folder, architecture)),
        task=task,
        labels=list("ab") if task == "classification" else (),
        quantize="nf4" if architecture == "nf4" else None,
        dtype="fp32",
    )
    ah.load(model, two / "adapter")


@pytest.mark.parametrize(("architecture", "method"), CASES)
def test_two_sharded_processes_train_like_one(architecture, method, folder, one, two):
    alone, sharded = (output_of(each, architecture, method) for each in (one, two))
    assert has_shards(sharded / "checkpoints" / "last")
    assert not has_shards(alone / "checkpoints" / "last")
    assert len(losses(alone)) == 9
    assert len(evaluations(alone)) == 3
    trained_alike(alone, sharded, folder, architecture)


def killed(started, folder):
    """Kill one of two processes when there is a checkpoint; it has written it in part, or whole."""
    last = folder / "checkpoints" / "last" / "progress.json"
    while not last.exists():
        assert not started.done(), started.result().printed[-4000:]
        time.sleep(0.05)
    workers = launched()
    workers[-1].kill()
    return len(workers)


def test_a_killed_process_is_started_again_and_the_run_ends_as_if_it_had_not(folder, one):
    """By `torchrun --max-restarts`, also without shards; all of a step's processes begin again."""
    case, outs = CORE[-1], {"killed-sharded": ["train.shard=true"], "killed-whole": []}
    commands = [words_of(folder, out, *case, 3, 1, *words) for out, words in outs.items()]
    launcher = ("torch.distributed.run", "--standalone", "--max-restarts=2")
    with launch(folder, commands, *launcher) as started:
        for out in outs:
            assert killed(started, output_of(folder / out, *case)) == 2
    finished(started.result())
    for out in outs:
        same_adapters(output_of(one, *case), output_of(folder / out, *case))


def test_a_run_is_resumed_by_another_number_of_processes(folder, one):
    """Two sharded processes, then one; and one, then two sharded ones."""
    first, second, shard = CORE[-1], CORE[1], "train.shard=true"
    begun = [words_of(folder, "divided", *first, 2, 1, shard)]
    run_all([words_of(folder, "joined", *second, 2, 2)])
    begun.append(words_of(folder, "joined", *second, 3, 1, shard, "--resume"))
    in_two(folder, begun)
    alone = [words_of(folder, "divided", *first, 3, 2, "train.shard=false", "--resume")]
    run_all(alone)
    same_adapters(output_of(one, *first), output_of(folder / "divided", *first))
    same_adapters(output_of(one, *second), output_of(folder / "joined", *second))


def test_accelerate_launches_fsdp2(folder, two):
    """As a user of accelerate does, with flags in place of an option of the recipe."""
    case = CORE[-1]
    launcher = (
        "accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2", "--num_processes=2",
        "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
    )  # fmt: skip
    with launch(folder, [words_of(folder, "accelerate", *case, 3, 1)], *launcher) as started:
        finished(started.result())
    launched = output_of(folder / "accelerate", *case)
    assert has_shards(launched / "checkpoints" / "last")
    same_adapters(output_of(two, *case), launched)


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
    run_all([words_of(folder, "alone", *case, 2, 1) for case in TOGETHER])
    run_all([words_of(folder, "begun-alone", *TOGETHER[0], 1, 1)])
    commands = [words_of(folder, "together", *case, 2, 1, on) for case in TOGETHER]
    commands.append(words_of(folder, "begun-alone", *TOGETHER[0], 2, 1, on, "--resume"))
    commands.append(words_of(folder, "begun-together", *TOGETHER[0], 1, 1, on))
    assert in_two(folder, commands).count("peak memory") == len(commands)
    run_all([words_of(folder, "begun-together", *TOGETHER[0], 2, 1, off, "--resume")])
    return folder


@plans
@pytest.mark.parametrize(("architecture", "method"), TOGETHER)
def test_processes_together_train_like_one(architecture, method, together):
    alone, two = (output_of(together / o, architecture, method) for o in ("alone", "together"))
    trained_alike(alone, two, together, architecture)


@plans
def test_a_run_is_resumed_by_processes_together_and_by_one(together):
    for resumed in ("begun-alone", "begun-together"):
        same_adapters(output_of(together / "alone", *TOGETHER[0]),
                      output_of(together / resumed, *TOGETHER[0]))  # fmt: skip
