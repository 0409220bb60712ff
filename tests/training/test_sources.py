"""Several sources in one run: columns, shares, scores of each, and an exact resume."""

import shutil
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.options import DataOptions
from adapterhub.data.sources import DataSource
from adapterhub.errors import AdapterhubError, ConfigError, DataError
from adapterhub.files.native import Saved
from adapterhub.inference.train import _are_sources
from adapterhub.loop.report import Several
from adapterhub.recipe.recipe import Recipe, parse_mixing, read
from adapterhub.tasks import Setting, parse_task
from adapterhub.training.plan import plan_of
from adapterhub.training.run import epoch_batches, prepare, run
from adapterhub.training.run_data import read_data
from adapterhub.training.sources import apportioned, drawn_rows, source_shares
from adapterhub.training.stream import BlockReader, mix_streams, open_examples
from tests.kit.data import sentences, word_tokenizer, write_json_lines, write_tsv
from tests.kit.runs import Notes, final_bytes, forks, killed, quiet


def write_sources(folder: Path, sizes: tuple[int, ...] = (40, 20, 12)) -> list[str]:
    """Write sentences with their class into files of some sizes, with other names of columns."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = ("text\tlabel", "review\tsentiment", "sentence\tcategory")
    rows = ((f"{text} {i}", label) for i, (text, label) in enumerate(sentences(sum(sizes))))
    return [
        str(write_tsv(folder / f"{name}.tsv", [*islice(rows, size)], column))
        for name, size, column in zip("abc", sizes, columns, strict=False)
    ]


def recipe_of(backbone: Path, folder: Path, train: Any, *words: str, **data: Any) -> Recipe:
    usual = ["task=classification", "method=lora(rank=2)", "train.batch_size=4", "train.epochs=2",
             "train.log_every=1", "train.tensorboard=false", "train.report=false"]  # fmt: skip
    data = {"train": train, **data}
    flags = {"backbone": str(backbone), "output": str(folder / "run"), "data": data}
    return read(None, [*usual, *words], flags)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.data(),
    st.integers(0, 6),
    st.integers(0, 3),
)
def test_every_epoch_has_its_shares_and_no_row_twice_before_all(sizes, data, epoch, seed):
    weights = data.draw(
        st.lists(st.floats(0.05, 20), min_size=len(sizes), max_size=len(sizes)), "weights"
    )
    mixing = parse_mixing(data.draw(st.sampled_from(["size", "equal", "temperature(t=3)"])))
    named = {str(i): size for i, size in enumerate(sizes)}
    shares = list(source_shares(mixing, named, {str(i): w for i, w in enumerate(weights)}).values())
    total = sum(sizes)
    given_before, numbers = next(islice(apportioned(shares, total), epoch, None))
    assert sum(numbers) == total
    for share, before, now in zip(shares, given_before, numbers, strict=True):
        assert abs(share * total * (epoch + 1) - before - now) < 1 + 1e-6
    starts = [0, *(sum(sizes[: i + 1]) for i in range(len(sizes)))]
    counted: Counter[int] = Counter()
    for each in range(epoch + 1):
        counted.update(drawn_rows(sizes, shares, each, seed))
    for (start, end), before, now in zip(pairwise(starts), given_before, numbers, strict=True):
        times = [counted[i] for i in range(start, end)]
        assert sum(times) == before + now
        assert max(times) - min(times) <= 1
    if mixing == parse_mixing("size") and len(set(weights)) == 1:
        assert drawn_rows(sizes, shares, epoch, seed) == list(range(total))


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        (["train", "test"], {"test": "--test"}),
        (["a", "My-Dev_set", "valid.2"], {"My-Dev_set": "--eval", "valid.2": "--eval"}),
        (["latest", "contest", "devices", "protest-a"], {}),
        (["test", "holdout"], {}),
    ],
)
@pytest.mark.parametrize("way", ["list", "pattern", "stream"])
def test_a_file_named_like_data_to_score_is_noted(names, flags, way, tmp_path):
    files = {n: write_tsv(tmp_path / f"{n}.tsv", sentences(20), "text\tlabel") for n in names}
    paths = [str(file) for file in files.values()]
    train = str(tmp_path / "*.tsv") if way == "pattern" else [{"path": path} for path in paths]
    words = ["train.max_steps=1", "train.epochs=null"] * (way == "stream")
    recipe = recipe_of(tmp_path, tmp_path, train, *words, stream=way == "stream", eval="none")
    noted = {note for note in read_data(recipe).notes if "trained on, too" in note}
    assert {note.partition("instead: ")[2] for note in noted} == {
        f"{flag} {files[name]}" for name, flag in flags.items()
    }


def test_several_files_are_one_file_of_all_their_rows(backbone, tmp_path):
    """The differential case: the default mixing draws the same batches, and gives equal tensors."""
    files = write_sources(tmp_path)
    dev = write_tsv(tmp_path / "dev.tsv", sentences(20))
    rows = [line for file in files for line in Path(file).read_text().splitlines()[1:]]
    (tmp_path / "all.tsv").write_text("\n".join(["text\tlabel", *rows, ""]))
    together = recipe_of(backbone, tmp_path / "1", files, eval=str(dev))
    alone = recipe_of(backbone, tmp_path / "2", str(tmp_path / "all.tsv"), eval=str(dev))
    outcomes = [run(recipe, quiet(recipe)) for recipe in (together, alone)]
    tensors = [(outcome.folder / "adapter.safetensors").read_bytes() for outcome in outcomes]
    assert tensors[0] == tensors[1]
    assert outcomes[0].metrics == outcomes[1].metrics
    records = [Saved.at(outcome.folder).manifest.training["data"] for outcome in outcomes]
    assert records[0].pop("sources")[1] == {
        "name": "b", "train": 20, "eval": 0, "weight": 1.0, "share": round(20 / 72, 6),
    }  # fmt: skip
    assert records[0] == records[1]


@pytest.fixture(scope="module")
def ended(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Any]:
    """A finished run on three sources in equal shares, of which the last is too small to divide."""
    folder = tmp_path_factory.mktemp("sources")
    files = [*write_sources(folder, (40, 20)), str(folder / "few.tsv")]
    write_tsv(folder / "few.tsv", [*sentences(9)[:1], ("nothing", "neg")])
    words = ["mixing=equal", "train.report=true", "train.best_metric=a/accuracy"]
    recipe = recipe_of(backbone, folder, files, *words, test=0.2)
    return recipe, run(recipe, quiet(recipe))


def test_each_source_has_its_scores(ended):
    _, outcome = ended
    assert [source.name for source, _ in outcome.sources] == ["a", "b", "few"]
    assert [source.evaluation > 0 for source, _ in outcome.sources] == [True, True, False]
    sizes = [source.evaluation for source, _ in outcome.sources[:2]]
    parts = [outcome.metrics[f"{name}/accuracy"] for name in "ab"]
    whole = sum(n * part for n, part in zip(sizes, parts, strict=True)) / sum(sizes)
    assert outcome.metrics["accuracy"] == pytest.approx(whole)
    assert [outcome.errors[f"{name}/accuracy"].rows for name in "ab"] == sizes
    assert outcome.result.metric == "a/accuracy"
    assert "few/accuracy" not in outcome.metrics
    assert {"accuracy", "a/accuracy", "b/macro_f1"} <= outcome.tested.keys()
    page = outcome.page.read_text()
    table = page.partition('id="sources"')[2].partition("</section>")[0]
    assert table.count("33.3%") == 3
    assert "few" in table
    card = (outcome.folder / "README.md").read_text() if outcome.folder else ""
    assert "few: 2 rows, 33.3% of the training" in card.replace("\\", "")


def test_the_batches_have_the_shares_and_the_plan_tells_them(ended):
    recipe, _ = ended
    prepared = prepare(replace(recipe, output=f"{recipe.output}-2"))
    rows = prepared.train
    source_of = np.repeat(rows.names, rows.rows_of)
    batches = [batch for epoch in range(6) for batch in epoch_batches(prepared, epoch).order]
    counts = Counter(source_of[index] for batch in batches for index in batch)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert counts.total() == 6 * len(rows.rows)
    assert [round(share, 3) for _, share in plan_of(prepared).sources] == [0.333] * 3


@forks
@pytest.mark.parametrize("how", ["memory", "stream"])
def test_killed_and_resumed_gives_the_same_bytes(backbone, tmp_path, how):
    files = write_sources(tmp_path / "data")
    train = [{"path": file, "weight": w} for file, w in zip(files, (1, 4, 0.5), strict=True)]
    words, data = ["train.save_every=4", "mixing=equal", "train.max_steps=10"], {}
    if how == "stream":
        words += ["train.epochs=null", "data.buffer=9"]
        data = {"stream": True, "eval": files[1]}
    whole, cut = (
        recipe_of(backbone, tmp_path / name, train, *words, **data) for name in ("whole", "cut")
    )
    run(whole, quiet(whole))

    killed(lambda: run(cut, Several([quiet(cut), Notes(6, signal.SIGKILL)])))
    run(cut, quiet(cut), resume=True)
    assert final_bytes(Path(cut.output)) == final_bytes(Path(whole.output))
    train[0]["weight"] = 2
    other = recipe_of(backbone, tmp_path / "cut", train, *words, **data)
    shutil.rmtree(Path(cut.output) / "adapter")
    with pytest.raises(ConfigError, match="another run") as error:
        run(other, quiet(other), resume=True)
    assert "sources.a: 1.0 in the checkpoint, 2.0 now" in error.value.offenders


def test_streams_are_interleaved_by_weight(tmp_path):
    """A small source is read again and again; a reader in the middle continues exactly."""
    files = write_sources(tmp_path, (40, 3))
    task = parse_task("classification")
    streams = [open_examples(file, DataOptions(), task)[0] for file in files]
    mixed = mix_streams(streams, [1, 3])
    reader = BlockReader(10, seed=0)
    blocks = list(islice(mixed.blocks(reader, mixed.start), 9))
    drawn = Counter(example.text for _, examples in blocks for example in examples)
    small = {example.text for example in streams[1]}
    assert sum(drawn[text] for text in small) in (67, 68)
    assert {drawn[text] for text in small} <= {22, 23}
    later = mixed.blocks(reader, blocks[4][0], 4)
    assert list(islice(later, 5)) == blocks[4:]
    assert mixed.labels() == task.labels(list(mixed))
    assert len(list(mixed)) == 43


def test_chats_pairs_and_instructions_are_one_run(tmp_path):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    forms = {
        "chats": [chat] * 12,
        "pairs": [{"prompt": "a", "completion": "b"}] * 12,
        "alpaca": [{"instruction": "a", "input": "", "output": "b"}] * 12,
        "scored": [{"sentence1": "a", "sentence2": "b", "score": n / 9} for n in range(9)],
        "plain": [{"anchor": "a", "positive": "b"}] * 9,
    }
    files = [
        str(write_json_lines(tmp_path / f"{name}.jsonl", rows)) for name, rows in forms.items()
    ]
    recipe = read(None, ["task=causal-lm"], {
        "backbone": "none", "output": "o", "data": {"train": [*files[:2], f"{files[2]}#5"],
                                                    "eval": "none"}})  # fmt: skip
    data = read_data(recipe)
    assert [source.train for source in data.sources] == [12, 12, 5]
    tokenizer = word_tokenizer("<s>", "</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    )
    rows = data.task.encode(data.train, Setting(tokenizer, 64), labelled=True).rows
    assert len({str(row) for row in rows}) == 1  # the same conversation in three forms
    with pytest.raises(DataError, match=r"plain\.jsonl has another form than"):
        read_data(replace(recipe, task="embedding", data=DataOptions(train=files[3:], eval="none")))


# Sources -> what is said of them. The files: good.tsv, other.tsv with other classes, empty.tsv,
# nolabel.tsv without a class, and a#5.tsv.
REFUSED: dict[str, tuple[Any, str]] = {
    "twice": (["good.tsv", "good.tsv"], "a source of data.train twice"),
    "empty": (["good.tsv", "empty.tsv"], "empty.tsv"),
    "no label": (["good.tsv", "nolabel.tsv"], "nolabel.tsv"),
    "labels": (["good.tsv", "other.tsv"], "'bad': only other.tsv, line 2"),
    "weight 0": (["good.tsv", {"path": "more.tsv", "weight": 0}], "weight of more.tsv is 0"),
    "nan": (["good.tsv", {"path": "more.tsv", "weight": float("nan")}], "more.tsv is nan"),
    "#0": (["good.tsv", "more.tsv#0"], "not a number of rows"),
    "#abc": ("good.tsv#abc", "not a number of rows"),
    "rows": ([{"path": "good.tsv#4", "rows": 3}, "more.tsv"], "one of both"),
    "pattern": (["good.tsv", "nothing-*.tsv"], "no files at nothing-*.tsv"),
    "missing": (["good.tsv", "gone.tsv"], "gone.tsv"),
    "name": (["good.tsv", {"path": "more.tsv", "name": "test"}], "the name of more.tsv is 'test'"),
    "names": ([{"path": "good.tsv", "name": "a"}, {"path": "more.tsv", "name": "a"}], "name a"),
    "no path": (["good.tsv", {"weight": 2}], "has no path"),
    "unknown": (["good.tsv", {"path": "more.tsv", "wieght": 2}], "wieght"),
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a recipe of these sources."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("good", "more", "a#5")):
        write_tsv(Path(f"{name}.tsv"), sentences(90)[30 * number :][:30])
    write_tsv(
        Path("other.tsv"), [(text, {"pos": "good"}.get(x, "bad")) for text, x in sentences(30)]
    )
    write_tsv(Path("nolabel.tsv"), [(text,) for text, _ in sentences(30)], "text")
    Path("empty.tsv").write_text("")
    return partial(recipe_of, "none", tmp_path)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mixed_is_refused_with_its_file(case, recipe):
    train, said = REFUSED[case]
    with pytest.raises(AdapterhubError) as error:
        read_data(recipe(train))
    assert said in str(error.value)


def test_names_patterns_and_numbers_of_rows(recipe):
    """A file may have a `#` in its name; one source with a number is the option data.rows."""
    data = read_data(recipe(["a#5.tsv", "good.tsv#7", "mo*.tsv"], eval="none"))
    assert [(s.name, s.train) for s in data.sources] == [("a-5", 30), ("good", 7), ("mo", 30)]
    same = [
        read_data(recipe(train, **more)).train
        for train, more in (("good.tsv#20", {}), ("good.tsv", {"rows": 20}),
                            ([{"path": "good.tsv", "rows": 20}], {}))
    ]  # fmt: skip
    assert same[0] == same[1] == same[2]
    assert len(same[0]) < 20
    files = read_data(recipe("[gm]o*.tsv", eval="none"))
    assert len(files.train) == 60
    assert not files.sources
    more = read_data(recipe(["good.tsv#500", "more.tsv"]))
    assert any("all its 30 rows, which are fewer than 500" in note for note in more.notes)


def test_labels_of_different_sources_are_united_if_they_are_named(recipe):
    train = ["good.tsv", "other.tsv"]
    data = read_data(recipe(train, labels="neg,pos,bad,good"))
    assert data.labels == ("neg", "pos", "bad", "good")
    own = [train[0], {"path": "other.tsv", "labels": "bad=neg,good=pos"}]
    assert read_data(recipe(own)).labels == ("neg", "pos")
    write_tsv(Path("some.tsv"), [(text, "pos") for text, _ in sentences(30)])
    some = read_data(recipe(["good.tsv", "some.tsv"]))
    assert any("1 of 2 labels are not in all sources: 'neg'" in note for note in some.notes)


def test_what_needs_one_source_says_so(recipe):
    several = ["good.tsv", "more.tsv"]
    words = ["train.epochs=null", "train.max_steps=5", "mixing=size"]
    with pytest.raises(ConfigError, match="mixing depends on the rows"):
        read_data(recipe(several, *words, stream=True, eval="none"))
    tasks = {name: {"data": {"train": several}} for name in "ab"}
    with pytest.raises(ConfigError, match="several tasks with 2 sources"):
        read_data(read(None, [], {"backbone": "none", "output": "o", "tasks": tasks}))
    with pytest.raises(ConfigError, match="the rows of each source"):
        recipe(several, rows=5)
    for name, rows in (("one.tsv", 1), ("two.tsv", 2)):
        write_tsv(Path(name), sentences(rows))
    with pytest.raises(DataError, match="too few to hold any out"):
        read_data(recipe(["one.tsv", "two.tsv"]))


def test_a_recipe_keeps_its_sources(tmp_path):
    options = DataOptions(train=["a.csv", DataSource("b.csv#5", weight=2.0, text="t")])  # type: ignore[arg-type]
    recipe = Recipe(output="o", data=options)
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    assert read(tmp_path / "r.yaml") == recipe
    assert options.location == "a.csv, b.csv"
    assert DataOptions(train="hf:imdb#5") == DataOptions(train="imdb", rows=5)


def test_rows_in_memory_are_not_taken_for_files(recipe):
    """The list of `ah.train`: files, with or without options, and rows are told apart."""
    for value, expected in (
        (["good.tsv#5", Path("more.tsv"), "hf:imdb"], True),
        (["good.tsv", {"path": "more.tsv", "weight": 2}], True),
        ([{"path": "a.wav", "label": "x"}], False),
        (["good.tsv", {"text": "a"}], False),
        (["a text", "another text"], False),
        ([], False),
    ):
        assert _are_sources(value) is expected, value


def test_packed_rows_have_texts_of_one_source(backbones, tmp_path):
    """They have no prediction by example, so each source is evaluated again for its scores."""
    files = []
    for name, size in (("a", 40), ("b", 20)):
        rows = [{"prompt": text, "completion": label} for text, label in sentences(size)]
        files.append(str(write_json_lines(tmp_path / f"{name}.jsonl", rows)))
    words = ["task=causal-lm(pack=true)", "train.max_length=24", "mixing=equal"]
    prepared = prepare(recipe_of(backbones("llama"), tmp_path, files, *words))
    train, held = prepared.train, prepared.evaluation
    assert not train.owners
    assert sum(train.rows_of) == len(train.rows) < 60
    parts = {name: part for name, _, part in train.by_source()}
    for name, part in parts.items():
        alone = train.task.encode(part.examples, train.setting, labelled=True)
        assert [row["input_ids"] for row in part.rows] == [
            row["input_ids"] for row in alone.rows
        ], name
    metrics = held.task.evaluate(prepared.model, held, 8)
    scores = held.source_scores(prepared.model, 8, [], metrics)
    assert scores.keys() == {f"{name}/{metric}" for name in "ab" for metric in metrics}
    low, high = sorted((scores["a/loss"], scores["b/loss"]))
    assert low <= metrics["loss"] <= high
