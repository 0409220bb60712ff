"""Group relative policy optimization: rewards, advantages, losses, runs, and trl's trainer."""

import json
import pickle
import warnings
from contextlib import nullcontext
from dataclasses import replace
from math import exp, log
from types import SimpleNamespace

import pytest
import torch

import adapterhub as ah
from adapterhub.cli.train import _rewarded
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common import policy_losses as losses
from adapterhub.tasks.common import rewards
from adapterhub.tasks.common.batches import measuring, model_inputs
from adapterhub.tasks.common.policy_losses import PolicyOptions, Sampled, policy_loss
from adapterhub.tasks.common.rewards import RewardedTexts, has_answer, reward_of, total_rewards
from adapterhub.tasks.grpo import ADVANTAGES, LABELS, OLD, REFERENCE, RewardedPrompt
from adapterhub.training.run import run
from adapterhub.training.run_data import _check_on_policy
from tests.kit import tiny_models
from tests.kit.data import json_lines, word_tokenizer, write_json_lines
from tests.kit.runs import adapter_bytes
from tests.kit.session import succeeded

TOKENIZER = word_tokenizer("<s>", "")
SETTING = Setting(TOKENIZER, 32, positions=64)
NAN = float("nan")

# Rewards


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("2 + 2 = 4", "4", True),
        ("It is 4.0, not 5.", "4", False),
        ("so she has 1,234 of them", "... #### 1234", True),
        ("-3.50", "-3.5", True),
        ("four", "4", False),
        ("The Cat.", "cat", True),
        ("", "cat", False),
        ("9" * 5000, "9" * 5000, True),
        ("1" + "0" * 5000, "1", False),
        ("version 4", "version 4", True),
    ],
)
def test_an_answer_is_the_last_number_or_the_whole_text(completion, answer, right):
    assert has_answer(completion, answer) is right


def scores(spec, *completions, answers=None, **columns):
    count = len(completions)
    texts = RewardedTexts(list(completions), ["p"] * count, answers or [None] * count, columns)
    return reward_of(spec).score(texts)


def test_a_pattern_is_searched_over_lines_and_may_not_take_for_ever(monkeypatch):
    monkeypatch.setattr(rewards, "REGEX_SECONDS", 0.1)
    assert scores("regex:^<a>.*</a>$", "<a>\n</a>", "", "x <a></a>") == [1, 0, 0]
    assert scores("regex:^(a|a)*$", "a" * 40 + "b") == [None]


FILE = """
def score(completions, prompts, answer, **columns):
    assert prompts == ["p"] * len(completions)
    return [None if not c else float(c == a) for c, a in zip(completions, answer)]
def few(completions, **_): return [1]
def nothing(completions, **_): pass
def endless(completions, **_): return [float("nan") for _ in completions]
def word(completions, **_): return ["good" for _ in completions]
def broken(completions, **_): return 1 / 0
number = 3
"""


def test_a_function_gets_all_columns_and_its_result_is_checked(tmp_path):
    place = tmp_path / "rewards.py"
    place.write_text(FILE)
    assert scores(f"{place}:score", "a", "b", "", answer=["a", "a", "a"]) == [1, 0, None]
    for name, message in [
        ("few", "returned 1 values for 2 texts"), ("nothing", "returned None for 2 texts"),
        ("endless", "returned nan"), ("word", "returned 'good'"),
        ("broken", "raised ZeroDivisionError"), ("number", "no function number"),
        ("missing", "no function missing"), ("score", "raised TypeError"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            scores(f"{place}:{name}", "a", "b")
    for spec in (f"{tmp_path}/other.py:score", "no.such.module:score"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            scores(spec, "a")


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
HOSTILE = [
    "", "import os; os._exit(0)", "raise SystemExit(0)", "while True: pass", "def add(a",
    "x = 'a' * (1 << 32)", "print('x' * (1 << 25))\ndef add(a, b): return 3",
    "open('f', 'w').write('x' * (1 << 25))\ndef add(a, b): return 3",
]  # fmt: skip


def test_code_passes_its_tests_or_does_not(monkeypatch):
    monkeypatch.setattr(rewards, "SECONDS", 1)
    tests = "assert add(1, 2) == 3"
    texts = [f"Here:\n{ADD}\nDone.", ADD.replace("+", "-"), *HOSTILE]
    assert scores("tests", *texts, answers=[tests] * len(texts)) == [1] + [0] * (len(texts) - 1)
    with pytest.raises(DataError, match="no tests"):
        scores("tests", ADD)


def test_rewards_are_weighted_and_those_that_do_not_score_a_text_do_not_count():
    texts = RewardedTexts(["good 4", "4", ""], ["p"] * 3, ["4"] * 3, {})
    three = [reward_of("exact"), reward_of("regex:good"), reward_of("regex:4")]
    total, each = total_rewards(three, (1.0, 0.5, -2.0), texts)
    assert total == [1 + 0.5 - 2, 1 - 2, 0]
    assert each == {"exact": [1, 1, 0], "regex": [1, 0, 0], "regex-3": [1, 1, 0]}
    slow = replace(three[0], score=lambda texts: [None] * 3)
    assert total_rewards([slow, three[1]], (1, 1), texts)[0] == [1, 0, 0]
    assert all(value != value for value in total_rewards([slow], (1,), texts)[0])


def test_the_flag_sets_the_reward_of_the_task_of_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: {grpo: {reward: exact, group: 4}}")
    found = json.loads(_rewarded(None, str(tmp_path / "recipe.yaml"), ["exact", "regex:a"]))
    assert found == {"grpo": {"group": 4, "reward": ["exact", "regex:a"]}}


# Examples


def read_rows(tmp_path, rows, **options):
    source = str(write_json_lines(tmp_path / "rows.jsonl", rows))
    task, choice = parse_task({"grpo": options}).fitted(source, DataOptions(), "train")
    return task, task.read(source, choice.options, "train")


def test_prompts_are_read_with_what_their_rewards_read(tmp_path):
    rows = [{"question": f"{n}?", "answer": n, "level": [n, None]} for n in range(3)]
    assert read_rows(tmp_path, rows)[1][1] == RewardedPrompt("1?", "1")
    assert read_rows(tmp_path, rows, reward="regex:a")[1][1] == RewardedPrompt("1?")
    _, examples = read_rows(tmp_path, rows, reward="rewards.py:score")
    assert examples[1].columns == (("answer", "1"), ("level", "[1, null]"))
    chats = [{"prompt": [{"role": "user", "content": "add"}], "test_list": ["a", "b"]}] * 2
    task, examples = read_rows(tmp_path, chats, reward="tests")
    assert (task.data, examples[0]) == ("chat", RewardedPrompt((("user", "add"),), "a\nb"))
    with pytest.raises(DataError, match="answer"):
        read_rows(tmp_path, [{"prompt": "a", "answer": ""}])


def test_code_is_not_run_from_the_record_of_an_adapter_or_without_consent():
    task = parse_task({"grpo": {"reward": ["a.py:f", "exact"], "weights": [1, 2]}})
    task = pickle.loads(pickle.dumps(task)).recorded()
    assert (task.specs, task.weights) == (("exact",), (2,))
    with pytest.raises(ConfigError, match="not run from its record"):
        parse_task("grpo(reward='os:system')").recorded().check((), [])
    with pytest.raises(ConfigError, match="run_code=true"):
        parse_task("grpo(reward=tests)").check((), [])


# Advantages and losses


def test_advantages_are_differences_in_a_group():
    groups = torch.tensor([[1.0, 0, 0, 1], [0.1, 0.1, 0.1, 0.1], [NAN, 1, 2, 3], [NAN] * 4])
    by_group = [(x - 0.5) / ((1 / 3) ** 0.5 + losses.STD_FLOOR) for x in (1, 0, 0, 1)]
    found = losses.advantages_of(groups, "group").tolist()
    assert found[0] == pytest.approx(by_group)
    assert found[1] == [0] * 4
    assert found[2] == pytest.approx(
        [0, -1 / (1 + losses.STD_FLOOR), 0, 1 / (1 + losses.STD_FLOOR)]
    )
    assert found[3] == [0] * 4
    assert losses.advantages_of(torch.tensor([[NAN, 0.1, 0.1, 0.1]]), "group").tolist() == [[0] * 4]
    assert losses.advantages_of(groups, "none").tolist()[2] == [0, -1, 0, 1]
    std = groups[groups.isfinite()].std().item()
    by_batch = losses.advantages_of(groups, "batch").tolist()[0]
    assert by_batch == pytest.approx([(x - 0.5) / (std + losses.STD_FLOOR) for x in (1, 0, 0, 1)])


RATIOS, A = [[1.5, 0.5, 1.1], [1.5, 0.5, 1.0]], [2.0, -1.0]
TERMS = [[-2 * 1.2, -2 * 0.5, -2 * 1.1], [1.5, 0.8]]  # min of both products, with epsilon = 0.2


def reduced(terms, loss_type):
    if loss_type == "grpo":
        return (sum(terms[0]) / 3 + sum(terms[1]) / 2) / 2
    return sum(map(sum, terms)) / {"bnpo": 5, "dapo": 5, "dr_grpo": 2 * 4}[loss_type]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_a_loss_is_its_equation(loss_type):
    ratios, mask = torch.tensor(RATIOS), torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    old = torch.full_like(ratios, -2)
    sampled = Sampled(old + ratios.log(), torch.tensor(A), mask, old, old)
    found = policy_loss(sampled, PolicyOptions(loss_type=loss_type), 4)
    assert found.loss.item() == pytest.approx(reduced(TERMS, loss_type))
    assert found.divergence is None
    assert found.clipped.item() == pytest.approx(2 / 5)  # 1.5 with A > 0, and 0.5 with A < 0
    for power in (0, 1):
        options = PolicyOptions(loss_type=loss_type, beta=0.5, kl_ratio=power == 1)
        found = policy_loss(sampled, options, 4)
        kl = [[1 / r + log(r) - 1 for r in row] for row in ((1.5, 0.5, 1.1), (1.5, 0.5))]
        assert found.divergence.item() == pytest.approx(sum(map(sum, kl)) / 5)
        each = [[k * r**power for k, r in zip(*pair, strict=False)] for pair in
                zip(kl, RATIOS, strict=True)]  # fmt: skip
        assert found.loss.item() == pytest.approx(
            reduced(TERMS, loss_type) + reduced(each, loss_type) / 2
        )


def test_the_ratio_of_a_whole_text_is_the_geometric_mean():
    ratios, mask = torch.tensor([[4.0, 1.0]]), torch.ones(1, 2)
    sampled = Sampled(ratios.log(), torch.tensor([1.0]), mask, torch.zeros(1, 2))
    options = PolicyOptions(loss_type="grpo", importance="sequence", epsilon_high=5.0)
    assert policy_loss(sampled, options, 2).loss.item() == pytest.approx(-exp(log(4) / 2))


# Batches


def prepared(spec):
    """Return a task, a model with a random adapter, and encoded prompts."""
    torch.manual_seed(0)
    model = tiny_models.language_model("llama").eval()
    for tensor in model.parameters():
        tensor.data.add_(torch.randn_like(tensor) * 0.1)
    tiny_models.scramble(ah.attach(model, "lora"))
    task = parse_task(spec)
    examples = [RewardedPrompt("the movie was"), RewardedPrompt("a plot")]
    return task, model, task.encode(examples, SETTING, labelled=True)


SPEC = {"reward": "regex:the|good|a", "group": 4, "new_tokens": 5, "iterations": 2, "beta": 0.1}


def test_a_batch_has_log_probabilities_of_the_sampler_and_of_the_bare_model():
    task, model, rows = prepared({"grpo": SPEC})
    bare = lambda: ah.disabled(model)  # noqa: E731
    with measuring() as measured:
        batch = task.rollout(model, rows, [1, 0], 0, bare)
        loss = task.loss(rows)(model(**model_inputs(batch)), batch)
    again = task.rollout(model, rows, [1, 0], 0, bare)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    other = task.rollout(model, rows, [1, 0], 1, bare)
    assert batch["input_ids"].tolist() != other["input_ids"].tolist()
    with torch.no_grad():
        for name, context in ((OLD, nullcontext), (REFERENCE, bare)):
            with context():
                logits = model(batch["input_ids"], batch["attention_mask"]).logits
            after = batch[LABELS][:, 1:]
            each = logits[:, :-1].log_softmax(-1).gather(2, after.clamp(min=0)[..., None])[..., 0]
            each = torch.cat([each * (after >= 0), torch.zeros(len(each), 1)], 1)
            torch.testing.assert_close(batch[name], each[:, -batch[name].shape[1] :])
    assert measured["clipped"] == [0]
    assert measured["kl"][0] > 0
    assert {"reward", "deviation", "equal_groups", "tokens", "truncated"} <= measured.keys()
    assert loss.requires_grad


# Runs


@pytest.fixture
def recipe_of(backbones, tmp_path):
    rows = [{"prompt": f"the movie {w}", "answer": "good"} for w in ("was", "is", "a plot", "very")]
    file = str(write_json_lines(tmp_path / "prompts.jsonl", rows * 3))

    def recipe(output, *words, **options):
        task = {"grpo": {"reward": "regex:good|the", "group": 4, "new_tokens": 4, **options}}
        flags = {"backbone": str(backbones("llama")), "output": str(tmp_path / output)}
        words = ("train.tensorboard=false", "train.report=false", "train.batch_size=2",
                 "train.schedule=constant", "train.learning_rate=1e-2", *words)  # fmt: skip
        return read(None, words, flags | {"task": task, "data": {"train": file, "eval": file}})

    return recipe


@pytest.mark.parametrize("method", ["lora", "norms"])
def test_a_resumed_run_samples_the_same_texts(method, recipe_of, tmp_path):
    options = {"iterations": 2, "beta": 0.05}
    words = (f"method={method}", "train.eval_every=2", "train.log_every=3")
    for output, steps, resume in ("whole", 4, False), ("parts", 2, False), ("parts", 4, True):
        recipe = recipe_of(output, f"train.max_steps={steps}", *words, **options)
        run(recipe, Reporter(), resume=resume)
    assert adapter_bytes(tmp_path / "whole") == adapter_bytes(tmp_path / "parts")


def test_the_reward_rises_and_is_reported(adapterhub, recipe_of, tmp_path, backbones):
    file = recipe_of("unused").data.train
    command = (
        "train", file, "--eval", file, "--task", "grpo(new_tokens=4)", "--reward", "regex:good",
        "--backbone", backbones("llama"), "--method", "full", "--output", tmp_path / "run",
        "--steps", "24", "train.batch_size=4", "train.log_every=1", "train.learning_rate=3e-3",
        "train.eval_every=24", "train.tensorboard=false", "--quiet",
    )  # fmt: skip
    assert "measured in 6 steps" in succeeded(adapterhub(*command, "--dry-run"))
    out = succeeded(adapterhub(*command))
    lines = [line["measures"] for line in json_lines((tmp_path / "run/metrics.jsonl").read_text())
             if line["event"] == "train"]  # fmt: skip
    first, last = (sum(line["reward"] for line in part) / 6 for part in (lines[:6], lines[-6:]))
    assert last > first + 0.3
    assert "off and on   reward" in out
    assert "Training: reward" in (tmp_path / "run/report.html").read_text()


def test_runs_that_cannot_generate_are_refused(recipe_of):
    recipe = recipe_of("run")
    sharded = replace(recipe, train=replace(recipe.train, shard=True))
    for run_of, streams in (recipe, True), (sharded, False):
        data = SimpleNamespace(parts={}, task=parse_task("grpo"), streams=streams)
        with pytest.raises(ConfigError, match="generates texts while it trains"):
            _check_on_policy(run_of, data)


# trl: `make trl`

CASES = [
    {"loss_type": "grpo"},
    {"loss_type": "bnpo", "scale_rewards": "batch"},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.3},
    {"loss_type": "dapo", "beta": 0.2, "iterations": 2},
    {"loss_type": "bnpo", "beta": 0.2, "kl_ratio": False},
    {"loss_type": "grpo", "beta": 0.5, "iterations": 2, "temperature": 0.7},
    {"loss_type": "grpo", "importance": "sequence", "iterations": 2, "epsilon": 0.01},
    {"loss_type": "dr_grpo", "mask_truncated": True, "iterations": 2, "beta": 0.1},
]
NAMES = {
    "iterations": "num_iterations", "importance": "importance_sampling_level",
    "mask_truncated": "mask_truncated_completions", "kl_ratio": "use_bias_correction_kl",
}  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_losses_gradients_and_tensors_are_those_of_trl(options, tmp_path, monkeypatch):
    """On the same texts, with the adapter off as the reference, at other weights than sampled."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    task, model, rows = prepared({"grpo": SPEC | {"iterations": 1, "beta": 0.0} | options})
    bare = lambda: ah.disabled(model)  # noqa: E731
    batch = task.rollout(model, rows, [0, 1], 0, bare)
    ids, known = batch["input_ids"], batch["attention_mask"].bool()
    prompts = [row["input_ids"] for row in rows.rows for _ in range(4)]
    completions = [ids[i][known[i]].tolist()[len(prompts[i]) :] for i in range(8)]

    def score(completions, **_):
        return [float(any(word in text for word in ("the", "good", "a"))) for text in completions]

    settings = {NAMES.get(name, name): value for name, value in options.items()}
    data = datasets.Dataset.from_list([{"prompt": "the movie was"}, {"prompt": "a plot"}] * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = trl.GRPOConfig(
            str(tmp_path), num_generations=4, max_completion_length=5, report_to=[],
            per_device_train_batch_size=8, use_cpu=True, bf16=False, gradient_checkpointing=False,
            **{"temperature": 1.0, "epsilon": 0.2, "beta": 0.0} | settings,
        )  # fmt: skip
        config.beta = 0.0  # otherwise the trainer loads a second model
        theirs = trl.GRPOTrainer(
            model, reward_funcs=score, args=config, train_dataset=data,
            processing_class=TOKENIZER,
        )  # fmt: skip
        theirs.model.eval()
        texts = [TOKENIZER.decode(c, skip_special_tokens=True) for c in completions]
        monkeypatch.setattr(theirs, "_generate", lambda _: (
            prompts, completions, None, texts, None, {}, None, None))  # fmt: skip
        sampled = theirs._generate_and_score_completions(
            [{"prompt": example.prompt} for example in rows.examples for _ in range(4)]
        )
        torch.testing.assert_close(batch[ADVANTAGES], sampled["advantages"], rtol=1e-5, atol=1e-6)
        assert (batch[LABELS] >= 0).sum() == sampled["completion_mask"].sum()
        theirs.beta = task.beta
        if task.beta:
            with bare():
                sampled["ref_per_token_logps"] = log_probabilities(theirs, sampled)
        if task.iterations > 1:
            sampled["old_per_token_logps"] = log_probabilities(theirs, sampled)
        trained = [p for p in model.parameters() if p.requires_grad]
        for tensor in trained:  # an optimizer step later
            tensor.data.add_(torch.randn_like(tensor) * 0.05)
        expected = theirs._compute_loss(model, sampled)
        found = task.loss(rows)(model(**model_inputs(batch)), batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=2e-6)
    ours, theirs = (torch.autograd.grad(loss, trained) for loss in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


@torch.no_grad()
def log_probabilities(trainer, sampled):
    ids, mask = (
        torch.cat([sampled[f"prompt_{kind}"], sampled[f"completion_{kind}"]], 1)
        for kind in ("ids", "mask")
    )
    count = sampled["completion_ids"].shape[1]
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, count)[0]
