"""Train diffusers pipelines to predict the noise that was added to images.

    DDPM           x_t = sqrt(a_t) x + sqrt(1 - a_t) e       the target is e, or x, or the velocity
                                                             v = sqrt(a_t) e - sqrt(1 - a_t) x
    flow matching  x_s = (1 - s) x + s e                     the target is e - x

    x: the latents of an image, (batch, channels, height, width)     e: noise of N(0, 1), like x

The configuration of the pipeline's scheduler selects one of the two, and the noise of each step t.
In flow matching, s follows the logit-normal density of Stable Diffusion 3. The pipeline's
`encode_prompt` encodes prompts, so text encoders can be adapted as well.

Noise, latents and steps of a row depend only on the seed of the row.

Ho et al. 2020, https://arxiv.org/abs/2006.11239; Esser et al. 2024,
https://arxiv.org/abs/2403.03206; the training examples of diffusers 0.42.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adapterhub.anatomy.backbone import DTYPES, parts_of
from adapterhub.backbones.checkpoint import BROKEN
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.quantized import quiet_bitsandbytes
from adapterhub.backbones.torch_free_checks import DIFFUSERS, PIPELINE_INDEX, require
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import BackboneError, ConfigError
from adapterhub.status import MODEL_LOCK, quiet_loading

Encoded: TypeAlias = tuple[Any, ...]
"""The return value of a pipeline's `encode_prompt`."""

_FLOW = "FlowMatch"  # prefix of the names of flow matching schedulers


@dataclass(frozen=True)
class Denoised:
    """Predictions of a pipeline for noisy latents, and their targets.

    Attributes:
        found: the predictions, (batch, ...).
        target: the targets, like `found`.
        weight: the weight of each image in the loss, (batch,).
    """

    found: Tensor
    target: Tensor
    weight: Tensor

    @property
    def losses(self) -> Tensor:
        """The weighted mean squared error of each image, (batch,)."""
        squares = (self.found.float() - self.target.float()) ** 2
        return self.weight * squares.flatten(1).mean(1)


@dataclass
class Kept:
    """Cache of the outputs of a pipeline's frozen parts, for each prompt and each image.

    Each is encoded alone, so its values do not depend on the rest of its batch, and a resumed run
    computes with the same values. The cache is in host memory. Entries over the limit are encoded
    each time.

    Attributes:
        limit: the size of the cache, in bytes.
        prompts: whether the text encoders are frozen, too.
    """

    limit: int
    prompts: bool = True
    _bytes: int = field(default=0, init=False)
    _values: dict[Hashable, tuple[Tensor | None, ...]] = field(default_factory=dict, init=False)

    def encoded(
        self, keys: Sequence[Hashable], encode: Callable[[int], Sequence[Tensor | None]]
    ) -> list[tuple[Tensor | None, ...]]:
        """Return the result of `encode(i)` for each row i, cached by key."""
        rows = []
        for number, key in enumerate(keys):
            if (row := self._values.get(key)) is None:
                with torch.inference_mode(False), torch.no_grad():
                    encoded = encode(number)
                    row = tuple(t if t is None else t.to("cpu", copy=True) for t in encoded)
                size = sum(0 if t is None else t.nbytes for t in row)
                if self._bytes + size <= self.limit:
                    self._values[key] = row
                    self._bytes += size
            rows.append(row)
        return rows


def _joined(rows: Sequence[tuple[Tensor | None, ...]], like: Tensor) -> tuple[Any, ...]:
    """Join the values of rows, on the device of `like`; values missing in the first are None."""
    return tuple(
        None
        if values[0] is None
        else torch.cat([t for t in values if t is not None]).to(like.device)
        for values in zip(*rows, strict=True)
    )


def load_pipeline(backbone: str, revision: str | None = None, dtype: str | None = None) -> Any:
    """Load a diffusers pipeline that can be trained.

    Raises:
        ConfigError: diffusers is not installed.
        BackboneError: the pipeline does not exist, or does not generate images from prompts.
    """
    require(*DIFFUSERS)
    quiet_bitsandbytes()
    from diffusers import DiffusionPipeline

    folder, commit = find_backbone(backbone, revision)
    if not (folder / PIPELINE_INDEX).is_file():
        raise BackboneError(
            f"{backbone!r} is not a diffusers pipeline: it lacks {PIPELINE_INDEX}",
            expected="a folder of pipe.save_pretrained, or a Hub id of a pipeline",
            hint="--backbone FOLDER, or another --task",
        )
    try:
        with MODEL_LOCK, quiet_loading(), _no_progress_bar(), warnings.catch_warnings():
            # A warning that the scheduler is outdated does not help the user of a pipeline.
            warnings.simplefilter("ignore", FutureWarning)
            kind: Any = DiffusionPipeline
            pipeline = kind.from_pretrained(
                folder, dtype=DTYPES[dtype or "fp32"], use_safetensors=True
            )
    except BROKEN as error:
        raise BackboneError(
            f"the pipeline {backbone!r} cannot be loaded: {error}",
            expected="a pipeline as diffusers wrote it, with safetensors",
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    check_trainable(pipeline)
    parts = parts_of(pipeline)
    named = str(folder.absolute()) if is_folder(backbone) else backbone
    vars(parts)["config"] = {"_name_or_path": named, "_commit_hash": commit}
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval().requires_grad_(False)
    make_learnable(pipeline)
    return pipeline


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from diffusers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def make_learnable(pipeline: Any) -> None:
    """Make the parts of a pipeline, called as a model, return `Denoised` for a batch."""
    own = weakref.ref(pipeline)  # its parts refer to it, and it would never be freed otherwise

    def compute(**batch: Any) -> Denoised:
        return denoised(own(), **batch)

    parts_of(pipeline).compute = compute


def check_trainable(pipeline: Any) -> None:
    """Refuse a pipeline that does not generate images from prompts, or uses an unsupported model.

    Raises:
        BackboneError: the pipeline cannot be trained.
    """
    denoiser, vae = _denoiser_of(pipeline), getattr(pipeline, "vae", None)
    if denoiser is None or vae is None:
        raise BackboneError(
            f"a {type(pipeline).__name__} cannot be trained by text-to-image",
            expected="a pipeline with a VAE and one of " + ", ".join(TRAINED),
            hint="ah.attach(pipe, ...) in a training loop of your own",
        )
    denoise, model = denoiser
    packed = 4 if denoise is _flux else 1  # in 2 x 2 squares
    channels = vae.config.latent_channels * packed
    if model.config.in_channels != channels:
        raise BackboneError(
            f"the {type(model).__name__} of this {type(pipeline).__name__} reads "
            f"{model.config.in_channels} channels, and its VAE has {channels}",
            expected="a pipeline that makes images of prompts alone, and edits or fills none",
            hint="ah.attach(pipe, ...) in a training loop of your own",
        )


def sized(pipeline: Any, side: int) -> dict[str, Any]:
    """Return the options that make a pipeline generate images of a size, in pixels.

    Otherwise some pipelines generate the nearest size that they were trained on, and scale it.
    """
    binning = "use_resolution_binning"
    has = binning in inspect.signature(pipeline.__call__).parameters
    return {"height": side, "width": side} | ({binning: False} if has else {})


def least_side(pipeline: Any) -> int:
    """Return the side of the squares that images of a pipeline consist of, in pixels."""
    denoise, model = _denoiser(pipeline)
    patch = 2 if denoise is _flux else model.config.get("patch_size") or 1
    return int(pipeline.vae_scale_factor) * int(patch)


def is_flow(pipeline: Any) -> bool:
    """Return whether a pipeline is trained by flow matching."""
    return type(pipeline.scheduler).__name__.startswith(_FLOW)


def cut_prompts(pipeline: Any, prompts: Sequence[str]) -> tuple[int, set[str]]:
    """Return the token limit of a pipeline's prompts, and the prompts that exceed it.

    If there are several text encoders, the largest limit counts.
    """
    parameters = inspect.signature(pipeline.encode_prompt).parameters
    of_t5 = getattr(parameters.get("max_sequence_length"), "default", None)
    limits = [
        (of_t5 if of_t5 and "CLIP" not in type(part).__name__ else part.model_max_length, part)
        for name in ("tokenizer", "tokenizer_2", "tokenizer_3")
        if (part := getattr(pipeline, name, None)) is not None
    ]
    most, tokenizer = max(limits, key=lambda each: each[0])
    texts = [*dict.fromkeys(prompts)]
    read = tokenizer(texts, verbose=False)["input_ids"]
    return most, {text for text, ids in zip(texts, read, strict=True) if len(ids) > most}


def side_of(pipeline: Any) -> int:
    """Return the side of the images that a pipeline was trained on, in pixels."""
    _, model = _denoiser(pipeline)
    size = model.config.get("sample_size")
    size = size[0] if isinstance(size, list | tuple) else size
    if not size:
        size = pipeline.default_sample_size
    return int(size) * int(pipeline.vae_scale_factor)


def denoised(
    pipeline: Any,
    pixel_values: Tensor,
    prompts: Tensor,
    seeds: Tensor,
    snr_gamma: Tensor | None = None,
    kept: Kept | None = None,
) -> Denoised:
    """Add noise to images, and let a pipeline predict it.

    Args:
        pipeline: a diffusers pipeline.
        pixel_values: images in [-1, 1], (batch, 3, height, width).
        prompts: the prompts of the images in UTF-8, padded with 0, (batch, bytes).
        seeds: the random seed of each row, (batch,).
        snr_gamma: the cap on the signal-to-noise ratio, (batch,); None: all steps weigh the same.
        kept: cached outputs of frozen parts; None: compute them.
    """
    denoise, model = _denoiser(pipeline)
    numbers = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
    latents = _latents(pipeline, pixel_values, numbers, kept)
    noise = torch.stack([torch.randn(latents.shape[1:], generator=each) for each in numbers])
    noise = noise.to(latents)
    noisy, steps, target, weight = _noised(pipeline, latents, noise, numbers, snr_gamma)
    encoded = _prompt(pipeline, prompt_texts(prompts), noisy, kept)
    output = denoise(pipeline, model, noisy.to(model.dtype), steps, encoded)
    if output.shape[1] == 2 * target.shape[1]:  # models that also predict a variance
        output = output.chunk(2, 1)[0]
    return Denoised(output, target, weight)


def prompt_bytes(texts: Sequence[str]) -> Tensor:
    """Encode texts in UTF-8, padded with 0: (batch, bytes)."""
    coded = [torch.tensor([*text.encode()], dtype=torch.uint8) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(coded, batch_first=True)


def prompt_texts(coded: Tensor) -> list[str]:
    """Decode the texts that `prompt_bytes` encoded."""
    return [bytes(row).rstrip(b"\0").decode() for row in coded.tolist()]


def _latents(
    pipeline: Any, pixel_values: Tensor, numbers: Sequence[torch.Generator], kept: Kept | None
) -> Tensor:
    """Sample the latents of images from the distribution that the VAE encodes."""
    vae = pipeline.vae

    def encode(pictures: Tensor) -> tuple[Tensor, Tensor]:
        coded = vae.encode(pictures.to(vae.device, vae.dtype)).latent_dist
        return coded.mean, coded.std

    with torch.no_grad(), torch.autocast(pixel_values.device.type, enabled=False):
        if kept is None:
            mean, std = encode(pixel_values)
        else:
            rows = [pixel_values[i : i + 1] for i in range(len(pixel_values))]
            keys = [hashlib.sha256(row.float().cpu().numpy().tobytes()).digest() for row in rows]
            mean, std = _joined(kept.encoded(keys, lambda i: encode(rows[i])), pixel_values)
        drawn = [torch.randn(mean.shape[1:], generator=each) for each in numbers]
        latents = mean + std * torch.stack(drawn).to(mean)
        latents = latents - (getattr(vae.config, "shift_factor", None) or 0.0)
        return latents.float() * vae.config.scaling_factor  # type: ignore[no-any-return]


def _noised(
    pipeline: Any,
    latents: Tensor,
    noise: Tensor,
    numbers: Sequence[torch.Generator],
    snr_gamma: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return noisy latents, their steps, the target and the weight of each row."""
    config = pipeline.scheduler.config
    ones = torch.ones(len(latents), device=latents.device)
    if is_flow(pipeline):
        # The last use of a pipeline's scheduler has changed its steps.
        schedule = type(pipeline.scheduler).from_config(config)
        share = torch.cat([torch.randn(1, generator=each) for each in numbers]).sigmoid()
        places = (share * schedule.config.num_train_timesteps).long()
        sigmas = schedule.sigmas[places].to(latents)[:, None, None, None]
        steps = schedule.timesteps[places].to(latents.device)
        return (1 - sigmas) * latents + sigmas * noise, steps, noise - latents, ones
    import diffusers
    from diffusers import training_utils

    kind: Any = diffusers.DDPMScheduler
    ddpm = kind.from_config(config)
    last = ddpm.config.num_train_timesteps
    steps = torch.cat([torch.randint(0, last, (1,), generator=each) for each in numbers])
    steps = steps.to(latents.device)
    predicted = ddpm.config.prediction_type
    if predicted == "v_prediction":
        target = ddpm.get_velocity(latents, noise, steps)
    elif predicted in ("epsilon", "sample"):
        target = noise if predicted == "epsilon" else latents
    else:
        raise ConfigError(
            f"the scheduler of this pipeline predicts {predicted!r}",
            expected="epsilon, sample or v_prediction, or a scheduler of flow matching",
        )
    if snr_gamma is not None:
        snr: Any = training_utils.compute_snr
        ratio = snr(ddpm, steps).to(latents)
        ones = torch.minimum(ratio, snr_gamma)  # predicts the image; the other types predict noise
        if predicted == "v_prediction":
            ones = ones / (ratio + 1)
        elif predicted == "epsilon":
            ones = (snr_gamma / ratio).clamp(max=1)  # 1 for pure noise, too
    return ddpm.add_noise(latents, noise, steps), steps, target, ones


@contextmanager
def _no_cut_notes(pipeline: Any) -> Iterator[None]:
    """Silence a pipeline's warning for each truncated prompt; `cut_prompts` counts them."""
    logger = logging.getLogger(type(pipeline).__module__)
    before, logger.disabled = logger.disabled, True
    try:
        with quiet_loading():
            yield
    finally:
        logger.disabled = before


def _prompt(pipeline: Any, prompts: list[str], like: Tensor, kept: Kept | None) -> Encoded:
    """Encode prompts with the pipeline, on the device of `like`."""
    options = {"device": next(parts_of(pipeline).parameters()).device, "num_images_per_prompt": 1}
    possible = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
    taken = inspect.signature(pipeline.encode_prompt).parameters
    options |= {name: value for name, value in possible.items() if name in taken}

    def encode(prompt: list[str]) -> Encoded:
        with _no_cut_notes(pipeline):
            return tuple(pipeline.encode_prompt(prompt=prompt, **options))

    if kept is None or not kept.prompts:
        return encode(prompts)
    kind = like.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    keys = [(text, dtype) for text in prompts]
    return _joined(kept.encoded(keys, lambda i: encode([prompts[i]])), like)


def _unet(pipeline: Any, model: Any, noisy: Tensor, steps: Tensor, encoded: Encoded) -> Tensor:
    """Predict with Stable Diffusion, or with SDXL, which also reads sizes."""
    states, _, *pooled = encoded
    more = {}
    if pooled:
        side = noisy.shape[-1] * pipeline.vae_scale_factor
        size, width = (side, side), pipeline.text_encoder_2.config.projection_dim
        times = pipeline._get_add_time_ids(size, (0, 0), size, noisy.dtype, width)
        times = times.to(noisy.device).expand(len(noisy), -1)
        more = {"added_cond_kwargs": {"text_embeds": pooled[0], "time_ids": times}}
    return model(noisy, steps, encoder_hidden_states=states, **more).sample  # type: ignore[no-any-return]


def _sd3(pipeline: Any, model: Any, noisy: Tensor, steps: Tensor, encoded: Encoded) -> Tensor:
    states, _, pooled, _ = encoded
    return model(  # type: ignore[no-any-return]
        hidden_states=noisy, timestep=steps, encoder_hidden_states=states,
        pooled_projections=pooled,
    ).sample  # fmt: skip


def _flux(pipeline: Any, model: Any, noisy: Tensor, steps: Tensor, encoded: Encoded) -> Tensor:
    states, pooled, _ = encoded
    text_ids = states.new_zeros(states.shape[1], 3)  # as in `encode_prompt`: not per row
    rows, channels, height, width = noisy.shape
    packed = pipeline._pack_latents(noisy, rows, channels, height, width)
    ids = pipeline._prepare_latent_image_ids(
        rows, height // 2, width // 2, noisy.device, noisy.dtype
    )
    guidance = torch.ones(rows, device=noisy.device) if model.config.guidance_embeds else None
    output = model(
        hidden_states=packed, timestep=steps / 1000, guidance=guidance, pooled_projections=pooled,
        encoder_hidden_states=states, txt_ids=text_ids, img_ids=ids,
    ).sample  # fmt: skip
    scale = pipeline.vae_scale_factor
    return pipeline._unpack_latents(output, height * scale, width * scale, scale)  # type: ignore[no-any-return]


def _pixart(pipeline: Any, model: Any, noisy: Tensor, steps: Tensor, encoded: Encoded) -> Tensor:
    states, mask, *_ = encoded
    sizes: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if model.config.sample_size == 128:  # only this one reads sizes
        side = torch.full((len(noisy), 2), noisy.shape[-1] * pipeline.vae_scale_factor)
        sizes = {"resolution": side.to(noisy), "aspect_ratio": torch.ones(len(noisy), 1).to(noisy)}
    return model(  # type: ignore[no-any-return]
        noisy, encoder_hidden_states=states, encoder_attention_mask=mask, timestep=steps,
        added_cond_kwargs=sizes,
    ).sample  # fmt: skip


_DENOISERS: dict[str, Callable[..., Tensor]] = {
    "UNet2DConditionModel": _unet,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "PixArtTransformer2DModel": _pixart,
}
TRAINED = tuple(_DENOISERS)
"""The diffusers classes that predict noise and can be trained."""


def _denoiser_of(pipeline: Any) -> tuple[Callable[..., Tensor], Any] | None:
    for name, module in parts_of(pipeline).items():
        if not name.startswith("text_encoder") and type(module).__name__ in _DENOISERS:
            return _DENOISERS[type(module).__name__], module
    return None


def _denoiser(pipeline: Any) -> tuple[Callable[..., Tensor], Any]:
    denoiser = _denoiser_of(pipeline)
    assert denoiser is not None, "check_trainable comes first"
    return denoiser
