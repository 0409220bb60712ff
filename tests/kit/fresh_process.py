"""Command lines in one fresh process of Python, and the slow libraries that each has imported.

python fresh_process.py < COMMANDS > RESULTS      JSON: {name: words}, {name: [code, output, slow]}
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# They take from 0.2 to 3 seconds each.
SLOW = {"torch", "transformers", "datasets", "pandas", "sklearn", "scipy", "accelerate", "peft"}
# Libraries that a training run without trackers, and a prediction, do without.
UNNEEDED = {"datasets", "peft", "seqeval", "sacrebleu", "nltk", "rouge_score", "wandb", "mlflow",
            "detect_secrets", "cryptography"}  # fmt: skip
# Libraries that a run loads behind its first step, for metrics and charts, and a prediction never.
LATER = {"pandas", "pyarrow", "sklearn", "scipy.stats", "matplotlib"}
_PLACES = ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")


def run_commands(
    commands: Mapping[str, Sequence[str]], folder: Path
) -> dict[str, tuple[int, str, list[str]]]:
    """Run command lines in a folder, which is also the home; a word `import:M` imports M.

    Args:
        commands: the words of each command line, by name.
        folder: the working directory.

    Returns:
        Exit code, output with errors, and the slow libraries that are imported by then.
    """
    run = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **dict.fromkeys(_PLACES, str(folder))},
        check=True,
    )
    return {name: tuple(result) for name, result in json.loads(run.stdout).items()}


def _run(words: Sequence[str]) -> tuple[int, str, list[str]]:
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        sys.argv, sys.stdin = ["adapterhub", *words], io.TextIOWrapper(io.BytesIO())
        try:
            if words[0].startswith("import:"):
                __import__(words[0].removeprefix("import:"))
            else:
                from adapterhub.cli import main

                main()
        except SystemExit as error:
            code = int(error.code or 0)
    return code, output.getvalue(), sorted((SLOW | UNNEEDED | LATER) & sys.modules.keys())


if __name__ == "__main__":
    results = {name: _run(words) for name, words in json.load(sys.stdin).items()}
    json.dump(results, sys.stdout)
