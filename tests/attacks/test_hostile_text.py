"""Texts of strangers on a terminal: in every field that admits them, by every command.

Each text field of a manifest, of names.json, of a lock file, of peft's configuration, of a recipe,
of labels and of a hub's answers gets every hostile sequence that its schema admits. Every command
then runs on a pseudo terminal, with and without --json: no sequence reaches the terminal, none is
read as markup or as an emoji code, and JSON keeps every character.
"""

import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forge import forge, harmless_text, sealed
from huggingface_hub import constants

import adapterhub as ah
from adapterhub import cli
from adapterhub.errors import AdapterhubError, printable
from adapterhub.files.manifest import from_json
from adapterhub.files.schema import canonical_json
from tests.kit import fake_hub
from tests.kit.runs import predictions, run_folder
from tests.kit.selection import long_table

MARKS = (
    "x:bomb:", "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "\u202egpj", "[link=https://x]y[/link]",
    "[bold]", "\r", "\x85", "\u2028", "\u200b", "\U000e0041", "\x7f", "\nerror: sudo", "\ud800",
)  # fmt: skip
HOSTILE = "".join(mark for mark in MARKS if mark != "\ud800")
EMOJI = "\U0001f4a3"
pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="needs a pseudo terminal"),
    pytest.mark.filterwarnings("ignore"),
]


def leaves(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every text in a tree."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        if isinstance(tree[key], (dict, list)):
            yield from leaves(tree[key])
        elif isinstance(tree[key], str):
            yield tree, key


def admitted(tree: dict[str, Any]) -> bool:
    try:
        from_json(sealed(tree))
    except (AdapterhubError, UnicodeEncodeError):
        return False
    return True


def plant(tree: dict[str, Any], keep: tuple[str, ...]) -> int:
    """Add to every text all sequences that the schema admits there; return how many fields."""
    count = 0
    kept = {
        id(c) for k in keep if isinstance(tree.get(k), (dict, list)) for c, _ in leaves(tree[k])
    }
    for container, key in list(leaves(tree)):
        if id(container) in kept or key in keep:
            continue
        before = container[key]
        for mark in MARKS:
            planted = container[key]
            container[key] += mark
            if not admitted(tree):
                container[key] = planted
        count += container[key] != before
    return count


@contextmanager
def terminal(monkeypatch) -> Iterator[list[str]]:
    """Connect standard output and error to a pseudo terminal; yield a list for what it shows."""
    shown: list[str] = []
    master, slave = os.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 1 << 16):
                chunks.append(data)
        except OSError:  # the other end was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    stream = io.TextIOWrapper(os.fdopen(slave, "wb", 0), encoding="utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "400")
    try:
        yield shown
    finally:
        stream.close()
        reader.join()
        os.close(master)
        shown.append(b"".join(chunks).decode())


def run(monkeypatch, *words: object) -> str:
    """Run a command on a pseudo terminal; return what it wrote, without the terminal's CR."""
    monkeypatch.setattr(sys, "argv", ["adapterhub", *map(str, words)])
    with warnings.catch_warnings(), terminal(monkeypatch) as shown:
        warnings.simplefilter("always")

        def show(message: Any, category: Any, *rest: Any) -> None:
            sys.stderr.write(warnings.formatwarning(message, category, *rest[:2]))

        warnings.showwarning = show
        try:
            cli.main()
        except SystemExit:
            pass
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
    (text,) = shown
    assert "Traceback" not in text, text
    return text.replace("\r\n", "\n")


def check(text: str) -> None:
    """Check that only rich's own colours reached the terminal."""
    plain = re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]", "", text)
    plain = re.sub(r"\r\x1b\[2K|\x1b\[1A|\x1b\[2K", "", plain)  # the bar of `train`
    assert harmless_text(plain), ascii(plain)
    assert not set(plain) & set("\u200b\U000e0041\x7f"), ascii(plain)
    assert EMOJI not in plain
    assert "\nerror: sudo" not in plain


@pytest.fixture(scope="module")
def world(backbone: Path, tmp_path_factory) -> Path:
    """Make a folder in which every file of others is hostile."""
    root = tmp_path_factory.mktemp("world")
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b", "c"])
    adapter = ah.attach(model, "lora(rank=2)", name="polite")
    adapter.metadata.training = {
        "recipe": {"task": "classification", "data": {"text": "text"}, "note": "n"}, "seed": 1,
    }  # fmt: skip
    adapter.metadata.metrics = {"accuracy": 0.5}
    adapter.metadata.publication = {
        "description": "d", "license": "mit", "language": ("en",), "tags": ("t",)
    }  # fmt: skip
    adapter.save(root / "run" / "adapter")
    (root / "run" / "recipe.yaml").write_text(f"backbone: {backbone}\n", encoding="utf-8")
    ah.publish(root / "run", "polite", registry=root / "registry", tags=("best",))
    (version,) = (root / "registry").glob("*/polite/v1")

    def change(tree: dict[str, Any]) -> None:
        tree["training"]["recipe"] |= {"k" + HOSTILE: [HOSTILE]}
        planted = plant(
            tree, ("methods", "backbone", "head", "versions", "files", "tokenizer", "task", "text")
        )
        assert planted >= 9

    for folder in (root / "run" / "adapter", version):
        forge(folder, change)
        (folder / "README.md").write_text(f"# Card {HOSTILE}\n{'<!--' * 9}\n", encoding="utf-8")
    shutil.copytree(version, version.with_name("v2"))
    names = {"tags": {"best": "v1"}, "yanked": {"v2": HOSTILE}}
    (version.parent / "names.json").write_bytes(canonical_json(names))
    tagged = Path(shutil.copytree(version.parent, version.parent.with_name("tagged")))
    names = {"tags": {HOSTILE: "v1"}, "yanked": {}}
    (tagged / "names.json").write_bytes(canonical_json(names))
    _more(root, backbone, version)
    return root


def _more(root: Path, backbone: Path, version: Path) -> None:
    """Add a folder with a hostile name, a broken manifest, data, a recipe and foreign files."""
    other = version.parent.parent / "z[bold]\x1b[2J\u202e"
    shutil.copytree(version.parent, other)
    shutil.copytree(root / "run", root / "sites")

    def change(tree: dict[str, Any]) -> None:
        assert plant(tree, ("task", "text", "description", "labels", "training")) >= 4

    forge(root / "sites" / "adapter", change)
    broken = root / "broken" / version.parent.parent.name / "polite" / "v1"
    shutil.copytree(version, broken)
    forge(broken, lambda tree: tree.update({HOSTILE: HOSTILE, "name": HOSTILE}))
    rows = "".join(
        f"a good movie\t{HOSTILE.replace(chr(10), ' ').replace(chr(13), '')}{i % 2}\n"
        for i in range(8)
    )
    (root / "data.tsv").write_bytes(f"text\tlabel\n{rows}".encode())
    recipe = {
        "backbone": str(backbone),
        "data": {"train": "x"},
        HOSTILE: HOSTILE,
        "method": HOSTILE,
    }
    (root / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    (root / "bad.yaml").write_text(f"backbone: [{HOSTILE}", encoding="utf-8")
    rows = [{"label": HOSTILE, "prediction": "x", "score": 0.5, "texts": [HOSTILE]}]
    run_folder(root / "pages", predictions("classes", rows), metric=HOSTILE, rate=HOSTILE)
    (root / "pages" / "recipe.yaml").write_text(json.dumps({"task": HOSTILE}), encoding="utf-8")
    (root / "theirs").mkdir()
    hostile = dict.fromkeys(("base_model_name_or_path", HOSTILE, "r"), HOSTILE)
    config = {"peft_type": "LORA", **hostile}
    (root / "theirs" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (root / "theirs" / "adapter_model.safetensors").write_bytes(b"")
    pinned = {"reference": f"polite@{HOSTILE}", "registry": HOSTILE, "digest": HOSTILE,
              "backbone": HOSTILE, "fingerprint": HOSTILE}  # fmt: skip
    lock = {"version": 1, "adapters": {HOSTILE: pinned}}
    (root / "hostile.lock").write_text(json.dumps(lock), encoding="utf-8")
    evil = Path(shutil.copytree(backbone, root / "evil"))
    tree = json.loads((evil / "config.json").read_text())
    (evil / "config.json").write_text(json.dumps(tree | {"model_type": HOSTILE}), encoding="utf-8")


# For each command, command lines that print something of others.
LINES: dict[str, list[str]] = {
    "train": [
        "--dry-run --backbone BACKBONE --train data.tsv --eval data.tsv --output new",
        "--backbone BACKBONE --train data.tsv --eval data.tsv --output new train.epochs=1"
        " train.tensorboard=false",
        "--dry-run recipe.yaml", "--dry-run bad.yaml",
    ],
    "eval": [
        "./run --data data.tsv", "./run --data data.tsv --label nothing",
        "--backbone evil --task seq2seq --data data.tsv",
    ],
    "bench": [
        "--backbone BACKBONE --train data.tsv --methods head --steps 1 --rates 1 --seeds 1"
        " --output study dtype=fp32",
        "--backbone BACKBONE --train data.tsv --methods REASON --output study2",
        "--backbone REASON --train data.tsv --output study3", "bad.yaml --output study4",
    ],
    "suggest": [
        "--backbone BACKBONE --train data.tsv --registry registry",
        "./run broken/*/polite/v1 --backbone BACKBONE --train data.tsv",
        "./sites --backbone BACKBONE --train data.tsv --label nothing",
    ],
    "report": ["pages", "./run", "data.tsv"],
    "compare": ["pages ./run --list", "pages pages --json", "./run ./sites", "pages data.tsv"],
    "predict": ["./run text", "./run --data data.tsv", "./sites text", "broken/*/polite/v1 text"],
    "publish": ["./run --registry copy"],
    "push": ["./run ADDRESS/acme/polite", "./run ADDRESS/acme/refused"],
    "pull": [
        "polite@v2 --registry registry", "polite@v1 --registry broken", "ADDRESS/acme/polite",
        "ADDRESS/acme/none",
    ],
    "list": [
        "--registry registry", "--all --registry registry", "--endpoint ADDRESS",
        "--registry broken",
    ],
    "show": [
        "polite --registry registry", "polite@v2 --registry registry",
        "polite --card --registry registry", "./run", "./theirs", "ADDRESS/acme/polite",
    ],
    "yank": [
        "polite@v1 --registry registry --reason REASON",
        "polite@v9 --registry registry --reason x",
    ],
    "tag": [
        "polite --registry registry", "polite@v1 REASON --registry registry",
        "polite good --registry registry", "polite REASON --remove --registry registry",
        "tagged --registry registry", "ADDRESS/acme/polite",
    ],
    "delete": [
        "polite@v1 --yes --registry registry", "REASON --yes --registry registry",
        "polite@REASON --yes", "polite@v9 --yes --registry broken",
        "polite@v1 --yes --registry broken",
    ],
    "diff": ["./run ./sites", "polite@v1 polite@v2 --registry registry", "./run ./theirs"],
    "lock": ["polite@v2 --registry registry --file new.lock", "polite --file hostile.lock"],
    "sync": ["--file hostile.lock"],
    "registry": [
        "verify --registry registry", "verify --registry broken", "index --registry registry",
        "gc --registry registry",
    ],
    "merge": ["./run --output merged", "broken/*/polite/v1 --output none"],
    "combine": ["./run ./run --output combined", "./run broken/*/polite/v1 --output none"],
    "convert": ["./run --output converted", "broken/*/polite/v1 --output none"],
    "resize": ["./run --rank 1 --output resized", "broken/*/polite/v1 --rank 1 --output none"],
    "import": ["./theirs --backbone BACKBONE --output ours"],
    "export": ["./run --output exported", "./run --check peft", "broken/*/polite/v1 --output none"],
    "recipe": [
        "recipe.yaml", "bad.yaml", "--method REASON", "REASON=1", "--REASON 1", "--save REASON",
        "data.text=REASON name=REASON --method chosen --backbone REASON",
    ],
    "options": ["REASON"],
    "methods": ["REASON"],
    "tasks": ["REASON"],
    "inspect": ["evil"],
    "backbones": [""],
    "quickstart": ["REASON"],
    "key": ["new REASON", "show data.tsv"],
    "sign": ["./run --key bad.yaml", "./run --key data.tsv --name REASON"],
    "verify": ["./run", "polite --registry registry", "./theirs", "ADDRESS/acme/polite"],
    "trust": ["REASON bad.yaml", "ns bad.yaml", "REASON REASON"],
    "login": ["REASON"],
    "logout": ["REASON"],
    "serve": ["REASON --check", "./run --check --tokens bad.yaml", "--config bad.yaml --check"],
    "token": [
        "create REASON --file new.json", "list --file bad.yaml", "revoke REASON --file new.json",
    ],
    "sample": ["REASON", "tickets REASON", "digits --held-out"],
    "hub": ["verify REASON", "import REASON registry", "token list bad.yaml"],
}  # fmt: skip
WITH_JSON = [
    name for name in LINES
    if any("--json" in o.opts for o in getattr(cli.group.get_command(None, name), "params", ()))  # type: ignore[arg-type]
]  # fmt: skip


def test_every_command_is_attacked() -> None:
    assert LINES.keys() == cli.COMMANDS.keys(), "add command lines that print a stranger's text"
    assert len(LINES) >= 20
    assert len(WITH_JSON) >= 13


@pytest.fixture(scope="module")
def hostile_hub(world: Path) -> Iterator[str]:
    """Serve a repository whose card, yank reasons and errors are hostile."""
    with fake_hub.serving() as (hub, address):
        repository = fake_hub.Repository()
        files = {p.name: p.read_bytes() for p in (world / "run" / "adapter").iterdir()}
        section = dict.fromkeys(("version", "digest", "backbone", "task", "description"), HOSTILE)
        lists = {key: [HOSTILE] for key in ("methods", "tags", "topics")}
        card = {
            "adapterhub": {**section, **lists, "metrics": {HOSTILE: 1.0}},
            "tags": ["adapterhub"],
        }
        front = json.dumps(card)
        files["README.md"] = f"---\n{front}\n---\n{HOSTILE}\n".encode()
        repository.tags["v1"] = repository.commit(files)
        files = {**files, "yanked.json": canonical_json({"v1": HOSTILE})}
        repository.commit(files)
        hub.repositories["acme/polite"] = repository
        original = fake_hub.Handler.create

        def create(handler: Any, options: dict[str, Any]) -> None:
            if options["name"] == "refused":
                raise fake_hub.Failure(400, "", "no \x1b[2J [bold]x:bomb: \x9b31m")
            original(handler, options)

        fake_hub.Handler.create = create  # type: ignore[method-assign]
        yield address
        fake_hub.Handler.create = original  # type: ignore[method-assign]


@long_table(
    ("command", "as_json"),
    [*((name, False) for name in LINES), *((name, True) for name in WITH_JSON)],
    parts=12,
    nightly=2,
)
def test_no_command_lets_a_stranger_control_the_terminal(
    command, as_json, world, hostile_hub, backbone, tmp_path, monkeypatch
) -> None:
    place = Path(shutil.copytree(world, tmp_path / "w"))
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for line in LINES[command]:
        words = [
            word.replace("BACKBONE", str(backbone)).replace("ADDRESS", hostile_hub)
            .replace("REASON", HOSTILE) for word in line.split()
        ]  # fmt: skip
        words = [
            next(iter(map(str, place.glob(w))), w) if "*" in w and "\n" not in w else w
            for w in words
        ]
        text = run(monkeypatch, command, *words, *["--json"] * as_json)
        check(text)


def test_texts_are_shown_escaped_and_json_keeps_every_character(world, tmp_path, monkeypatch):
    """What the tables and lines show is the text itself, escaped, and not nothing."""
    monkeypatch.chdir(shutil.copytree(world, tmp_path / "w"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    listed = run(monkeypatch, "list", "--registry", "registry")
    for text in ("x:bomb:", "[link=https://x]y[/link]", "\\x1b]0;"):
        assert text in listed, ascii(listed)
    yanked = run(monkeypatch, "pull", "polite@v2", "--registry", "registry")
    assert "note: polite@v2 was yanked: x:bomb:\\u001b]0;owned\\u0007" in yanked
    manifest = json.loads((world / "run" / "adapter" / "adapter.json").read_bytes())
    assert HOSTILE in manifest["description"]
    assert HOSTILE in manifest["labels"][0]
    assert json.loads(run(monkeypatch, "show", "./run", "--json")) == manifest
    lines = run(monkeypatch, "list", "--registry", "registry", "--all", "--json").splitlines()
    entries = [json.loads(line) for line in lines if not line.startswith("note: ")]
    assert {entry["description"] for entry in entries} == {manifest["description"]}
    text = run(monkeypatch, "predict", "./run", "a good movie", "--json")
    predicted = json.loads(text[text.index('{"text"') :])  # behind the stages
    assert sorted(predicted["scores"]) == sorted(manifest["labels"])
    check(run(monkeypatch, "predict", "./run", "a \x1b[31mred\u202e one"))


def test_logs_and_unexpected_errors_are_printable(capsys, monkeypatch) -> None:
    def fail(**_: Any) -> None:
        logging.getLogger("stranger").error("a %s", HOSTILE)
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr(cli, "group", fail)
    monkeypatch.setattr(sys, "argv", ["adapterhub", "list"])
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("stranger").addHandler(handler)
    with pytest.raises(RuntimeError) as error:
        cli.main()
    sys.excepthook(RuntimeError, error.value, None)
    logging.getLogger("stranger").removeHandler(handler)
    text = capsys.readouterr().err
    assert "a x:bomb:\\u001b]0;owned" in text
    assert "RuntimeError: x:bomb:\\u001b]0;owned" in text
    assert harmless_text(text)


def test_a_message_cannot_imitate_another() -> None:
    error = AdapterhubError("a\nerror: b", offenders=["c\n$ rm"], hint="d\n$ ")
    assert [line for line in str(error).splitlines() if not line.startswith("  ")] == ["a"]


def test_scripts_that_join_letters_are_kept() -> None:
    for text in ("\u0645\u06cc\u200c\u062e", "\U0001f468\u200d\U0001f469", "na\u00efve \u00a0"):
        assert printable(text) == text
    assert printable("ad\u200dmin") == "ad\\u200dmin"


MAIN = "from adapterhub.cli import main; main()"
SHOW = (sys.executable, "-c", MAIN, "show", "polite", "--registry")


def test_output_that_the_stream_cannot_encode_is_escaped(world, tmp_path) -> None:
    """A terminal or pipe of another encoding shows escapes instead of a traceback."""
    place = Path(shutil.copytree(world / "registry", tmp_path / "registry"))
    for card in place.glob("*/polite/v*/README.md"):
        card.write_text("# Höfliche Karte \u6f22\u5b57 \U0001f600\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([*SHOW, str(place)], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "\\u6f22\\u5b57" in done.stdout.decode("cp1252")
