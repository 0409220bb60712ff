"""Several runs in one process on one loaded backbone: one after the other, or in the loop together.

Each run has an output folder of its own, and can be resumed, compared and published like any other.
One after the other, it ends with the same bytes as alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from adapterhub.config.options import to_dict
from adapterhub.errors import AdapterhubError
from adapterhub.tasks import dump_task, parse_task
from adapterhub.training.joint import train_together
from adapterhub.training.loading import BackboneLoader, SharedLoader
from adapterhub.training.output_folder import RECIPE
from adapterhub.training.prepare import PreparedRun
from adapterhub.training.recipe import Recipe
from adapterhub.training.report import Reporter, Several
from adapterhub.training.run import OpenedRun, RunOutcome, open_run, prepare_run, run
from adapterhub.training.run_data import RunData, check_options, read_data
from adapterhub.training.stop_signals import Stopped, catch_stop_signals


@dataclass(frozen=True)
class Ended:
    """A run of several that has ended: with its outcome, or with an error."""

    recipe: Recipe
    outcome: RunOutcome | None = None
    error: AdapterhubError | None = None


def run_several(
    recipes: Sequence[Recipe],
    reporter: Callable[[Recipe], Reporter],
    *,
    resume: bool = False,
    loader: BackboneLoader | None = None,
    together: int = 1,
) -> Iterator[Ended]:
    """Train one recipe after the other; what they share is loaded, read and computed once.

    The backbone, the data and the encoded rows are shared, and so are the outputs of frozen layers
    (`train.frozen_cache`). A run that fails is yielded with its error, and the next one begins.

    Args:
        recipes: the recipes, each with an output folder of its own.
        reporter: returns where a run reports its progress.
        resume: continue the runs that have begun; the others begin.
        loader: loads the backbones; by default one for these runs.
        together: how many runs are in the loop at once, where small batches then share forward and
            backward passes; results are equal but for the order of summation.

    Yields:
        Each run when it has ended.

    Raises:
        Stopped: a signal stopped the current run, after its state was saved.
    """
    loader = loader or SharedLoader(together=together > 1)
    several = _SeveralRuns(reporter, resume, loader)
    with catch_stop_signals() as stop:
        for start in range(0, len(recipes), together):
            if stop.requested:  # at the end of the runs before, which it did not stop
                raise Stopped(
                    f"stopped by a signal after {start} of {len(recipes)} runs",
                    hint="run the same command with --resume to continue",
                )
            yield from several.train(recipes[start : start + together])


class _SeveralRuns:
    """Runs that share a loader, data and what was said."""

    def __init__(
        self, reporter: Callable[[Recipe], Reporter], resume: bool, loader: BackboneLoader
    ) -> None:
        self.reporter, self.resume, self.loader = reporter, resume, loader
        self.data, self.said = DataReader(), set[str]()

    def train(self, recipes: Sequence[Recipe]) -> Iterator[Ended]:
        """Train a run alone, or several together."""
        if len(recipes) == 1:
            yield self._alone(recipes[0])
            return
        with ExitStack() as stack:
            waiting: dict[Hashable, list[tuple[int, Recipe, OpenedRun]]] = {}
            ended: dict[int, Ended] = {}
            prepared = list(self._prepared(recipes, stack, ended))
            for number, recipe, run_ in prepared:
                try:
                    reports, resume = self._reports(recipe), self._continues(recipe)
                    opened = stack.enter_context(open_run(run_, recipe, reports, resume))
                except AdapterhubError as error:
                    ended[number] = Ended(recipe, error=error)
                else:
                    key = id(run_.model), run_.options.mixed_precision
                    waiting.setdefault(key, []).append((number, recipe, opened))
            for group in waiting.values():
                ended |= _trained_together(group)
        stopped = [each.error for each in ended.values() if isinstance(each.error, Stopped)]
        yield from (ended[n] for n in sorted(ended) if not isinstance(ended[n].error, Stopped))
        if stopped:
            raise stopped[0]

    def _alone(self, recipe: Recipe) -> Ended:
        try:
            data, resume = self.data.read(recipe), self._continues(recipe)
            reports = self._reports(recipe)
            outcome = run(recipe, reports, resume=resume, data=data, loader=self.loader)
        except Stopped:
            raise
        except AdapterhubError as error:
            return Ended(recipe, error=error)
        return Ended(recipe, outcome)

    def _prepared(
        self, recipes: Sequence[Recipe], stack: ExitStack, ended: dict[int, Ended]
    ) -> Iterator[tuple[int, Recipe, PreparedRun]]:
        """Yield the runs that can be prepared, all attached to one backbone where they share it."""
        for number, recipe in enumerate(recipes):
            try:
                prepared = prepare_run(
                    recipe,
                    resume=self._continues(recipe),
                    data=self.data.read(recipe),
                    loader=self.loader,
                    attach_as=f"{recipe.name}-{number}",
                )
            except AdapterhubError as error:
                ended[number] = Ended(recipe, error=error)
            else:
                stack.callback(self.loader.release, prepared.model)
                yield number, recipe, prepared

    def _continues(self, recipe: Recipe) -> bool:
        return self.resume and (Path(recipe.output) / RECIPE).exists()

    def _reports(self, recipe: Recipe) -> Reporter:
        return _SaidOnce([self.reporter(recipe)], self.said)


def _trained_together(group: list[tuple[int, Recipe, OpenedRun]]) -> dict[int, Ended]:
    """Train the runs of one backbone, and save those that succeed."""
    outcomes = train_together([opened.session for _, _, opened in group])
    ended = {}
    for (number, recipe, opened), outcome in zip(group, outcomes, strict=True):
        if isinstance(outcome, AdapterhubError):
            ended[number] = Ended(recipe, error=outcome)
            continue
        try:
            ended[number] = Ended(recipe, opened.finish(outcome))
        except AdapterhubError as error:
            ended[number] = Ended(recipe, error=error)
    return ended


class _SaidOnce(Several):
    """Forwards a note that an earlier run has given to nobody."""

    def __init__(self, reporters: list[Reporter], said: set[str]) -> None:
        super().__init__(reporters)
        self.said = said

    def note(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            super().note(text)


class DataReader:
    """Reads the data of recipes; equal data are read once."""

    def __init__(self) -> None:
        self.latest: tuple[Hashable, RunData] | None = None

    def read(self, recipe: Recipe) -> RunData:
        """Return the data of a recipe, as `read_data` does.

        Raises:
            ConfigError: an option of the recipe does not fit the data.
        """
        task = dump_task(parse_task(recipe.task))
        tasks = to_dict(recipe)["tasks"]
        key = str((task, to_dict(recipe.data), tasks, recipe.seed))
        if self.latest is None or self.latest[0] != key:
            self.latest = key, read_data(recipe)
        data = self.latest[1]
        check_options(recipe, data)
        return data
