"""The processes of one run, as started by `accelerate launch` or `torchrun`.

Every process computes; only the first one writes and prints. A process reads its rank from its
environment variables, before anything is loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    import torch

_SHARDING = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def is_main() -> bool:
    """Return True in the first process of a run, or the only one."""
    return process_rank() == 0


def process_rank() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """Return the number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_everyone() -> None:
    """Wait until all processes of the run get here."""
    from accelerate import PartialState  # slow to import

    if PartialState._shared_state:
        PartialState().wait_for_everyone()


def own_device() -> torch.device:
    """Return the device of this process: its own GPU, or the CPU.

    It is the CPU if there is no GPU, or if accelerate is configured to use the CPU.
    """
    import torch  # slow to import
    from accelerate.utils import parse_flag_from_env

    if not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_launcher() -> None:
    """Refuse a launcher that is configured to shard the model.

    Raises:
        ConfigError: the launcher uses FSDP, DeepSpeed or Megatron-LM.
    """
    set_flags = _SHARDING.keys() & os.environ.keys()
    if not set_flags:
        return
    from accelerate.utils import parse_flag_from_env  # slow to import

    sharding = [_SHARDING[flag] for flag in sorted(set_flags) if parse_flag_from_env(flag)]
    if sharding:
        raise ConfigError(
            f"the launcher is configured for {', '.join(sharding)}, but `adapterhub train` does "
            "not shard models",
            expected="the whole model in each process",
            hint="accelerate launch --multi_gpu --num_processes N -m adapterhub train ...; for "
            "FSDP2, attach and then call fully_shard in your own loop (docs/guides/trainers.md)",
        )
