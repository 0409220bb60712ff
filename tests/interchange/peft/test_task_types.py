"""peft uses an exported prompt or prefix on every kind of model, or the export is refused."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from transformers import AutoConfig, BertForNextSentencePrediction

import adapterhub as ah
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import MismatchError
from tests.kit import tiny_models
from tests.kit.peers import edit
from tests.kit.selection import long_table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PREFIX = "prefix(length=3, positions=true, sites=['{}.attn.kv'])"


def configuration(architecture):
    tokens = {"vocab_size": tiny_models.VOCAB, "pad_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(architecture, **tiny_models.SIZES[architecture], **tokens)


def new_model(model_class, architecture):
    torch.manual_seed(0)
    return model_class(configuration(architecture)).eval()


def model_classes():
    """Return each model class of our tasks, and one of no task, with its architecture."""
    for architecture in ("bert", "bart", "gpt2"):
        config = configuration(architecture)
        classes = {cls for row in TASK_MODELS.values() for cls in row.classes_for(config)}
        classes |= {BertForNextSentencePrediction} if architecture == "bert" else set()
        for model_class in sorted(classes, key=lambda cls: cls.__name__):
            yield pytest.param(model_class, architecture, id=model_class.__name__)


def outputs(model):
    """Return the logits, or the last hidden state: a pooler reads one position."""
    inputs = tiny_models.batch()
    if "MultipleChoice" in str(type(model)):
        inputs = {name: tensor[:, None] for name, tensor in inputs.items()}
    if model.config.is_encoder_decoder and "Classification" not in str(type(model)):
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        values = model(**inputs, use_cache=False)
    names = ("logits", "start_logits", "end_logits", "last_hidden_state")
    return [values[name] for name in names if name in values]


CELLS = list(model_classes())


@long_table(
    ("model_class", "architecture", "method"),
    [
        pytest.param(*cell.values, method, id=f"{cell.id}-{kind}")
        for cell in CELLS
        for kind, method in (("prompt", "prompt(length=3)"), ("prefix", PREFIX))
    ],
    3,
)
def test_peft_uses_exported_virtual_tokens(tmp_path, model_class, architecture, method):
    ours, bare = (new_model(model_class, architecture) for _ in range(2))
    last = "encoder" if architecture not in tiny_models.GENERATORS else "decoder"
    try:
        adapter = ah.attach(ours, method.format(last))
        tiny_models.scramble_parameters(adapter, std=0.3)
        adapter.export(tmp_path / "peft")
    except ah.errors.AdapterhubError:
        return
    theirs = peft.PeftModel.from_pretrained(new_model(model_class, architecture), tmp_path / "peft")
    assert type(theirs) is not peft.PeftModel  # the class that ignores virtual tokens
    for found, expected, without in zip(outputs(theirs), outputs(ours), outputs(bare), strict=True):
        found = found[:, -expected.shape[1] :]  # peft returns the outputs of virtual tokens too
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        assert not torch.allclose(expected, without, atol=1e-3)


@pytest.mark.parametrize("task", ["classification", "tagging", "question-answering"])
def test_a_head_that_the_adapter_does_not_have_is_exported_as_it_is(tmp_path, task):
    """peft requires it in the files."""
    kind = {"classification": "SequenceClassification", "tagging": "TokenClassification"}
    name = f"T5For{kind.get(task, 'QuestionAnswering')}"
    ours, theirs = (new_model(getattr(transformers, name), "t5") for _ in range(2))
    adapter = ah.attach(ours, "lora")
    tiny_models.scramble_parameters(adapter, std=0.3)
    adapter.export(tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft")
    for found, expected in zip(outputs(theirs), outputs(ours), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["MaskedLM", "NextSentencePrediction", "MultipleChoice"])
@pytest.mark.parametrize("method", ["prompt(length=3)", PREFIX.format("encoder")])
def test_a_model_without_a_task_type_is_refused(tmp_path, name, method):
    model = new_model(getattr(transformers, f"BertFor{name}"), "bert")
    with pytest.raises(MismatchError) as caught:
        ah.attach(model, method).export(tmp_path / "peft")
    problem = f"peft has no task type for BertFor{name}, and without one it ignores virtual tokens"
    assert problem in caught.value.offenders


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_virtual_tokens_without_a_task_type_are_not_imported(tmp_path, kind):
    """peft loads such a checkpoint, and ignores its virtual tokens."""
    config = kind(num_virtual_tokens=3, task_type="CAUSAL_LM")
    peft.get_peft_model(tiny_models.model("gpt2", "causal-lm"), config).save_pretrained(tmp_path)
    edit(tmp_path, task_type=None)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model("gpt2"), tmp_path)
    assert type(theirs) is peft.PeftModel
    with pytest.raises(MismatchError) as caught:
        ah.load(tiny_models.model("gpt2", "causal-lm"), tmp_path)
    assert "task_type: none, and then peft ignores virtual tokens" in caught.value.offenders
