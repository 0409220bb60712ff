"""The pages of the tasks: an index, and one page for each registered task.

What they say comes from the docstrings of the task's class and module, its options and columns, and
the classes of transformers.
"""

from __future__ import annotations

import inspect
import sys

import transformers

from adapterhub.anatomy import FAMILIES
from adapterhub.backbones.diffusion import TRAINED
from adapterhub.backbones.task_models import CAUSAL_LM, TASK_MODELS, TEXT_TO_IMAGE, TaskModel
from adapterhub.config.options import options_of
from adapterhub.data.columns import described_columns
from adapterhub.tasks import TASKS, Task
from adapterhub.tasks.common.base import aliases_of
from reference._docstrings import block, is_shown, linked, paragraphs
from reference._tables import escaped, options_table, table

# A backbone for the example of each kind of model.
BACKBONES = {
    CAUSAL_LM: "Qwen/Qwen3-0.6B",
    "seq2seq": "google-t5/t5-small",
    "image-classification": "google/vit-base-patch16-224",
    "image-text-to-text": "Qwen/Qwen2-VL-2B-Instruct",
    "audio-classification": "facebook/wav2vec2-base",
    "speech-recognition": "UsefulSensors/moonshine-tiny",
    TEXT_TO_IMAGE: "stabilityai/stable-diffusion-xl-base-1.0",
}
USUAL_BACKBONE = "google-bert/bert-base-uncased"
# How to import what writes a file, and to write one.
_WRITTEN = {
    "image": ("from PIL import Image", 'Image.new("RGB", (32, 32), (40 * i, 0, 0)).save(name)'),
    "audio": (
        "import numpy, soundfile",
        "soundfile.write(name, numpy.random.default_rng(i).normal(0, 0.1, 8000), 16000)",
    ),
}
_WRITTEN["prompt"] = _WRITTEN["image"]
MOST_NAMES = 8  # of columns, that a table lists


def pages() -> dict[str, str]:
    """Return the index and the page of each task."""
    return {"tasks/index.md": index()} | {f"tasks/{n}.md": page(n) for n in sorted(TASKS)}


def index() -> str:
    """Return the page that compares all tasks."""
    rows = [
        (f"[{n}]({n}.md)", escaped(t.summary), f"`{TASKS[n]().main_metric}`", _aliases(t))
        for n, t in sorted(TASKS.items())
    ]
    return f"""# Tasks

`--task NAME` on the command line, `task: NAME` in a recipe. A name may have options:
`--task "seq2seq(metric=rouge)"`.

{table(("task", "what it predicts", "best by", "also called"), rows)}
*Best by*: the metric that selects the best checkpoint, by default. What concerns all tasks
(lengths, names of labels, what is refused) is in [the guide](../guides/tasks.md).
"""


def _aliases(task: type[Task]) -> str:
    return ", ".join(f"`{alias}`" for alias in aliases_of(task.name)) or "-"


def page(name: str) -> str:
    """Return the page of a task."""
    task = TASKS[name]
    summary, *rest = paragraphs(inspect.getdoc(task) or "")
    _, steps, *notes = paragraphs(sys.modules[task.__module__].__doc__ or "")
    predictions = next(n for n, text in enumerate(rest) if text.startswith("`predict` "))
    data, printed = rest[:predictions], rest[predictions:]
    return f"""# {name}

{summary}

## Data

{_data(task, data)}
{_columns(task)}
More on files and columns: [data](../guides/data.md).

## Train

{_recipe(name, data)}
## What the model learns

{block(steps)}

{_paragraphs(notes)}

## Predict

{_paragraphs(printed[:1])}

{block(printed[1])}

The second line is that of `--json`, without the text.

## Metrics

{_metrics(task())}
## Options

{_options(task)}
## Backbones

{_backbones(task())}
"""


def _paragraphs(texts: list[str]) -> str:
    return "\n\n".join(block(text) if is_shown(text) else linked(text) for text in texts)


def data_file(data: list[str]) -> str:
    """Return the name of the file that a docstring shows rows of."""
    return data[0].partition("`")[2].partition("`")[0]


def _files(task: type[Task], rows: str) -> str:
    """Return the code that writes the files that rows name."""
    if not task.decodes:
        return ""
    names = [line.partition(",")[0] for line in rows.splitlines()[1:]]
    imports, code = _WRITTEN[task.input_name]
    return f"""
{imports}

for i, name in enumerate({names}):
    {code}
"""


def _data(task: type[Task], data: list[str]) -> str:
    """Return the rows as a file, and what is said of them; the tests evaluate on the same rows."""
    file = data_file(data)
    rows = inspect.cleandoc(data[1])
    return f"""{data[0]}

```text title="{file}"
{rows}
```

<!-- setup
import shutil
{_files(task, rows)}
shutil.copy("{file}", "{file.replace("train", "dev")}")
-->
{_paragraphs(data[2:])}
"""


def _columns(task: type[Task]) -> str:
    rows = []
    for option, (words, names) in described_columns(task.columns).items():
        shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
        more = ", ..." if len(names) > MOST_NAMES else ""
        rows.append((f"`data.{option}`", words, shown + more))
    return table(("option", "column", "found by itself if it is called"), rows)


def _recipe(name: str, data: list[str]) -> str:
    """Return an example recipe, and how to look at a row and train."""
    file = data_file(data)
    backbone = BACKBONES.get(TASKS[name]().head, USUAL_BACKBONE)
    return f"""```yaml title="recipe.yaml"
backbone: {backbone}
task: {name}
method: lora
data:
  train: {file}
  eval: {file.replace("train", "dev")}
output: runs/{name}
```

```console
$ adapterhub train recipe.yaml --show 1
```

This prints a row as the model gets it, and stops. `adapterhub train recipe.yaml` trains; without
`data.eval`, a tenth of the rows is held out.
"""


def _metrics(task: Task) -> str:
    rows = [
        (f"`{name}`", "lower" if name in task.lower_is_better else "higher",
         "yes" if name == task.main_metric else "")
        for name in task.metric_names([])
    ]  # fmt: skip
    return (
        f"{table(('metric', 'better if', 'selects the best checkpoint'), rows)}\n"
        "With the default options. `train.best_metric` selects by another one.\n"
    )


def _options(task: type[Task]) -> str:
    options = options_of(task)
    text = options_table(options) if options else "None.\n"
    return f"{text}\nHow to write options: [options](../guides/options.md).\n"


def _model_types(kind: TaskModel) -> str:
    """Return the class of transformers that is loaded, and the model types that have one."""
    texts = []
    if kind is TASK_MODELS[TEXT_TO_IMAGE]:
        listed = ", ".join(f"`{name}`" for name in TRAINED)
        return f"`{kind.auto}` of diffusers is loaded. Its pipelines have such a class: {listed}.\n"
    for auto in kind.autos:
        mapping = getattr(transformers, auto)._model_mapping
        listed = ", ".join(sorted({f"`{config.model_type}`" for config in mapping}))
        texts.append(f"`{auto}` is loaded. These types of model have such a class: {listed}.\n")
    return "\n".join(texts)


def _backbones(task: Task) -> str:
    """Return the class of transformers that is loaded, and the architectures that have one."""
    kind = TASK_MODELS[task.head]
    if task.decodes:
        return _model_types(kind)
    fitting = [
        name for name, family in FAMILIES.items()
        if kind.classes_for(transformers.AutoConfig.for_model(name))
        and (task.head != CAUSAL_LM or any(s.name == "decoder" for s in family.stacks))
    ]  # fmt: skip
    listed = ", ".join(f"`{name}`" for name in sorted(fitting))
    return (
        f"`{kind.auto}` is loaded. Of the {len(FAMILIES)} architectures of [the support matrix]"
        f"(../reference/support.md), {len(fitting)} have such a class: {listed}.\n"
    )
