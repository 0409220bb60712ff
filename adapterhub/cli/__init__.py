"""The `adapterhub` command.

Each subcommand is one module, imported only when it runs: `adapterhub --help` does not load torch.
Code that Python users need as well belongs in the rooms above.
"""

from __future__ import annotations

import importlib
import io
import itertools
import logging
import os
import re
import sys
import traceback
import warnings
from types import TracebackType
from typing import NoReturn

import click

from adapterhub._version import __version__
from adapterhub.errors import AdapterhubError, ConfigError, did_you_mean, one_line, printable
from adapterhub.status import display_for_terminal, showing

HEADINGS = {
    "Train and use": {
        "quickstart": "Train, evaluate and use an adapter on built-in text.",
        "sample": "Write a small data set to try commands on.",
        "train": "Train an adapter from a recipe or from flags.",
        "bench": "Compare methods on your data: tuned, repeated, tested.",
        "suggest": "Find the trained adapter to start from for your data.",
        "report": "Write the page of a run: curves, scores, mistakes.",
        "compare": "Compare runs and test whether their differences are chance.",
        "eval": "Evaluate an adapter, or an untrained backbone.",
        "predict": "Predict on texts, a file, or lines that you type.",
    },
    "Serve": {
        "serve": "Answer requests to any adapter over HTTP.",
        "token": "Create, list or revoke the tokens of a server's clients.",
        "hub": "Serve your own hub: users, tokens, any client.",
    },
    "Change adapters": {
        "merge": "Merge an adapter into its backbone and write a checkpoint.",
        "combine": "Combine adapters into one: linear, TIES or DARE.",
        "convert": "Write an adapter of another method as a LoRA.",
        "resize": "Give a LoRA another rank.",
    },
    "Look up": {
        "recipe": "Print a recipe with every option, each with a comment.",
        "options": "List the options of recipes, methods and tasks.",
        "methods": "List the methods, or show the options of one.",
        "tasks": "List the tasks, or show the options of one.",
        "backbones": "List local backbones, and recommended ones.",
        "inspect": "Show the sites of a backbone and the methods that fit it.",
    },
    "Share": {
        "publish": "Publish an adapter to a registry: a folder or a bucket.",
        "list": "List or search published adapters.",
        "show": "Show an adapter's versions, card and manifest.",
        "diff": "Compare two adapters: settings, scores and tensors.",
        "tag": "Name a published version, or list such names.",
        "yank": "Withdraw a published version, without deleting it.",
        "delete": "Delete a version from a registry or your own hub.",
        "registry": "Verify, index, copy or clean a registry, or write pages of it.",
    },
    "Share on a hub": {
        "push": "Push an adapter to the Hugging Face Hub or your own hub.",
        "pull": "Fetch the files of a published adapter and verify them.",
        "login": "Store an access token for a hub.",
        "logout": "Delete the access token of a hub.",
    },
    "Other libraries": {
        "import": "Import an adapter of another library, such as peft.",
        "export": "Export an adapter to peft, vLLM, llama.cpp or diffusers.",
    },
    "Pin and sign": {
        "lock": "Pin the adapters of a project in its lock file.",
        "sync": "Restore the adapters pinned in the lock file.",
        "key": "Create a key pair for signatures, or show its public key.",
        "sign": "Sign an adapter with a private key.",
        "verify": "Show who signed an adapter, and whether you trust them.",
        "trust": "List, add or remove the keys that you trust.",
    },
}
"""The commands with one-line descriptions, under their headings in the help text."""
COMMANDS = {name: said for names in HEADINGS.values() for name, said in names.items()}
EXAMPLES = {
    "quickstart": ("adapterhub quickstart --output runs/first",),
    "sample": (
        "adapterhub sample",
        "adapterhub sample tickets > tickets.csv",
        "adapterhub sample docstrings dev.tsv --held-out --rows 100",
        "adapterhub sample digits digits",
    ),
    "train": (
        "adapterhub train recipes/quickstart.yaml train.epochs=1",
        "adapterhub train --backbone sentence-transformers/all-MiniLM-L6-v2 \\",
        "    --method lora --train train.tsv --eval dev.tsv --output runs/sst2",
        "adapterhub train recipe.yaml --sweep method=lora,pfeiffer --sweep seed=0,1,2",
        "adapterhub train --resume --output runs/sst2",
    ),
    "bench": (
        "adapterhub bench --backbone sentence-transformers/all-MiniLM-L6-v2 \\",
        "    --train train.tsv --methods lora,full --budget 30m --output bench/mine",
        "adapterhub bench study.yaml --output bench/glue",
        "adapterhub bench --output bench/mine",
    ),
    "suggest": (
        "adapterhub suggest --backbone acme/bert --train my.tsv",
        "adapterhub suggest runs/a hf:acme/b --backbone acme/bert --train my.tsv",
    ),
    "report": (
        "adapterhub report runs/sst2 --open",
        "adapterhub report runs/*",
        "adapterhub report bench/mine",
    ),
    "compare": ("adapterhub compare runs/head runs/lora", "adapterhub compare runs/* --list"),
    "eval": (
        "adapterhub eval runs/sst2 --data dev.tsv",
        'adapterhub eval --backbone ID --task "prompted(...)" --data dev.tsv',
    ),
    "predict": (
        'adapterhub predict runs/sst2 "a gorgeous, witty movie"',
        "adapterhub predict sst2@best reviews.txt --json",
        "adapterhub predict sst2 reviews.csv --output predicted.csv",
        "adapterhub predict sst2             # asks for lines, and answers each",
        "adapterhub predict sst2 --input 'reviews/*.parquet' --output predicted",
    ),
    "serve": (
        "adapterhub serve runs/sst2 polite@3",
        "adapterhub serve --backbone sentence-transformers/all-MiniLM-L6-v2",
        "adapterhub serve polite --allow 'team-*' --host 0.0.0.0 --tokens tokens.json",
        "adapterhub serve --config serve.yaml --check",
    ),
    "token": (
        "adapterhub token create shop --adapter 'team-*' --expires 90d",
        "adapterhub token list",
        "adapterhub token revoke shop",
    ),
    "merge": ("adapterhub merge runs/sst2 --output merged",),
    "combine": (
        "adapterhub combine runs/a runs/b --output both --weights 0.7,0.3",
        "adapterhub combine runs/a runs/b --output both --how ties --density 0.3",
    ),
    "convert": (
        "adapterhub convert runs/oft --output lora --energy 0.99 --eval test.csv",
        "adapterhub convert runs/vera --output lora",
    ),
    "resize": ("adapterhub resize runs/sst2 --output small --rank 4",),
    "recipe": (
        "adapterhub recipe --method lora --task seq2seq --train train.csv > my.yaml",
        "adapterhub train my.yaml --output runs/one",
        "adapterhub recipe lora seq2seq --save my.yaml",
        "adapterhub recipe runs/one/recipe.yaml train.epochs=10 --save longer.yaml",
    ),
    "options": (
        "adapterhub options                  all options of a recipe",
        "adapterhub options train            how to train",
        "adapterhub options lora             of a method",
        "adapterhub options causal-lm        of a task",
        "adapterhub options lr               of another name: train.learning_rate",
    ),
    "methods": ("adapterhub methods", "adapterhub methods lora"),
    "tasks": ("adapterhub tasks", "adapterhub tasks seq2seq"),
    "backbones": ("adapterhub backbones",),
    "inspect": ("adapterhub inspect sentence-transformers/all-MiniLM-L6-v2",),
    "publish": (
        "adapterhub publish runs/sst2",
        "adapterhub publish runs/sst2 --name polite --tag best --license mit",
    ),
    "list": (
        "adapterhub list --sort newest",
        "adapterhub list german reviews --task classification --sort accuracy",
    ),
    "show": ("adapterhub show sst2", "adapterhub show runs/sst2 --json"),
    "diff": ("adapterhub diff sst2@v1 sst2@v2", "adapterhub diff runs/lora runs/mam"),
    "tag": (
        "adapterhub tag sst2@v2 best            # sst2@best is v2 from now on",
        "adapterhub tag sst2                    # lists the tags",
        "adapterhub tag sst2 best --remove",
    ),
    "yank": ("adapterhub yank sst2@v1 --reason 'trained on the test set'",),
    "delete": (
        "adapterhub delete sst2@v1",
        "adapterhub yank sst2@v1 --reason WHY     # withdraws it, keeps its files",
    ),
    "registry": ("adapterhub registry site --output public", "adapterhub registry verify"),
    "push": (
        "adapterhub push runs/sst2 hf:acme/sst2 --private",
        "adapterhub push runs/sst2 https://hub.example.org/acme/sst2 --tag v1",
    ),
    "pull": ("adapterhub pull sst2@best", "adapterhub pull hf:acme/sst2 --to adapters/sst2"),
    "login": ("adapterhub login https://hub.example.org",),
    "logout": ("adapterhub logout https://hub.example.org",),
    "hub": (
        "adapterhub hub user hub ada --admin",
        "adapterhub hub token create hub --user ada",
        "adapterhub hub start hub",
        "HF_ENDPOINT=http://127.0.0.1:8733 hf auth whoami",
    ),
    "import": ("adapterhub import their-lora --backbone Qwen/Qwen3-0.6B --output mine",),
    "export": (
        "adapterhub export runs/mine/adapter --output mine-peft",
        'adapterhub export --check vllm --method "lora(rank=64)" \\',
        "    --backbone Qwen/Qwen3-0.6B",
    ),
    "lock": ("adapterhub lock sst2@v1", "adapterhub lock hf:acme/sst2 --name sentiment"),
    "sync": ("adapterhub sync", "adapterhub sync --to models/adapters"),
    "key": ("adapterhub key new acme.key", "adapterhub key show acme.pub"),
    "sign": (
        "adapterhub sign runs/sst2 --key acme.key",
        "adapterhub sign sst2@v1 --key acme.key",
        "adapterhub push runs/sst2 hf:acme/sst2 --sign acme.key",
    ),
    "verify": ("adapterhub verify sst2@v1", "adapterhub verify runs/sst2"),
    "trust": (
        "adapterhub trust acme.pub",
        "adapterhub trust ed25519:...",
        "adapterhub trust --remove acme.pub",
        "adapterhub trust --require-signatures",
    ),
}
"""Example command lines at the end of a help text."""
SEE_ALSO = {
    "quickstart": "train, with your own data; recipe, for all options",
    "sample": "train; quickstart",
    "train": "options, which lists all; recipe, for a file; report, predict",
    "bench": "compare, train, methods",
    "suggest": "train --from; bench; list",
    "report": "compare, eval",
    "compare": "report, diff",
    "eval": "predict, compare, publish",
    "predict": "eval, publish, merge",
    "serve": "token; publish; predict",
    "token": "serve",
    "merge": "export, for peft; combine",
    "combine": "merge, eval",
    "convert": "resize; export, for other programs; merge",
    "resize": "convert; eval",
    "recipe": "options, which explains one; train",
    "options": "recipe, methods, tasks",
    "methods": "options METHOD; inspect, for what fits a backbone",
    "tasks": "options TASK; train --show 3, for the model's inputs",
    "backbones": "inspect, for the sites of one; tasks",
    "inspect": "methods; options METHOD",
    "publish": "list, show, tag; push, to a hub",
    "list": "show, pull",
    "show": "pull, diff, verify",
    "diff": "show, compare",
    "tag": "publish, show, yank",
    "yank": "tag, delete",
    "delete": "yank; registry gc, which frees the space",
    "registry": "list, publish, delete",
    "push": "publish, login, sign",
    "pull": "show, verify, lock",
    "login": "push, pull, logout",
    "logout": "login",
    "hub": "push, pull, login; registry copy",
    "import": "eval, publish, export",
    "export": "import, merge",
    "lock": "sync, pull",
    "sync": "lock",
    "key": "sign, trust",
    "sign": "verify, push",
    "verify": "trust, sign",
    "trust": "verify, key show",
}
"""Related commands at the end of a help text."""
ALIASES = {"search": "list"}
OTHER_WORDS = {
    **dict.fromkeys(
        ("sft", "finetune", "fine-tune", "fit", "pretrain", "pt", "cpt", "learn", "fine_tune"),
        "adapterhub train DATA; --task causal-lm for prompts and answers",
    ),
    **dict.fromkeys(
        ("dpo", "orpo", "kto", "simpo", "cpo", "ipo"),
        "adapterhub train DATA --task preference; adapterhub options preference lists the losses",
    ),
    **dict.fromkeys(("reward", "rm-train", "reward-model"), "adapterhub train DATA --task reward"),
    **dict.fromkeys(
        ("grpo", "rlvr", "dapo"),
        "adapterhub train DATA --task grpo --reward exact; docs/guides/grpo.md has the rewards",
    ),
    **dict.fromkeys(
        ("ppo", "rlhf", "rloo", "online-dpo"),
        "adapterhub train DATA --task grpo learns from rewards, --task preference from pairs of "
        "answers",
    ),
    **dict.fromkeys(
        ("distillation", "distill", "kd", "gkd"),
        "distillation from logits is not supported; adapterhub predict writes a teacher's "
        "answers to a file, "
        "and adapterhub train learns them",
    ),
    **dict.fromkeys(
        ("api", "server", "start", "deploy", "vllm", "launch"),
        "adapterhub serve ADAPTER, with the API of OpenAI; adapterhub export for vLLM",
    ),
    **dict.fromkeys(
        ("chat", "talk", "ask", "generate", "infer", "inference", "complete", "cli", "try"),
        "adapterhub predict ADAPTER, which answers the lines that you type",
    ),
    **dict.fromkeys(
        ("webui", "ui", "webchat", "gui", "board", "dashboard", "web", "demo", "studio", "app"),
        "training has no web form; adapterhub serve ADAPTER has a page to try it, and "
        "adapterhub report RUN the page of a run",
    ),
    **dict.fromkeys(
        ("upload", "push-to-hub", "push_to_hub", "share"),
        "adapterhub push RUN hf:OWNER/NAME for a hub, or adapterhub publish RUN for a registry",
    ),
    **dict.fromkeys(
        ("download", "fetch", "get", "install", "add", "clone"), "adapterhub pull ADAPTER"
    ),
    **dict.fromkeys(
        ("evaluate", "evaluation", "test", "score", "validate", "lm-eval", "lm_eval"),
        "adapterhub eval ADAPTER --data FILE",
    ),
    **dict.fromkeys(
        ("classify", "label", "tag-texts", "embed", "encode"),
        "adapterhub predict ADAPTER TEXT; ah.embed has the vectors of a backbone",
    ),
    **dict.fromkeys(
        ("init", "new", "create", "config", "configure", "template", "example", "setup"),
        "adapterhub recipe --save my.yaml, or adapterhub quickstart",
    ),
    **dict.fromkeys(("run", "runs", "go"), "adapterhub train DATA, or a recipe"),
    **dict.fromkeys(("resume", "continue"), "adapterhub train --resume --output RUN"),
    **dict.fromkeys(
        ("sweep", "tune", "search-parameters", "hpo", "optimize", "compare-methods"),
        "adapterhub bench --train FILE, or adapterhub train FILE --sweep KEY=V,V",
    ),
    **dict.fromkeys(("benchmark", "experiment"), "adapterhub bench --train FILE"),
    **dict.fromkeys(("models", "model", "bases"), "adapterhub backbones"),
    **dict.fromkeys(
        ("adapters", "ls", "catalog", "catalogue", "browse", "find", "history"), "adapterhub list"
    ),
    **dict.fromkeys(
        ("datasets", "dataset", "data", "prepare", "preprocess", "tokenize"),
        "adapterhub train DATA --show 3, which prints rows as the model gets them",
    ),
    **dict.fromkeys(("info", "describe", "card", "view", "cat"), "adapterhub show ADAPTER"),
    **dict.fromkeys(
        ("rm", "remove", "unpublish", "del", "uninstall"),
        "adapterhub delete NAME@VERSION, or adapterhub yank to withdraw one",
    ),
    **dict.fromkeys(
        ("fuse", "merge-lora", "merge_lora", "merge-and-unload", "bake"),
        "adapterhub merge ADAPTER --output DIR",
    ),
    **dict.fromkeys(
        ("soup", "mix", "average", "ties", "dare", "mergekit"),
        "adapterhub combine A B --output DIR",
    ),
    **dict.fromkeys(
        ("quantize", "quant"),
        "adapterhub train --quantize nf4 for training; merged "
        "checkpoints are quantized by other programs",
    ),
    **dict.fromkeys(
        ("gguf", "ollama", "llamacpp", "llama.cpp", "convert-gguf"),
        "adapterhub export ADAPTER --to gguf",
    ),
    **dict.fromkeys(("help", "commands", "man"), "adapterhub --help --all"),
    **dict.fromkeys(("whoami", "auth", "signin"), "adapterhub login URL; hf auth whoami"),
    **dict.fromkeys(("env", "doctor", "version", "versions"), "adapterhub --version"),
    **dict.fromkeys(("plot", "log", "logs", "tensorboard", "monitor"), "adapterhub report RUN"),
}
"""Commands of other programs, each with its counterpart here, or a note that it is missing."""
_GPU = "CUDA_VISIBLE_DEVICES=0 before the command; without it, a GPU that is there is used"
OTHER_FLAGS = {
    **dict.fromkeys(("gpu", "gpus", "device", "devices", "cuda", "use-gpu", "gpu-id"), _GPU),
    **dict.fromkeys(("cpu", "no-cuda", "use-cpu"), "CUDA_VISIBLE_DEVICES= before the command"),
    **dict.fromkeys(("version", "revision", "tag"), "NAME@v3 instead of the name"),
    **dict.fromkeys(("model", "base", "base-model", "model-name-or-path"), "--backbone ID"),
    **dict.fromkeys(("adapter", "adapter-name-or-path", "lora", "peft"), "the adapter as a word"),
    **dict.fromkeys(("out", "out-dir", "output-dir", "save-dir", "dest"), "--output DIR"),
    **dict.fromkeys(
        ("file", "dataset", "test-file", "eval", "input-file"), "--data FILE, or the file as a word"
    ),
    **dict.fromkeys(("batch", "bs", "per-device-eval-batch-size"), "--batch-size N"),
    **dict.fromkeys(("verbose", "debug", "v"), "no flag: what matters is printed"),
    **dict.fromkeys(("yes", "y", "force", "f"), "--overwrite where a command has it"),
}
"""Flags of other programs, each with its counterpart here; flags of recipes have aliases."""
_FIRST = ("Train and use", "Look up")
_ALL = "adapterhub.all_commands"


class LazyGroup(click.Group):
    """A click group that lists its subcommands from COMMANDS and imports them only to run them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands in the order of a typical workflow."""
        return [*COMMANDS]  # `list` is the module cli/list.py here, once it is imported

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the subcommand `name`: the function `command` of `cli/<name>.py`."""
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"adapterhub.cli.{name}")
        command: click.Command = module.command
        examples = "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[name])])
        command.epilog = f"{examples}\n\nSee also: {SEE_ALSO[name]}."
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a subcommand as click does, but suggest the nearest name for a mistyped one."""
        if args and not args[0].startswith("-") and args[0] not in {*COMMANDS, *ALIASES}:
            other = OTHER_WORDS.get(args[0].lower(), "")
            near = f"; try {other}" if other else did_you_mean(args[0], COMMANDS)
            raise click.UsageError(f"unknown command {args[0]!r}{near}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; escape the parts of the command line that click's errors quote."""
        try:
            with showing(display_for_terminal(stages=False)):
                return super().invoke(ctx)
        except click.NoSuchOption as error:
            flag = error.option_name
            other = OTHER_FLAGS.get(flag.lstrip("-").replace("_", "-"), "")
            command = error.ctx.command if error.ctx else self
            own = {name for each in command.params for name in each.opts}
            if not other or (other.startswith("--") and other.split()[0] not in own):
                raise
            raise click.UsageError(f"no such flag: {flag}; try {other}", error.ctx) from error
        except click.ClickException as error:
            quoted = printable(error.message).replace("\n", "\n    ")
            vars(error)["message"] = quoted  # final by its annotation
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; `--all` also applies to a `--help` before it."""
        ctx.meta[_ALL] = "--all" in itertools.takewhile(lambda word: word.startswith("-"), args)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the subcommands under their headings, without importing their modules.

        The subcommands of most headings are only named, unless `--all` is set.
        """
        described = [title for title in HEADINGS if ctx.meta.get(_ALL) or title in _FIRST]
        width = max(len(name) for title in described for name in HEADINGS[title])
        for title in described:
            with formatter.section(title):
                lines = HEADINGS[title].items()
                formatter.write_dl([(name.ljust(width), summary) for name, summary in lines])
        if more := [title for title in HEADINGS if title not in described]:
            with formatter.section("More (descriptions: adapterhub --help --all)"):
                formatter.write_dl([(title, ", ".join(HEADINGS[title])) for title in more])


def _print_all(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        click.echo(ctx.get_help())
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`adapterhub COMMAND --help` has the options and examples of one. New here: "
    "`adapterhub quickstart`.",
)
@click.version_option(__version__, prog_name="adapterhub")
@click.option(
    "--all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_all,
    help="Show all commands with a description of each, and exit.",
)
def group() -> None:
    """Parameter-efficient fine-tuning of transformers: train, use, share and merge adapters."""


# Variables that libraries read on import. tokenizers uses all cores, and warns about later
# subprocesses unless the variable is set. torch keeps compiled products of 1,024 shapes in each of
# two caches; batches have many lengths, and 64 shapes take a third less memory in bf16, as fast.
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


def main() -> None:
    """Run the command line; on an expected error print one message and exit with code 2."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _make_output_printable()
    try:
        _refuse_undecodable(sys.argv[1:])
        group(prog_name="adapterhub")
    except AdapterhubError as error:
        _fail(str(error))
    except OSError as error:  # a full disk, a lost mount: not a bug, so no traceback
        _fail(one_line(f"{error.filename or 'a file'}: {error.strerror or error}"))


class _PrintableRecord(logging.LogRecord):
    """A log record whose message is printable: libraries log texts of hubs and files."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def _make_output_printable() -> None:
    """Escape foreign text in warnings, logs and tracebacks, and characters a stream cannot encode.

    The commands' own output is escaped by `_format`, errors by `AdapterhubError`.
    """
    warnings.formatwarning = _warning_line
    logging.setLogRecordFactory(_PrintableRecord)
    sys.excepthook = _print_traceback
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an unexpected exception as Python does, but printable."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


def _refuse_undecodable(words: list[str]) -> None:
    """Reject arguments that are not in the terminal's encoding: Python hides their bytes."""
    for number, word in enumerate(words, start=1):
        if lone := re.search("[\ud800-\udfff]", word):
            byte = ord(lone.group()) - 0xDC00
            raise ConfigError(
                f"argument {number} is not {sys.getfilesystemencoding().upper()} text: byte "
                f"0x{byte & 0xFF:02x} at character {lone.start() + 1}",
                expected="text in the encoding of the terminal",
                hint="pipe texts through iconv -f LATIN1 -t UTF-8; rename files with other names",
            )


def _warning_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning for users, without the line of code that raised it."""
    text = printable(str(message)).replace("\n", "\n    ")
    return f"{'note' if category is UserWarning else category.__name__}: {text}\n"


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(2)
