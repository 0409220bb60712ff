"""Prepare an adapter's folder for publication: add the publisher's metadata and write the card.

The metadata becomes part of the manifest, and so of the version: the same adapter under another
licence is another version.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adapterhub.files import native
from adapterhub.files.atomic import read_file
from adapterhub.files.card import InPeft, card
from adapterhub.files.manifest import (
    MAX_TENSOR_BYTES,
    FoundationRef,
    Manifest,
    to_json,
)
from adapterhub.interchange.peft.files import CONFIG_FILE, write_peft
from adapterhub.interchange.peft.files import TENSORS_FILE as PEFT_TENSORS


@dataclass(frozen=True)
class PublicationInfo:
    """Metadata that a publisher adds; fields that are None or empty keep the manifest's value.

    Attributes:
        description: one sentence for the card and the listing.
        license: an identifier such as apache-2.0.
        language: language codes such as en.
        topics: search keywords.
    """

    description: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    def apply(self, manifest: Manifest) -> Manifest:
        """Return a copy of the manifest with this metadata."""
        fields = {name: value for name, value in asdict(self).items() if value}
        if "topics" in fields:
            fields["tags"] = fields.pop("topics")
        return replace(manifest, **fields)


@contextmanager
def prepared_folder(
    source: Path,
    info: PublicationInfo,
    reference: str,
    peft: InPeft | None = None,
    on: tuple[FoundationRef, ...] = (),
) -> Iterator[Path]:
    """Provide a folder with the adapter as it is to be published, for the length of the context.

    Args:
        source: the adapter's folder; it is used as it is if nothing changes.
        info: the publisher's metadata.
        reference: the text that loads the adapter, for the card.
        peft: whether peft can load the published repository, for the card.
        on: where the adapters that it was trained on are published.

    Raises:
        FileError: `source` holds no valid adapter.
        OutputError: the metadata is invalid.
    """
    manifest = native.check_adapter(source)
    published = replace(info.apply(manifest), on=on)
    if published == manifest and peft is None:
        yield source
        return
    text = card(published, native.read_card(source), reference=reference, peft=peft)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        files = {
            native.MANIFEST_FILE: to_json(published),
            native.CARD_FILE: native.card_bytes(text),
        }
        native.write_copy(folder, source, manifest, files)
        yield folder


def peft_files(source: Path, backbone: str | None) -> tuple[dict[str, bytes], InPeft]:
    """Convert the adapter in `source` to peft's files.

    Args:
        source: the adapter's folder.
        backbone: the folder or Hub id of the backbone, if not the one in the manifest.

    Returns:
        peft's files by name, empty if peft cannot express the adapter, and the reasons for the
        card.

    Raises:
        FileError: `source` holds no valid adapter.
        BackboneError: `backbone` cannot be read.
    """
    from adapterhub.adapters.export import in_peft  # imports torch and transformers

    conversion = in_peft(source, backbone)
    summary = InPeft(conversion.kind, conversion.problems)
    if conversion.files is None:
        return {}, summary
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "peft"
        write_peft(folder, conversion.files)
        names, most = (CONFIG_FILE, PEFT_TENSORS), MAX_TENSOR_BYTES
        return {name: read_file(folder / name, 0, most, None) for name in names}, summary


Note = Callable[[str], None]
"""Receives one-line messages for the user that are not errors."""


def silent(text: str) -> None:
    """Ignore a message."""
