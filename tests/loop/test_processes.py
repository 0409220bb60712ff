"""The processes of a run: which one writes, divided evaluations, launchers and stop signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

import pytest

from adapterhub.errors import ConfigError, TrainingError
from adapterhub.loop import processes
from adapterhub.loop.processes import (
    any_process,
    catch_stop_signals,
    divided_evaluation,
    everyone_s,
    from_main,
    is_main,
    launcher_shards,
    process_index,
    restarted,
    wait_for_everyone,
    without_launcher_sharding,
)
from adapterhub.tasks.common.batches import in_step, results
from tests.kit.runs import Data, Ticks, final_bytes, fit


def test_what_a_launcher_says_of_a_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert (is_main(), process_index(), restarted()) == (True, 0, False)
    assert (everyone_s("a"), from_main("a")) == (["a"], "a")
    assert (any_process(True), any_process(False)) == (True, False)
    wait_for_everyone()  # a single process waits for nobody
    monkeypatch.setenv("RANK", "0")
    assert is_main()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert (is_main(), process_index(), restarted()) == (False, 2, True)


def test_only_fsdp2_is_what_a_launcher_may_shard_by(monkeypatch):
    assert not launcher_shards()
    for flag in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        monkeypatch.setenv(flag, "true")
    with pytest.raises(ConfigError, match="Megatron-LM, FSDP of version 1") as error:
        launcher_shards()
    assert "--fsdp_version 2" in error.value.hint
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "false")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert launcher_shards()
    with without_launcher_sharding():  # accelerate does not see what its launcher said
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ConfigError, match="parameters on the CPU"):
        launcher_shards()


@pytest.mark.parametrize("sharded", [True, False])
def test_a_process_of_several_computes_its_own(sharded, monkeypatch):
    with divided_evaluation(sharded=True):  # a single process computes all
        assert results(range(3), str) == ["0", "1", "2"]
        assert not in_step()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(processes, "join_processes", lambda: None)
    monkeypatch.setattr(processes, "everyone_s", lambda own: [["other's 0", "other's 2"], own])
    with divided_evaluation(sharded=sharded):
        assert in_step() == sharded
        assert results(range(3), str) == ["other's 0", "1", "other's 2"]
    assert not in_step()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_state_and_the_error_names_resume(tmp_path, number):
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


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    def evaluate() -> Mapping[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return {"loss": 0.0}

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, evaluate=evaluate)


def test_a_thread_without_signal_handlers_trains_all_the_same():
    requested: list[bool] = []

    def work() -> None:
        with catch_stop_signals() as stop:
            requested.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert requested == [False]
