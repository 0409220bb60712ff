"""The pages of the methods: an index, and one page for each registered method.

What they say comes from the docstring of the method's module, its options, its plan on a few named
backbones, and the code that decides what can be merged and exported.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.sites import number_ranges
from adapterhub.config.options import options_of
from adapterhub.errors import AdapterhubError
from adapterhub.methods import METHODS, Method, Placement, Unfrozen
from adapterhub.methods.common.base import described_method
from reference import _backbones, _method_groups, _picture
from reference._backbones import BERT, NAMED, Fit, anatomy, fit, named
from reference._docstrings import Docstring, linked, parsed
from reference._tables import escaped, options_table, table

RECORD = Path(__file__).parents[2] / "benchmarks/results/method_cost.json"
STARTS = {
    "identity": "At first, the outputs are those of the backbone.",
    "near-identity": "At first, the outputs are almost those of the backbone.",
    "paper": "At first, the outputs differ from those of the backbone, as in the paper.",
}


def pages() -> dict[str, str]:
    """Return the index and the page of each method."""
    return {"methods/index.md": index()} | {f"methods/{n}.md": page(n) for n in sorted(METHODS)}


def groups() -> dict[str, list[str]]:
    """Return the pages below the headings of the index, for the navigation."""
    return _method_groups.groups({name: f"methods/{name}.md" for name in METHODS})


def index() -> str:
    """Return the page that says when to take which method."""
    sections = "\n".join(map(_section, _method_groups.GROUPS))
    return f"""# Methods

`--method NAME` on the command line, `ah.attach(model, "NAME")` in Python. Several are composed:
`--method "[prefix, lora]"`. By when to take which; on little data, see first
[what the studies took](#what-the-studies-took). Your own data decides: `adapterhub bench` tunes and
compares them [on your rows](../guides/bench.md).

{sections}
## How to read these tables

- *Where, trained*: the places and the number of parameters, with the default options on {BERT},
  without the task head, which trains with every method.
- *Merges*: it becomes a change of the backbone's weights, and costs nothing afterwards.
- *Loaded by*: other programs that load the exported adapter, with the backbones for which they do
  if not for all of {_listed(NAMED)}.
- *Against lora*: in the studies of [tasks of GLUE](../studies/glue.md),
  [a decoder](../studies/miniature-causal.md) and
  [an encoder-decoder](../studies/miniature-seq2seq.md). Tied: their rows and seeds cannot tell the
  two apart. Taken: the cheapest that is near enough to the best.

Not every method fits every architecture: see [the support matrix](../reference/support.md).

## What the studies took

The cheapest method that is near enough to the best one
([what that means](../guides/bench.md#recommendation)), from few rows to many. Each study has
one small backbone: this is where to begin, not where to end.

{_method_groups.taken_table()}"""


def _section(group: _method_groups.Group) -> str:
    """Return a group of the index: when to take it, its methods, what was found."""
    claims = _method_groups.claims(group)
    if claims:
        claims = f"What is said of them, and what was found:\n\n{claims}"
    return f"""## {group.when}

{group.text}

{table(_COLUMNS, map(_row, group.methods))}
{claims}"""


def _row(name: str) -> tuple[str, ...]:
    method = METHODS[name].example()
    return (
        f"[{name}]({name}.md)<br>{escaped(method.summary)}",
        f"{sites_text(place(name))}<br>{method.count(anatomy(named(BERT))):,}",
        _merges(name), _peers(name), _method_groups.verdict(name),
    )  # fmt: skip


@cache
def place(name: str) -> _picture.Where:
    """Return where a method sits in BERT."""
    return _picture.where(METHODS[name].example(), named(BERT))


def _fitting(name: str) -> dict[str, Fit]:
    fits = {backbone: fit(name, backbone) for backbone in NAMED}
    return {backbone: result for backbone, result in fits.items() if not result.refused}


def _merges(name: str) -> str:
    return "no" if any(result.merge for result in _fitting(name).values()) else "yes"


def _peers(name: str) -> str:
    found = []
    for peer in ("peft", "vllm"):
        fits = _fitting(name)
        good = [backbone for backbone, result in fits.items() if not getattr(result, peer)]
        if good:
            found.append(_PEERS[peer] + ("" if len(good) == len(fits) else f" ({_listed(good)})"))
    return ", ".join(found) or "-"


_COLUMNS = ("method", "where, trained", "merges", "loaded by", "against lora")
_PEERS = {"peft": "peft", "vllm": "vLLM"}


def sites_text(place: _picture.Where) -> str:
    """Describe in a few words where a method sits in BERT."""
    words = [f"`{role}`" for role in dict.fromkeys(role for role, _ in place.added)]
    boxes = set(_picture.box_of_parameters(anatomy(named(BERT))).values())
    if set(place.own.values()) == {"bias"}:
        words.append("biases")
    elif place.own.keys() == boxes and len(place.stages) == place.depth:
        words.append("all weights")
    elif place.own and all(box.endswith("norm") for box in place.own):
        words.append("norms")
    elif place.own and place.stages:
        words.append(f"layers {number_ranges(place.stages)}, and above")
    else:
        words += [f"`{box}`" for box in place.own]
    return ", ".join(words) or "only the task head"


def page(name: str) -> str:
    """Return the page of a method."""
    method = METHODS[name]
    doc = docstring(method)
    first = method.__doc__ or ""
    return f"""# {name}

{linked(" ".join(first.split()))} {_others(method)}

## Use

{_use(name)}
## What it computes

{linked(doc.title)}

{doc.markdown()}

{STARTS[method.start]}

## Where it sits

{_picture.figure(name, place(name))}

{BERT}, with the default options:

{table(("where", "what trains"), _trained(method.example()))}
## Options

{_options(name)}
## Cost

{_cost(name, doc)}
## Merge and serve

{_serving(name)}
## Quantized backbones

{_quantized(name)}

## Architectures

{_architectures(name)}

## Source

{linked(" ".join(doc.source.split()))}
"""


@cache
def docstring(method: type[Method]) -> Docstring:
    """Return the docstring of a method's module."""
    return parsed(importlib.import_module(method.__module__).__doc__ or "")


def _others(method: type[Method]) -> str:
    """Link the other methods of the same module, which share its text."""
    same = [n for n, m in sorted(METHODS.items()) if m.__module__ == method.__module__]
    others = [f"[{n}]({n}.md)" for n in same if n != method.name]
    return f"Described together with {_listed(others)}." if others else ""


def _use(name: str) -> str:
    """Return what to type, in Python and on the command line."""
    example = METHODS[name].example()
    built = METHODS[name].built_from is not Method.built_from
    return (_use_of_adapters if built else _use_of_options)(name, example)


_LOAD = """import adapterhub as ah

model, tokenizer = ah.load_backbone(
    "google-bert/bert-base-uncased", task="classification", labels=["no", "yes"]
)
"""


def _use_of_options(name: str, example: Method) -> str:
    simple = [o for o in options_of(type(example)) if type(o.default) in (int, float, str)]
    first = next(iter(simple), None)
    option = f", {first.name}={first.default!r}" if first else ""
    return f"""```python
{_LOAD}adapter = ah.attach(model, "{name}"{option})
```

```console
$ adapterhub train --train train.csv --method {name} --output runs/{name} \\
    --backbone google-bert/bert-base-uncased
```
"""


def _use_of_adapters(name: str, example: Method) -> str:
    """Return what to type for a method that is built from trained adapters."""
    part = "pfeiffer"
    return f"""```python
{_LOAD}ah.attach(model, "{part}", name="one")  # or ah.load(model, "runs/one", name="one")
ah.attach(model, "{part}", name="two")
adapter = ah.attach(model, "{name}", adapters=["one", "two"], name="both")
```

```console
$ adapterhub train --train train.csv --method "{name}(adapters=[runs/one, runs/two])" \\
    --backbone google-bert/bert-base-uncased --output runs/{name}
```
"""


def _trained(method: Method) -> Iterator[tuple[str, str]]:
    """Yield where a method sits in BERT and the tensors that train there."""
    model = named(BERT)
    layers: dict[tuple[str, str], list[int]] = {}
    own: dict[str, int] = {}
    parameters = anatomy(model).parameters(every_use=True)
    boxes = _picture.box_of_parameters(anatomy(model))
    for part, step in _backbones.steps(method, model):
        if isinstance(step, Placement):
            shapes = [(n, tuple(p.shape)) for n, p in step.module.named_parameters()]
            text = ", ".join(f"`{n}` {'x'.join(map(str, shape))}" for n, shape in shapes)
            found = layers.setdefault((f"{part.name} at `{step.site.role}`", text), [])
            found += [] if step.site.layer is None else [step.site.layer]
        elif isinstance(step, Unfrozen):
            box = boxes[step.path]
            own[box] = own.get(box, 0) + parameters[step.path].numel()
    for (place, text), numbers in layers.items():
        where = f", layers {number_ranges(numbers)}" if numbers else ""
        yield place + where, text
    for box, count in own.items():
        yield f"`{box}`, of the backbone", f"{count:,} parameters"
    yield "task head", "its weight and bias"


def _options(name: str) -> str:
    described = described_method(name)
    options = options_of(described.options)
    text = options_table(options) if options else "None.\n"
    schedule = f", and its schedule `{described.schedule}`" if described.schedule else ""
    return (
        f"{text}\nIts default learning rate (`train.learning_rate`) is "
        f"`{described.learning_rate:g}`{schedule}. How to write options: "
        "[options](../guides/options.md).\n"
    )


def _cost(name: str, doc: Docstring) -> str:
    method = METHODS[name].example()
    rows = []
    for backbone in NAMED:
        model = named(backbone)
        try:
            count = method.count(anatomy(model))
            total = sum(p.numel() for p in anatomy(model).parameters().values())
            rows.append((backbone, f"{count:,}", f"{100 * count / total:.3g} %"))
        except AdapterhubError:
            rows.append((backbone, "refused", ""))
    return (
        f"Parameters: {linked(doc.cost)}\n\n"
        f"{table(('backbone', 'trained', 'of its parameters'), rows)}\n"
        "Computed from the configurations, with the default options and without the task head.\n\n"
        f"{_times(name)}"
    )


def _times(name: str) -> str:
    """Return the time of a training step, if it was measured."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    times = record.get("milliseconds", {})
    if name not in times:
        return "The time of a training step has not been measured.\n"
    forward, full = times[name] / times["forward"], times[name] / times["full"]
    return (
        f"A training step takes {forward:.1f} times as long as the forward pass of the bare "
        f"backbone, and {full:.2f} times as long as a step of full fine-tuning "
        f"({record['about']}).\n"
    )


def _serving(name: str) -> str:
    """Return what can be merged and exported, with the reasons why not."""
    fits = {backbone: fit(name, backbone) for backbone in NAMED}
    uses = {"merge": "merges", "peft": "peft loads it", "vllm": "vLLM serves it"}
    rows = [(label, *(_cell(r, use) for r in fits.values())) for use, label in uses.items()]
    reasons: dict[str, list[str]] = {}
    for backbone, result in fits.items():
        for line in _problems(result):
            general = re.sub(r"\b(encoder|decoder)\.", "", line)
            found = reasons.setdefault(general, [])
            found += [] if backbone in found else [backbone]
    lines = [
        f"- {escaped(line)}" + ("" if len(where) == len(NAMED) else f" ({_listed(where)})") + "\n"
        for line, where in reasons.items()
    ]
    return (
        f"{table(('', *NAMED), rows)}\n{''.join(lines)}{chr(10) if lines else ''}"
        "By the checks of `adapterhub merge` and `adapterhub export --check`, on models for "
        f"{_listed(row[1] for row in NAMED.values())}. vLLM serves LoRA on decoders only; what is "
        "converted to it loses a part. More in "
        "[to and from other libraries](../guides/interchange.md).\n"
    )


def _cell(result: Fit, use: str) -> str:
    good = "converted" if use == "vllm" and result.converted else "yes"
    return "refused" if result.refused else "no" if getattr(result, use) else good


def _problems(result: Fit) -> Iterator[str]:
    """Yield why a method cannot be merged or exported, each with what it prevents."""
    if result.refused:
        yield f"refused: {result.refused}"
    yield from (f"not merged: {line}" for line in result.merge)
    yield from (f"not in peft: {line}" for line in result.peft)
    yield from (f"in peft: {line}" for line in result.warnings if not result.peft)
    own = [line for line in result.vllm if line not in result.peft]
    if not any("vLLM serves LoRA on" in line for line in own):
        yield from (f"not in vLLM: {line}" for line in own)


def _quantized(name: str) -> str:
    reason = _backbones.quantized_refusal(name)
    text = f"Refused: {escaped(reason)}." if reason else "Fits backbones in 4 bits (nf4)."
    return f"{text} More in [quantized backbones](../guides/quantization.md)."


def _architectures(name: str) -> str:
    """Return which architectures refuse the method, with the reasons."""
    reasons = _backbones.refusals(name)
    lines = [
        f"- {_listed(f'`{a}`' for a in where)}: {escaped(why)}\n" for why, where in reasons.items()
    ]
    fitting = f"{_backbones.tested(name)} of the {len(FAMILIES)} architectures"
    text = f"Tested on {fitting} of [the support matrix](../reference/support.md)."
    return f"{text} Refused on:\n\n{''.join(lines)}" if lines else f"{text}\n"


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
