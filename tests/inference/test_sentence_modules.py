"""Encoders of sentence-transformers: the vectors of `encode` for all modules, or a refusal."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.backbones.find import _is_second_form
from adapterhub.errors import BackboneError, ConfigError, MismatchError
from adapterhub.inference.open import open_adapter, open_backbone
from adapterhub.serving import Engine
from adapterhub.tasks import parse_task
from tests.kit.selection import long_table
from tests.kit.session import refused, succeeded
from tests.kit.task_cases import partners

st = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

TEXTS = ["the movie was good", "the plot was very bad and the end was worse", "good"]
PROMPTS = {"query": "the plot was ", "document": ""}
Change = Callable[[Path], None]


def rewrite(name: str, **changes: Any) -> Change:
    """Return what changes values of a JSON file of a folder."""

    def change(folder: Path) -> None:
        path = folder / name
        own = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps({**own, **changes}), encoding="utf-8")

    return change


def pickled(folder: Path) -> None:
    """Keep the weights of a Dense layer as versions before 2.3 did."""
    from safetensors.torch import load_file

    (place,) = folder.glob("*_Dense")
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()


def of_version_2(folder: Path) -> None:
    """Write the names and flags of version 2, and the length under an older name."""
    for module in (modules := json.loads((folder / "modules.json").read_text(encoding="utf-8"))):
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    own = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, **flags}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(own), encoding="utf-8")
    (folder / "sentence_bert_config.json").unlink()
    rewrite("sentence_roberta_config.json", max_seq_length=6, do_lower_case=False)(folder)
    rewrite("tokenizer_config.json", model_max_length=512)(folder)


def at_random(module: Any) -> Any:
    """Return a module with random weights."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def dense(of: int, to: int, activation: nn.Module | None = None, **more: Any) -> Any:
    return at_random(modules.Dense(of, to, activation_function=activation or nn.Tanh(), **more))


class Case:
    """A sentence encoder: a pooling, what is behind it, options, and changes of its files."""

    def __init__(
        self, pooling: str | tuple[str, ...] = "mean", *behind: Callable[[], Any],
        length: int | None = None, side: str = "right", lower: bool = False,
        include_prompt: bool = True, change: Change = lambda folder: None, **options: Any,
    ) -> None:  # fmt: skip
        self.pooling, self.behind, self.options = pooling, behind, options
        self.length, self.side, self.lower = length, side, lower
        self.include_prompt, self.change = include_prompt, change

    def write(self, backbone: Path, folder: Path) -> Path:
        """Write the encoder to a folder."""
        torch.manual_seed(3)
        first = modules.Transformer(
            str(backbone), max_seq_length=self.length, do_lower_case=self.lower
        )
        first.tokenizer.padding_side = self.side
        pool = modules.Pooling(32, self.pooling, include_prompt=self.include_prompt)
        parts = [first, pool, *(make() for make in self.behind)]
        whole = st.SentenceTransformer(modules=parts, device="cpu", **self.options)
        whole.save(str(folder), create_model_card=False)
        self.change(folder)
        return folder


D = partial
NORMALIZE = modules.Normalize
CASES = {
    "cls": Case("cls", NORMALIZE),
    "mean": Case("mean", NORMALIZE),
    "max": Case("max", NORMALIZE),
    "lasttoken": Case("lasttoken", NORMALIZE),
    "weightedmean": Case("weightedmean", NORMALIZE),
    "mean_sqrt_len_tokens": Case("mean_sqrt_len_tokens"),
    "not normalized": Case("cls"),
    "two poolings": Case(("cls", "mean"), NORMALIZE),
    "all poolings in another order": Case(
        ("lasttoken", "weightedmean", "mean_sqrt_len_tokens", "mean", "max", "cls")
    ),
    "on the left": Case(("weightedmean", "lasttoken", "cls"), side="left"),
    "dense": Case("mean", D(dense, 32, 16)),
    "dense, normalized": Case("cls", D(dense, 32, 32, nn.Identity()), NORMALIZE),
    "normalized, dense": Case("cls", NORMALIZE, D(dense, 32, 8, nn.GELU(), bias=False)),
    "two dense layers": Case(
        "mean", D(dense, 32, 64, nn.ReLU()), D(dense, 64, 16, nn.Identity(), bias=False), NORMALIZE
    ),
    "dense behind two poolings": Case(("mean", "max"), D(dense, 64, 24, nn.Sigmoid())),
    "residual": Case("mean", D(dense, 32, 32, use_residual=True)),
    "residual of another size": Case("mean", D(dense, 32, 12, use_residual=True), NORMALIZE),
    "layer norm": Case("mean", lambda: at_random(modules.LayerNorm(32))),
    "dropout": Case("mean", D(modules.Dropout, 0.5), D(dense, 32, 16), NORMALIZE),
    "truncated": Case("mean", NORMALIZE, truncate_dim=7),
    "dense in a pickle": Case("mean", D(dense, 32, 16), change=pickled),
    "files of version 2": Case("mean", NORMALIZE, change=of_version_2),
    "short": Case("mean", NORMALIZE, length=5),
    "lower case": Case("mean", lower=True),
    "default prompt": Case("mean", NORMALIZE, prompts=PROMPTS, default_prompt_name="query"),
    "an empty default prompt": Case("mean", prompts=PROMPTS, default_prompt_name="document"),
    "prompts, none by default": Case("mean", prompts=PROMPTS),
    **{
        f"prompt not pooled, {mode}, {side}": Case(
            mode, prompts=PROMPTS, default_prompt_name="query", include_prompt=False, side=side
        )
        for mode in ("mean", "cls", "weightedmean", "max", "lasttoken")
        for side in ("right", "left")
    },
    "a prompt longer than the encoder reads": Case(
        "mean", prompts=PROMPTS, default_prompt_name="query", include_prompt=False, length=4
    ),
    "all of it": Case(
        ("cls", "weightedmean"), D(dense, 64, 24), lambda: at_random(modules.LayerNorm(24)),
        NORMALIZE, lower=True, prompts=PROMPTS, default_prompt_name="query", include_prompt=False,
        length=12,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def encoders(backbone, tmp_path_factory):
    """Return a function that gives the folder of a case, and the vectors of its texts."""
    known: dict[str, tuple[Path, Any]] = {}
    place = tmp_path_factory.mktemp("encoders")
    cased = Path(shutil.copytree(backbone, place / "cased"))
    path = cased / "tokenizer.json"
    own = json.loads(path.read_text(encoding="utf-8"))
    own["normalizer"] = None  # a vocabulary of lower case, and a tokenizer that keeps the case
    path.write_text(json.dumps(own), encoding="utf-8")

    def of(name: str) -> tuple[Path, Any]:
        if name not in known:
            case, folder = CASES[name], place / str(len(known))
            case.write(cased if case.lower else backbone, folder)
            peer = st.SentenceTransformer(str(folder), device="cpu")
            known[name] = folder, peer.encode(texts(name))
        return known[name]

    return of


def texts(name: str) -> list[str]:
    return [text.title() for text in TEXTS] if CASES[name].lower else TEXTS


def close(found: Any, expected: Any, far: float = 1e-5) -> None:
    """Check that vectors are equal."""
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_allclose(found, expected, atol=far, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*inputs are longer than:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_embed_and_the_task_have_the_vectors_of_encode(encoders, name: str) -> None:
    folder, expected = encoders(name)
    model, tokenizer = ah.load_backbone(str(folder), task="embedding")
    close(ah.embed(model, tokenizer, texts(name), batch_size=2), expected)
    opened = open_backbone(str(folder), parse_task("embedding"))
    close([p.vectors[0] for p in opened.predict(texts(name))], expected)


@long_table("name", CASES, 8, nightly=2)
def test_the_server_has_the_vectors_of_encode(encoders, name: str) -> None:
    folder, expected = encoders(name)
    with Engine(str(folder)) as engine:
        asked = [engine.submit(None, text) for text in texts(name)]
        found = [each.result(60) for each in asked]
    close([each["vector"] for each in found], expected)


def train(adapterhub: Any, backbone: Path, folder: Path, *options: str, task="embedding") -> str:
    """Train an adapter of vectors for a step or two in a folder; return what is told."""
    code, _, err = adapterhub(
        "train", "--backbone", backbone, "--task", task, "--train", partners(folder), "--output",
        folder / "run", "--method", "lora", "train.report=false", "train.tensorboard=false",
        *options,
    )  # fmt: skip
    assert code == 0, err
    return err


@pytest.mark.filterwarnings("ignore:.*inputs are longer than:UserWarning")
@long_table("name", CASES, 16, nightly=6)
def test_an_adapter_trains_predicts_and_merges_over_all_of_it(encoders, adapterhub, tmp_path, name):
    folder, before = encoders(name)
    run, out = tmp_path / "run", tmp_path / "merged"
    train(adapterhub, folder, tmp_path, "train.max_steps=2", "train.learning_rate=3e-2", "--quiet")
    opened = open_adapter(run)
    found = [p.vectors[0] for p in opened.predict(texts(name))]
    model, tokenizer = ah.load_backbone(str(folder), task="embedding")
    ah.load(model, run / "adapter")
    close(ah.embed(model, tokenizer, texts(name)), found)
    assert np.shape(found) == np.shape(before)
    assert np.abs(np.asarray(found) - before).max() > 1e-3
    succeeded(adapterhub("merge", run, "--output", out))
    merged = st.SentenceTransformer(str(out), device="cpu")
    close(merged.encode(texts(name)), found, 1e-4)
    again, tokenizer = ah.load_backbone(str(out), task="embedding")
    close(ah.embed(again, tokenizer, texts(name)), found, 1e-4)


def listed(change: Callable[[list[Any]], Any]) -> Change:
    """Return what changes the list of modules."""

    def act(place: Path) -> None:
        path = place / "modules.json"
        modules = json.loads(path.read_text(encoding="utf-8"))
        change(modules)
        path.write_text(json.dumps(modules), encoding="utf-8")

    return act


def at(kind: str, folder: str = "2_Other") -> Change:
    """Return what adds a module of another class."""
    module = {"idx": 9, "name": "9", "path": folder, "type": kind}
    return listed(lambda modules: modules.append(module))


def first(kind: str) -> Change:
    """Return what gives the first module another class."""
    return listed(lambda modules: modules[0].update(type=kind))


MODELS = "sentence_transformers.models"
DENSE, POOLING = "2_Dense/config.json", "1_Pooling/config.json"
OWN, WHOLE = "sentence_bert_config.json", "config_sentence_transformers.json"
# What the refusal names, and the change of an encoder with a Dense layer behind its pooling.
REFUSED: dict[str, tuple[str, Change]] = {
    "another module": ("CNN", at(f"{MODELS}.CNN")),
    "another pooling": ("SpladePooling", at(f"{MODELS}.SpladePooling")),
    "another first module": ("Router", first(f"{MODELS}.Router")),
    "own transformer": ("custom_st.Transformer", first("custom_st.Transformer")),
    "own module": ("mine.Head", at("mine.Head")),
    "sparse": ("sparse", at("sentence_transformers.sparse_encoder.models.Pooling")),
    "two poolings one after another": ("one Pooling", at(f"{MODELS}.Pooling", "1_Pooling")),
    "outside": ("../1_Pooling", at(f"{MODELS}.Dense", "../1_Pooling")),
    "dense of tokens": ("Dense", rewrite(DENSE, module_input_name="token_embeddings")),
    "own activation": ("mine.Act", rewrite(DENSE, activation_function="mine.Act")),
    "no such activation": ("nn.Nothing", rewrite(DENSE, activation_function="torch.nn.Nothing")),
    "other sizes": ("Dense", rewrite(DENSE, out_features=17)),
    "no weights": ("2_Dense", lambda place: (place / "2_Dense" / "model.safetensors").unlink()),
    "unknown pooling": ("median", rewrite(POOLING, pooling_mode="median")),
    "unknown flag": ("median", rewrite(POOLING, pooling_mode=None, pooling_mode_median=True)),
    "broken": ("modules.json", lambda place: (place / "modules.json").write_text("[")),
    "another task of the transformer": ("fill-mask", rewrite(OWN, transformer_task="fill-mask")),
    "an option of the model": ("is_causal", rewrite(OWN, config_args={"is_causal": False})),
    "an option of texts": ("processing_kwargs", rewrite(OWN, processing_kwargs={"text": {"a": 3}})),
    "chats": ("message", rewrite(OWN, modality_config={"message": {"method": "forward"}})),
    "sparse encoder": ("SparseEncoder", rewrite(WHOLE, model_type="SparseEncoder")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_computes_something_else_is_refused_by_its_name(name, backbone, tmp_path):
    named, change = REFUSED[name]
    folder = Case("mean", D(dense, 32, 16), change=change).write(backbone, tmp_path / "encoder")
    model, tokenizer = ah.load_backbone(str(folder), task="embedding")
    for read in (ah.embed, lambda model, *_: parse_task("embedding").for_model(model)):
        with pytest.raises(BackboneError) as error:
            read(model, tokenizer, TEXTS)
        assert named in str(error.value)
    task = parse_task("embedding(modules=none, pooling=mean)")
    assert task.for_model(model).modules == "none"
    if name != "another module":
        return
    alone = ah.embed(model, tokenizer, TEXTS, modules="none", pooling="mean")
    plain, tokenizer = ah.load_backbone(str(backbone), task="embedding")
    wanted = ah.embed(plain, tokenizer, TEXTS, normalize=False)
    close(alone / np.linalg.norm(alone, axis=1, keepdims=True),
          wanted / np.linalg.norm(wanted, axis=1, keepdims=True))  # fmt: skip


def test_an_adapter_of_a_dense_encoder_is_refused_without_its_dense_layer(
    encoders, backbone, adapterhub, tmp_path
):
    folder, _ = encoders("dense")
    run = tmp_path / "run"
    assert "Dense(32 to 16, Tanh)" in train(adapterhub, folder, tmp_path, "train.max_steps=1")
    other = Case("mean", lambda: [dense(16, 16), dense(32, 16)][1])  # the same sizes, other weights
    made = other.write(backbone, tmp_path / "other")
    for place in (made, backbone):
        with pytest.raises(MismatchError, match="other modules"):
            open_adapter(run, str(place))
        model, _ = ah.load_backbone(str(place), task="embedding")
        with pytest.raises(MismatchError, match="other modules"):
            ah.load(model, run / "adapter")
        said = "Dense" if place == made else "no modules"
        refused(adapterhub("predict", run, "good", "--backbone", place), said)
        refused(adapterhub("merge", run, "--output", tmp_path / "m", "--backbone", place), said)


def test_a_run_that_records_no_modules_keeps_its_vectors(encoders, backbone, adapterhub, tmp_path):
    """An adapter that an older version trained, without the modules, is opened on all of them."""
    run, (folder, _) = tmp_path / "run", encoders("dense")
    train(adapterhub, backbone, tmp_path, "train.max_steps=1", task="embedding(normalize=true)")
    manifest = json.loads((run / "adapter" / "adapter.json").read_text(encoding="utf-8"))
    assert "modules" not in manifest["training"]["recipe"]["task"]["embedding"]
    expected = [p.vectors[0] for p in open_adapter(run).predict(TEXTS)]
    close([p.vectors[0] for p in open_adapter(run, str(folder)).predict(TEXTS)], expected)


@pytest.mark.filterwarnings("ignore:.*inputs are longer than:UserWarning")
def test_options_of_the_user_hold(encoders) -> None:
    folder, expected = encoders("dense, normalized")
    model, tokenizer = ah.load_backbone(str(folder), task="embedding")
    long = ah.embed(model, tokenizer, TEXTS, normalize=False)
    assert np.abs(np.linalg.norm(long, axis=1) - 1).min() > 0.1
    close(long / np.linalg.norm(long, axis=1, keepdims=True), expected)
    with pytest.raises(MismatchError, match="32 numbers"):
        ah.embed(model, tokenizer, TEXTS, pooling="cls+mean")
    with pytest.raises(ConfigError, match="pooling"):
        parse_task("embedding(pooling=cls+median)")
    folder, expected = encoders("default prompt")
    model, tokenizer = ah.load_backbone(str(folder), task="embedding")
    peer = st.SentenceTransformer(str(folder), device="cpu")
    bare = peer.encode(TEXTS, prompt="")
    close(ah.embed(model, tokenizer, TEXTS, prefix=""), bare)
    long = [*TEXTS, "", "word " * 400]
    wanted = peer.encode(long, prompt="query: ")
    close(ah.embed(model, tokenizer, long, prefix="query: ", batch_size=3), wanted)
    task = parse_task("embedding(query_prefix='good ')").for_model(model)
    assert (task.query_prefix, task.passage_prefix) == ("good ", "the plot was ")


def test_a_model_of_transformers_has_the_modules_of_its_folder(encoders, tmp_path, monkeypatch):
    from transformers import AutoModel, AutoTokenizer

    folder, expected = encoders("dense")
    monkeypatch.chdir(folder)  # what lies in the working directory belongs to no model
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    close(ah.embed(model, tokenizer, TEXTS), expected)
    with torch.device("cpu"):
        alone = type(model)(model.config)
    alone.config._name_or_path = alone.name_or_path = ""
    assert ah.embed(alone, tokenizer, TEXTS).shape == (3, 32)


def test_weights_of_modules_are_downloaded_in_the_form_that_there_is() -> None:
    names = {
        "model.safetensors", "pytorch_model.bin", "2_Dense/pytorch_model.bin", "training_args.bin",
        "3_Dense/pytorch_model.bin", "3_Dense/model.safetensors", "original/consolidated.00.pth",
    }  # fmt: skip
    kept = {name for name in names if not _is_second_form(name, names)}
    assert kept == {
        "model.safetensors", "3_Dense/model.safetensors", "2_Dense/pytorch_model.bin"
    }  # fmt: skip


def test_every_command_tells_of_the_modules_or_refuses(encoders, adapterhub, backbone, tmp_path):
    shown, (whole, _) = "Pooling(cls+weightedmean), Dense(64 to 24, Tanh)", encoders("all of it")
    change = at("sentence_transformers.models.CNN")
    folder, data = Case("mean", change=change).write(backbone, tmp_path / "e"), partners(tmp_path)
    options = ("--backbone", folder, "--task", "embedding")
    for words in (
        ("train", *options, "--train", data, "--output", tmp_path / "run"),
        ("eval", *options, "--data", data),
    ):
        refused(adapterhub(*words), "CNN", "modules=none")
    assert "CNN" in adapterhub("inspect", folder)[1]
    with Engine(str(folder)) as engine, pytest.raises(BackboneError, match="not supported"):
        engine.submit(None, "good").result(60)
    shown += ", LayerNorm(24), Normalize"
    out = succeeded(adapterhub("inspect", whole))
    assert shown in " ".join(out.split())
    assert shown in json.loads(adapterhub("inspect", whole, "--json")[1])["vectors"]
    code, _, err = adapterhub("eval", "--backbone", whole, "--task", "embedding", "--data", data)
    assert code == 0
    assert shown in err
    assert "'the plot was '" in err
