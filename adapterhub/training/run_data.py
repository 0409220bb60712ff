"""The data of a run: task, examples and labels, read before the backbone is loaded."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterhub.backbones.find import default_backbone
from adapterhub.backbones.torch_free_checks import DEQUANTIZE, check_backbone_options
from adapterhub.data.docstrings import load_docstrings
from adapterhub.data.examples import (
    SHARE,
    Streamed,
    TooFewGroups,
    classes_in,
    hold_out,
    notes_on,
    notes_on_scores,
    notes_on_test,
    sample,
    strata_of,
)
from adapterhub.data.options import NO_GROUPS, DataOptions, case_note, unnamed_note
from adapterhub.data.row_stream import is_many_files, is_pattern, list_files
from adapterhub.data.sources import DataSource
from adapterhub.data.tables import has_split, is_on_hub, read_table
from adapterhub.data.text_stream import TextStream, open_stream
from adapterhub.errors import ConfigError, DataError, unknown
from adapterhub.files.native import Saved
from adapterhub.files.run_folder import backbone_of_adapter
from adapterhub.loop.processes import is_main, launcher_shards, process_count, readers
from adapterhub.methods.common.base import check_spec
from adapterhub.recipe.output_folder import RECIPE, check_output
from adapterhub.recipe.recipe import Equally, Recipe, parse_mixing, read
from adapterhub.registry.pull import pull
from adapterhub.status import reading
from adapterhub.tasks import Task, dump_task, parse_task
from adapterhub.tasks.common.distillation import DIVERGENCE
from adapterhub.tasks.common.infer_task import DEFAULT, USUAL_METHOD, task_by_data, usual_method
from adapterhub.training.sources import SourceRows
from adapterhub.training.stream import ExampleStream, mix_streams, open_examples
from adapterhub.training.task_mixture import TaskMixture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adapterhub.adapters.adapter import Adapter

BUILTIN = "builtin:docstrings"
NO_EVALUATION = "none"
_NOT_EVALUATED = "no evaluation: the adapter has the tensors of the last step"
_SCORED = re.compile(r"(?<![a-z])(?:(?P<test>test|holdout)|eval|dev|val|valid|validation)(?![a-z])")
STREAM_BATCH = 32  # rows: suits data of any larger size


@dataclass(frozen=True)
class RunData:
    """The examples of a run, its task and its labels.

    `task` and `options` come from the recipe; missing forms and columns are filled in from the
    data. `notes` are for the user, one line each. Without evaluation, `evaluation` is empty; `test`
    contains rows that choose nothing, or none, and `retain` rows of other data. With several
    tasks, `parts` contains the data by
    name; the examples are in the order of the tasks, and `labels` belong to the first task.
    `spec` is the task of the recipe or its replacement. `backbone` is set if the recipe does not
    name one. `chosen` has a line about each choice. `sources` lists the sources of the training
    rows in order, if there are several.
    """

    task: Task
    labels: tuple[str, ...]
    train: Sequence[Any]
    evaluation: Sequence[Any]
    options: DataOptions
    notes: tuple[str, ...] = ()
    parts: Mapping[str, RunData] = field(default_factory=dict)
    spec: object = None
    backbone: str = ""
    chosen: tuple[str, ...] = ()
    test: Sequence[Any] = ()
    retain: Sequence[Any] = ()
    sources: tuple[SourceRows, ...] = ()

    def completed(self, recipe: Recipe) -> Recipe:
        """Return the recipe completed by the task, backbone and method chosen for these data."""
        tasks = {
            name: replace(own, task=self.parts[name].spec) if own.task is None else own
            for name, own in recipe.tasks.items()
        }
        task = (self.spec or DEFAULT) if recipe.task is None else recipe.task
        backbone = recipe.backbone or self.backbone
        method = recipe.method
        if method is None and recipe.from_ is None:
            method = usual_method(self.head)
        return replace(recipe, task=task, tasks=tasks, backbone=backbone, method=method)

    @property
    def head(self) -> str:
        """The kind of model that the first task needs."""
        return next(iter(self.parts.values()), self).task.head

    def complete_options(self, recipe: Recipe) -> dict[str, Any]:
        """Return the complete options of a recipe, including those that depend on its data."""
        if not self.parts:
            return {"data": self.options, "task": dump_task(self.task)}
        tasks = {
            name: replace(own, task=dump_task(self.parts[name].task), data=self.parts[name].options)
            for name, own in recipe.tasks.items()
        }
        return {"tasks": tasks}

    def for_model(self, model: PreTrainedModel) -> RunData:
        """Return the data with the task options that depend on the backbone."""
        parts = {name: part.for_model(model) for name, part in self.parts.items()}
        task = self.task.for_model(model)
        if not (parts or self.streams):
            task = task.for_examples(self.train)
        note = task.model_note if task != self.task else ""
        return replace(self, task=task, parts=parts, notes=(*self.notes, *[note] * bool(note)))

    def typed_inputs(self) -> str:
        """Return the arguments to type after `adapterhub predict RUN`, for the first task."""
        head, first = next(iter(self.parts.items()), ("", self))
        second = f"a {first.task.pair_name}" if first.task.pair_name else "another"
        pair = f' --pair "{second}"' * (first.task.fields(first.options) != 1)
        return f"{f'--head {head} ' * bool(head)}{first.task.typed_input()}{pair}"

    @property
    def streams(self) -> bool:
        """Whether the training data are streamed from disk."""
        return isinstance(self.train, Streamed)

    @property
    def batch_size(self) -> int | None:
        """The default batch size, if the number of rows does not determine it."""
        return STREAM_BATCH if isinstance(self.train, ExampleStream) else None

    def notes_on_scores(self, source: str = "--{} FILE") -> tuple[str, ...]:
        """Return notes on scored rows that are too few or of a single class.

        `source` is the command-line text for a file of such rows.
        """
        own = {name: f"tasks.{name}.data.{{}}=FILE" for name in self.parts}
        if own:
            parts = ((n, note) for n in own for note in self.parts[n].notes_on_scores(own[n]))
            return tuple(f"{name}: {note}" for name, note in parts)
        scored = (("evaluation", "eval", self.evaluation), ("test", "test", self.test))
        return tuple(
            note
            for what, option, rows in scored
            if len(rows) and not isinstance(rows, Streamed)
            for note in notes_on_scores(
                len(rows), classes_in(rows, self.labels), what, source.format(option)
            )
        )

    def counts(self, purpose: str) -> tuple[int, ...]:
        """Return the number of "training", "evaluation" or "test" examples of each source."""
        name = "train" if purpose == "training" else purpose
        return tuple(getattr(source, name) for source in self.sources)

    def some(self, most: int) -> Sequence[Any]:
        """Return about `most` training examples; for a stream, the first ones."""
        if isinstance(self.train, ExampleStream):
            return self.train.head[:most]
        return self.train[:: max(1, len(self.train) // most)]


def read_data(recipe: Recipe) -> RunData:
    """Read the examples of a recipe; hold out some if evaluation data are missing.

    Raises:
        ConfigError: an option needs an evaluation, which is missing; or it is invalid or missing
            for a stream.
        DataError: the data is missing or broken, or does not fit the task.
    """
    data = _read(recipe)
    if not recipe.backbone:
        data = _with_backbone(recipe, data)
    return _with_method(data) if recipe.method is None and recipe.from_ is None else data


def _with_method(data: RunData) -> RunData:
    """Note the method that is chosen for a language model."""
    if (method := usual_method(data.head)) == USUAL_METHOD:
        return data
    note = f"method: {method}, for a language model; another one: --method SPEC"
    return replace(data, chosen=(*data.chosen, f"{note} (adapterhub methods)"))


def _read(recipe: Recipe) -> RunData:
    if recipe.tasks:
        data = _read_tasks(recipe)
    elif recipe.data.stream:
        if recipe.task is None:  # rows after the first ones cannot be inspected
            recipe = replace(recipe, task=DEFAULT)
        location = recipe.data.location
        text = parse_task(recipe.task).streams and not is_many_files(location)
        text = text and not recipe.data.several
        data = (_streamed_text if text else _streamed_rows)(recipe)
    elif recipe.data.several:
        data = _data_of_sources(recipe)
    else:
        data = _table_data(recipe)
    check_options(recipe, data)
    if not recipe.tasks:
        data = replace(data, notes=(*data.notes, *_notes_on_names(recipe.data)))
    return _with_retained(recipe, data) if recipe.data.retain else data


def _notes_on_names(options: DataOptions) -> tuple[str, ...]:
    """Return notes on training files that are named like data to score."""
    files = [
        file
        for source in options.sources
        for file in (list_files(source.path) if _is_local_pattern(source.path) else (source.path,))
    ]
    named = {file: match for file in files if (match := _SCORED.search(Path(file).stem.lower()))}
    if len(named) == len(files):  # the user has no other ones
        return ()
    flags = {file: "--test" if match["test"] else "--eval" for file, match in named.items()}
    return tuple(
        f"{file} is trained on, too; to score on it instead: {flag} {file}"
        for file, flag in list(flags.items())[:3]
    )


def _is_local_pattern(location: str) -> bool:
    return is_pattern(location) and "://" not in location


def _with_retained(recipe: Recipe, data: RunData) -> RunData:
    """Read the rows that are scored with the adapter off and on.

    Raises:
        ConfigError: the run has several tasks.
        DataError: the rows cannot be read, or do not fit the task.
    """
    source = str(recipe.data.retain)
    if data.parts:
        raise ConfigError(
            f"data.retain={source} in a run with several tasks",
            expected="one task, which reads these rows too",
            hint="adapterhub eval RUN --data FILE --against-backbone --head NAME, after the run",
        )
    other = replace(recipe.data, text=None, pair=None, label=None)  # its own columns
    task, choice = data.task.fitted(source, other, "eval")
    rows = task.read(source, choice.options, "eval")
    data.task.check(data.labels, rows)
    return replace(data, retain=rows, notes=(*data.notes, *choice.notes))


def _with_backbone(recipe: Recipe, data: RunData) -> RunData:
    """Choose the backbone of the adapter to start from or build on, or one for the task."""
    if trained := [name for name in (recipe.from_, *recipe.on) if name]:
        folder = pull(trained[0])
        backbone, place = backbone_of_adapter(folder, Saved.at(folder).manifest)[0], trained[0]
    else:
        backbone, place = default_backbone(data.head)
    note = f"backbone: {backbone} ({place}); another one: --backbone ID (adapterhub backbones)"
    return replace(data, backbone=backbone, chosen=(*data.chosen, note))


def _table_data(recipe: Recipe) -> RunData:
    """Read the examples of a recipe into memory; hold out some if evaluation data are missing."""
    reader = _Reader(recipe.task, recipe.data)
    read = reader.read(recipe.data.location, "train")
    train = sample_rows(reader.task, read, recipe.data.rows, recipe.seed)
    total = len(train)
    train, evaluation = _with_evaluation(reader, recipe, train)
    train, test = _with_test(reader, recipe, train, total)
    labels = _labels(reader.task, train, recipe.data.label_names)
    reader.task.check(labels, evaluation)
    reader.task.check(labels, test)
    notes = (
        *reader.notes,
        *notes_on(train, evaluation, labels),
        *notes_on_test(train, test, labels),
        *case_note(labels),
        *unnamed_note(labels),
    )
    task = reader.task.drawn(train, recipe.seed)
    data = RunData(task, labels, train, evaluation, reader.options, notes)
    return replace(data, spec=reader.spec, chosen=tuple(reader.chosen), test=test)


def _data_of_sources(recipe: Recipe) -> RunData:
    """Read several sources into memory, each with its columns; hold out some rows of each.

    Raises:
        ConfigError: an option needs a single source.
        DataError: a source is missing or broken, or shares no label with the others.
    """
    _check_sources(recipe)
    options, parts = recipe.data, list[_SourcePart]()
    for source in options.sources:
        parts.append(_read_source(recipe, source, parts[0].reader if parts else None))
    first = parts[0].reader
    task, spec = _joined((part.source.path, part.reader.task) for part in parts), first.spec
    train, evaluation, test = (
        [example for part in parts for example in getattr(part, name)]
        for name in ("train", "evaluation", "test")
    )
    notes = [f"{part.source.name}: {note}" for part in parts for note in part.reader.notes]
    shared = _Reader(task, options)
    if options.eval not in (None, NO_EVALUATION):
        evaluation += _fewer(task, shared.read(options.eval, "eval"), recipe, notes)
    elif options.eval == NO_EVALUATION and not evaluation:
        notes.append(_NOT_EVALUATED)
    elif not evaluation:
        raise parts[0].too_few or TooFewGroups("there are no evaluation rows")
    if options.test_file:
        test += shared.read(options.test_file, "eval")
    labels = _labels(task, train, options.label_names)
    notes += _check_label_sets(task, parts, labels, named=bool(options.label_names))
    task.check(labels, evaluation)
    task.check(labels, test)
    notes += [*shared.notes, *notes_on(train, evaluation, labels)]
    notes += [*notes_on_test(train, test, labels), *case_note(labels), *unnamed_note(labels)]
    task = task.drawn(train, recipe.seed)
    kept = {name: getattr(options, name) for name in ("train", "eval", "rows", "labels")}
    kept |= {"test": options.test, "eval_rows": options.eval_rows}
    data = RunData(task, labels, train, evaluation, replace(first.options, **kept), tuple(notes))
    rows = tuple(part.rows for part in parts)
    return replace(data, spec=spec, chosen=tuple(first.chosen), test=test, sources=rows)


@dataclass
class _SourcePart:
    """The examples of one of several sources, and the reader that read them."""

    source: DataSource
    reader: _Reader
    train: list[Any]
    evaluation: list[Any]
    test: list[Any]
    places: dict[str, str]
    too_few: TooFewGroups | None = None

    @property
    def rows(self) -> SourceRows:
        """The numbers of the examples."""
        counts = len(self.train), len(self.evaluation), len(self.test)
        return SourceRows(str(self.source.name), self.source.path, self.source.weight, *counts)


def _read_source(recipe: Recipe, source: DataSource, first: _Reader | None) -> _SourcePart:
    """Read one of several sources, and hold out some of its rows if it has enough of them."""
    options = recipe.data.of_source(source)
    most = options.eval_rows and max(options.eval_rows // len(recipe.data.sources), 1)
    options = replace(options, eval=source.eval, eval_rows=most)
    own = replace(recipe, data=options)
    reader = _Reader(first.spec if first else recipe.task, options)
    read = reader.read(source.path, "train")
    places = _places_of_labels(reader, read, source.path)
    if source.rows is not None and source.rows > len(read):
        reader.notes.append(f"all its {len(read):,} rows, which are fewer than {source.rows:,}")
    train = sample_rows(reader.task, read, source.rows, recipe.seed)
    part = _SourcePart(source, reader, train, [], [], places)
    try:
        if source.eval is not None or recipe.data.eval is None:
            part.train, part.evaluation = _with_evaluation(reader, own, part.train)
        if options.test_share:
            part.train, part.test = _with_test(reader, own, part.train, len(train))
    except TooFewGroups as error:
        part.too_few = error
        reader.notes.append(f"{error.problem}: all are trained on")
    return part


def _joined(tasks: Iterable[tuple[str, Task]]) -> Task:
    """Return the task of all sources, whose own ones are given with their paths.

    Raises:
        DataError: the sources have forms that no task learns together.
    """
    (first, task), *others = tasks
    for path, other in others:
        both = task.joined(other)
        if both is None:
            raise DataError(
                f"{path} has another form than {first}",
                offenders=[f"{first}: {dump_task(task)}", f"{path}: {dump_task(other)}"],
                expected="sources of one form",
            )
        task = both
    return task


def _places_of_labels(reader: _Reader, examples: Sequence[Any], path: str) -> dict[str, str]:
    """Return the place of the first example of each label, for errors."""
    labels = set(reader.task.labels(examples))
    places = reader.places if len(reader.places) == len(examples) else []
    first_places: dict[str, str] = {}
    for number, example in enumerate(examples):
        if len(first_places) == len(labels):
            break
        for label in reader.task.labels([example]):
            first_places.setdefault(label, places[number] if places else path)
    return first_places


def _check_label_sets(
    task: Task, parts: Sequence[_SourcePart], labels: Sequence[str], *, named: bool
) -> list[str]:
    """Return a note on labels that some sources lack.

    Raises:
        DataError: a source shares no label with the others, and none are named.
    """
    if not labels or not task.has_labels:
        return []
    shared = Counter(label for part in parts for label in part.places)
    apart = [part for part in parts if all(shared[label] == 1 for label in part.places)]
    if apart and not named:
        raise DataError(
            "the sources of data.train have different labels",
            offenders=[
                f"{label!r}: only {place}" for part in apart for label, place in part.places.items()
            ],
            expected="the same labels in each source, or all of them named in order",
            hint=f"--labels {','.join(labels[:4])}{',...' * (len(labels) > 4)}, if they are "
            "different classes; or data.train=[{path: FILE, labels: '0=no,1=yes'}, ...]",
        )
    alone = [label for label in labels if shared[label] < len(parts)]
    if not alone:
        return []
    places = {label: place for part in parts for label, place in part.places.items()}
    shown = ", ".join(f"{label!r} ({places[label]})" for label in alone[:3] if label in places)
    return [f"{len(alone):,} of {len(labels):,} labels are not in all sources: {shown}"]


def _check_sources(recipe: Recipe) -> None:
    """Check that no option needs a single source.

    Raises:
        ConfigError: some options do.
    """
    data = recipe.data
    paths = [each.path for each in data.sources]
    problems = {
        "builtin:docstrings is one of them": BUILTIN in paths,
        "data.train_target is set": data.train_target is not None,
        "data.eval_target is set": data.eval_target is not None,
    }
    if data.stream:
        sized = parse_mixing(recipe.mixing) if recipe.mixing is not None else None
        problems |= {
            f"{each.path}#{each.rows}: a stream does not count its rows": each.rows is not None
            for each in data.sources
        }
        problems["mixing depends on the rows of each source, which a stream does not count"] = (
            sized is not None and not isinstance(sized, Equally)
        )
    if wrong := [problem for problem, applies in problems.items() if applies]:
        raise ConfigError(
            f"data.train has {len(paths)} sources",
            offenders=wrong,
            expected="files or datasets with columns, mixed by weight"
            if data.stream
            else "files or datasets with columns",
        )


def one_source(recipe: Recipe, purpose: str) -> None:
    """Check that a recipe has a single source, which a purpose needs, such as "a study".

    Raises:
        ConfigError: the recipe has several.
    """
    for data in (recipe.data, *(own.data for own in recipe.tasks.values())):
        if data.several:
            raise ConfigError(
                f"{purpose} with {len(data.sources)} sources in data.train: {data.location}",
                expected="one file, pattern or dataset",
                hint="data.train=FILE",
            )


def _streamed_text(recipe: Recipe) -> RunData:
    """Stream the raw text of a recipe; hold out some of it if evaluation data are missing."""
    _check_stream_test(recipe)
    options, notes = recipe.data, []
    train = open_stream(options.location, options)
    if options.rows is not None and options.rows < train.documents:
        train = train.drawn(options.rows, recipe.seed)
    held: TextStream | None = None
    if options.eval is None:
        total = train.documents
        train, held = train.held_out(recipe.seed)
        notes.append(f"no evaluation data: {held.documents:,} of {total:,} documents are held out")
    elif options.eval == NO_EVALUATION:
        notes.append(_NOT_EVALUATED)
    else:
        held = open_stream(options.eval, options)
    if held and options.eval_rows and options.eval_rows < held.documents:
        held = held.drawn(options.eval_rows, recipe.seed)
        notes.append(f"evaluating on {held.documents:,} documents, by data.eval_rows")
    test = open_stream(options.test_file, options) if options.test_file else ()
    task, spec = parse_task(recipe.task), recipe.task
    return RunData(task, (), train, held or [], options, tuple(notes), spec=spec, test=test)


def _streamed_rows(recipe: Recipe) -> RunData:
    """Open the rows of a recipe as a stream, and read its evaluation data."""
    _check_stream(recipe)
    _check_stream_test(recipe)
    options, train = recipe.data, recipe.train
    stream, notes = _open_stream(recipe)
    task, options = stream.task, replace(stream.options, train=options.train)
    _, world = readers(train.tensor_parallel)
    per_step = (train.batch_size or STREAM_BATCH) * train.gradient_accumulation * world
    stream = replace(stream, epoch=int(train.max_steps or 0) * per_step)
    labels = tuple(options.label_names.values())
    if labels and task.labels(stream.head):
        stream.read_through()
    else:
        labels = stream.labels()
    evaluation, sources = _evaluated_sources(recipe, task, stream)
    noted = [*notes, *unnamed_note(labels)]

    def read(source: str, split: str, most: int | None) -> list[Any]:
        own = recipe.data if sources else options  # guessed again: the sources have other columns
        if is_many_files(source):
            return _first_rows(source, own, task, most)
        own = task.fitted(source, own, split)[1].options if sources else own
        return task.read(source, own, split)

    if options.eval in (None, NO_EVALUATION):
        noted += [_NOT_EVALUATED] * (not evaluation)
    elif is_many_files(str(options.eval)):
        evaluation += read(str(options.eval), "eval", options.eval_rows)
    else:
        evaluation += _fewer(task, read(str(options.eval), "eval", None), recipe, noted)
    test: list[Any] = []
    if options.test_file:
        many = is_many_files(options.test_file)
        test = read(options.test_file, "eval" if many else _test_split(options), None)
    task.check(labels, evaluation)
    task.check(labels, test)
    notes, spec = tuple(noted), recipe.task
    data = RunData(task, labels, stream, evaluation, options, notes, spec=spec, test=test)
    return replace(data, sources=sources)


def _open_stream(recipe: Recipe) -> tuple[ExampleStream, tuple[str, ...]]:
    """Open the rows of a recipe; several sources are interleaved by their weights."""
    options, task = recipe.data, parse_task(recipe.task)
    if not options.several:
        return open_examples(options.location, options, task)
    _check_sources(recipe)
    opened = [open_examples(each.path, options.of_source(each), task) for each in options.sources]
    weights = [each.weight for each in options.sources]
    joined = _joined((stream.location, stream.task) for stream, _ in opened)
    named = zip(options.sources, opened, strict=True)
    notes = tuple(f"{source.name}: {note}" for source, (_, remarks) in named for note in remarks)
    mixed = mix_streams([stream for stream, _ in opened], weights)
    return replace(mixed, task=joined), notes


def _evaluated_sources(
    recipe: Recipe, task: Task, stream: ExampleStream
) -> tuple[list[Any], tuple[SourceRows, ...]]:
    """Read the evaluation rows that streamed sources have for themselves."""
    examples: list[Any] = []
    rows: list[SourceRows] = []
    sources = recipe.data.sources if recipe.data.several else ()
    for source, part in zip(sources, stream.parts, strict=bool(sources)):
        own: list[Any] = []
        if source.eval is not None:
            most = recipe.data.eval_rows
            own = (
                _first_rows(source.eval, part.options, task, most)
                if is_many_files(source.eval)
                else task.read(source.eval, part.options, "eval")
            )
            own = sample_rows(task, own, most, recipe.seed)
        examples += own
        rows.append(SourceRows(str(source.name), source.path, source.weight, 0, len(own)))
    return examples, tuple(rows)


def _first_rows(source: str, options: DataOptions, task: Task, most: int | None) -> list[Any]:
    """Read the first rows of many files, or all of them."""
    rows, _ = open_examples(source, options, task, "eval")
    return list(islice(replace(rows, task=task), most))


def _check_stream_test(recipe: Recipe) -> None:
    """Check that a recipe does not hold out a share of a stream for testing.

    Raises:
        ConfigError: the recipe does.
    """
    if recipe.data.test_share:
        raise ConfigError(
            f"data.test={recipe.data.test_share:g} with data.stream=true: a stream has no shares",
            expected="test data of their own",
            hint="--test FILE",
        )


def _check_stream(recipe: Recipe) -> None:
    """Check that a recipe for a stream neither depends on the number of rows nor needs all rows.

    Raises:
        ConfigError: the recipe does.
    """
    task, train, data = parse_task(recipe.task), recipe.train, recipe.data
    problems = {
        "train.max_steps is missing: the number of rows is not known": train.max_steps is None,
        "train.epochs is set: a stream has no epochs": train.epochs is not None,
        "data.eval is missing: no rows are held out of a stream":
            data.eval is None and not (data.several and any(s.eval for s in data.sources)),
        "data.rows is set: train.max_steps determines the number of rows": data.rows is not None,
        "data.train_target is set: a stream has rows": data.train_target is not None,
        "shots are drawn from all rows, which a stream has not":
            task.draws_shots,
        f"{task.name} compares with a reference, which is computed of all rows beforehand":
            task.compares_with_reference,
    }  # fmt: skip
    if wrong := [problem for problem, applies in problems.items() if applies]:
        raise ConfigError(
            f"data.stream=true with {task.name} on {data.location}",
            offenders=wrong,
            expected="a number of steps, evaluation data or none, and a task that reads rows",
            hint="--steps N --eval FILE (or --eval none)",
        )


def _read_tasks(recipe: Recipe) -> RunData:
    """Read the data of several tasks, each as for a separate run."""
    if streamed := [name for name, own in recipe.tasks.items() if own.data.stream]:
        raise ConfigError(
            f"data.stream=true for {', '.join(streamed)} in a run with several tasks",
            expected="a stream for a run with one task: the shares of tasks follow their rows",
            hint="one task, or data.stream=false",
        )
    one_source(recipe, "a run with several tasks")
    parts = {name: _read(recipe.of_task(name)) for name in recipe.tasks}
    weights = {name: own.weight for name, own in recipe.tasks.items()}
    first = next(iter(parts.values()))
    return RunData(
        TaskMixture({name: part.task for name, part in parts.items()}, weights),
        first.labels,
        [example for part in parts.values() for example in part.train],
        [example for part in parts.values() for example in part.evaluation],
        recipe.data,
        tuple(f"{name}: {note}" for name, part in parts.items() for note in part.notes),
        parts,
        chosen=tuple(f"{name}: {note}" for name, part in parts.items() for note in part.chosen),
        test=[example for part in parts.values() for example in part.test],
    )


def check_options(recipe: Recipe, data: RunData) -> None:
    """Check that the data allow the training options.

    Raises:
        ConfigError: a metric is unknown, an option needs an evaluation, which is missing, or the
            task or the teacher excludes an option.
    """
    if not data.evaluation:
        _check_no_evaluation(recipe)
    else:
        names = metric_names(data, recipe)
        _check_metric(data.task, recipe.train.best_metric, names)
    if recipe.teacher.model is not None:
        _check_teacher(recipe, data)
    _check_on_policy(recipe, data)


def metric_names(data: RunData, recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the metrics of an evaluation; with a teacher, of the divergence too."""
    names = data.task.metric_names(data.evaluation)
    scored = (source.name for source in data.sources if source.evaluation)
    names = (*names, *(f"{source}/{name}" for source in scored for name in names))
    return (*names, DIVERGENCE) if recipe.teacher.model is not None else names


def _check_teacher(recipe: Recipe, data: RunData) -> None:
    """Check that a task can be learned from a teacher.

    Raises:
        ConfigError: it cannot, or the student cannot sample its responses.
    """
    teacher = recipe.teacher
    excluded = {
        "several tasks": bool(data.parts),
        "train.shard=true": bool(recipe.train.shard),
        "train.tensor_parallel=true": recipe.train.tensor_parallel,
        "new_tokens, which the teacher lacks": bool(recipe.new_tokens),
        "teacher.on_policy with data.stream=true": bool(teacher.on_policy) and data.streams,
    }
    offenders = [name for name, applies in excluded.items() if applies]
    if offenders := [*offenders, *([] if data.parts else teacher.problems(data.task))]:
        raise ConfigError(
            "these cannot be used with a teacher (--teacher)",
            offenders=offenders,
            hint="leave out these, or --teacher",
        )


def _check_on_policy(recipe: Recipe, data: RunData) -> None:
    """Check that a run can generate the texts of its batches.

    Raises:
        ConfigError: the model is sharded, the rows are streamed, or there are several tasks.
    """
    tasks = [part.task for part in data.parts.values()] or [data.task]
    names = ", ".join(task.name for task in tasks if task.on_policy)
    reasons = {
        "several tasks (tasks)": bool(data.parts),
        "a sharded model (train.shard)": bool(recipe.train.shard),
        "streamed rows (data.stream)": data.streams,
    }
    if names and (excluded := [reason for reason, applies in reasons.items() if applies]):
        raise ConfigError(
            f"{names} generates texts while it trains, which excludes {', '.join(excluded)}",
            expected="one task, whole rows, and a model that each process has",
        )


def check_attached(data: RunData, adapter: Adapter) -> None:
    """Check that an adapter can be trained and scored with the data.

    Raises:
        ConfigError: its virtual tokens precede packed texts, or rows to retain need its head.
    """
    virtual = {p.method.name for p in adapter.placed if p.site.kind == "embed"}
    if data.task.packs and virtual:
        raise ConfigError(
            f"{', '.join(virtual)} prepends virtual tokens to each row, where only the first of "
            "its packed texts can attend to them",
            hint="pack=false",
        )
    if data.retain and adapter.all_heads():
        raise ConfigError(
            f"data.retain scores the backbone with the adapter off, and {data.task.name} needs the "
            "head that is trained with it",
            expected="a task of a language model, which needs no head",
            hint="leave out --retain (data.retain)",
        )


def _with_evaluation(
    reader: _Reader, recipe: Recipe, train: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the training and evaluation examples, read or held out."""
    source = _evaluation_source(reader.options)
    if source is not None:
        evaluation = reader.read(source, "eval")
    elif recipe.data.eval == NO_EVALUATION:
        evaluation = []
        reader.notes.append(_NOT_EVALUATED)
    else:
        train, evaluation, note = divide(reader.task, train, reader.options, recipe.seed)
        reader.notes.append(f"no evaluation data: {note}")
    return train, _fewer(reader.task, evaluation, recipe, reader.notes)


def _with_test(
    reader: _Reader, recipe: Recipe, train: list[Any], total: int
) -> tuple[list[Any], list[Any]]:
    """Return the training and test examples; test rows come from a file or are held out of `total`.

    They are held out after the evaluation rows, which are the same with and without them.

    Raises:
        ConfigError: a file of texts whose targets are in another file.
        DataError: there are too few examples.
    """
    options = recipe.data
    if options.test_share:
        rows = max(round(options.test_share * total), 1)
        train, test, note = divide(
            reader.task, train, options, recipe.seed, rows=rows, flag="--test", total=total
        )
        reader.notes.append(f"{note} to test, by data.test")
        return train, test
    if not options.test_file:
        return train, []
    if options.train_target:
        raise ConfigError(
            f"data.test={options.test_file} beside data.train_target: which file has its targets?",
            expected="a share of the training rows, or one file with texts and targets",
            hint="--test 0.1",
        )
    return train, reader.read(options.test_file, _test_split(reader.options))


def _test_split(options: DataOptions) -> str:
    """Return the split of test data that has splits: "test" if it exists."""
    source = str(options.test_file)
    has_test = is_on_hub(source, options) and has_split(source, options, "test")
    return "test" if has_test else "eval"


def divide(
    task: Task,
    examples: list[Any],
    options: DataOptions,
    seed: int,
    share: float = SHARE,
    *,
    rows: int | None = None,
    flag: str = "--eval",
    total: int = 0,
) -> tuple[list[Any], list[Any], str]:
    """Hold out whole groups; return the remaining rows, the held-out rows and a note.

    Groups are defined by the data (`data.group`) or the task, such as queries. If a task has too
    few groups, rows of equal content form groups, and the note reports it.

    Raises:
        TooFewGroups: there are too few rows, or too few groups that are named by the data or
            ranked.
    """
    strata = strata_of(examples) if task.labels(examples) else [None] * len(examples)
    take = partial(hold_out, examples, seed, strata, share, rows=rows, flag=flag)
    groups, named = task.groups_of(examples), options.group not in (None, NO_GROUPS)
    name = f"values of {options.group!r}" if named else task.groups
    count, few = len(set(groups)), ""
    try:
        kept, held = take(groups=None if options.group == NO_GROUPS else groups)
    except TooFewGroups as error:
        if len(examples) > count and (named or task.ranks_groups):
            raise TooFewGroups(
                f"too few {name} to hold some out: {count:,}, in {len(examples):,} rows",
                expected=f"more {name}, none of them with most of the rows, which stay together",
                hint=f"{flag} FILE, or --group none: a part of the rows of each is then held out",
            ) from error
        kept, held = take()
        few = f"; {name} are too few ({count:,}) to hold whole ones out: the scores are too good"
    labels = ", in the same shares of each label" if any(strata) else ""
    by = f", those of {len(set(task.groups_of(held))):,} of {count:,} {name}"
    by = by if count < len(examples) and not few and options.group != NO_GROUPS else ""
    rows_of = f"{len(held):,} of {total or len(examples):,} rows are held out"
    return kept, held, f"{rows_of}{by}{labels}{few}"


def _labels(task: Task, train: list[Any], names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the labels in the order of the logits; named labels keep the order of their names."""
    if names and not task.has_labels:
        raise ConfigError(
            f"{task.name} has no labels to name", hint="leave out --labels (data.labels)"
        )
    labels = task.labels(train)
    return tuple(names.values()) if labels and names else labels


def _check_metric(task: Task, metric: str | None, names: Sequence[str]) -> None:
    if metric is not None and metric not in names:
        raise unknown(
            "metric", metric, names, hint=f"train.best_metric={task.main_metric}, the default"
        )


class _Reader:
    """Reads the sources of a run one after the other, all with the columns of the first one."""

    def __init__(self, spec: object, options: DataOptions) -> None:
        self.spec, self.options = spec, options
        self.task = parse_task(DEFAULT if spec is None else spec)
        self.notes: list[str] = []
        self.chosen: list[str] = []
        self.places: list[str] = []  # of the rows read last, for errors

    def read(self, source: str | None, split: str) -> list[Any]:
        if source is not None and is_pattern(source):
            return self._read_files(source, split)
        if BUILTIN in (source, self.options.train):
            self.spec = self.spec or DEFAULT
            # The built-in rows have no columns; these are the usual names, for data to predict on.
            self.options = replace(
                self.options, text=self.options.text_column, label=self.options.label_column
            )
            return load_docstrings()[("train", "eval").index(split)]
        assert source is not None
        if self.spec is None:
            table = read_table(source, self.options, split)
            self.spec, reason = task_by_data(table, self.options)
            self.task = parse_task(self.spec)
            line = f"task: {self.spec}, for {reason}; another one: --task NAME (adapterhub tasks)"
            self.chosen += [line] * bool(reason)
        self.task, choice = self.task.fitted(source, self.options, split)
        self.options = choice.options
        examples = self.task.read(source, choice.options, split)
        self.notes += [note for note in choice.notes if note not in self.notes]
        if choice.table is not None and split == "train":
            self.notes += choice.table.unused_note(choice.notes)
        if choice.table is not None and (skipped := len(choice.table.lines) - len(examples)) > 0:
            rows = f"{skipped:,} of {len(choice.table.lines):,} rows"
            self.notes.append(f"{rows} with an empty text or label are skipped")
        self.places = choice.places(len(examples))
        return examples

    def _read_files(self, pattern: str, split: str) -> list[Any]:
        """Read the files of a pattern in order, with notes on the first one."""
        examples, places, shown = list[Any](), list[str](), 0
        files = list_files(pattern)
        for number, file in enumerate(files):
            examples += self.read(file, split)
            places += self.places
            shown = shown if number else len(self.notes)
        self.notes[shown:] = [f"{pattern}: {len(files):,} files, {len(examples):,} rows"]
        self.places = places
        return examples


def _evaluation_source(options: DataOptions) -> str | None:
    """Return the evaluation source: the `eval` option, or the split of a dataset on the Hub."""
    if options.eval not in (None, NO_EVALUATION):
        return options.eval
    train = options.location
    if options.eval == NO_EVALUATION:
        return None
    if train == BUILTIN:
        return BUILTIN
    on_hub = is_on_hub(train, options) and has_split(train, options, options.eval_split)
    return train if on_hub else None


def _fewer(task: Task, evaluation: list[Any], recipe: Recipe, notes: list[str]) -> list[Any]:
    """Sample the evaluation rows, if the recipe limits them."""
    most = recipe.data.eval_rows
    if most is None or most >= len(evaluation):
        return evaluation
    some = sample_rows(task, evaluation, most, recipe.seed)
    notes.append(f"evaluating on {len(some):,} of {len(evaluation):,} rows, by data.eval_rows")
    return some


def sample_rows(task: Task, examples: list[Any], most: int | None, seed: int) -> list[Any]:
    """Sample examples; if rows are ranked within groups, sample whole groups, at least one.

    Raises:
        DataError: `most` is less than 1.
    """
    if not task.ranks_groups or most is None or not 1 <= most < len(examples):
        return sample(examples, most, seed)
    groups = task.groups_of(examples)
    sizes = Counter(groups)
    names = random.Random(seed).sample(list(sizes), len(sizes))
    ends = accumulate(sizes[name] for name in names)
    kept = {name for name, end in zip(names, ends, strict=True) if end <= most} or {names[0]}
    return [example for example, group in zip(examples, groups, strict=True) if group in kept]


def _check_no_evaluation(recipe: Recipe) -> None:
    """Check that no option needs evaluations.

    Raises:
        ConfigError: some options do.
    """
    train = recipe.train
    needed = {"train.patience": train.patience, "train.best_metric": train.best_metric,
              "data.eval_rows": recipe.data.eval_rows}  # fmt: skip
    if wrong := [f"{name}={value}" for name, value in needed.items() if value is not None]:
        raise ConfigError(
            "these options need an evaluation, and --eval is none",
            offenders=wrong,
            hint="leave them out, or --eval FILE; without --eval, rows are held out",
        )


def check_run(recipe: Recipe, resume: bool, *, dry: bool = False) -> RunData:
    """Check a recipe and its files, and return its data; write nothing and do not import torch.

    With `dry`, nothing will be written, so the output folder is not checked.

    Raises:
        AdapterhubError: of any type; the cheapest checks come first.
    """
    check_recipe(recipe, resume, dry=dry)
    options = [own.data for own in recipe.tasks.values()] or [recipe.data]
    with reading(", ".join(each.location for each in options)):
        return read_data(recipe)


def check_recipe(recipe: Recipe, resume: bool, *, dry: bool = False) -> Recipe:
    """Check the parts of a recipe that do not need data, and return it as `placed`.

    Raises:
        AdapterhubError: of any type; the cheapest checks come first.
    """
    recipe = placed(recipe)
    if resume and recipe.method is None and recipe.from_ is None:
        recipe = replace(recipe, method=_method_of(Path(recipe.output)))
    check_trackers(recipe.train.tracker)
    if is_main() and not dry:
        check_output(Path(recipe.output), resume)
    if recipe.method is not None:
        check_spec(recipe.method)  # type: ignore[arg-type]
    for spec in (recipe.task, *(own.task for own in recipe.tasks.values())):
        if spec is not None:
            parse_task(spec)
    if recipe.backbone:
        check_backbone_options(recipe.backbone, recipe.dtype, recipe.quantize)
    return recipe


def _method_of(output: Path) -> object:
    """Return the method of the run in a folder, chosen by the release that began it."""
    try:
        return read(output / RECIPE).method if (output / RECIPE).exists() else None
    except ConfigError:
        return None


def placed(recipe: Recipe) -> Recipe:
    """Return a recipe with `train.shard` resolved to true or null.

    Raises:
        ConfigError: parameters cannot be sharded, or the launcher is configured differently.
    """
    launched, option = launcher_shards(), recipe.train.shard
    shard = launched if option is None else option
    if shard:
        _check(recipe)
    if recipe.train.tensor_parallel:
        _check_tensor_parallel(recipe, sharded=shard)
    return replace(recipe, train=replace(recipe.train, shard=shard or None))


def _check(recipe: Recipe) -> None:
    from adapterhub.backbones.quantized import sharded_codes  # imports torch

    if offenders := list(_unsharded(recipe, sharded_codes())):
        raise ConfigError(
            "these options cannot be used with sharded parameters (train.shard=true)",
            offenders=offenders,
        )
    if process_count() == 1:
        raise ConfigError(
            "train.shard=true divides the parameters over processes, and there is only one",
            hint="torchrun --nproc-per-node N -m adapterhub train ..., or train.shard=false",
        )


def _check_tensor_parallel(recipe: Recipe, *, sharded: bool) -> None:
    offenders = list(_unsharded(recipe, ())) + ["train.shard=true: FSDP2"] * sharded
    if recipe.new_tokens:
        offenders.append("new_tokens: they resize a divided embedding")
    if offenders:
        raise ConfigError(
            "these options cannot be used with train.tensor_parallel=true", offenders=offenders
        )
    if process_count() == 1:
        raise ConfigError(
            "train.tensor_parallel=true divides projections over processes, and there is only one",
            hint="torchrun --nproc-per-node N -m adapterhub train ..., or "
            "train.tensor_parallel=false",
        )


def _unsharded(recipe: Recipe, codes: Sequence[str]) -> Iterator[str]:
    """Yield the options that do not support sharded parameters, and their alternatives.

    `codes` are the quantizations that can be sharded.
    """
    options = recipe.train
    if options.optimizer != "adamw":
        yield f"train.optimizer={options.optimizer}: it needs whole tensors; use adamw"
    if options.mixed_precision == "fp16":
        yield "train.mixed_precision=fp16: loss scaling; use bf16"
    if recipe.quantize not in (None, DEQUANTIZE, *codes):
        instead = f"use {' or '.join(codes)}" if codes else "use train.shard=true (FSDP2)"
        yield f"quantize={recipe.quantize}: its scales; {instead}"


_PIP = {"comet_ml": "comet-ml"}  # packages whose name differs from their module
_OWN = "tensorboard"  # written by loop/report.py


def check_trackers(names: Iterable[str]) -> None:
    """Check that trackers are known and installed.

    Raises:
        ConfigError: a tracker is unknown or not installed.
    """
    if not (chosen := tuple(names)):
        return
    from accelerate import tracking

    available = {str(name) for name in tracking.get_available_trackers()}
    for name in chosen:
        if name == _OWN:
            raise ConfigError(
                "TensorBoard is not a train.tracker", hint="train.tensorboard=true, the default"
            )
        if name not in tracking.LOGGER_TYPE_TO_CLASS:
            choices = sorted(str(n) for n in tracking.LOGGER_TYPE_TO_CLASS if n != _OWN)
            raise unknown("tracker", name, choices)
    if missing := [name for name in chosen if name not in available]:
        raise ConfigError(
            f"not installed: {', '.join(missing)}, named by train.tracker",
            hint=f"pip install {' '.join(_PIP.get(name, name) for name in missing)}",
        )
