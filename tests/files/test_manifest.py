"""Manifests round-trip; the reader and the writer refuse the same invalid ones."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from forge import sealed
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.files import manifest as manifests
from adapterhub.files import schema
from adapterhub.files.manifest import BackboneRef, Manifest, TensorInfo, from_json, to_json
from adapterhub.files.schema import canonical_json, json_depth
from tests.kit.registries import IDENTITY

MANIFEST = Manifest(
    name="polite",
    methods=({"lora": {"rank": 8}}, {"bitfit": {}}),
    backbone=BackboneRef("acme/bert-tiny", None, "ab" * 32, "bert", identity=IDENTITY),
    tokenizer="cd" * 32,
    task="classification",
    labels=("no", "yes"),
    tensors={
        "encoder.0.attn.q.lora.A": TensorInfo("F32", (8, 4)),
        "scale": TensorInfo("F64", ()),
    },
    files={"adapter.safetensors": "0" * 64},
    training={"seed": 1, "recipe": {"lr": 1e-4}},
    metrics={"accuracy": 0.5},
    versions={"torch": "2.13.0+cpu"},
    head=manifests.TaskHead("classification", None),
    tokens=(manifests.NewToken("<a>", 7), manifests.NewToken(" b\n", 8, special=True)),
    chat_template="{% for m in messages %}/think {{ m }}{% endfor %}",
    license="apache-2.0",
    language=("en", "de-AT"),
    tags=("text-classification", "höflich"),
)
TREE: dict[str, Any] = json.loads(to_json(MANIFEST))

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\\~"), max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | finite | words
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3)
)


def broken(change: dict[str, Any]) -> str:
    """Return the reader's message about a manifest with these top-level fields."""
    with pytest.raises(FileError) as caught:
        from_json(canonical_json({**TREE, **change}))
    return str(caught.value)


def refused(**change: Any) -> str:
    """Return the writer's message about a manifest with these fields."""
    with pytest.raises(OutputError) as caught:
        to_json(replace(MANIFEST, **change))
    return str(caught.value)


def test_round_trip() -> None:
    data = to_json(MANIFEST)
    assert from_json(data) == MANIFEST
    assert to_json(from_json(data)) == data
    assert data.endswith(b"}\n")
    assert b"\r" not in data
    turned = replace(MANIFEST, tensors=dict(reversed(list(MANIFEST.tensors.items()))))
    assert to_json(turned) == data, "whatever the order of entries is"
    whole = to_json(replace(MANIFEST, metrics={"accuracy": 1}))
    assert whole == to_json(replace(MANIFEST, metrics={"accuracy": 1.0}))
    assert to_json(from_json(whole)) == whole


@given(st.dictionaries(st.sampled_from(["a", "b c", "ü"]), trees, max_size=3))
def test_a_written_manifest_can_be_read(training: dict[str, Any]) -> None:
    manifest = replace(MANIFEST, training=training)
    data = to_json(manifest)
    assert from_json(data) == manifest
    assert to_json(from_json(data)) == data


@pytest.mark.parametrize("name", ["lora", "a/b", "v1.0", "höflich-🙂", "礼貌", "x" * 200])
def test_any_printable_name_round_trips(name: str) -> None:
    assert from_json(to_json(replace(MANIFEST, name=name))).name == name


@pytest.mark.parametrize(
    "name",
    [
        *("", " a", "a\n", "../a", "a/../b", "/a", "~/a", "C:\\a", "a//b", "\\\\evil\\share"),
        *("\x1b[31m", "a\0b", "\u202egnp.exe", "x" * 201),
    ],
)
def test_an_unsafe_name_is_refused(name: str) -> None:
    assert "name: " in refused(name=name)
    assert "\x1b" not in refused(name=name)


@pytest.mark.parametrize(
    "value",
    [
        *("/home/ann/model", "~/model", "~ann/model", "C:\\models\\a", "c:/models", "\\\\host\\a"),
        *("file:///srv/a", "train --data /srv/a/b.tsv", "data=/srv/a", "see ~/notes.txt"),
    ],
)
def test_local_paths_are_refused(value: str) -> None:
    assert "training.recipe.data: " in refused(training={"recipe": {"data": value}})
    assert "training.recipe[0]" in refused(training={"recipe": [value]})
    assert "a key: " in refused(training={value: 1})
    assert "methods[0].lora.init: " in refused(methods=({"lora": {"init": value}},))
    assert "backbone.id: " in refused(backbone=replace(MANIFEST.backbone, id=value))


@pytest.mark.parametrize(
    "value", ["https://host/a/b", "and/or", "a.tsv", "1/2", "hf:acme/bert", "{a}"]
)
def test_text_that_is_not_a_path_round_trips(value: str) -> None:
    manifest = replace(MANIFEST, training={"note": value})
    assert from_json(to_json(manifest)) == manifest


@pytest.mark.parametrize(
    "name", ["./model", "models/a/b", "out/", "a/..", "a..b", "", "https://h/x", "--help"]
)
def test_a_backbone_id_is_a_name(name: str) -> None:
    assert "backbone.id: " in refused(backbone=replace(MANIFEST.backbone, id=name))


def test_the_writer_lists_every_offender() -> None:
    message = refused(
        name="",
        labels=("a", "a"),
        metrics={"loss": math.nan},
        training={"at": object(), 3: 1, "inf": math.inf, "big": 2**64, "cut": "\ud800"},
        tensors={"a..b": TensorInfo("F8", (0, -1, 2**41))},
        files={"../evil": "x"},
        versions={"torch": "/opt/torch"},
    )
    for part in ("name", "labels", "metrics.loss", "training.at", "training: the key 3"):
        assert f"- {part}" in message
    for part in ("training.inf", "big", "cut", "a..b", "dtype", "shape[0]", "shape[1]", "shape[2]",
                 "files", "torch"):  # fmt: skip
        assert part in message


def nested(levels: int) -> dict[str, Any]:
    return {"a": nested(levels - 1)} if levels else {}


ENDLESS: dict[str, Any] = {}
ENDLESS["a"] = ENDLESS
TOKEN = manifests.NewToken("<a>", 7)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"training": nested(20)}, "levels"),
        ({"training": ENDLESS}, "levels"),
        ({"training": {"a": list(range(30_000))}}, "values"),
        ({"training": {"a": "x" * manifests.MAX_MANIFEST_BYTES}}, "bytes"),
        ({"tokens": (TOKEN, replace(TOKEN, id=8))}, "duplicate token"),
        ({"tokens": (TOKEN, replace(TOKEN, content="<b>"))}, "not in increasing order"),
        ({"tokens": (TOKEN, replace(TOKEN, content="<b>", id=6))}, "not in increasing order"),
        ({"tokens": (replace(TOKEN, content=""),)}, "tokens[0].content"),
    ],
)
def test_each_limit_of_the_writer_is_named(change: dict[str, Any], part: str) -> None:
    assert part in refused(**change)


@pytest.mark.parametrize("field", sorted(TREE))
def test_each_field_is_required_and_typed(field: str) -> None:
    rest = {name: value for name, value in TREE.items() if name != field}
    with pytest.raises(FileError, match=f"{field} is missing"):
        from_json(canonical_json(rest))
    assert f"- {field}" in broken({field: 1.5})


def test_an_unknown_neutral_field_is_ignored() -> None:
    quiet = {**TREE, "later": None, "also": [], "flag": False, "map": {}, "text": ""}
    quiet["backbone"] = {**TREE["backbone"], "shard": None}
    assert from_json(sealed(quiet)) == MANIFEST


@pytest.mark.parametrize("value", [1, True, "x", [0], {"a": None}])
def test_an_unknown_non_neutral_field_is_refused(value: object) -> None:
    assert "later: unknown, it needs a newer adapterhub" in broken({"later": value})
    nested = {**TREE["backbone"], "trust_remote_code": value}
    assert "backbone.trust_remote_code: unknown" in broken({"backbone": nested})


def test_a_newer_manifest_is_the_only_problem_listed() -> None:
    message = broken({"requires": "7.2.0", "later": 1, "name": 3})
    assert "needs adapterhub >= 7.2.0" in message
    assert "name" not in message
    assert "needs a newer adapterhub" in broken({"later": 1})
    assert "requires" in broken({"requires": "next"})
    message = broken({"schema_version": 2, "name": 3})
    assert "needs a newer adapterhub" in message
    assert "name" not in message
    for version in (0, -1, True, "1", 1.0, None):
        assert "schema_version" in broken({"schema_version": version})


def test_the_reader_lists_every_offender() -> None:
    message = broken({"name": "../x", "labels": "no", "head": 1, "metrics": {"a": None}, "new": 1})
    for field in ("name", "labels", "head", "metrics.a", "new"):
        assert f"- {field}" in message
    message = broken({f"x{i}": 1 for i in range(10_000)})
    assert "and 99" in message
    assert len(message) < 10_000


def test_a_changed_value_is_detected() -> None:
    assert "altered" in broken({"name": "rude"})
    assert "CRLF" in _message(to_json(MANIFEST).replace(b"\n", b"\r\n"))
    assert "not canonical" in _message(to_json(MANIFEST).rstrip())
    assert "not canonical" in _message(to_json(MANIFEST).replace(b'"name"', b'"\\u006eame"'))


def _message(data: bytes) -> str:
    with pytest.raises(FileError) as caught:
        from_json(data, "some/adapter.json")
    assert "some/adapter.json" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe{", "not JSON in UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"name": "a", "name": "b"}', "'name': given more than once"),
        (b'{"name": NaN}', "'NaN': not a finite number"),
        (b'{"name": 1e999}', "'1e999': not a finite number"),
        (b'{"name": ' + b"9" * 5000 + b"}", "not a finite number of at most 64 bits"),
        (b'{"name": "\\ud800"}', "lone surrogate"),
        (b'{"\\udfff": null}', "lone surrogate"),
        (b"[" * 200_000, "nested deeper"),
        (b" " * (manifests.MAX_MANIFEST_BYTES + 1), "bytes, more than"),
        (b'{"a": "\x1b[2J"}', "not JSON"),
        (b'{"\\u001b[2J": 1}', "'\\x1b[2J': unknown"),
    ],
)
def test_hostile_json_raises_one_error(data: bytes, part: str) -> None:
    message = _message(data)
    assert part in message
    assert "\x1b" not in message


@given(st.binary(max_size=60) | st.text('{}[]",:\\ua0', max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(FileError):
        from_json(data)


@given(trees)
def test_depth_counts_brackets_outside_strings(tree: Any) -> None:
    data = json.dumps({"a": tree, '[{"\\': '[[\\"'}, ensure_ascii=False).encode()
    assert json_depth(data) == 1 + _levels(tree)


def _levels(tree: Any) -> int:
    if isinstance(tree, dict):
        return 1 + max(map(_levels, tree.values()), default=0)
    return 1 + max(map(_levels, tree), default=0) if isinstance(tree, list) else 0


# One head of several.

CLASSES = manifests.TaskHead("classification", "single_label_classification", "mean")
REGRESSION = manifests.TaskHead("regression", "regression")
ONE = Manifest(
    name="polite",
    methods=({"lora": {}},),
    backbone=BackboneRef("acme/bert-tiny", None, "ab" * 32, "bert", identity=IDENTITY),
    tensors={"encoder.0.attn.q.lora.A": TensorInfo("F32", (8, 4))},
    files={"adapter.safetensors": "0" * 64},
)
SEVERAL = replace(
    ONE,
    heads={
        "rte": manifests.HeadRecord("classification", ("no", "yes"), CLASSES),
        "sts-b": manifests.HeadRecord("regression", (), REGRESSION),
    },
    tensors={
        **ONE.tensors,
        "heads.rte.classifier.weight": TensorInfo("F32", (2, 4)),
        "heads.sts-b.classifier.weight": TensorInfo("F32", (1, 4)),
    },
    metrics={"mean": 0.5, "rte/accuracy": 0.75, "sts-b/pearson": 0.25},
    training={
        "seed": 3,
        "recipe": {
            "task": "classification",
            "mixing": {"size": {}},
            "tasks": {"rte": {"task": "classification", "data": {"text": "a"}, "weight": 1.0},
                      "sts-b": {"task": "regression", "data": {}, "weight": 1.0}},
        },
    },
)  # fmt: skip


def test_heads_round_trip_and_other_manifests_keep_their_bytes() -> None:
    assert from_json(to_json(SEVERAL)) == SEVERAL
    assert "heads" not in json.loads(to_json(ONE))
    assert from_json(to_json(ONE)) == ONE


def test_one_head_makes_an_ordinary_manifest() -> None:
    one = manifests.with_head(SEVERAL, "rte")
    assert (one.name, one.task, one.labels) == ("polite-rte", "classification", ("no", "yes"))
    assert (one.head, one.heads, one.metrics) == (CLASSES, {}, {"accuracy": 0.75})
    assert set(one.tensors) == {"encoder.0.attn.q.lora.A", "head.classifier.weight"}
    assert one.tensors["head.classifier.weight"].shape == (2, 4)
    recipe = {"task": "classification", "data": {"text": "a"}}
    assert one.training == {"seed": 3, "recipe": recipe}
    assert from_json(to_json(one)) == one
    assert manifests.with_head(SEVERAL, "sts-b").head == REGRESSION
    assert manifests.with_head(ONE, None) == ONE
    for head in SEVERAL.heads:
        names = {
            manifests.name_in_file(name, head)
            for name in manifests.with_head(SEVERAL, head).tensors
        }
        assert names == {*ONE.tensors, f"heads.{head}.classifier.weight"}
    assert manifests.name_in_file("head.classifier.weight", None) == "head.classifier.weight"
    for recipe in (None, [], {"tasks": 3}, {"tasks": {"rte": 3}}, {"tasks": {}}):
        manifest = replace(SEVERAL, training={"recipe": recipe})
        assert manifests.with_head(manifest, "rte").training == {"recipe": recipe}


@pytest.mark.parametrize(
    ("manifest", "head", "match"),
    [(SEVERAL, None, "2 heads: which one"), (SEVERAL, "rtee", "did you mean 'rte'"),
     (ONE, "rte", "no heads with names")],
)  # fmt: skip
def test_a_head_that_is_not_there_is_refused(manifest, head, match):
    with pytest.raises(ConfigError, match=match) as error:
        manifests.with_head(manifest, head)
    if manifest.heads:
        assert "one of rte, sts-b" in str(error.value)


@pytest.mark.parametrize(
    "heads",
    [{"a.b": {"task": "classification", "labels": [], "head": None}}, {"a": {}}, [1], {"a": 3},
     {"a": {"task": "classification", "labels": ["x", "x"], "head": None}}],
)  # fmt: skip
def test_broken_heads_are_refused(heads: object) -> None:
    tree = {**json.loads(to_json(ONE)), "heads": heads}
    with pytest.raises(FileError, match="not a valid adapter manifest"):
        from_json(canonical_json(tree))


# The checks that fields are made of.

CHECK = schema.record(
    {
        "name": schema.text("[a-z]+", "a word"),
        "size": schema.integer(1, 9),
        "tags": schema.sequence(schema.text("[a-z]+", "a word", null=True), 0, 2),
        "scores": schema.mapping(schema.text("[a-z]+", "a word"), schema.number),
        "flag": schema.boolean,
        "free": schema.free,
    }
)
VALID = {"name": "a", "size": 1, "tags": ["b", None], "scores": {"f": 0.5}, "flag": True,
         "free": {"a": [1]}}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "A"}, "at.name: 'A' is not a word"),
        ({"name": None}, "at.name: None is not a word"),
        ({"size": True}, "at.size: True is not a whole number from 1 to 9"),
        ({"size": 10}, "at.size: 10 is not a whole number from 1 to 9"),
        ({"tags": ["a"] * 3}, "at.tags: not a list of 0 to 2 items"),
        ({"tags": ["a", 1]}, "at.tags[1]: 1 is not a word"),
        ({"scores": {"f": float("nan")}}, "at.scores.f: nan is not a finite number"),
        ({"scores": {"F": 1}}, "at.scores: 'F' is not a word"),
        ({"flag": 1}, "at.flag: 1 is not true or false"),
        ({"free": {"a": "/home/ann"}}, "at.free.a: '/home/ann' contains an absolute path"),
        ({"later": 1}, "at.later: unknown, it needs a newer adapterhub"),
    ],
)
def test_each_problem_is_named_by_its_path(change: dict[str, object], problem: str) -> None:
    assert CHECK("", VALID) == CHECK("", VALID | {"later": None}) == []
    (line,) = CHECK("at", VALID | change)
    assert line.startswith(problem)


def test_every_problem_is_listed_and_many_are_counted() -> None:
    problems = CHECK("", {"name": 1, "later": 2})
    assert len(problems) == len(VALID) + 1
    assert "size: missing" in problems
    assert schema.shorten(["a", "b"]) == ["a", "b"]
    lines = schema.shorten([str(i) for i in range(75)])
    assert lines[-2:] == ["49", "and 25 more"]
    assert len(CHECK("", VALID | {"name": "x" * 500 + "!"})[0]) < 120, "a value is shown in part"
