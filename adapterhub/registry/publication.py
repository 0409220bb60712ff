"""An adapter's folder as it is published: with what its publisher says of it, and a card for it.

What is said stands in the manifest, so it belongs to the version like all else in it: the same
adapter with another licence is another version.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adapterhub.files import native
from adapterhub.files.atomic import UnreadableError, read_file
from adapterhub.files.card import InPeft, card
from adapterhub.files.manifest import Manifest, to_json
from adapterhub.interchange.peft.files import CONFIG_FILE, write_peft
from adapterhub.interchange.peft.files import TENSORS_FILE as PEFT_TENSORS


@dataclass(frozen=True)
class PublicationInfo:
    """What a publisher says of an adapter; what is None or empty stays as its manifest has it.

    `license` is an identifier such as apache-2.0, `language` codes such as en, `topics` words by
    which the adapter is found.
    """

    description: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    def on(self, manifest: Manifest) -> Manifest:
        """The manifest that says so."""
        said = {name: value for name, value in asdict(self).items() if value}
        if "topics" in said:
            said["tags"] = said.pop("topics")
        return replace(manifest, **said)


Listing = PublicationInfo  # its name in the public API


@contextmanager
def prepared(
    source: Path, listing: PublicationInfo, reference: str, peft: InPeft | None = None
) -> Iterator[Path]:
    """A folder with the adapter of `source` as it is to be published, for as long as the context.

    Raises:
        FileError: `source` holds no sound adapter. OutputError: the manifest cannot say that.
    """
    manifest, _ = native.read_adapter(source)
    listed = listing.on(manifest)
    if listed == manifest and peft is None:
        yield source
        return
    text = card(listed, _old_card(source), reference=reference, peft=peft)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / native.MANIFEST_FILE).write_bytes(to_json(listed))
        (folder / native.CARD_FILE).write_bytes(native.card_bytes(text))
        shutil.copyfile(source / native.TENSORS_FILE, folder / native.TENSORS_FILE)
        yield folder


def _old_card(source: Path) -> str:
    try:
        data = read_file(source / native.CARD_FILE, 1, native.MAX_CARD_BYTES, None)
    except UnreadableError:  # it is for people, and need not be there
        return ""
    return data.decode("utf-8", "replace")


def peft_files(source: Path, backbone: str | None) -> tuple[dict[str, bytes], InPeft]:
    """The files that peft loads the adapter of `source` from, none where it cannot have it, and
    what the card says of that. `backbone` is where its backbone is, if not where it says.

    Raises:
        FileError: `source` holds no sound adapter. BackboneError: `backbone` is none.
    """
    from adapterhub.adapters.export import in_peft  # it needs the models

    found = in_peft(source, backbone)
    said = InPeft(found.kind, found.problems)
    if found.files is None:
        return {}, said
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "peft"
        write_peft(folder, found.files)
        return {n: (folder / n).read_bytes() for n in (CONFIG_FILE, PEFT_TENSORS)}, said


Note = Callable[[str], None]
"""Told what a user should know that is no error."""


def silent(text: str) -> None:
    """Nobody is told."""
