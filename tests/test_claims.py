"""What pages deny is tried here, and what they count is generated.

A page may say that something is absent: "not here", "is refused", "cannot". Behind such a sentence
is a mark, `<!-- absent: NAME -->`. NAME is an entry of `ABSENT`, which is tried below and has to
be refused, or a test that shows the refusal, `tests/FILE.py::test_NAME`; a sentence that names its
test in its text has none. `others` is for what another library or a device lacks. So who makes it
work finds the sentences that deny it. Sentences are found by `DENIALS`, and all items below a
heading of `HEADINGS` count as such.
"""

import ast
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import click
import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    ViTConfig,
    Wav2Vec2Config,
)

import adapterhub as ah
from adapterhub.backbones.torch_free_checks import check_quantization
from adapterhub.bench import study
from adapterhub.cli import group
from adapterhub.errors import AdapterhubError, ConfigError
from adapterhub.files.manifest import Manifest
from adapterhub.loop.processes import launcher_shards
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe.recipe import TrainOptions, read_draft
from adapterhub.speed import compiled_layers
from adapterhub.tasks.common.base import parse_task, task_class
from adapterhub.training.task_mixture import TaskMixture
from tests.kit import tiny_models

ROOT = Path(__file__).parents[1]
# docs/architectures.md is written by `make sweep`.
PAGES = sorted(
    {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/architectures.md"}
)
DENIALS = re.compile(
    r"\bnot (?:yet )?(?:here|supported|possible|implemented|available|in a recipe|exported|imported"
    r"|packed|augmented|kept over)\b"
    r"|\bunsupported\b|^refused\b|\brefuses?\b|\b(?:is|are|be) (?:all )?refused\b"
    r"|(?<!that )(?<!which )(?<!what )(?<!who )\bcannot\b"
    r"|\bthere (?:is|are) no\b|\bno effect\b|\b(?:does|do) not work\b|\b(?:is|are) not read\b"
    r"|\bonly works?\b|\bworks? only\b|\bonly with\b|\b(?:im|ex)ported only\b"
    r"|^\W*only (?:methods|the)\b"
    r"|\b(?:is|are) no (?:sites?|parts)\b|\bno (?-i:[A-Z]\w+)"
    r"|\bno (?:export|index|option|support)\b"
    r"|\bneeds? (?:an?|the)\b|^\| [^|]+ \| no \|",
    re.IGNORECASE,
)
HEADINGS = re.compile(
    r"^#+ (?:not here|not supported|refused|limits|what does not work|where it ends today"
    r"|known weak points|what \w+ has and adapterhub has not)$",
    re.IGNORECASE,
)
OTHERS = "others"


# What is tried: of each claim, what has to be refused, and a word of the error.
Attempts = list[tuple[Callable[[], object], str]]


def method(spec: str) -> tuple[Callable[[], object], str]:
    """Parse a method, or an option of it, that there is none of."""
    return lambda: parse_methods(spec), re.split(r"\W", spec.partition("(")[2] or spec)[0]


def task(spec: str) -> tuple[Callable[[], object], str]:
    """Parse a task, or an option of it, that there is none of."""
    return lambda: parse_task(spec), re.split(r"[^\w-]", spec.partition("(")[2] or spec)[0]


def recipe(word: str) -> tuple[Callable[[], object], str]:
    """Read a recipe with an option, or a value of it, that there is none of."""
    return lambda: read_draft(overrides=[word]), re.split(r"[=.]", word.removeprefix("train."))[0]


def command(words: str, match: str) -> tuple[Callable[[], object], str]:
    """Run a command."""
    return lambda: group.main(words.split(), prog_name="adapterhub", standalone_mode=False), match


def adapted(spec: str, layer: nn.Module) -> tuple[Callable[[], object], str]:
    """Attach a method at a layer that is in front of a projection."""
    return lambda: ah.attach(nn.Sequential(layer, nn.Linear(4, 4)), spec), "site"


def refusal(condition: bool) -> None:
    """Refuse, where the package says itself that it leaves something out."""
    if condition:
        raise ConfigError("left out")


def left_out(condition: Callable[[], bool]) -> tuple[Callable[[], object], str]:
    """Read what the package says of itself."""
    return lambda: refusal(condition()), "left out"


def exported(name: str) -> tuple[Callable[[], object], str]:
    """Take a name from the package."""

    def take() -> None:
        if not hasattr(ah, name):
            raise ConfigError(f"adapterhub has no {name}")

    return take, name


def attached(method: str, architecture: str = "bert", kind: str = "classification") -> nn.Module:
    """Build a tiny model with two adapters, a and b."""
    model: nn.Module = tiny_models.model(architecture, kind)
    for name in "ab":
        ah.attach(model, method, name=name)
    return model


def under_deepspeed() -> None:
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_DEEPSPEED": "true"}):
        launcher_shards()


class Plain(nn.Module):
    """A module that multiplies by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


def sharded() -> nn.Module:
    """Build a model whose first parameter says that processes share it."""
    model = tiny_models.model("bert", "classification")
    with mock.patch("adapterhub.anatomy.backbone.is_sharded", return_value=True):
        return ah.attach(model, "lora").model


def without_tokens(method: str, config: PreTrainedConfig) -> tuple[Callable[[], object], str]:
    """Attach a method that needs token embeddings to a backbone of pictures or sounds."""
    return lambda: ah.attach(AutoModel.from_config(config), method), method


SIZES = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
}  # fmt: skip
PICTURES = ViTConfig(**SIZES, image_size=8, patch_size=4)
SOUNDS = Wav2Vec2Config(
    **SIZES, conv_dim=(8,), conv_stride=(2,), conv_kernel=(2,), num_feat_extract_layers=1,
    num_conv_pos_embedding_groups=2,
)  # fmt: skip


def of_adapters(option: str, value: object) -> tuple[Callable[[], object], str]:
    """Load a checkpoint of the library adapters whose bottlenecks have an option."""

    def load() -> None:
        golden = ROOT / "tests/golden/adapters/bert"
        shutil.copytree(golden / "houlsby", "theirs")
        file = Path("theirs/adapter_config.json")
        config = json.loads(file.read_text(encoding="utf-8"))
        config["config"][option] = value
        file.write_text(json.dumps(config), encoding="utf-8")
        model = AutoModelForSequenceClassification.from_pretrained(golden / "backbone")
        ah.load(model, "theirs", any_backbone=True)

    return load, option


def compiled_beside_heads() -> None:
    """Compile the layers of a model whose adapter has several heads."""
    said: list[str] = []
    adapter = ah.attach(tiny_models.model("bert", "classification"), "lora")
    adapter.heads["other"] = next(iter(adapter.heads.values()), mock.MagicMock())
    with mock.patch.object(compiled_layers, "CompiledLayers"):
        compiled_layers.compiled_layers(
            adapter, TrainOptions(compile=True), mock.MagicMock(), said.append
        )
    refusal(any("no effect" in line for line in said))


def exported_for_adapters() -> None:
    ah.attach(tiny_models.model("bert"), "lora").export("out", format="adapters")


def shira_to_peft() -> None:
    ah.attach(tiny_models.model("bert"), "shira(places=largest, share=0.01)").export("out")


ABSENT: dict[str, Attempts] = {
    "adapter-drop": [recipe("train.adapter_drop=2"), recipe("adapter_drop=2")],
    "augmented-pictures": [
        task("image-classification(flip=true)"), task("image-classification(augment=true)"),
        recipe("train.augment=true"),
    ],
    "augmented-sounds": [
        task("audio-classification(augment=true)"), task("speech-recognition(augment=true)")
    ],
    "budget-of-a-part": [command("bench a.csv --budget 1h --shard 1/2 --output out", "budget")],
    "cached-pictures": [
        left_out(lambda: task_class("image-classification").decodes),
        left_out(lambda: task_class("image-text-to-text").decodes),
    ],
    "cached-sounds": [
        left_out(lambda: task_class("audio-classification").decodes),
        left_out(lambda: task_class("speech-recognition").decodes),
    ],
    "chats-with-sounds": [task("audio-text-to-text"), task("sft(audio=sound)")],
    "checkpoints-of-adapterplus": [of_adapters("original_ln_after", False)],
    "combined-bottlenecks": [
        (lambda: ah.combine(attached("pfeiffer"), ["a", "b"]), "not linear"),
        (lambda: ah.combine(attached("houlsby"), ["a", "b"]), "not linear"),
    ],
    "compiled-heads": [(compiled_beside_heads, "left out")],
    "compositions": [exported("Split"), exported("MultiTask"), exported("Fuse")],
    "curves-of-published": [left_out(lambda: "history" not in Manifest.__dataclass_fields__)],
    "deepspeed": [(under_deepspeed, "DeepSpeed"), recipe("deepspeed=zero3.json")],
    "dependency-parsing": [task("dependency-parsing"), task("parsing")],
    "exported-shira": [(shira_to_peft, "shira")],
    "format-of-adapters": [(exported_for_adapters, "adapters")],
    "glow": [method("madx(kind=glow)"), of_adapters("inv_adapter", "glow")],
    "int4": [(lambda: check_quantization("int4-weight"), "int4")],
    "intruder-dimensions": [exported("reduce_intruder_dimension")],
    "language-model-of-ctc": [task("speech-recognition(language_model=kenlm)")],
    "layer-replication": [method("lora(layer_replication=[[0, 1]])")],
    "magnitude-pruning": [
        (lambda: ah.combine(attached("lora"), ["a", "b"], how="magnitude_prune"), "magnitude"),  # type: ignore[arg-type]
    ],
    "mtl-lora": [method("mtl-lora"), method("mtllora")],
    "names-elsewhere": [
        (lambda: parse_methods("lora(target_modules=[q_proj])"), "sites=[attn.q"),
        (lambda: read_draft(overrides=["warmup_ratio=0.1"]), "train.warmup=0.1"),
        (lambda: parse_methods("qlora"), "quantize"),
    ],
    "norms-of-channels": [
        adapted("ssf(sites=['0'])", nn.BatchNorm2d(4)),
        adapted("ssf(sites=['0'])", nn.GroupNorm(2, 4)),
    ],
    "optimizers": [
        recipe(f"train.optimizer={name}")
        for name in ("galore_adamw", "badam", "apollo_adamw", "muon")
    ],
    "packed-pictures": [task("image-text-to-text(pack=true)")],
    "page-of-several-tasks": [left_out(lambda: not TaskMixture.outcomes)],
    "plain-parameters": [
        (lambda: ah.attach(Plain(), "lora(sites=['matrix'])"), "no modules inside")
    ],
    "environments": [task("grpo(environment=x)"), task("grpo(tools=[x])"), task("grpo(server=x)")],
    "ppo": [task("ppo"), task("rloo"), task("preference(loss_type=ppo)")],
    "prompts-of-pictures": [
        without_tokens("prompt", PICTURES), without_tokens("p-tuning", PICTURES)
    ],
    "prompts-of-sounds": [
        without_tokens("prompt", SOUNDS), without_tokens("p-tuning", SOUNDS)
    ],
    "quantizations": [
        (lambda name=name: check_quantization(name), name)
        for name in ("hqq", "eetq", "aqlm", "inc")  # type: ignore[misc]
    ],
    "remote-code": [recipe("trust_remote_code=true")],
    "sharded-models": [(sharded, "sharded")],
    "timestamps": [task("speech-recognition(timestamps=true)")],
    "transposed-convolutions": [adapted("lora(sites=['0'])", nn.ConvTranspose2d(3, 4, 3))],
    "train-on-prompt": [recipe("train_on_prompt=true"), task("causal-lm(train_on_prompt=true)")],
    "training-in-a-browser": [
        command("webui", "unknown command"), command("web", "unknown command")
    ],
    "tuned-options": [(lambda: study.read_study(overrides=["bench.dropouts=[0, 1]"]), "dropouts")],
    "unsloth": [recipe("use_unsloth=true"), recipe("train.unsloth=true")],
    "videos": [
        task("video-classification"), task("video-text-to-text"),
        task("image-text-to-text(video=clip)"),
    ],
}  # fmt: skip


def shown(page: str) -> str:
    """Return what is written on a page by hand and shown: no code, and nothing generated."""
    page = re.sub(r"^( *)```.*?^\1```$", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"<!-- setup\n.*?-->|!\[.*?\]\(.*?\)", "", page, flags=re.DOTALL)
    page = re.sub(r"<!-- ([\w-]+): [^>\n]* -->\n.*?<!-- /\1 -->", "", page, flags=re.DOTALL)
    page = re.sub(r"<!-- [\w ]+: generated by make catalogue -->\n(?:\|.*\n)*", "", page)
    return re.sub(r"<!-- count: .*?<!-- /count -->", "", page)


def sentences(page: str) -> Iterator[tuple[str, bool]]:
    """Yield the sentences of a page, each with its marks, and whether it is below a HEADING.

    An item of a list below such a heading is one sentence.
    """
    page = shown(page)
    page = re.sub(r"([.:;!?)]*)\s*(<!-- absent: [^>]* -->)", r" \2\1", page)
    is_denied = False
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )|\n(?=\||#)", page):
        text = " ".join(block.split())
        if text.startswith("#"):
            is_denied = bool(HEADINGS.match(text))
        elif is_denied and text.startswith(("- ", "|")):
            yield text, True
        else:
            yield from ((one, False) for one in re.split(r"(?<=[.!?]) (?=\W*[A-Z`])", text))


def marks(sentence: str) -> list[str]:
    """List the names in the marks of a sentence."""
    found = re.findall(r"<!-- absent: (.*?) -->", sentence)
    return [name.strip() for names in found for name in names.split(",")]


@cache
def sources_of(path: str) -> dict[str, str]:
    """Return the source of each test of a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    return {
        node.name: ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def told(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the marks of a page, each with its sentence."""
    for sentence, _ in sentences(page.read_text(encoding="utf-8")):
        for name in marks(sentence):
            yield name, sentence


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_denies_has_a_mark_and_what_it_counts_is_generated(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    unmarked = [
        sentence
        for sentence, is_denied in sentences(text)
        if (is_denied or DENIALS.search(re.sub(r"<!--.*?-->", "", sentence)))
        and not marks(sentence)
        and not re.search(r"`test_\w+`|tests/[\w/]+\.py", sentence)
    ]
    assert not unmarked, "add `<!-- absent: NAME -->`, as the docstring of this file says"
    counted = COUNTED.findall(shown(text))
    assert not counted, "say it without, or write <!-- count: NAME --><!-- /count -->"


@pytest.mark.parametrize("name", ABSENT)
def test_what_a_page_denies_is_refused(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for attempt, word in ABSENT[name]:
        with pytest.raises((AdapterhubError, click.ClickException)) as refused:
            attempt()
        assert word in str(getattr(refused.value, "message", refused.value))


def test_marks_and_what_is_tried_agree() -> None:
    named = {name: page for page in PAGES for name, _ in told(page)}
    unknown = {
        name: page.name
        for name, page in named.items()
        if name not in ABSENT and name != OTHERS and not is_test(name)
    }
    assert not unknown, "no entry of ABSENT, and no test that shows a refusal"
    assert not ABSENT.keys() - named.keys(), "no page denies these"


def is_test(name: str) -> bool:
    """Return whether a name is that of a test which shows that something is refused or left out."""
    path, _, function = name.partition("::")
    if not path.startswith("tests/") or not (ROOT / path).is_file():
        return False
    source = sources_of(path).get(function, "")
    return bool(
        re.search(
            r"raises|refus|error|err\b|note|status|code|not |is None|unchanged\(|excluded", source
        )
    )


# Numbers of what grows are generated, or are not written. Up to four, it is an example.
NUMBER = (
    r"(?:[5-9]|\d[\d,]+|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six"
    r"|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty(?:-\w+)?)"
)
GROWS = (
    r"(?:methods|tasks|commands|families|(?:model )?types|architectures|rooms"
    r"|kinds of (?:methods|tasks|modules|adapters))"
)
COUNTED = re.compile(
    rf"\b{NUMBER}\s(?:other |more |recent |usual |different )?{GROWS}\b", re.IGNORECASE
)


@pytest.mark.parametrize(
    "lie",
    [
        "Spreadsheets are refused: save the sheet as CSV.",
        "| `finetuning_type: oft` | not here |",
        "adapterhub needs a model of transformers.",
        "## Not here\n\n- Preference training.",
        "| Streams | no | yes | yes |",
        "Bottleneck adapters cannot be\nmerged.",
    ],
)
def test_a_sentence_that_denies_something_is_found(lie: str) -> None:
    found = [
        one for one, denied in sentences(f"# A page\n\n{lie}") if denied or DENIALS.search(one)
    ]
    assert len(found) == 1
    assert not marks(found[0])
    marked = lie.replace(" |", "<!-- absent: a, tests/b.py::test_c --> |", 1)
    marked += "<!-- absent: a, tests/b.py::test_c -->" if marked == lie else ""
    ((sentence, _),) = (each for each in sentences(f"# A page\n\n{marked}") if marks(each[0]))
    assert marks(sentence) == ["a", "tests/b.py::test_c"]
