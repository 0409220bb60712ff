"""preference and reward: equations of the losses, rated responses, pairs, and trl's trainers."""

import itertools
import warnings
from math import exp, log, log1p
from types import SimpleNamespace

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.route import only_foundations
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison
from adapterhub.errors import DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.preference_losses import LOSSES, Responses
from adapterhub.tasks.common.preference_pairs import Rated
from adapterhub.tasks.preference import LABELS, LIKED, _log_probabilities
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer, write_json_lines

# Log probabilities of (chosen, rejected) under the model and its reference, and numbers of tokens.
POLICY, REFERENCE = [(-2.0, -6.0), (-3.5, -1.0)], [(-2.5, -5.0), (-3.0, -2.0)]
TOKENS, MARKS, BETA, E, GAMMA = [(2, 3), (3, 4)], [True, False], 0.4, 0.1, 0.5
RATIOS = [(p[0] - q[0], p[1] - q[1]) for p, q in zip(POLICY, REFERENCE, strict=True)]
MEANS = [(p[0] / t[0], p[1] / t[1]) for p, t in zip(POLICY, TOKENS, strict=True)]
DISTANCE = max(0.0, sum(r for _, r in RATIOS) / 2)


def s(x):
    return 1 / (1 + exp(-x))


def smoothed(z):
    return -(1 - E) * log(s(z)) - E * log(s(-z))


def by_row(equation, rows=RATIOS):
    return [equation(*row) for row in rows]


def odds(mean):
    return exp(mean) / (1 - exp(mean))


Z = by_row(lambda c, r: BETA * (c - r))
MEAN_RATIOS = [(a / t, b / u) for (a, b), (t, u) in zip(RATIOS, TOKENS, strict=True)]
DIFFERENCES = [sorted(a - b for a, b in rows) for rows in (POLICY, REFERENCE)]
SORTED = list(zip(sorted(c for c, _ in RATIOS), sorted(r for _, r in RATIOS), strict=True))
NEXT_TOKEN = 5.5 / 5

EXPECTED = {
    "dpo": [smoothed(z) for z in Z],
    "hinge": [max(0, 1 - z) for z in Z],
    "ipo": by_row(lambda c, r: (c - r - 1 / (2 * BETA)) ** 2, MEAN_RATIOS),
    "exo_pair": [s(z) * (log(s(z)) - log1p(-E)) + s(-z) * (log(s(-z)) - log(E)) for z in Z],
    "nca_pair": by_row(
        lambda c, r: -log(s(BETA * c)) - (log(s(-BETA * c)) + log(s(-BETA * r))) / 2
    ),
    "robust": [(-(1 - E) * log(s(z)) + E * log(s(-z))) / (1 - 2 * E) for z in Z],
    "bco_pair": by_row(lambda c, r: -log(s(BETA * c)) - log(s(-BETA * r))),
    "sppo_hard": by_row(lambda c, r: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2),
    "aot": [smoothed(BETA * (a - b)) for a, b in zip(*DIFFERENCES, strict=True)],
    "aot_unpaired": by_row(lambda c, r: smoothed(BETA * (c - r)), SORTED),
    "apo_zero": by_row(lambda c, r: 1 - s(BETA * c) + s(BETA * r)),
    "apo_down": by_row(lambda c, r: s(BETA * c) + 1 - s(BETA * (c - r))),
    "discopop": [-s(-z / 0.05) * log(s(z)) + s(z / 0.05) * exp(-z) for z in Z],
    "sigmoid_norm": by_row(lambda c, r: -log(s(BETA * (c - r))), MEAN_RATIOS),
    "sft": [NEXT_TOKEN] * 2,
    "orpo": by_row(lambda c, r: -c - BETA * log(s(log(odds(c) / odds(r)))), MEANS),
    "cpo": by_row(lambda c, r: smoothed(BETA * (c - r)) + NEXT_TOKEN, POLICY),
    "simpo": by_row(lambda c, r: smoothed(BETA * (c - r) - GAMMA), MEANS),
    "kto": [2 * s(BETA * (DISTANCE - RATIOS[0][0])), 3 * s(BETA * (RATIOS[1][0] - DISTANCE))],
    "apo_zero_unpaired": [2 * s(-BETA * RATIOS[0][0]), 3 * s(BETA * RATIOS[1][0])],
}
EXPECTED["sigmoid"] = EXPECTED["dpo"]


def spec_of(name, **options):
    options = {"loss_type": name, "beta": BETA} | options
    if LOSSES[name].smoothing:
        options = {"label_smoothing": E} | options
    return f"preference({', '.join(f'{key}={value}' for key, value in options.items())})"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_equation(name):
    task = parse_task(spec_of(name, gamma=GAMMA, desirable_weight=2, undesirable_weight=3))
    responses = Responses(*map(torch.tensor, (POLICY, REFERENCE, TOKENS, MARKS)))
    assert task._losses(responses).tolist() == pytest.approx(EXPECTED[name], abs=1e-6)


def test_the_weight_of_the_next_token_loss_is_added():
    responses = Responses(*map(torch.tensor, (POLICY, REFERENCE, TOKENS)))
    simpo = "preference(loss_type=simpo, sft_weight={})"
    alone, added = (parse_task(simpo.format(w))._losses(responses) for w in (0, 0.3))
    assert (added - alone).tolist() == pytest.approx([0.3 * NEXT_TOKEN] * 2, abs=1e-6)


# Rated responses

READ = [
    Comparison("the movie was", "very good", ""),
    Comparison("a plot is", "", "dull"),
    Comparison("the end", "fine", ""),
]
RATED = [
    {"prompt": e.text, "completion": e.chosen or e.rejected, "label": bool(e.chosen)} for e in READ
]
TOKENIZER = word_tokenizer("<s>", "")
SETTING = Setting(TOKENIZER, 32, positions=64)


def read(tmp_path, rows):
    source = str(write_json_lines(tmp_path / "rows.jsonl", rows))
    task, choice = parse_task("preference(loss_type=kto)").fitted(source, DataOptions(), "train")
    return task, task.read(source, choice.options, "train")


@pytest.mark.parametrize(
    ("names", "marks"),
    [(("completion", "label"), (1, 0, 1)), (("output", "thumbs_up"), ("yes", "No", "YES"))],
)
def test_rated_responses_are_read(tmp_path, names, marks):
    rows = [
        {"prompt": row["prompt"], names[0]: row["completion"], names[1]: mark}
        for row, mark in zip(RATED, marks, strict=True)
    ]
    assert read(tmp_path, rows)[1] == READ


def test_rated_chats_and_pairs_are_read(tmp_path):
    asked = [{"role": "user", "content": "the movie"}]
    answer = [{"role": "assistant", "content": "good"}]
    expected = Comparison((("user", "the movie"),), "", "good")
    for row in ({"prompt": asked, "completion": answer}, {"messages": asked + answer}):
        task, (example, *_) = read(tmp_path, [row | {"label": mark} for mark in (False, True)])
        assert task.data == "chat"
        assert example == expected
    rows = [{"prompt": "the movie", "chosen": "good", "rejected": "bad"}] * 2
    _, examples = read(tmp_path, rows)
    both = [Comparison("the movie", "good", ""), Comparison("the movie", "", "bad")]
    assert examples == both * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "", "label": True}, "completion"),
        ({"prompt": "a", "completion": "b", "label": "maybe"}, "mark|cannot tell"),
        ({"prompt": "a", "label": True}, "the response"),
    ],
)
def test_rows_that_are_not_rated_responses_are_refused(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, [row, RATED[0], RATED[1]] if len(row) == 3 else [row, row])


def test_a_row_has_the_response_of_another_for_the_distance_and_metrics_its_own():
    task = parse_task("preference(loss_type=kto)")
    rows = task.encode(READ, SETTING, labelled=True)
    first, second = (
        [TOKENIZER.decode(each["input_ids"], skip_special_tokens=True) for each in row["responses"]]
        for row in rows.rows[:2]
    )
    assert [text.rpartition(": ")[2] for text in second] == ["dull", "very good"]
    assert all("a plot is" in text for text in second)
    assert first[1].endswith("fine")
    assert rows.batch([0, 1, 2])[LIKED].tolist() == [True, False, True]

    found = task.metrics(READ, [Rated(1.0, 0.2), Rated(0.5, 0.4), Rated(0.0, 0.6)])
    assert found == {"accuracy": 0.5, "margin": 0.0, "loss": pytest.approx(0.4)}


# Pairs

PAIRS = [
    Comparison("the movie was", "very good", "bad"),
    Comparison("a plot is", "dull", "a great end"),
    Comparison("the end", "fine", "poor"),
]


def tiny_llama():
    torch.manual_seed(0)
    return tiny_models.model("llama", "causal-lm").eval()


def encoded(task):
    return task.encode(PAIRS, SETTING, labelled=True)


def inputs(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def test_log_probabilities_are_of_the_responses_alone():
    model = tiny_llama()
    task = parse_task("preference(template='{text} ')")
    batch = encoded(task).batch([0])
    policy, tokens = _log_probabilities(model(**inputs(batch)), batch)
    assert tokens.tolist() == [[3, 2]]  # with the end of the text
    prompt = TOKENIZER("the movie was ")["input_ids"]
    for column, response in enumerate(("very good", "bad")):
        answer = TOKENIZER(response, add_special_tokens=False)["input_ids"]
        ids = [*prompt, *answer, TOKENIZER.eos_token_id]
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(scores[i - 1, ids[i]] for i in range(len(prompt), len(ids)))
        assert policy[0, column].item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("method", ["lora", "full", "prompt"])
def test_the_reference_is_the_model_with_the_adapter_off(method):
    model = tiny_llama()
    task = parse_task("preference")
    expected = task.with_reference(model, encoded(task), 4).rows
    tiny_models.scramble(ah.attach(model, method, name="a"), std=1.0)
    with only_foundations(model):
        found = task.with_reference(model, encoded(task), 4).rows
    on = task.with_reference(model, encoded(task), 4).rows
    for row, own, other in zip(expected, found, on, strict=True):
        assert own["reference"] == pytest.approx(row["reference"], abs=1e-4)
        assert other["reference"] != pytest.approx(row["reference"], abs=1e-2)


def test_the_loss_is_minus_the_log_of_the_probability_of_the_choice():
    """P(chosen) = exp(s_c) / (exp(s_c) + exp(s_r)); trl's RewardTrainer has the same."""
    scores = torch.tensor([[1.0, -0.5], [0.2, 2.0]])  # chosen, rejected
    expected = -torch.log(scores.exp()[:, 0] / scores.exp().sum(1)).mean()
    output = SimpleNamespace(logits=scores.T.reshape(4, 1))
    loss = parse_task("reward").loss(None)
    assert torch.allclose(loss(output, {}), expected)


def test_a_prediction_is_the_reward_of_one_response(backbone):
    model, tokenizer = ah.load_backbone(str(backbone), task="regression")
    task, setting = parse_task("reward"), Setting(tokenizer, 32)
    rows = task.encode(PAIRS[:2], setting, labelled=True)
    record = []
    metrics = task.evaluate(model, rows, 2, record)
    assert metrics["margin"] == pytest.approx(sum(c.margin for c in record) / 2)
    for row, compared in zip(PAIRS[:2], record, strict=True):
        for response, reward in ((row.chosen, compared.chosen), (row.rejected, compared.rejected)):
            example = task.example([row.text, response], DataOptions())
            alone = task.encode([example], setting, labelled=False)
            (prediction,) = task.predict(model, alone, 1)
            ids = tokenizer(f"{row.text}\n{response}", return_tensors="pt")["input_ids"][:, :-1]
            with torch.no_grad():
                expected = model(ids).logits.item()
            assert prediction.value == pytest.approx(expected, abs=1e-5)
            assert prediction.value == pytest.approx(reward, abs=1e-5)


# trl: `make trl`


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "orpo"])
def test_a_loss_and_its_gradients_are_those_of_trl(name, tmp_path):
    """On the same tokens, which trl gets with a mask of the responses."""
    trl = pytest.importorskip("trl")
    kind, model, reference = LOSSES[name], tiny_llama(), tiny_llama()
    for tensor in itertools.chain(model.parameters(), reference.parameters()):
        tensor.data.add_(torch.randn_like(tensor) / 10)
    smooth = kind.smoothing and kind.compute is not LOSSES["dpo"].compute  # not in trl
    task = parse_task(spec_of(name, label_smoothing=E if smooth else 0))
    pairs = PAIRS[:2]
    examples = READ if kind.rated else pairs
    rows = task.with_reference(reference, task.encode(examples, SETTING, labelled=True), 2)
    batch = rows.batch(range(len(examples)))
    found = task.loss(rows)(model(**inputs(batch)), batch)
    gradients = torch.autograd.grad(found, list(model.parameters()))
    settings = {"beta": BETA, "report_to": "none", "bf16": False, "use_cpu": True,
                "disable_dropout": True, "gradient_checkpointing": False}  # fmt: skip
    if smooth:
        settings["label_smoothing"] = E
    n, masked = len(examples), inputs(batch) | {"completion_mask": (batch[LABELS] >= 0).long()}
    data = [{"prompt": e.text, "chosen": e.chosen, "rejected": e.rejected} for e in pairs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = pytest.importorskip("datasets")
        if kind.rated:
            data, sent = RATED, {key: value[:n] for key, value in masked.items()}
            sent |= {f"KL_{key}": value[n:] for key, value in masked.items()}
            sent["label"] = batch[LIKED]
            trainer, config = trl.KTOTrainer, trl.KTOConfig
            settings |= {"loss_type": name, "per_device_train_batch_size": 3,
                         "train_sampling_strategy": "sequential"}  # fmt: skip
        elif kind.reference or name == "sft":
            sent, trainer, config = masked, trl.DPOTrainer, trl.DPOConfig
            settings["loss_type"] = "sigmoid" if name == "dpo" else name
        else:
            from trl.experimental import cpo

            of_rows = inputs(batch) | {"labels": batch[LABELS]}
            sent = {f"chosen_{key}": value[:n] for key, value in of_rows.items()}
            sent |= {f"rejected_{key}": value[n:] for key, value in of_rows.items()}
            trainer, config = cpo.CPOTrainer, cpo.CPOConfig
            settings |= {"loss_type": "sigmoid" if name == "cpo" else name,
                         "cpo_alpha": kind.sft_weight, "simpo_gamma": GAMMA}  # fmt: skip
        data = datasets.Dataset.from_list(data)
        both = () if trainer.__name__ == "CPOTrainer" else (reference,)
        theirs = trainer(
            model, *both, args=config(str(tmp_path), **settings), train_dataset=data,
            processing_class=TOKENIZER,
        )  # fmt: skip
        expected = theirs.compute_loss(theirs.model, sent)
    assert found.item() == pytest.approx(expected.item(), rel=2e-6)
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(gradients, theirs, rtol=1e-4, atol=2e-6)


def test_orpo_reads_no_reference():
    task = parse_task("preference(loss_type=orpo)")
    assert not task.compares_with_reference
    rows = encoded(task)
    assert task.with_reference(tiny_llama(), rows, 4) is rows
    chats = parse_task("preference(data=chat)")
    assert chats.example(["a film"], DataOptions()).prompt == (("user", "a film"),)
