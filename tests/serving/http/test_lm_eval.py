"""EleutherAI's lm-eval, unmodified: a server's scores and texts are those of its own backend."""

import json
from pathlib import Path

import pytest

from adapterhub.adapters.state import find_state
from adapterhub.backbones.find import remember_folder
from adapterhub.files.native import Saved
from adapterhub.inference.open import open_adapter
from adapterhub.serving import Engine
from tests.kit.server import BACKBONE, TEXTS, TaskExample, running, service_of, write_wordy

lm_eval = pytest.importorskip("lm_eval", reason='pip install "adapterhub[lm-eval]"')
pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and its dependencies
SHORT = TaskExample("causal-lm(new_tokens=6)", "causal-lm")
METHODS = {"lora": "lora(rank=2)", "prompt": "prompt(length=4)"}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: [good, very bad, the end]
doc_to_target: label
metric_list: [{metric: acc}]
"""
TEXT = """
output_type: generate_until
doc_to_target: "{{label}}"
generation_kwargs: {until: [actor], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    """Return a function from a model of lm-eval to its answers for two tasks, rounded."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    rows = [json.dumps({"text": text, "label": n % 3}) for n, text in enumerate(TEXTS[:4])]
    (folder / "data.jsonl").write_text("\n".join(rows))
    for name, rest in {"choices": CHOICES, "texts": TEXT}.items():
        text = TASK.format(name=name, data=folder / "data.jsonl") + rest
        (folder / f"{name}.yaml").write_text(text)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)

    def answer(given):
        if isinstance(given, str):
            return given.strip()  # the backend decodes texts without the prompt before them
        return round(float(given[0]), 3), given[1]

    def evaluate(model):
        found = lm_eval.evaluate(model, tasks.load(["choices", "texts"]), bootstrap_iters=0)
        return {
            name: [[answer(each) for each in row["filtered_resps"]] for row in samples]
            for name, samples in found["samples"].items()
        }

    return evaluate


@pytest.fixture(scope="module")
def served(backbones, tmp_path_factory):
    """Serve an adapter of each method; return the address, and their folders."""
    folder = tmp_path_factory.mktemp("adapters")
    folders = {
        name: write_wordy(backbones("llama"), folder / name, SHORT, method)
        for name, method in METHODS.items()
    }
    with Engine(str(backbones("llama"))) as engine, running(service_of(engine, folders)) as url:
        yield url, folders


@pytest.mark.parametrize("name", [*METHODS, BACKBONE])
def test_a_server_answers_as_the_backend_for_models(name, served, evaluate, backbones, tmp_path):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    url, folders = served
    backbone = str(backbones("llama"))
    if name == BACKBONE:
        model = HFLM(pretrained=backbone, device="cpu", batch_size=4)
    else:
        remember_folder(Saved.at(Path(folders[name])).manifest.backbone.id, backbones("llama"))
        opened = open_adapter(folders[name])
        model = HFLM(pretrained=opened.model, tokenizer=opened.tokenizer, batch_size=4)
    expected = evaluate(model)
    client = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model=name,
        tokenizer=backbone,
        tokenizer_backend="huggingface",
        add_bos_token=True,  # as the other backend does
        max_length=64,
        batch_size=3,
        num_concurrent=2 if name == BACKBONE else 1,
    )
    assert evaluate(client) == expected
    if name == "lora":
        (adapter,) = find_state(opened.model).adapters.values()
        adapter.export(tmp_path / "peft")
        base = AutoModelForCausalLM.from_pretrained(backbone)
        plain = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
        peft = HFLM(pretrained=plain, tokenizer=opened.tokenizer, batch_size=4)
        assert evaluate(peft) == expected
