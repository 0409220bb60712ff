"""Prompts and prefixes of peft in our terms."""

from __future__ import annotations

from torch import Tensor

from adapterhub.files.peft import PeftFiles
from adapterhub.interchange.draft import Draft
from adapterhub.interchange.targets import Places


def import_prompt(files: PeftFiles, places: Places, draft: Draft) -> dict[str, Tensor]:
    raise NotImplementedError


def import_prefix(files: PeftFiles, places: Places, draft: Draft) -> dict[str, Tensor]:
    raise NotImplementedError
