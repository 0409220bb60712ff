"""The processes of a run: which one writes, its device, and launchers that are refused."""

from __future__ import annotations

import pytest
import torch

from adapterhub.errors import ConfigError
from adapterhub.training.processes import check_launcher, is_main, own_device, wait_for_everyone


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


def test_every_sharding_launcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launcher()
    for flag in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        monkeypatch.setenv(flag, "true")
    with pytest.raises(ConfigError, match="FSDP, Megatron-LM") as error:
        check_launcher()
    assert "--multi_gpu" in error.value.hint


def test_a_single_process_waits_for_nobody() -> None:
    wait_for_everyone()
