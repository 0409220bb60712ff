"""The processes of a run: which one writes, its device, and launchers that are refused."""

from __future__ import annotations

import os

import pytest
import torch

from adapterhub.errors import ConfigError
from adapterhub.loop.processes import (
    any_process,
    everyone_s,
    from_main,
    is_main,
    launcher_shards,
    own_device,
    process_index,
    restarted,
    wait_for_everyone,
    without_launcher_sharding,
)


def test_only_rank_0_is_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert is_main()
    monkeypatch.setenv("RANK", "0")
    assert is_main()
    monkeypatch.setenv("RANK", "1")
    assert not is_main()


def test_each_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for rank in (0, 3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert own_device() == torch.device("cuda", rank)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert own_device() == torch.device("cpu")


def test_only_fsdp2_is_what_a_launcher_may_shard_by(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not launcher_shards()
    for flag in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        monkeypatch.setenv(flag, "true")
    with pytest.raises(ConfigError, match="Megatron-LM, FSDP of version 1") as error:
        launcher_shards()
    assert "--fsdp_version 2" in error.value.hint
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "false")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert launcher_shards()
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ConfigError, match="parameters on the CPU"):
        launcher_shards()


def test_accelerate_does_not_see_what_its_launcher_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with without_launcher_sharding():
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


def test_one_process_is_everyone() -> None:
    assert (everyone_s("a"), from_main("a"), any_process(True), any_process(False)) == (
        ["a"], "a", True, False,
    )  # fmt: skip


def test_what_torchrun_says_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (process_index(), restarted()) == (0, False)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert (process_index(), restarted()) == (2, True)


def test_a_single_process_waits_for_nobody() -> None:
    wait_for_everyone()
