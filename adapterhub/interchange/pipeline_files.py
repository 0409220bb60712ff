"""Detection of folders with LoRA files of pipelines, without torch."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from adapterhub.config.user_folders import is_folder, is_there

FILE = "pytorch_lora_weights.safetensors"  # diffusers' file name
_STARTS = (
    "unet.", "transformer.", "transformer_2.", "text_encoder", "lora_unet_", "lora_te",
    "lora_transformer_", "diffusion_model.", "double_blocks.", "single_blocks.",
)  # fmt: skip


def is_diffusers(folder: Path) -> bool:
    """Return whether a folder has a LoRA file of a pipeline, and no files of other formats."""
    file = file_in(folder)
    if file is None:
        return False
    try:
        with safe_open(file, "np") as opened:
            names = list(opened.keys())
    except (OSError, SafetensorError):
        return False
    return bool(names) and (file.name == FILE or all(name.startswith(_STARTS) for name in names))


def file_in(folder: Path) -> Path | None:
    """Return the LoRA file of a folder: by diffusers' name, or the only safetensors file."""
    if is_there(folder / "adapter_config.json") or not is_folder(folder):
        return None
    named = [folder / FILE] if (folder / FILE).exists() else sorted(folder.glob("*.safetensors"))
    return named[0] if len(named) == 1 and named[0].is_file() else None
