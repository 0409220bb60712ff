"""The processes of one run, as `accelerate launch` and `torchrun` start them.

Each computes; the first alone writes and prints. Which one a process is stands in its environment,
so that it is known before anything is loaded.
"""

from __future__ import annotations

import os

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from adapterhub.errors import ConfigError

_SHARDING = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def is_main() -> bool:
    """Whether this process is the first of its run, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def wait() -> None:
    """Go on when all processes of the run are here."""
    if PartialState._shared_state:
        PartialState().wait_for_everyone()


def own_device() -> torch.device:
    """Where this process computes: on a GPU of its own, or on the CPU where there is none or where
    accelerate was told so."""
    if not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_launcher() -> None:
    """Refuse a launcher that wants the model in shards.

    Raises:
        ConfigError: what it wants, and what to type.
    """
    if wanted := [name for flag, name in _SHARDING.items() if parse_flag_from_env(flag)]:
        raise ConfigError(
            f"the launcher asks for {', '.join(wanted)}, and `adapterhub train` does not shard a "
            "model",
            expected="a whole model in each process",
            hint="accelerate launch --multi_gpu --num_processes N -m adapterhub train ...; for "
            "FSDP2, attach and then fully_shard in a training loop of your own (docs/trainers.md)",
        )
