"""Ctrl-C and SIGTERM stop a run after its step, with the state saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from adapterhub.errors import TrainingError
from adapterhub.loop.processes import catch_stop_signals
from tests.kit.runs import Data, Ticks, final_bytes, fit


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_state_and_the_error_names_resume(tmp_path: Path, number: int) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    fit(tmp_path / "whole")
    with pytest.raises(TrainingError, match="after step 4 of 6") as error:
        fit(tmp_path / "cut", data=Data(Ticks(10, number)))
    assert "--resume" in str(error.value)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    data = Data()
    fit(tmp_path / "cut", data=data, resume=True)
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")
    assert (data.collated, data.epochs) == (5, [1]), "skipped batches were collated"


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def evaluate() -> Mapping[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return {"loss": 0.0}

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, evaluate=evaluate)


def test_a_thread_without_signal_handlers_trains_all_the_same() -> None:
    requested: list[bool] = []

    def work() -> None:
        with catch_stop_signals() as stop:
            requested.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert requested == [False]
