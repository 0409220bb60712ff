"""Experiment trackers that are unknown or not installed."""

from __future__ import annotations

import pytest
from accelerate import tracking

from adapterhub.errors import ConfigError
from adapterhub.training.run_data import check_trackers

NAMES = ("wandb", "mlflow", "trackio", "swanlab")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict.fromkeys(NAMES))
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: list(NAMES[:3]))


def test_unknown_and_missing_trackers_are_refused() -> None:
    check_trackers(())
    check_trackers(["wandb", "mlflow"])
    with pytest.raises(ConfigError, match=r"unknown tracker 'wandbb'; did you mean 'wandb'"):
        check_trackers(["wandbb"])
    with pytest.raises(ConfigError, match="not installed: swanlab") as error:
        check_trackers(["wandb", "swanlab"])
    assert error.value.hint == "pip install swanlab"
    with pytest.raises(ConfigError, match=r"train\.tensorboard=true"):
        check_trackers(["tensorboard"])
