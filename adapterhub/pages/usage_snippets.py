"""Instructions for loading a published adapter in adapterhub, peft and vLLM, and for citing it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from adapterhub.files.card import backbone_auto_class, loading_lines, model_kind, peft_lines
from adapterhub.files.manifest import Manifest, with_head
from adapterhub.pages.versions import PublishedVersion
from adapterhub.tasks import TASKS, Task

_MOST = 4_000  # characters per line: there may be many labels
_FOR_TEXT = "AutoModelForCausalLM"  # supported by vLLM


@dataclass(frozen=True)
class Way:
    """A way to load an adapter: the library, the lines to copy, and a remark."""

    title: str
    text: str
    note: str = ""


def ways_to_load(version: PublishedVersion, registry: str | None) -> list[Way]:
    """Return the lines for each library; `registry` is the registry to name, if any."""
    manifest, reference = version.manifest, version.entry.reference
    lines = "\n".join(loading_lines(manifest, reference, registry=registry))
    if len(lines) > _MOST:
        short = "\n".join(loading_lines(_without_labels(manifest), reference, registry=registry))
        lines = f"{short}\n# its labels are in the manifest: labels=[...] of load_backbone"
    return [
        *_commands(version, registry),
        Way("Python", f"import adapterhub as ah\n{_predicting(version, registry)}"),
        Way("adapterhub", lines, "On a model of your own."),
        _in_peft(version, registry),
        _in_vllm(version, registry),
    ]


def _commands(version: PublishedVersion, registry: str | None) -> list[Way]:
    """Return the commands that predict with an adapter and serve it."""
    reference = f"{version.entry.reference}{_option(registry)}"
    typed = _task(version).typed_input()
    text = f"adapterhub predict {reference} {typed}\nadapterhub serve {reference}"
    return [Way("Command line", text)]


def _predicting(version: PublishedVersion, registry: str | None) -> str:
    """Return Python lines that load the backbone and predict."""
    keyword = f", registry={registry!r}" if registry else ""
    typed = _task(version).typed_input()
    argument = typed if typed.startswith('"') else repr(typed)
    return f"print(ah.open({version.entry.reference!r}{keyword}).predict({argument}))"


def _task(version: PublishedVersion) -> type[Task]:
    return TASKS.get(version.manifest.task or "", Task)


def citation(version: PublishedVersion) -> str:
    """Return a BibTeX entry; name, version and digest identify the bytes."""
    entry = version.entry
    key = "".join(c if c.isalnum() else "-" for c in f"{entry.name}-{entry.version}")
    year = f"\n  year = {{{entry.published[:4]}}}," if entry.published else ""
    return (
        f"@misc{{{key},\n"
        f"  title = {{{entry.name}, version {entry.version}: an adapter of {entry.backbone}}},"
        f"{year}\n"
        f"  note = {{sha256 of the manifest: {entry.digest}}}\n}}"
    )


def _in_peft(version: PublishedVersion, registry: str | None) -> Way:
    if refused := _not_in_peft(version.manifest):
        return Way("peft", "", f"peft cannot load it: {refused}.")
    imports, lines = peft_lines(version.manifest, _kind(version.manifest), repr(_folder(version)))
    text = "\n".join([_export(version, registry), "", *imports, *lines])
    return Way("peft", text, "The export refuses with every reason what peft cannot express.")


def _in_vllm(version: PublishedVersion, registry: str | None) -> Way:
    entry, manifest = version.entry, version.manifest
    refused = _not_in_peft(manifest)
    if not refused and backbone_auto_class(manifest, _kind(manifest)) != _FOR_TEXT:
        refused = "vLLM serves adapters of decoders that write text"
    if refused:
        return Way("vLLM", "", f"vLLM cannot serve it: {refused}.")
    served = f"vllm serve {shlex.quote(manifest.backbone.location)} --enable-lora"
    place = f"{entry.name}-vllm"
    export = f"adapterhub export {entry.reference}{_option(registry)} --to vllm --output {place}"
    text = f"{export}\n{served} --lora-modules {entry.name}={place}"
    return Way("vLLM", text, f"Is it one that vLLM serves? {_checked(version, registry)}")


def _not_in_peft(manifest: Manifest) -> str:
    """Return the obstacle to an export, as far as it follows from the manifest alone."""
    if manifest.on:
        return "it is on top of other adapters"
    if manifest.heads:
        return "it has several heads"
    if manifest.head is not None and manifest.head.pooling is not None:
        pooling = manifest.head.pooling
        return f"its head reads the {pooling} of the tokens, not what the model's class gives it"
    return ""


def _export(version: PublishedVersion, registry: str | None) -> str:
    place = _folder(version)
    return f"adapterhub export {version.entry.reference}{_option(registry)} --output {place}"


def _checked(version: PublishedVersion, registry: str | None) -> str:
    return f"adapterhub export {version.entry.reference}{_option(registry)} --check vllm"


def _option(registry: str | None) -> str:
    return f" --registry {shlex.quote(registry)}" if registry else ""


def _folder(version: PublishedVersion) -> str:
    return f"{version.entry.name}-peft"


def _kind(manifest: Manifest) -> str | None:
    return model_kind(with_head(manifest, next(iter(manifest.heads), None)))


def _without_labels(manifest: Manifest) -> Manifest:
    return replace(manifest, labels=())
