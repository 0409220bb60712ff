"""Several runs in one process, one after the other on one loaded backbone.

Each run has an output folder of its own, and can be resumed, compared and published like any other.
It ends with the same bytes as alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapterhub.config.options import to_dict
from adapterhub.errors import AdapterhubError
from adapterhub.loop.report import Reporter, Several
from adapterhub.loop.stop_signals import Stopped, catch_stop_signals
from adapterhub.recipe.output_folder import RECIPE
from adapterhub.recipe.recipe import Recipe
from adapterhub.tasks import dump_task, parse_task
from adapterhub.training.loading import BackboneLoader, SharedLoader
from adapterhub.training.run import RunOutcome, run
from adapterhub.training.run_data import RunData, check_options, read_data


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
) -> Iterator[Ended]:
    """Train one recipe after the other; what they share is loaded, read and computed once.

    The backbone, the data and the encoded rows are shared, and so are the outputs of frozen layers
    (`train.frozen_cache`). A run that fails is yielded with its error, and the next one begins.

    Yields:
        Each run when it has ended.

    Raises:
        Stopped: a signal stopped the current run, after its state was saved.
    """
    several = _SeveralRuns(reporter, resume, loader or SharedLoader())
    with catch_stop_signals() as stop:
        for done, recipe in enumerate(recipes):
            if stop.requested:  # at the end of the run before, which it did not stop
                raise Stopped(
                    f"stopped by a signal after {done} of {len(recipes)} runs",
                    hint="run the same command with --resume to continue",
                )
            yield several.train(recipe)


class _SeveralRuns:
    """Runs that share a loader, data and what was said."""

    def __init__(
        self, reporter: Callable[[Recipe], Reporter], resume: bool, loader: BackboneLoader
    ) -> None:
        self.reporter, self.resume, self.loader = reporter, resume, loader
        self.data, self.said = DataReader(), set[str]()

    def train(self, recipe: Recipe) -> Ended:
        """Train one run; an error of the package ends it, and not the others."""
        try:
            data, resume = self.data.read(recipe), self._continues(recipe)
            reports = self._reports(recipe)
            outcome = run(recipe, reports, resume=resume, data=data, loader=self.loader)
        except Stopped:
            raise
        except AdapterhubError as error:
            return Ended(recipe, error=error)
        return Ended(recipe, outcome)

    def _continues(self, recipe: Recipe) -> bool:
        return self.resume and (Path(recipe.output) / RECIPE).exists()

    def _reports(self, recipe: Recipe) -> Reporter:
        return _SaidOnce([self.reporter(recipe)], self.said)


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
