"""The processes of one run, as started by `accelerate launch` or `torchrun`.

Every process computes; only the first one writes and prints. A process reads its rank from its
environment variables, before anything is loaded.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from adapterhub.errors import ConfigError, TrainingError
from adapterhub.tasks.common.batches import Division, dividing

if TYPE_CHECKING:
    import torch


class Stopped(TrainingError):
    """A signal stopped the run, after its state was saved."""


class StopRequest:
    """A flag: a signal requested that the run stop after the current step.

    A request is passed on to the surrounding handler when several runs are nested.
    """

    def __init__(self) -> None:
        self.requested = False
        self.outer: StopRequest | None = None

    def receive(self, number: int, frame: object) -> None:
        """Handle a signal; a second one interrupts at once."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self.outer is not None:
            self.outer.requested = True

    def inherit(self, handler: object) -> None:
        """Take over the request, and the signals, of a handler that this one replaces."""
        outer = getattr(handler, "__self__", None)
        if isinstance(outer, StopRequest):
            self.outer, self.requested = outer, outer.requested


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM inside the block; a second signal interrupts at once."""
    stop = StopRequest()
    # Python allows signal handlers only in the main thread.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, stop.receive) for number in numbers}
    for handler in before.values():
        stop.inherit(handler)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_T = TypeVar("_T")
FSDP_FLAG = "ACCELERATE_USE_FSDP"
_OTHERS = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


def is_main() -> bool:
    """Return whether this is the first process of a run, or the only one."""
    return process_index() == 0


def process_index() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """Return the number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def readers(tensor_parallel: bool) -> tuple[int, int]:
    """Return the index and the count of the processes that read different examples.

    With tensor parallelism, all processes compute every example together.
    """
    return (0, 1) if tensor_parallel else (process_index(), process_count())


def join_processes() -> None:
    """Connect the processes of the run, unless they are connected already."""
    from accelerate import PartialState  # slow to import

    if process_count() > 1 and not PartialState._shared_state:
        PartialState(cpu=own_device().type == "cpu", **_own_store())


def _own_store() -> dict[str, Any]:
    """Return the rendezvous store for restarted processes.

    torchrun keeps one store for all attempts, with the addresses of dead processes.
    """
    if not restarted() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # slow

    count, attempt = process_count(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(f"attempt {attempt}", TCPStore(*address, count, is_master=False))
    return {"store": store, "rank": process_index(), "world_size": count}


def any_process(flag: bool) -> bool:
    """Return whether a flag is set in any process; all processes must call this together."""
    return bool(total(flag))


def total(number: float) -> float:
    """Return the sum of a number over all processes; all processes must call this together."""
    if process_count() == 1:
        return number
    import torch  # slow to import

    # Between the hosts: no process waits for its GPU.
    summed = torch.tensor(float(number), dtype=torch.float64)
    torch.distributed.all_reduce(summed, group=_hosts())
    return float(summed)


@cache
def _hosts() -> Any:
    """Return a group of all processes that communicates through host memory."""
    import torch.distributed as dist  # slow to import

    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def everyone_s(value: _T) -> list[_T]:
    """Return the values of all processes, in order; all processes must call this together."""
    if process_count() == 1:
        return [value]
    from accelerate.utils import gather_object  # slow to import

    values: list[_T] = gather_object([value])
    return values


def from_main(value: _T) -> _T:
    """Return the first process's value in every process; all processes must call this together."""
    if process_count() == 1:
        return value
    from accelerate.utils import broadcast_object_list  # slow to import

    values: list[_T] = broadcast_object_list([value])
    return values[0]


@contextmanager
def divided_evaluation(*, sharded: bool = False, together: bool = False) -> Iterator[None]:
    """Divide the batches inside over the processes of the run; all get the same results.

    With `sharded`, each process holds a share of the parameters. Processes that compute each batch
    `together` (tensor parallelism) do not divide the batches.
    """
    if process_count() == 1 or together:
        yield
        return
    join_processes()
    with dividing(Division(process_index(), process_count(), everyone_s, in_step=sharded)):
        yield


def restarted() -> bool:
    """Return whether `torchrun --max-restarts` has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def wait_for_everyone() -> None:
    """Wait until all processes of the run have called this."""
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


def launcher_shards() -> bool:
    """Return whether `accelerate launch` is configured to shard the model by FSDP2.

    Raises:
        ConfigError: it is configured for DeepSpeed, Megatron-LM, or another kind of FSDP.
    """
    if not any(flag in os.environ for flag in (FSDP_FLAG, *_OTHERS)):
        return False
    from accelerate.utils import parse_flag_from_env  # slow to import

    others = [name for flag, name in _OTHERS.items() if parse_flag_from_env(flag)]
    sharding = parse_flag_from_env(FSDP_FLAG)
    if sharding and os.environ.get("FSDP_VERSION", "1") != "2":
        others.append("FSDP of version 1")
    if sharding and parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
        others.append("parameters on the CPU")
    if others:
        raise ConfigError(
            f"the launcher is configured for {', '.join(others)}",
            expected="processes with whole models, or FSDP2",
            hint="accelerate launch --use_fsdp --fsdp_version 2 --num_processes N -m adapterhub "
            "train ..., or --multi_gpu instead of --use_fsdp",
        )
    return bool(sharding)


@contextmanager
def without_launcher_sharding() -> Iterator[None]:
    """Turn off accelerate's own sharding inside the context; `sharding.shard` replaces it."""
    flag = os.environ.pop(FSDP_FLAG, None)
    try:
        yield
    finally:
        if flag is not None:
            os.environ[FSDP_FLAG] = flag
