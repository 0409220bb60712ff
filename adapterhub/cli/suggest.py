"""`adapterhub suggest`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import print_json, print_table, say, say_wrapped
from adapterhub.cli._options import as_json_option, registry_option
from adapterhub.cli.train import (
    FLAGS,
    RecipeCommand,
    nested_flags,
    recipe_flags,
    recipe_words,
)
from adapterhub.config.user_folders import is_file
from adapterhub.errors import ConfigError
from adapterhub.files.shown_table import ShownTable
from adapterhub.status import display_for_terminal, doing, showing

if TYPE_CHECKING:
    from adapterhub.bench.statistics import Estimate
    from adapterhub.bench.suggest import Candidate, Suggestion
    from adapterhub.recipe.recipe import Recipe

_MOST = 1000  # adapters of a registry
SECTIONS = {
    "Data": ("train", "text", "pair", "label", "labels", "task", "max_length", "rows"),
    "Adapters": ("backbone", "registry"),
}
_USED = {"backbone", "train", "text", "pair", "label", "labels", "task", "max-length"}
_NOT_USED = tuple(flag for flag in FLAGS if flag not in _USED)


@click.command("suggest", cls=RecipeCommand, sections=SECTIONS)
@click.argument("adapters", nargs=-1, metavar="[DATA] [ADAPTER]...")
@partial(recipe_flags, without=_NOT_USED)
@click.option(
    "--rows",
    type=click.IntRange(20),
    default=1000,
    show_default=True,
    metavar="N",
    help="Training rows that are probed, at most.",
)
@registry_option
@as_json_option
def command(
    adapters: tuple[str, ...], rows: int, registry: str | None, as_json: bool, **flags: Any
) -> None:
    """Suggest which trained adapter to start from: --from NAME of adapterhub train.

    The features of your texts with each adapter are compared with the bare backbone's by a
    linear probe and cross-validation, without any training. Without ADAPTER, all adapters of your
    registry for this backbone are compared.
    """
    from adapterhub.data.tables import is_data_name

    files = [word for word in adapters if is_file(word) or is_data_name(word)]
    adapters = tuple(word for word in adapters if word not in files)
    recipe_words(tuple(files), flags)
    if not flags["train"]:
        raise ConfigError("no data to probe", hint="adapterhub suggest FILE")
    with showing(display_for_terminal()):
        suggestion = _probed(nested_flags(flags), adapters, rows, registry)
    if as_json:
        print_json(_json(suggestion))
        return
    _print(suggestion)
    if suggestion.best:
        named = f"--backbone {flags['backbone']} " * bool(flags["backbone"])
        files = [flags["train"]] if isinstance(flags["train"], str) else flags["train"]
        words = f"{named}--train {shlex.join(files)}"
        say("")
        say(f"adapterhub train --from {suggestion.best} {words} --output DIR")


def _probed(
    flags: dict[str, Any], adapters: Sequence[str], rows: int, registry: str | None
) -> Suggestion:
    """Read the data, load the backbone, and probe each adapter on at most `rows` rows."""
    with doing("loading torch"):
        from adapterhub.backbones.pooling import max_positions
        from adapterhub.bench.suggest import behind_virtual_tokens, check_probed, suggest
        from adapterhub.data.examples import sample
        from adapterhub.recipe.recipe import read_draft
        from adapterhub.tasks import Setting, parse_task
        from adapterhub.training.loading import BackboneLoader, KernelChoice
        from adapterhub.training.run_data import NO_EVALUATION, read_data

    recipe = read_draft(None, (), flags)
    recipe = replace(recipe, data=replace(recipe.data, eval=NO_EVALUATION))
    if recipe.task is not None:
        check_probed(parse_task(recipe.task))
    data = read_data(recipe)
    check_probed(data.task)
    recipe = data.completed(recipe)
    data = replace(data, train=sample(data.train, rows, recipe.seed), sources=())
    candidates = _candidates(recipe, adapters, registry)
    loader = BackboneLoader()
    loaded = loader.backbone(recipe, data, KernelChoice(recipe.dtype or "fp32", recipe.attention))
    loaded.model.eval()
    positions = max_positions(loaded.model)
    setting = Setting(loaded.processor, positions, data.labels, recipe.seed, positions)
    encoded = loader.rows(data, setting, recipe.train.max_length, None).train
    with doing(f"probing {len(candidates)} adapters on {len(encoded.rows):,} rows"):
        encoded, crowded = behind_virtual_tokens(loaded.model, encoded, candidates)
        fitting = [each for each in candidates if each.reference not in crowded]
        suggestion = suggest(loaded.model, encoded, fitting)
        return replace(suggestion, unusable={**suggestion.unusable, **crowded})


def _candidates(recipe: Recipe, adapters: Sequence[str], registry: str | None) -> list[Candidate]:
    """Return the named adapters, or the registry's adapters for the backbone."""
    from adapterhub.backbones.fingerprint import fingerprint
    from adapterhub.bench.suggest import Candidate
    from adapterhub.registry.local import registry_at
    from adapterhub.registry.pull import pull_verified
    from adapterhub.registry.store import Query

    if not adapters:
        backbone = fingerprint(recipe.backbone, revision=recipe.revision)
        query = Query(backbone=backbone, limit=_MOST)
        adapters = [entry.reference for entry in registry_at(registry).search(query)]
    candidates = []
    for reference in adapters:
        fetched = pull_verified(reference, registry=registry)
        candidates.append(Candidate(reference, fetched.source))
    return candidates


def _print(suggestion: Suggestion) -> None:
    from adapterhub.bench.advice import points_text
    from adapterhub.bench.suggest import BARE

    columns = ("adapter", suggestion.score, "95 %", f"against the {BARE}")
    rows = []
    bare = suggestion.bare
    own = [suggestion.words] if suggestion.words else []
    for each in sorted([bare, *own, *suggestion.estimates], key=lambda e: -(e.value or 0.0)):
        ends = [points_text(x, each.points) for x in (each.low, each.high) if x is not None]
        score = points_text(each.value or 0.0, each.points)
        rows.append((each.method, score, "-".join(ends), _verdict(suggestion, each)))
    print_table(ShownTable(columns, rows, numbers=True))
    for reference, problem in suggestion.unusable.items():
        say(f"left out: {reference}: {problem}", err=True)
    say_wrapped(_sentence(suggestion))
    if suggestion.words and suggestion.comparisons[suggestion.words.method].verdict != "worse":
        say_wrapped(_sentence_of_words(suggestion, suggestion.words))


def _verdict(suggestion: Suggestion, each: Estimate) -> str:
    pair = suggestion.comparisons.get(each.method)
    if pair is None or pair.value is None:
        return ""
    return f"{pair.value * pair.points:+.1f}, {pair.verdict}"


def _sentence(suggestion: Suggestion) -> str:
    """Print the adapter to start from, or that none of them helps."""
    from adapterhub.bench.advice import numbers_text

    if suggestion.best:
        pair = suggestion.comparisons[suggestion.best]
        text = f"Start from {suggestion.best}: its features are better ({numbers_text(pair)})."
        return f"{text} An adapter that was trained on these rows looks better than it is."
    if not suggestion.estimates:
        return "No adapter to compare."
    size = suggestion.smallest
    text = "No difference: no adapter's features are better than the backbone's own."
    if not size:
        return text
    return f"{text} A difference of less than about {100 * size:.1f} points cannot be seen."


def _sentence_of_words(suggestion: Suggestion, words: Estimate) -> str:
    """Warn that the features of the backbone are not better than a bag of words."""
    from adapterhub.bench.advice import numbers_text

    pair = suggestion.comparisons[words.method]
    better = "is better than" if pair.verdict == "better" else "was not shown to be worse than"
    return (
        f"A bag of words {better} the features of the {suggestion.bare.method} "
        f"({numbers_text(pair)}): compare a trained adapter with it (adapterhub bench)."
    )


def _json(suggestion: Suggestion) -> dict[str, Any]:
    def row(each: Estimate) -> dict[str, Any]:
        pair = suggestion.comparisons.get(each.method)
        values = {"adapter": each.method, "value": each.value, "low": each.low, "high": each.high}
        if pair is None:
            return values
        return values | {"difference": pair.value, "verdict": pair.verdict, "p": pair.corrected}

    return {
        "score": suggestion.score,
        "best": suggestion.best,
        "bare": row(suggestion.bare),
        "bag_of_words": row(suggestion.words) if suggestion.words else None,
        "adapters": [row(each) for each in suggestion.estimates],
        "unusable": dict(suggestion.unusable),
    }
