"""The clock of a run: time spent training and on other work, speed, and peak memory."""

from __future__ import annotations

import os
import sys
import time

import torch

from adapterhub.training.progress import RunProgress
from adapterhub.training.report import Timing


class RunClock:
    """Adds the time of one session to the progress of a run. It runs from its creation on."""

    def __init__(self, progress: RunProgress, device: torch.device) -> None:
        self.progress = progress
        self.device = device
        self.restart_speed()
        self.lap_start = time.perf_counter()

    def add_training(self) -> None:
        """Count the time since the last call as training, and update the peak memory."""
        self.progress.train_seconds += self._lap()
        self.progress.peak_memory = max(self.progress.peak_memory, peak_memory(self.device))

    def add_other(self) -> None:
        """Count the time since the last call as other work: evaluating, saving."""
        self.progress.other_seconds += self._lap()

    def timing(self) -> Timing:
        """Return the timing up to now, with the speed since the last `restart_speed`."""
        self.add_training()
        progress = self.progress
        seconds = max(progress.train_seconds - self.reported_seconds, 1e-9)
        return Timing(
            seconds=progress.seconds,
            examples_per_second=(progress.examples - self.reported_examples) / seconds,
            peak_memory=progress.peak_memory,
            tokens_per_second=(progress.tokens - self.reported_tokens) / seconds,
        )

    def restart_speed(self) -> None:
        """Measure the training speed from here on."""
        self.reported_examples = self.progress.examples
        self.reported_tokens = self.progress.tokens
        self.reported_seconds = self.progress.train_seconds

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self.lap_start = now - self.lap_start, now
        return lap


def process_memory() -> int:
    """Return the memory that the process takes now, in bytes; 0 if the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory(torch.device("cpu"))


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the GPU, or of the process if the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    if sys.platform == "linux":  # where rusage begins with the peak of the parent process
        with open("/proc/self/status") as file:
            (line,) = (line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
