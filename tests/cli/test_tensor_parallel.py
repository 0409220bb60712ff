"""`adapterhub train` with tensor parallelism, in two processes: what one process trains."""

import re
from importlib.util import find_spec

import pytest
from transformers import AutoTokenizer

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.data import sentences, write_tsv
from tests.kit.processes import evaluations, in_two, losses, run_all, same_adapters

pytestmark = [
    pytest.mark.apart,
    pytest.mark.skipif(
        find_spec("transformers.distributed.parallel_utils") is None, reason="no plans that train"
    ),
]
# Site modules at divided projections, a prefix of own heads, copies of divided parameters.
CASES = [("llama", "lora"), ("llama", "unipelt"), ("llama", "full"), ("dpo", "lora")]
TRAIN = (
    "train.batch_size=4", "train.schedule=constant", "train.warmup=0", "train.eval_every=epoch",
    "train.log_every=1", "train.frozen_cache=off", "train.tensorboard=false", "train.report=false",
)  # fmt: skip
TOGETHER = "train.tensor_parallel=true"


def output_of(folder, architecture, method):
    return folder / re.sub(r"\W", "-", f"{architecture}-{method}")


def words_of(folder, out, architecture, method, epochs, *further):
    rows = folder / ("pairs.jsonl" if architecture == "dpo" else "rows.tsv")
    task = ("--task", "preference") if architecture == "dpo" else ()
    return (
        "train", "--backbone", folder / architecture, "--method", method, "--train", rows,
        "--eval", rows, *task, *TRAIN, f"train.epochs={epochs}",
        "--output", output_of(folder / out, architecture, method), *further,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, backbone):
    folder = tmp_path_factory.mktemp("together")
    write_tsv(folder / "rows.tsv", sentences(20))
    texts = [text for text, _ in sentences(20)]
    pairs = "\n".join(
        f'{{"prompt": "the", "chosen": "{t}", "rejected": "{t[::-1]}"}}' for t in texts
    )
    (folder / "pairs.jsonl").write_text(pairs)
    for name, task in (("llama", "features"), ("dpo", "causal-lm")):
        model = tiny_models.model("llama", task, **tiny_models.NO_DROPOUT)
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(backbone).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def one(folder):
    """Train every case in one process; return the folder of the runs."""
    run_all([words_of(folder, "one", *case, 2) for case in CASES])
    return folder / "one"


@pytest.fixture(scope="module")
def two(folder, one):
    """Train every case in two processes, and resume a run of one in two; return the folder."""
    commands = [words_of(folder, "two", *case, 2, TOGETHER) for case in CASES]
    run_all([words_of(folder, "joined", *CASES[0], 1)])
    commands.append(words_of(folder, "joined", *CASES[0], 2, TOGETHER, "--resume"))
    commands.append(words_of(folder, "divided", *CASES[0], 1, TOGETHER))
    printed = in_two(folder, commands)
    assert printed.count("peak memory") == len(commands)
    return folder / "two"


@pytest.mark.parametrize(("architecture", "method"), CASES)
def test_processes_together_train_like_one(architecture, method, folder, one, two):
    alone, together = (output_of(each, architecture, method) for each in (one, two))
    same_adapters(alone, together)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)
    pairs = zip(evaluations(together), evaluations(alone), strict=True)
    assert all(here == pytest.approx(there, rel=1e-4) for here, there in pairs)
    task = "causal-lm" if architecture == "dpo" else "classification"
    labels = () if architecture == "dpo" else ("a", "b")
    model, _ = ah.load_backbone(str(folder / architecture), task=task, labels=labels)
    ah.load(model, together / "adapter")  # the fingerprint is that of the whole backbone


def test_a_run_is_resumed_by_processes_together_and_by_one(folder, one, two):
    run_all([words_of(folder, "divided", *CASES[0], 2, "train.tensor_parallel=false", "--resume")])
    for resumed in ("joined", "divided"):
        same_adapters(output_of(one, *CASES[0]), output_of(folder / resumed, *CASES[0]))
