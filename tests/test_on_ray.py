"""What runs on a real local Ray, in a process of its own, on one cluster.

Ray's library ends the process that it is in when one of its daemons does not answer in time, as on
a busy machine. Here that ends no other tests, its last words are shown, and it is tried once more.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    "bench/ray_engine_cases.py",
    "inference/table_engine_cases.py",
    "serving/replicas_cases.py",
]


@pytest.mark.apart
@pytest.mark.timeout(900)
def test_the_cases_pass() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", "-rfE"]
    command += [str(Path(__file__).parent / cases) for cases in CASES]
    # Else its workers wait for all other processes of a busy machine.
    environment = os.environ | {"RAY_worker_niceness": "0"}
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        said = f"exit status {done.returncode}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
        if done.returncode in (0, 1):  # tests passed, or failed
            break
        print(said)
    assert done.returncode == 0, said
    assert " passed" in done.stdout
