"""What is read of transformers' continuous batching, and packed steps of several architectures."""

import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.adapters.route import TokenRun
from adapterhub.serving.generation.continuous import PackedModel
from adapterhub.serving.generation.paged import PAGE, PagedSteps, missing_names, paged_problem
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.server import METHODS

# Those that attend by the interface of transformers, with functions that know the paged cache.
PACKED = ("gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen3", "olmo2", "gemma3_text", "phi3",
          "mixtral")  # fmt: skip
BATCHED = ("gpt_neo", "bloom", "falcon", "mpt")


@long_table("architecture", [*PACKED, *BATCHED], 3)
def test_architectures(architecture):
    """Packed steps compute what passes of one text each do, or are not used."""
    assert not missing_names(), f"transformers {transformers.__version__} breaks paged.py"
    model = tiny_models.model(architecture, "causal-lm")
    packed = PackedModel(model)
    problem = paged_problem(model) or packed.problem(None)
    assert (problem == "") == (architecture in PACKED), problem
    if problem:
        return
    for method in ("lora(rank=2)", "prefix(length=3)", "prompt(length=2)", "pfeiffer(size=4)"):
        adapter = ah.attach(model, method, name=method.partition("(")[0])
        tiny_models.scramble(adapter)
        ah.activate(model)
        found = packed.problem(adapter)
        slides = architecture == "gemma3_text" and method.startswith(("prefix", "prompt"))
        assert found == ("its virtual tokens would leave the sliding window" if slides else "")


@pytest.mark.parametrize("method", METHODS)
def test_the_trial_sees_an_adapter_that_is_not_applied(method, monkeypatch):
    model = tiny_models.model("llama", "causal-lm")
    adapter = ah.attach(model, method, name="own")
    tiny_models.scramble(adapter)
    ah.activate(model)
    packed = PackedModel(model)
    assert not packed.problem(None)
    compute = packed.logits

    def without(inputs, runs):
        return compute(inputs, [TokenRun(None, run.tokens, run.first) for run in runs])

    monkeypatch.setattr(packed, "logits", without)
    assert "other logits" in packed.problem(adapter)


def test_what_is_not_packed():
    for method, reason in (
        ("full", "it changes what all texts share"),
        ("norms", "it changes what all texts share"),
        ("unipelt", "reads more than the tokens"),
        ("scalar-mix", "reads more than the tokens"),
        ("prefix(length=2, layers='top 1')", "one in each layer"),
    ):
        model = tiny_models.model("llama", "causal-lm")
        adapter = ah.attach(model, method, name="own")
        ah.activate(model)
        assert reason in PackedModel(model).problem(adapter)
    assert paged_problem(tiny_models.model("t5", "seq2seq")) == "an encoder-decoder"


# Steps


@pytest.fixture
def steps():
    torch.manual_seed(3)
    expected = torch.rand(3).tolist()
    torch.manual_seed(3)
    steps = PagedSteps(tiny_models.model("llama", "causal-lm"), 32 * PAGE, 48, 8)
    assert torch.rand(3).tolist() == expected, "the seed of the process stays"
    return steps


def computed(steps, chosen=7):
    """Schedule steps until all prompts are computed; return the rows of each."""
    found = []
    while rows := steps.schedule():
        steps.inputs()
        steps.advance(rows, [chosen for row in rows if row.gives])
        found.append([(row.name, row.first, row.tokens) for row in rows])
        if all(row.gives for row in rows):
            return found
    return found


def test_equal_beginnings_share_pages_with_one_salt_alone(steps):
    ids = list(range(3, 3 + 2 * PAGE + 4))
    steps.add("first", ids, salt="a")
    assert computed(steps) == [[("first", 0, len(ids))]]
    for name, salt, begin in (("same", "a", 2 * PAGE), ("other", "b", 0), ("none", "", 0)):
        steps.add(name, ids, salt=salt)
        (*_, last) = computed(steps)
        assert {row[0]: row[1] for row in last}[name] == begin
    pages = steps.used_pages
    for name in ("first", "same", "other", "none"):
        steps.drop(name)
    assert pages > 0
    assert steps.used_pages == 0
    assert not steps.busy


def test_what_was_written_is_salted_too(steps, monkeypatch):
    """Of a prompt of one token, whose few bits may be equal for two adapters."""
    salt = steps._salt
    monkeypatch.setattr(steps, "_salt", lambda name: [0, *salt(name)[1:]])
    for name in ("a", "b"):
        steps.add(name, [5], salt=name)
    for _ in range(PAGE + 1):  # the same tokens in both
        steps.advance(steps.schedule(), [7, 7])
    tables = next(iter(steps._steps.cache.cache_allocators.values())).block_table
    assert not {*tables["a"]} & {*tables["b"]}


def test_what_was_not_finite_is_not_kept_for_others(steps):
    ids = list(range(3, 3 + 2 * PAGE))
    steps.add("broken", ids, salt="a")
    computed(steps)
    steps.drop("broken", share=False)
    steps.add("next", ids, salt="a")
    rows = steps.schedule()
    inputs = steps.inputs()
    assert inputs["input_ids"].tolist() == [ids]
    assert inputs["position_ids"].tolist() == [list(range(len(ids)))]
    assert inputs["logits_indices"].tolist() == [len(ids) - 1]
    steps.advance(rows, [9])
    steps.schedule()
    assert steps.inputs()["input_ids"].tolist() == [[9]]
