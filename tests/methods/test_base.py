"""Methods and their specs: names of options, texts, normal forms, the catalogue without torch."""

import dataclasses
import inspect
import re

import catalogue
import peft
import pytest

import adapterhub as ah
from adapterhub.config.options import options_of, to_dict
from adapterhub.errors import ConfigError
from adapterhub.methods import METHODS
from adapterhub.methods.common import base
from adapterhub.methods.common.base import check_spec, parse_methods, with_options
from adapterhub.methods.lora import LoRA
from tests.kit import tiny_models


def test_a_spec_without_quotes_and_with_other_names(subtests):
    cases = [
        ("lora(sites=[attn.q])", {"lora": {"sites": ["attn.q"]}}),
        ("lora(sites=[attn.q, attn.v], rank=8)", "lora(rank=8, sites=['attn.q', 'attn.v'])"),
        ("lora(ranks={encoder.0.attn.q: 4})", {"lora": {"ranks": {"encoder.0.attn.q": 4}}}),
        ("lora(layers=top 1)", {"lora": {"layers": "top 1"}}),
        ("lora(layers=0..1)", {"lora": {"layers": "0..1"}}),
        ("lora(r=4, lora_alpha=8, lora_dropout=0.1)", "lora(rank=4, alpha=8, dropout=0.1)"),
        ("prefix(num_virtual_tokens=4)", {"prefix": {"length": 4}}),
        ("pfeiffer(bottleneck_size=4, non_linearity=gelu)", "pfeiffer(size=4, activation=gelu)"),
    ]  # fmt: skip
    for text, same in cases:
        with subtests.test(text=text):
            assert parse_methods(text) == parse_methods(same)


def test_names_of_options_have_one_meaning():
    own = {option.name for cls in METHODS.values() for option in options_of(cls)}
    assert set(base.ALIASES.values()) <= own
    assert own.isdisjoint(base.ALIASES)
    of_attach = set(inspect.signature(ah.attach).parameters)
    assert {"model", "method", "name", "tokenizer"} <= of_attach
    assert own.isdisjoint(of_attach)
    for cls in METHODS.values():
        names = base.option_names(cls)
        assert own.isdisjoint(names.meanings), cls.name
        for alias, option in names.aliases.items():
            assert names.own_name(alias) == option


def test_no_meaning_of_a_method_is_a_method():
    assert base.METHOD_MEANINGS.keys().isdisjoint(METHODS)
    for name in base.METHOD_MEANINGS:
        with pytest.raises(ConfigError) as error:
            parse_methods({name.upper(): {}})
        assert base.METHOD_MEANINGS[name] in str(error.value)


def test_a_wrong_name_says_what_to_type(subtests):
    cases = [
        ("qlora", "--method lora --quantize nf4"),
        ("adapter", "pfeiffer and houlsby"),
        ("prefix_tuning", "prefix is this method"),
        ("sft", "task=causal-lm"),
        ("lora(target_modules=[q, v])", "try sites=[attn.q, attn.v, cross.q, cross.v]"),
        ("houlsby(target_modules=x)", "try sites=[attn, cross, ffn]"),
        ("pfeiffer(reduction_factor=16)", "try size=48"),
        ("lora(lr=1)", "try train.learning_rate"),
        ("lora(rank=4, r=8)", "rank: as rank and r"),
        ("pfeiffer(r=8)", "valid options: size"),
    ]
    for spec, expected in cases:
        with subtests.test(spec=spec):
            with pytest.raises(ConfigError) as error:
                parse_methods(spec)
            assert expected in str(error.value)


def test_options_beside_the_name_of_one_method():
    found = with_options("lora(rank=4)", {"r": 2, "alpha": 8})
    assert found == parse_methods("lora(rank=2, alpha=8)")
    for spec in (["lora", "prefix"], ah.LoRA()):
        with pytest.raises(ConfigError, match="options") as error:
            with_options(spec, {"rank": 4})
        having = error.value.offenders[0].removeprefix("rank: of ").split(", ")
        assert {"compacter", "dora", "lora"} <= {*having}
        assert "LoRA(rank=4)" in error.value.hint


def test_the_text_of_a_method_is_read_back():
    for name, cls in METHODS.items():
        method = cls.example()
        for spec in (name, [name, {name: method.options()}], method):
            check_spec(spec)
        again = parse_methods(base.method_text(method))
        assert base.dump_methods(again) == base.dump_methods([method]), name
        assert base.method_text(cls()) == name


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")
@pytest.mark.parametrize(
    ("options", "architecture"),
    [
        ({"r": 4, "target_modules": ["q_proj", "v_proj"]}, "llama"),
        ({"r": 2, "lora_alpha": 7, "lora_dropout": 0.1, "target_modules": ["c_attn"]}, "gpt2"),
        ({"use_rslora": True, "target_modules": ["self.query", "output.dense"]}, "bert"),
        (
            {"use_dora": True, "target_modules": ["query"], "task_type": "FEATURE_EXTRACTION"},
            "bert",
        ),
    ],
)
def test_a_configuration_of_peft_trains_what_it_trains_there(options, architecture):
    config = peft.LoraConfig(**options)
    adapter = ah.attach(tiny_models.model(architecture, "features"), config)
    theirs = peft.get_peft_model(tiny_models.model(architecture, "features"), config)
    expected = sorted(
        tuple(p.shape) for p in theirs.parameters() if p.requires_grad and p.numel() > 0
    )
    assert sorted(tuple(t.shape) for t in adapter.tensors().values()) == expected
    (method,) = adapter.methods
    assert (method.rank, method.alpha) == (config.r, config.lora_alpha)
    assert method.dropout == config.lora_dropout
    assert method.name == ("dora" if config.use_dora else "rslora" if config.use_rslora else "lora")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (peft.LoraConfig(target_modules="all-linear"), "target_modules: all-linear"),
        (peft.LoraConfig(rank_pattern={"q": 4}, bias="all"), "bias: all"),
        (peft.LoraConfig(init_lora_weights="pissa"), "init_lora_weights: pissa"),
        (peft.LoraConfig(modules_to_save=["head"]), "modules_to_save"),
        (peft.LoraConfig(use_dora=True, use_rslora=True), "peft_type"),
        (peft.IA3Config(), "peft_type"),
        (peft.PrefixTuningConfig(num_virtual_tokens=3), "peft_type"),
    ],
)
def test_a_configuration_of_peft_that_is_not_translated_names_why(config, named):
    with pytest.raises(ConfigError, match="configuration of peft") as error:
        parse_methods(config)
    assert any(line.startswith(named) for line in error.value.offenders)
    assert error.value.hint


def test_the_catalogue_is_up_to_date():
    current = {name: base.describe(method) for name, method in METHODS.items()}
    assert base.catalogue() == current, "run: make catalogue"
    for name, method in METHODS.items():
        assert options_of(base.described_method(name).options) == options_of(method), name
    assert len(current) > 20
    exports = catalogue.EXPORTS.read_text(encoding="utf-8")
    assert catalogue.exports(exports) == exports, "run: make catalogue"
    without = re.sub(r".*(import|methods\.).*LoRA.*\n", "", exports)
    assert without.count("LoRA") < exports.count("LoRA")
    assert catalogue.exports(without) == exports


def test_a_method_of_the_caller_is_described_too(monkeypatch):
    own = dataclasses.make_dataclass("Own", [("size", int, 3)], bases=(LoRA,), frozen=True)
    monkeypatch.setitem(METHODS, "own", own)
    check_spec("own(size=4)")
    with pytest.raises(ConfigError, match="'four'"):
        check_spec("own(size='four')")


def test_an_invalid_spec_has_the_same_error_without_the_classes(subtests):
    cases = [
        "lore", "lora(rnk=4)", "lora(rank='four')", "lora(", {"lora": 3}, [], ["lora", "x"], 3,
        "chosen(names=3)",
    ]  # fmt: skip
    for case in cases:
        with subtests.test(spec=case):
            with pytest.raises(ConfigError) as built:
                parse_methods(case)
            with pytest.raises(ConfigError) as checked:
                check_spec(case)
            assert str(checked.value) == str(built.value)


def test_an_omitted_option_is_written_when_it_is_set() -> None:
    (shared,) = parse_methods("lora(experts=shared)")
    assert to_dict(shared)["experts"] == "shared"
    assert parse_methods([{"lora": to_dict(shared)}]) == (shared,)
    (usual,) = parse_methods("lora")
    assert "experts" not in to_dict(usual)
