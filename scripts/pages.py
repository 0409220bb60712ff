"""Run the code blocks of pages of documentation, and write the outputs into them.

    python scripts/pages.py docs/start.md              # run its blocks in an empty folder
    python scripts/pages.py docs/start.md --write      # and write what they print, their times,
                                                       # the version and the machine
    python scripts/pages.py docs/start.md --quick      # little data, few steps; the tests do this,
                                                       # and compare the form of the outputs
    python scripts/pages.py                            # list the pages that show outputs

A page is run from top to bottom, all in one folder:

- `console`: each line after `$ ` is a command, continued by a backslash; what follows is its
  output, without lines that the page leaves out as `...`. A line `*1.2 s.*` below the block is its
  time. A block without outputs gets none, if others of the page have some.
- `python`: runs in one namespace per page. If it prints, a block `text title="output"` follows,
  which must match (`...` stands for anything); in `text title="output, numbers vary"`, the words;
  in `text title="output, a model's words"`, the number of lines, and the labels before a colon.
- `console title="another terminal"`: a server that runs until the end of the page; the next block
  runs when it has printed its address.
- any language with a title (`yaml title="recipe.yaml"`): is written to that file, or added to it
  (`python title="tests/test_x.py, at the end"`).
- `<!-- setup` up to `-->`: Python that runs but is not shown, for data that a reader has, or to
  shorten a training where the environment has QUICK, as with --quick.
- `text` and languages without a title that are listed in SHOWN: are shown only.

A page with the line `<!-- in a copy of the repository -->` is run in one: `make` runs there with
this environment, and blocks may write and extend source files.

A page with the line `<!-- in a clone -->` finds there the folders of a clone that readers use:
`registry`, `benchmarks`, `examples` and `recipes`.

A page with the line `<!-- on trained weights -->` finds the models of `make real-models` as
`build/models`, and as `data` the folder of data sets that ADAPTERHUB_DATA names.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import doctest
import glob
import io
import itertools
import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SHOWN = {"text", "json", "toml", "yaml", "ini"}
NOT_RUN = ("pip install", "make ", "git clone", "cd ")  # the reader's machine is set up by these
IN_COPY = "<!-- in a copy of the repository -->"
IN_CLONE = "<!-- in a clone -->"
ON_TRAINED_WEIGHTS = "<!-- on trained weights -->"
ANOTHER_TERMINAL = "another terminal"
_ROOT = Path(__file__).resolve().parents[1]  # a working directory changes
_LEFT_OUT = "..."
_AT_THE_END = ", at the end"
_NOT_COPIED = (".*", "build", "dist", "runs", "out", "shared", "*.egg-info")
_STAMPS = (".installed", ".complete")  # of an environment, in the order in which make writes them
_FENCE = re.compile(
    r"^(?P<indent> *)(?:```(?P<kind>[\w-]+)?(?: title=\"(?P<title>[^\"]*)\")?|<!-- setup)\n"
    r"(?P<text>.*?)^(?P=indent)(?P<end>```|-->)\n(?P<time>\n(?P=indent)\*[\d.]+ s\.\*\n)?",
    re.MULTILINE | re.DOTALL,
)
OUTPUT, VARYING, WRITTEN = "output", "output, numbers vary", "output, a model's words"
_VARIES = {
    VARYING: re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?"),
    WRITTEN: re.compile(r"(?<=: ).*|^(?:(?!: ).)+$", re.MULTILINE),
}
# A label of a line, the first key of JSON, or the head of a table.
_LABEL = re.compile(
    r"""^(?: ([A-Za-z][\w./@-]*(?:\ [a-z]+){0,2}?) (?: :\ | :$ | \ {2,} )
          | (\{"\w+") | (\ {2,}\S.*)\n\ ─ )""",
    re.MULTILINE | re.VERBOSE,
)
_DIGITS = re.compile(r"(?<=@)[0-9a-f]{8,}|\d+")  # digests too
_START = re.compile(r"^\W*\w*")  # of a line: its first word, and what is before it
_LENGTH = {"train loss", "best", "rank", "note", "Cannot tell yet"}  # of longer trainings
_MATCHES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'")
_WORD = re.compile(rf"(?:{_QUOTED.pattern}|[^\s\"'])+")
_SHELL = re.compile(r"[|<>;&$]|^(?!adapterhub )")
# What --quick adds to commands: everything runs, with little data and few repetitions.
_QUICK = {
    "train": " train.max_steps=4 train.batch_size=4",
    "bench": " bench.steps=4 bench.rates=1 bench.tuning_seeds=1 bench.seeds=1 bench.rows=[64]"
    " train.batch_size=4 train.max_length=16",
}
_LONGEST = 27  # lines of an output that are shown; of a longer one, the first and the last
_HEAD, _TAIL = 8, 18
# Of users: nothing of theirs is read or written.
_HOMES = {"CACHE": ".cache", "CONFIG": ".config", "DATA": ".local/share", "STATE": ".local/state"}
_HOME = ".home"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    title: str
    text: str
    line: int  # of its first line of code

    @property
    def commands(self) -> list[str]:
        """The commands of a console block, each with its continuation lines."""
        return [command for command, _ in self.printed]

    @property
    def printed(self) -> list[tuple[str, str]]:
        """The commands of a console block, each with the output that the page shows."""
        lines = iter(self.text.splitlines())
        printed: list[tuple[str, str]] = []
        for line in lines:
            if line.startswith("$ "):
                while line.endswith("\\"):
                    line += "\n" + next(lines)
                printed.append((line.removeprefix("$ "), ""))
            elif printed:
                command, output = printed[-1]
                printed[-1] = (command, f"{output}{line}\n")
        return printed

    @property
    def shows_output(self) -> bool:
        """Whether the block shows what one of its commands prints."""
        return self.kind == "console" and any(output for _, output in self.printed)


@dataclass
class Done:
    """What a block printed: of a console block, for each command."""

    outputs: list[str] = field(default_factory=list)
    seconds: float = 0.0


def blocks(text: str) -> list[Block]:
    """List the fenced blocks of a page."""
    return [_block(text, match) for match in _FENCE.finditer(text)]


def _block(text: str, match: re.Match[str]) -> Block:
    line = text.count("\n", 0, match.start("text")) + 1
    code = textwrap.dedent(match["text"])
    kind = "python" if match["end"] == "-->" else match["kind"] or ""
    return Block(kind, match["title"] or "", code, line)


def run_page(page: str, text: str, folder: Path, quick: bool = False) -> list[Done]:
    """Run the blocks of a page in order, in a folder.

    Args:
        page: its name, for errors.
        text: its text.
        folder: the working directory of everything that is run.
        quick: shorten trainings, and run commands of adapterhub in this process, servers in forks.

    Raises:
        RuntimeError: a block fails, or does not print what the page says.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    done: list[Done] = []
    if IN_COPY in text:
        folder = copy_of_repository(folder)
    if IN_CLONE in text:
        for name in ("registry", "benchmarks", "examples", "recipes"):
            (folder / name).symlink_to(_ROOT / name)
    if ON_TRAINED_WEIGHTS in text:
        (folder / "build").symlink_to(_ROOT / "build")
        (folder / "data").symlink_to(Path(os.environ.get("ADAPTERHUB_DATA", "data")).resolve())
    with _in_folder(folder, quick), contextlib.ExitStack() as running:
        for block in blocks(text):
            start = time.perf_counter()
            try:
                if block.title == ANOTHER_TERMINAL:
                    servers = [_server(command, quick) for command in block.commands]
                    outputs = [running.enter_context(each) for each in servers]
                    for (command, shown), printed in zip(block.printed, outputs, strict=True):
                        _compare_forms(command, shown, printed, quick)
                else:
                    outputs = _run(block, page, namespace, quick, done)
            except (Exception, SystemExit) as error:
                raise RuntimeError(f"{page}:{block.line}: {error}") from error
            done.append(Done(outputs, time.perf_counter() - start))
    return done


def copy_of_repository(folder: Path) -> Path:
    """Copy the source into a folder, with this environment in place of that of `make venv`."""
    copy = folder / "adapterhub"
    shutil.copytree(_ROOT, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    environment = copy / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name not in _STAMPS:
            (environment / entry.name).symlink_to(entry)
    for name in _STAMPS:  # so that make installs nothing: it would be into this environment
        (environment / name).touch()
    os.environ |= {"PYTHONPATH": str(copy)}
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if name.partition(".")[0] == "adapterhub"]:
        del sys.modules[name]  # that of the copy is imported
    return copy


@contextlib.contextmanager
def _in_folder(folder: Path, quick: bool) -> Iterator[None]:
    """Work in a folder, with the user's folders inside of it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"PATH": path, "COLUMNS": "80", "PYTHONWARNINGS": "ignore"}
    os.environ |= {"QUICK": "1"} if quick else {}
    # With --quick, pages share what is computed of a backbone's files.
    homes = {name: path for name, path in _HOMES.items() if not quick or name != "CACHE"}
    os.environ |= {f"XDG_{name}_HOME": str(folder / _HOME / path) for name, path in homes.items()}
    with _chdir(folder):
        yield


@contextlib.contextmanager
def _chdir(folder: Path) -> Iterator[None]:  # contextlib.chdir needs Python 3.11
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _run(
    block: Block, page: str, namespace: dict[str, object], quick: bool, done: list[Done]
) -> list[str]:
    """Run one block and return what it printed."""
    if block.title in (OUTPUT, *_VARIES):
        _compare(block, "".join(done[-1].outputs), quick)
    elif block.title:
        _write(block)
    elif block.kind == "python":
        return [_execute(block, page, namespace)]
    elif block.kind == "console":
        outputs = []
        for command, shown in block.printed:
            outputs.append(_command(command, quick))
            _compare_forms(command, shown, outputs[-1], quick)
        return outputs
    elif block.kind not in SHOWN:
        raise ValueError(f"a block of {block.kind or 'no language'} without a title")
    return []


def _write(block: Block) -> None:
    """Write the file of a titled block, or add to it."""
    file = Path(block.title.removesuffix(_AT_THE_END))
    before = ""
    if block.title.endswith(_AT_THE_END):
        before = file.read_text(encoding="utf-8") + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(before + block.text, encoding="utf-8")


def _compare(block: Block, printed: str, quick: bool) -> None:
    """Check that a page shows what is printed; only the check of the tests is strict."""
    shown = block.text
    if varies := _VARIES.get(block.title):
        shown, printed = (varies.sub("0", text) for text in (shown, printed))
    if quick and not doctest.OutputChecker().check_output(shown, printed, _MATCHES):
        raise ValueError(f"the page shows\n{shown}\nbut printed was\n{printed}")


def form(output: str) -> set[str]:
    """Return what data and the length of a training do not change: labels, heads, keys of JSON."""
    labels = {" ".join("".join(match.groups("")).split()) for match in _LABEL.finditer(output)}
    return {_DIGITS.sub("0", label) for label in labels} - _LENGTH


def _compare_forms(command: str, shown: str, printed: str, quick: bool) -> None:
    """Check that an output that a page shows has the form of what is printed.

    Predictions are not compared: they are a model's words.

    Raises:
        ValueError: it has not, so the page is older than the program.
    """
    if not quick or command.startswith("adapterhub predict"):
        return
    old, new = form(shown), form(printed)
    more = new - old if shown.strip() and _LEFT_OUT not in shown.splitlines() else set()
    if old - new or more:
        raise ValueError(
            f"{command}: the page shows {sorted(old - new)}, and {sorted(more)} was printed, too; "
            "make docs-outputs writes the outputs anew"
        )


def _execute(block: Block, page: str, namespace: dict[str, object]) -> str:
    """Run Python code, with the line numbers of the page in tracebacks."""
    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def _command(command: str, quick: bool) -> str:
    """Run a command and return what it printed.

    Raises:
        RuntimeError: it fails.
    """
    in_copy = command.startswith("make ") and Path("Makefile").exists()
    if command.startswith(NOT_RUN) and "&&" not in command and not in_copy:
        return ""
    moved = re.fullmatch(r"cd (\S+) && (adapterhub .+)", command, re.DOTALL)
    if quick and moved:
        with _chdir(Path(moved[1])):
            return _command(moved[2], quick)
    called = re.match(r"adapterhub (train|bench) (?!.*--show)", command, re.DOTALL)
    if quick and called:
        command += _QUICK[called[1]] + " data.eval_rows=16" * ("--eval none" not in command)
    if quick and not _SHELL.search(_QUOTED.sub("", command)):
        return _in_process(_words(command))
    result = subprocess.run(
        command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False,
    )  # fmt: skip
    if result.returncode:
        raise RuntimeError(f"{command} failed:\n{result.stdout}")
    return _at_home(result.stdout)


def _at_home(printed: str) -> str:
    """Replace the folder of the page, and the user's folders in it, by `~`."""
    return printed.replace(str(Path.cwd() / _HOME), "~").replace(str(Path.cwd()), "~")


@contextlib.contextmanager
def _server(command: str, quick: bool) -> Iterator[str]:
    """Run a server in the block, and yield the lines up to its address.

    Raises:
        RuntimeError: it ends without having printed an address.
    """
    words = _words(command)
    reading, writing = os.pipe()
    if quick and words[0] == "adapterhub":
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(words, writing))
        process.start()
    else:
        process = subprocess.Popen(
            words, stdout=writing, stderr=writing, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
    os.close(writing)
    printed = open(reading, encoding="utf-8")  # noqa: SIM115
    lines: list[str] = []
    drain = threading.Thread(target=printed.read, daemon=True)
    try:
        for line in printed:
            lines.append(line)
            if re.search(r"https?://|\bport \d", line):
                break
        else:
            raise RuntimeError(f"{command} ended:\n{''.join(lines)}")
        drain.start()
        yield _at_home("".join(lines))
    finally:
        process.terminate()
        process.wait(60) if isinstance(process, subprocess.Popen) else process.join(60)
        if drain.ident:
            drain.join()
        printed.close()


def _serve(words: list[str], writing: int) -> None:
    """Run a command of adapterhub in a fork, which has imported what it needs."""
    from adapterhub.cli import main

    os.dup2(writing, 1)
    os.dup2(writing, 2)
    sys.argv = words
    with open(writing, "w", buffering=1) as out:
        sys.stdout = sys.stderr = out
        main()


def _words(command: str) -> list[str]:
    """Split a command into words as a shell does, which also lists the files of a pattern."""
    words: list[str] = []
    for match in _WORD.finditer(command.replace("\\\n", "")):
        if match[0].startswith("#"):
            break
        files = [] if _QUOTED.search(match[0]) else sorted(glob.glob(match[0]))
        words += files if "*" in match[0] and files else shlex.split(match[0])
    return words


def _in_process(words: list[str]) -> str:
    """Run a command of adapterhub without a new process: torch is imported once per page."""
    from adapterhub.cli import main

    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    before, sys.argv = sys.argv, words
    code: object = 0
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main()
    except SystemExit as exit_:
        code = exit_.code
    finally:
        sys.argv = before
    output = printed.buffer.getvalue().decode()
    if code:
        raise RuntimeError(f"{shlex.join(words)} failed:\n{output}")
    return output


def with_outputs(text: str, done: list[Done]) -> str:
    """Return the page with the outputs of its commands and the times that it shows."""
    results = iter(done)
    last: list[str] = []

    def filled(match: re.Match[str]) -> str:
        block, result = _block(text, match), next(results)
        shown, seconds = match["text"], match["time"] or ""
        run = block.kind == "console" and block.title in ("", ANOTHER_TERMINAL)
        if run and (block.shows_output or not shows_outputs(text)):
            pairs = zip(block.printed, result.outputs, strict=True)
            output = "".join(f"$ {command}\n{cut(old, new)}" for (command, old), new in pairs)
            shown = textwrap.indent(output, match["indent"])
            seconds = re.sub(r"[\d.]+ s", f"{result.seconds:.1f} s", seconds)
        elif block.title in _VARIES or (block.title == OUTPUT and "..." not in block.text):
            shown = textwrap.indent("".join(last), match["indent"])
        last[:] = result.outputs
        head = text[match.start() : match.start("text")]
        return f"{head}{shown}{match['indent']}{match['end']}\n{seconds}"

    return _FENCE.sub(filled, text)


_SIGNED = re.compile(r"\n\*The outputs of commands .*\*\n\Z")


def signed(text: str) -> str:
    """Return a page that ends with the version and the machine that printed its outputs."""
    from adapterhub import __version__

    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    line = f"*The outputs of commands were printed by adapterhub {__version__} on {machine}.*"
    return f"{_SIGNED.sub('', text).rstrip()}\n\n{line}\n"


def cut(shown: str, output: str) -> str:
    """Return an output without the lines that the page leaves out as `...`, or a long one does.

    Lines that begin with the same word are the same line; new ones between two that the page shows
    one below the other are shown, too.
    """
    if _LEFT_OUT not in shown.splitlines():
        lines = [line.rstrip() for line in output.strip("\n").splitlines()]
        if len(lines) > _LONGEST + 4:
            lines = [*lines[:_HEAD], _LEFT_OUT, *lines[-_TAIL:]]
        return "\n".join(lines).rstrip() + "\n" if lines else ""
    if doctest.OutputChecker().check_output(shown, output, _MATCHES):
        return shown
    kept, lines = shown.splitlines(), output.strip("\n").rstrip().splitlines()
    keys = ([_START.findall(_DIGITS.sub("0", line))[0] for line in each] for each in (kept, lines))
    matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
    pairs = [(m.a + i, m.b + i) for m in matcher.get_matching_blocks() for i in range(m.size)]
    pairs = [(i, j) for i, j in pairs if kept[i] != _LEFT_OUT]
    written: list[str] = []
    for (i, j), (next_i, next_j) in itertools.pairwise([(-1, -1), *pairs, (len(kept), len(lines))]):
        between = lines[j + 1 : next_j]
        written += [_LEFT_OUT] * bool(between) if _LEFT_OUT in kept[i + 1 : next_i] else between
        written += lines[next_j : next_j + 1]
    return "".join(f"{line.rstrip()}\n" for line in written)


def pages_with_outputs() -> list[Path]:
    """List the pages that show what commands print; those in a copy are written by hand."""
    pages = sorted((_ROOT / "docs").rglob("*.md"))
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    return [page for page, text in texts.items() if IN_COPY not in text and shows_outputs(text)]


def shows_outputs(text: str) -> bool:
    """Return whether a page shows what a command prints."""
    return any(block.shows_output for block in blocks(text))


def main() -> None:
    """Run one page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("page", type=Path, nargs="?", help="without it: list pages with outputs")
    parser.add_argument("--write", action="store_true", help="write outputs and times to the page")
    parser.add_argument("--quick", action="store_true", help="train on little data, with few steps")
    parser.add_argument("--record", type=Path, help="write what was printed to a JSON file")
    options = parser.parse_args()
    if options.page is None:
        print(*(page.relative_to(_ROOT) for page in pages_with_outputs()), sep="\n")
        return
    text = options.page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        done = run_page(options.page.name, text, Path(folder), options.quick)
    if options.write:
        options.page.write_text(signed(with_outputs(text, done)), encoding="utf-8")
    if options.record:
        options.record.write_text(json.dumps([vars(one) for one in done]), encoding="utf-8")
    print(f"{len(done)} blocks, {sum(one.seconds for one in done):.0f} s")


if __name__ == "__main__":
    main()
