"""A small study that several tests run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from adapterhub.bench.baselines import Constant
from adapterhub.bench.conduct import run_study
from adapterhub.bench.results import study_results
from adapterhub.bench.study import Study, read_study
from tests.kit.data import sentences, write_tsv
from tests.kit.session import home_in
from tests.kit.studies import made_records, planned


def small_study(backbone: Path, folder: Path) -> Study:
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(150))]
    source = write_tsv(folder / "train.tsv", rows)
    flags = {"backbone": str(backbone), "output": str(folder / "study"),
             "data": {"train": str(source)}}  # fmt: skip
    bench = {"methods": ("head", "lora(rank=2)", "lora(sites=[nowhere])"), "rates": 2, "seeds": 2,
             "steps": 6, "baseline": "head"}  # fmt: skip
    return read_study(None, ["dtype=fp32"], flags, bench)


@pytest.fixture
def study(backbone, tmp_path):
    return small_study(backbone, tmp_path)


@pytest.fixture(scope="session")
def finished(backbone, tmp_path_factory):
    """A study that has run: tests read it, and write elsewhere."""
    folder = tmp_path_factory.mktemp("finished")
    study = small_study(backbone, folder)
    with home_in(folder / "home"):
        plan, records, engine = planned(study, folder)
        state = run_study(plan, records, engine)
    work = folder / "study" / "work"
    return SimpleNamespace(study=study, plan=plan, folder=records, state=state, work=work)


@pytest.fixture
def made_study():
    """A study that is only written down: `studies.made_records` makes its records."""
    bench = {"methods": ("head", "lora", "mam"), "rates": 3}
    flags = {"backbone": "some/backbone", "output": "out/mine", "data": {"train": "mine.tsv"}}
    return read_study(None, (), flags, bench)


@pytest.fixture
def made_results(made_study):
    accuracy = {"head": 0.6, "lora": 0.9, "mam": float("nan")}
    constants = {"mine": Constant("majority class", "classes", "pos", 0.6)}
    return study_results(made_study, made_records(made_study, accuracy), constants)
