"""The plugin of vLLM: which LoRA a name is, and when there is none."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.serving import lora_cache
from adapterhub.serving.vllm import ALLOW, MAX_LOST, MAX_RANK, register
from tests.kit.server import LoRARequest, ModelRegistry, Server, standing_in
from tests.kit.tiny_adapters import text_logits, write_language_model, write_noisy


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a backbone, and adapters of it."""
    folder = tmp_path_factory.mktemp("language")
    write_language_model(folder / "llama", "llama")
    write_language_model(folder / "other", "llama", seed=1)
    write_noisy(folder / "one", folder / "llama", "lora(rank=2)")
    write_noisy(folder / "two", folder / "llama", "lora(rank=2)", seed=1)
    write_noisy(folder / "dora", folder / "llama", "dora(rank=2)")
    write_noisy(folder / "prefix", folder / "llama", "prefix(length=2)")
    return folder


@pytest.fixture
def server(language: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Publish adapters, register the plugin, and return a server."""
    for name in ("one", "dora", "prefix"):
        ah.publish(language / name, name)
    with standing_in() as registry:
        monkeypatch.setenv(ALLOW, "one, dora,pre*,hf:acme/*")
        register()
        yield Server(str(language / "llama"), registry)


def ask(server: Server, *names: str) -> list[LoRARequest | None]:
    """Ask for several names at once."""

    async def together() -> list[LoRARequest | None]:
        return await asyncio.gather(*map(server.resolve, names))

    return asyncio.run(together())


def path_of(server: Server, name: str) -> Path:
    """Ask for a name; return the folder of its LoRA."""
    (found,) = ask(server, name)
    assert found is not None
    assert found.lora_name == name
    return Path(found.lora_path)


def in_weights(backbone: Path, lora: Path) -> torch.nn.Module:
    """Add a LoRA to the weights by vLLM's rule: W + alpha / r B A, by the names of its tensors."""
    model, _ = ah.load_backbone(str(backbone), task="causal-lm")
    config = json.loads((lora / "adapter_config.json").read_bytes())
    tensors = load_file(lora / "adapter_model.safetensors")
    for name, low in tensors.items():
        if name.endswith(".lora_A.weight"):
            high = tensors[name.replace("lora_A", "lora_B")]
            host = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            with torch.no_grad():
                model.get_submodule(host).weight += config["lora_alpha"] / config["r"] * high @ low
    return model


def test_a_reference_is_a_lora_that_computes_the_same(server, language, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a folder of the same name is not meant
    write_noisy(tmp_path / "one", language / "llama", "lora(rank=4)", seed=7)
    model, _ = ah.load_backbone(server.base, task="causal-lm")
    bare = text_logits(model)
    ah.load(model, language / "one")
    expected = text_logits(model)
    assert not torch.allclose(bare, expected, atol=1e-3)
    for name in ("one@1", "one"):
        served = text_logits(in_weights(language / "llama", path_of(server, name)))
        assert torch.allclose(served, expected, atol=2e-5)


def test_a_request_tells_that_experts_are_stacked(tmp_path, monkeypatch):
    write_language_model(tmp_path / "mixtral", "mixtral")
    spec = "lora(rank=2, sites=['ffn.experts.*'])"
    write_noisy(tmp_path / "experts", tmp_path / "mixtral", spec)
    ah.publish(tmp_path / "experts", "experts")
    monkeypatch.setenv(ALLOW, "experts")
    stacks = ModelRegistry.models["GptOssForCausalLM"]
    monkeypatch.setitem(ModelRegistry.models, "MixtralForCausalLM", stacks)
    with standing_in() as registry:
        register()
        (found,) = ask(Server(str(tmp_path / "mixtral"), registry), "experts@1")
    assert found is not None
    assert found.is_3d_lora_weight


def test_a_conversion_tells_its_error(server, caplog, monkeypatch):
    def asked_with(rank: str, lost: str) -> LoRARequest | None:
        monkeypatch.setenv(MAX_RANK, rank)
        monkeypatch.setenv(MAX_LOST, lost)
        register()
        server.requests.clear()
        return ask(server, "dora@1")[0]

    caplog.set_level(logging.INFO, "vllm.adapterhub")
    assert asked_with("2", "") is None
    assert "as a LoRA of rank 2, noisy loses" in caplog.text
    assert "ADAPTERHUB_VLLM_MAX_LOST" in caplog.text
    near = asked_with("2", "1")
    assert "converted to a LoRA of rank 2, which loses up to" in caplog.text
    assert "'dora@1' is dora@v1, sha256" in caplog.text
    equal = asked_with("32", "0.001")
    assert near is not None
    assert equal is not None
    assert near.lora_path != equal.lora_path


REFUSED = {
    "not allowed": ("two", "no adapter 'two' is served"),
    "a folder": ("./one", "no adapter './one' is served"),
    "a hub": ("hf:other/one", "no adapter 'hf:other/one' is served"),
    "another host": ("https://example.org/acme/one", "is served"),
    "no reference": ("one\n@1", "is served"),
    "unknown": ("prelude", "prelude"),
    "no such version": ("one@7", "one"),
    "no LoRA": ("prefix@1", "prefix at decoder.attn.kv: it adds keys and values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_not_found_and_the_log_says_why(server, caplog, case):
    name, reason = REFUSED[case]
    assert ask(server, name) == [None]
    assert reason in caplog.text
    assert len(caplog.records) == 1


def test_the_backbone_is_compared_by_its_fingerprint(server, language, caplog):
    assert ask(server, "one@1") != [None]  # it is in the cache by now
    other = Server(str(language / "other"), server.registry)
    server.registry.resolvers.clear()
    register()
    assert ask(other, "one@1", "dora@1") == [None, None]
    assert caplog.text.count("was trained on a different backbone") == 2
    for backbone in ("llama", "other"):
        assert ah.fingerprint(language / backbone) in caplog.text


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Path], Event]:
    """List the adapters that are converted from here on, each when the event is set."""
    found, go, convert = [], Event(), lora_cache.in_vllm

    def recorded(folder, **options):
        found.append(folder)
        go.wait(10)
        return convert(folder, **options)

    monkeypatch.setattr(lora_cache, "in_vllm", recorded)
    monkeypatch.setattr(lora_cache, "_FORM", str(tmp_path))  # none is in the cache
    return found, go


def test_one_conversion_however_many_ask_and_others_go_on_meanwhile(server, conversions):
    converted, go = conversions

    async def together() -> int:
        asked = [asyncio.create_task(server.resolve(n)) for n in ["one", "one@1", "one@v1"] * 3]
        turns = 0
        while not all(task.done() for task in asked):
            await asyncio.sleep(0.01)
            turns += 1
            if turns == 20:
                go.set()
        assert None not in [task.result() for task in asked]
        return turns

    assert asyncio.run(together()) >= 20
    assert len(converted) == 1
    one, same, _ = server.requests.values()
    assert one.lora_path == same.lora_path
    assert one.lora_int_id == same.lora_int_id


def test_a_name_means_the_same_until_the_server_is_started_again(server, language):
    first = path_of(server, "one")
    ah.publish(language / "two", "one")
    server.requests.clear()  # POST /v1/unload_lora_adapter
    assert path_of(server, "one") == first
    second = path_of(server, "one@2")
    register()
    server.requests.clear()
    assert first != path_of(server, "one") == second


def test_a_damaged_copy_in_the_cache_is_made_again(server, conversions):
    converted, go = conversions
    go.set()
    file = path_of(server, "one") / "adapter_model.safetensors"
    whole = file.read_bytes()
    for restart in (False, True):
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        server.requests.clear()
        if restart:
            register()
        ask(server, "one")
        assert file.read_bytes() == whole
    assert len(converted) == 3


def test_nothing_is_registered_unless_adapters_are_named(monkeypatch):
    with standing_in() as registry:
        monkeypatch.delenv(ALLOW, raising=False)
        register()
        monkeypatch.setenv(ALLOW, " , ")
        register()
        assert not registry.resolvers
    monkeypatch.setenv(ALLOW, "one")
    wrong = (MAX_RANK, "0"), (MAX_RANK, "1.5"), (MAX_RANK, "x"), (MAX_LOST, "2"), (MAX_LOST, "-1")
    for variable, value in wrong:
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(ConfigError, match=variable):
                register()
