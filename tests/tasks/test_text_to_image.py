"""The task text-to-image, on pipelines of the size of a stamp."""

import functools
import itertools
import json
import re

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

pytest.importorskip("diffusers")

import diffusers

import adapterhub as ah
from adapterhub.anatomy.backbone import parts_of
from adapterhub.backbones import diffusion
from adapterhub.data.options import DataOptions
from adapterhub.errors import BackboneError, ConfigError, DataError
from adapterhub.loop.engine import Engine
from adapterhub.tasks.common.batches import Setting
from adapterhub.tasks.text_to_image import TextToImage
from tests.kit import pipelines
from tests.kit.data import write_json_lines
from tests.kit.runs import adapter_bytes, lines
from tests.kit.selection import long_table
from tests.kit.session import refused, succeeded

MAKES = [kind for kind in pipelines.KINDS if kind != "DiTPipeline"]
FLOW = ("StableDiffusion3Pipeline", "FluxPipeline")
LORA = "lora(sites=['*.to_q','*.to_v'], rank=2)"
PROMPTS = ["a b", "c d e"]


def made(kind="StableDiffusionPipeline", **options):
    pipe = pipelines.with_tokenizers(pipelines.pipeline(kind=kind))
    if options:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **options)
    diffusion.make_learnable(pipe)
    return pipe


def batch():
    pixels = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
    return {"pixel_values": pixels, "prompts": diffusion.prompt_bytes(PROMPTS)}


def counted_calls(monkeypatch, owner, name, place=None):
    """Return a list that gets the prompts of each call of a method: an argument, or `prompt`."""
    calls, method = [], getattr(owner, name)

    @functools.wraps(method)
    def counted(self, *args, **given):
        calls.append(given["prompt"] if place is None else [*args[place]])
        return method(self, *args, **given)

    monkeypatch.setattr(owner, name, counted)
    return calls


def drawn(pipe, seeds):
    """Return latents, noise and numbers, as the loss draws them."""
    numbers = [torch.Generator().manual_seed(seed) for seed in seeds]
    with torch.no_grad():
        coded = pipe.vae.encode(batch()["pixel_values"]).latent_dist
    spread = torch.stack([torch.randn(coded.mean.shape[1:], generator=n) for n in numbers])
    latents = (coded.mean + coded.std * spread - 0.1) * pipe.vae.config.scaling_factor
    noise = torch.stack([torch.randn(latents.shape[1:], generator=n) for n in numbers])
    return latents, noise, numbers


def called(pipe, noisy, steps):
    """Call the model of a pipeline as diffusers' training examples do."""
    kind = type(pipe).__name__
    if kind == "FluxPipeline":
        states, pooled, ids = pipe.encode_prompt(PROMPTS, None)
        packed = pipe._pack_latents(noisy, 2, 1, 8, 8)
        places = pipe._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32)
        found = pipe.transformer(
            hidden_states=packed, timestep=steps / 1000, pooled_projections=pooled,
            encoder_hidden_states=states, txt_ids=ids, img_ids=places, return_dict=False,
        )[0]  # fmt: skip
        return pipe._unpack_latents(found, 8, 8, 1)
    if kind == "StableDiffusion3Pipeline":
        states, _, pooled, _ = pipe.encode_prompt(
            PROMPTS, None, None, do_classifier_free_guidance=False
        )
        return pipe.transformer(noisy, states, pooled, steps, return_dict=False)[0]
    if kind == "PixArtAlphaPipeline":
        states, mask, _, _ = pipe.encode_prompt(PROMPTS, do_classifier_free_guidance=False)
        more = {"resolution": None, "aspect_ratio": None}
        found = pipe.transformer(
            noisy, encoder_hidden_states=states, encoder_attention_mask=mask, timestep=steps,
            added_cond_kwargs=more, return_dict=False,
        )[0]  # fmt: skip
        return found.chunk(2, dim=1)[0]
    if kind == "StableDiffusionXLPipeline":
        states, _, pooled, _ = pipe.encode_prompt(PROMPTS, do_classifier_free_guidance=False)
        ids = torch.tensor([[8.0, 8.0, 0.0, 0.0, 8.0, 8.0]] * 2)
        more = {"time_ids": ids, "text_embeds": pooled}
        return pipe.unet(noisy, steps, states, added_cond_kwargs=more, return_dict=False)[0]
    states = pipe.encode_prompt(PROMPTS, "cpu", 1, False)[0]
    return pipe.unet(noisy, steps, states, return_dict=False)[0]


@pytest.mark.parametrize("kind", MAKES)
def test_the_loss_is_that_of_the_training_examples(kind, monkeypatch):
    """Also with what is kept of the prompts and pictures."""
    pipe, seeds = made(kind), [3, 4]
    tensors = [*ah.attach(pipe, LORA).tensors().values()]
    kept, given = diffusion.Kept(10**6), batch() | {"seeds": torch.tensor(seeds)}
    with monkeypatch.context() as patch:
        calls = counted_calls(patch, type(pipe), "encode_prompt")
        found, _, again = (parts_of(pipe)(**given, kept=each) for each in (None, kept, kept))
    assert calls == [PROMPTS, ["a b"], ["c d e"]]
    latents, noise, numbers = drawn(pipe, seeds)
    if kind in FLOW:
        scheduler = pipe.scheduler
        share = torch.sigmoid(torch.cat([torch.randn(1, generator=n) for n in numbers]))
        steps = scheduler.timesteps[(share * 1000).long()]
        sigmas = (steps / 1000).view(2, 1, 1, 1)
        noisy, target = (1 - sigmas) * latents + sigmas * noise, noise - latents
    else:
        steps = torch.cat([torch.randint(0, 1000, (1,), generator=n) for n in numbers])
        kept = pipe.scheduler.alphas_cumprod[steps].view(2, 1, 1, 1)
        noisy, target = kept.sqrt() * latents + (1 - kept).sqrt() * noise, noise
    expected = F.mse_loss(called(pipe, noisy, steps), target)
    theirs = torch.autograd.grad(expected, tensors)
    assert len(theirs) == len(tensors) > 4
    for loss in (found.losses.mean(), again.losses.mean()):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        ours = torch.autograd.grad(loss, tensors)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_targets_and_weights_of_snr_gamma(kind):
    """Also where there is noise alone."""
    options = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    pipe = made(prediction_type=kind, **options)
    seeds = [next(s for s in range(9000) if step_of(s) == 999), 4]
    given = batch() | {"seeds": torch.tensor(seeds), "snr_gamma": torch.full((2,), 0.5)}
    found = parts_of(pipe)(**given)
    latents, noise, _ = drawn(pipe, seeds)
    kept = pipe.scheduler.alphas_cumprod[[999, step_of(4)]]
    ratio = kept / (1 - kept)
    clipped, shares = ratio.clamp(max=0.5), kept.view(2, 1, 1, 1)
    velocity = shares.sqrt() * noise - (1 - shares).sqrt() * latents
    target, weight = {
        "epsilon": (noise, torch.tensor([1.0, (clipped / ratio)[1]])),
        "sample": (latents, clipped),
        "v_prediction": (velocity, clipped / (ratio + 1)),
    }[kind]
    torch.testing.assert_close(found.target, target)
    torch.testing.assert_close(found.weight, weight, atol=1e-6, rtol=1e-4)


def test_a_pipeline_of_another_kind(tmp_path):
    """One without prompts, a broken one, and one with the VAE of a pipeline that fills pictures."""
    other, filling = pipelines.pipeline(kind="DiTPipeline"), made()
    with pytest.raises(TypeError, match="call the DiTPipeline itself"):  # not made learnable
        parts_of(other)()
    other.save_pretrained(tmp_path / "other")
    filling.save_pretrained(tmp_path / "broken")
    filling.register_modules(vae=pipelines._vae(8))
    filling.save_pretrained(tmp_path / "filling")
    file = tmp_path / "broken/unet/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_num_groups": 0}))
    for name, expected in (
        ("other", "cannot be trained by text-to-image"),
        ("broken", "cannot be loaded"),
        ("filling", "reads 4 channels, and its VAE has 8"),
    ):
        with pytest.raises(BackboneError, match=expected):
            ah.load_backbone(str(tmp_path / name), task="text-to-image")


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        picture = Image.new("RGB", (12, 9), "white")
        colour = (255 - number, 0, 0) if number % 2 else (0, 0, 255 - number)
        picture.paste(colour, (2, 2, 9, 7))
        picture.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a b\n" if number % 2 else "c d\n")
    return folder


def pictures_of(task, source):
    fitted, choice = task.fitted(str(source), DataOptions(train=str(source)), "train")
    return fitted.read(str(source), choice.options, "train")


def captions(task, source):
    return [each.label for each in pictures_of(task, source)]


def rows_of(task, photos, pipe, count=12):
    return task.encode(pictures_of(task, photos)[:count], Setting(pipe, 8), labelled=True)


@pytest.fixture
def asked(monkeypatch):
    """Return a list that gets the prompts of each call that makes pictures."""
    return counted_calls(monkeypatch, TextToImage, "pictures", 1)


def test_captions(photos):
    """In files beside the pictures, one for all, and in tables."""
    assert sorted(captions(TextToImage(), photos)) == ["a b"] * 6 + ["c d"] * 6
    assert set(captions(TextToImage(prompt="a photo"), photos)) == {"a photo"}
    (photos / "3.txt").unlink()
    (photos / "5.txt").write_text(" \n")
    with pytest.raises(DataError, match="2 of 12 images have no caption") as refusal:
        captions(TextToImage(), photos)
    assert refusal.value.offenders == ("3.png: 3.txt is missing", "5.png: 5.txt is empty")
    assert "prompt=" in refusal.value.hint

    table = ["file_name,text", *(f"{n}.png,caption {n}" for n in range(12))]
    (photos / "metadata.csv").write_text("\n".join(table))
    assert captions(TextToImage(), photos)[3] == "caption 3"
    rows = [{"image": f"{n}.png", "caption": f"c{n}"} for n in range(12)]
    assert captions(TextToImage(), write_json_lines(photos / "rows.jsonl", rows))[3] == "c3"


@pytest.fixture
def trained(photos, tmp_path, adapterhub):
    """Return a function that trains on photos, and returns the losses and what was said."""
    pipelines.with_tokenizers(pipelines.pipeline()).save_pretrained(tmp_path / "backbone")

    def train(name, task, method, *options):
        code, out, err = adapterhub(
            "train", photos, "--eval", photos, "--backbone", tmp_path / "backbone",
            "--task", task, "--method", method, "--output", tmp_path / name,
            "--batch-size", "4", "--seed", "1", *options,
        )  # fmt: skip
        assert code == 0, err
        events = lines(tmp_path / name / "metrics.jsonl")
        return [each["metrics"]["loss"] for each in events if each["event"] == "eval"], out + err

    return train


UNET = "lora(sites=['unet.*.to_q'], rank=2)"
BOTH = "lora(sites=['unet.*.to_q','text_encoder.*.q_proj'], rank=2)"


def test_prior_preservation_adds_its_weighted_loss(photos):
    pipe, task = made(), TextToImage(prior="e f", prior_pictures=2, prior_weight=0.5, steps=1)
    encoded = rows_of(task, photos, pipe, 4)
    with_prior = task.with_reference(None, encoded, 2)
    assert with_prior.rows[0]["prior"] is with_prior.rows[2]["prior"]  # two for four rows
    loss, both = task.loss(encoded), with_prior.batch([0, 1])
    found = loss(parts_of(pipe)(**inputs(both)), both)
    losses = parts_of(pipe)(**inputs(both)).losses
    assert found.item() == pytest.approx((losses[:2].mean() + 0.5 * losses[2:].mean()).item())
    assert diffusion.prompt_texts(both["prompts"]) == ["c d", "a b", "e f", "e f"]
    own = encoded.batch([0, 1])
    torch.testing.assert_close(parts_of(pipe)(**inputs(own)).losses, losses[:2])


def inputs(given):
    return {name: tensor for name, tensor in given.items() if not name.startswith("loss.")}


def test_a_prior_is_made_for_training_alone(photos, trained, tmp_path, adapterhub, asked):
    task = "text-to-image(prior='e f', prior_pictures=3, samples=1, steps=1)"
    trained("run", task, LORA, "--steps", "2")
    assert asked[0] == ["e f"] * 3
    assert {tuple(prompts) for prompts in asked[1:]} == {("c d",)}  # of the report
    del asked[:]
    succeeded(adapterhub("eval", tmp_path / "run", "--data", photos))
    assert ["e f"] not in [prompts[:1] for prompts in asked]


def test_from_a_folder_to_a_picture(photos, trained, tmp_path, adapterhub, asked):
    """Train, evaluate, predict, export: the picture is that of diffusers with the same file.

    Files of pictures are refused before the pictures are made.
    """
    run, picture, place = tmp_path / "run", tmp_path / "one.png", tmp_path / "backbone"
    ok = lambda *given: succeeded(adapterhub(*given))  # noqa: E731
    words = ("--steps", "20", "--lr", "0.02", "--batch-size", "2", "--seed", "0")
    trained("run", "text-to-image(steps=2)", BOTH, *words)
    page = (run / "report.html").read_text()
    assert len(re.findall(r'<img class="made" src="data:image/png;base64,', page)) == 2
    assert "img-src data:" in page

    ok("eval", run, "--data", photos)
    refused(adapterhub("predict", run, "a b"), "--output picture.png")
    ok("predict", run, "a b", "--output", picture)
    made_here = Image.open(picture)
    assert made_here.size == (8, 8)
    refused(adapterhub("serve", run, "--check"), "makes images")

    del asked[:]
    (tmp_path / "red-2.png").write_bytes(b"")
    two = ("predict", run, "a b", "c d", "--output")
    refused(adapterhub(*two, tmp_path / "red.png"), "red-2.png is already there")
    assert asked == []
    (tmp_path / "blue.png").write_bytes(b"")  # which two prompts do not write
    out = ok(*two, tmp_path / "blue.png")
    assert out == f"{tmp_path}/blue-1.png\ta b\n{tmp_path}/blue-2.png\tc d\n"
    ok(*two, tmp_path / "new" / "folder" / "red.png")
    assert (tmp_path / "new" / "folder" / "red-2.png").is_file()

    out = ok("merge", run, "--output", tmp_path / "merged")
    assert f"DiffusionPipeline.from_pretrained('{tmp_path / 'merged'}')" in out
    merged = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "merged")
    assert (image_of(merged) - pixels(made_here)).abs().max() <= 1

    ok("export", run, "--to", "diffusers", "--output", tmp_path / "file")
    ok("import", tmp_path / "file", "--backbone", place, "--output", tmp_path / "in")
    ok("predict", tmp_path / "in", "a b", "--output", tmp_path / "in.png")
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(place, safety_checker=None)
    bare = image_of(theirs)
    theirs.load_lora_weights(str(tmp_path / "file"))
    adapted = image_of(theirs)
    assert (adapted - bare).abs().max() > 1
    # One grey level: pictures of float32 are rounded.
    assert (adapted - pixels(made_here)).abs().max() <= 1


def test_half_of_the_pictures_are_mirrored_and_a_share_of_prompts_is_empty(photos):
    pipe = made()
    mirrored, plain = (
        rows_of(TextToImage(flip=flip), photos, pipe).batch(range(12))["pixel_values"]
        for flip in (True, False)
    )
    changed = [not torch.equal(*each) for each in zip(mirrored, plain, strict=True)]
    assert 2 <= sum(changed) <= 10
    task = TextToImage(empty_prompts=0.5)
    encoded = rows_of(task, photos, pipe)

    def varied(epoch):
        rows = enumerate(encoded.rows * 20)
        return [task.vary(row, encoded.setting, (0, epoch, i))["prompt"] for i, row in rows]

    assert 80 < varied(1).count("") < 160
    assert {*varied(1)} == {"", "a b", "c d"}
    assert varied(1) == varied(1) != varied(2)
    given = inputs(rows_of(TextToImage(empty_prompts=1.0), photos, pipe).batch([0, 1]))
    assert diffusion.prompt_texts(given["prompts"]) == ["", ""]
    assert parts_of(pipe)(**given).losses.isfinite().all()


def image_of(pipe):
    pipe.set_progress_bar_config(disable=True)
    generator = [torch.Generator().manual_seed(0)]
    made_there = pipe(["a b"], num_inference_steps=2, generator=generator, height=8, width=8)
    return pixels(made_there.images[0])


def pixels(image):
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float()


def test_what_is_over_the_limit_is_encoded_each_time(monkeypatch):
    pipe = made()
    calls = counted_calls(monkeypatch, type(pipe), "encode_prompt")
    given = batch() | {"seeds": torch.tensor([3, 4])}
    of_a_prompt = 12 * pipelines.WIDTH * 4
    small, large = diffusion.Kept(of_a_prompt), diffusion.Kept(10**6)
    # The latents of a picture, a mean and a deviation, are larger.
    found = [parts_of(pipe)(**given, kept=each) for each in (large, small, small)]
    assert calls == [["a b"], ["c d e"], ["a b"], ["c d e"], ["c d e"]]
    assert all(torch.equal(each.losses, found[0].losses) for each in found)


@long_table("method", [UNET, BOTH], 2)
def test_frozen_encoders_compute_once_in_a_run(method, trained, monkeypatch):
    calls = counted_calls(monkeypatch, type(made()), "encode_prompt")
    task = "text-to-image(samples=0)"
    off, said = trained("off", task, method, "--epochs", "2", "train.frozen_cache=off")
    assert "encoded once" not in said
    before = len(calls)
    on, said = trained("on", task, method, "--epochs", "2")
    what = "each prompt and each image" if method == UNET else "each image"
    line = f"{what}: encoded once, and kept in memory; train.frozen_cache=off encodes them"
    assert line in said
    assert before > 10
    assert len(calls) - before == (2 if method == UNET else before)
    assert on == pytest.approx(off, rel=1e-5)


def test_runs_with_other_options_and_seeds_have_one_evaluation(trained):
    zero = ("--steps", "2", "--lr", "1e-9")
    plain, _ = trained("plain", "text-to-image(samples=0)", UNET, *zero)
    varied = "text-to-image(samples=0, flip=true, empty_prompts=1.0)"
    other, _ = trained("varied", varied, UNET, *zero, "--seed", "2")
    assert other[-1] == pytest.approx(plain[-1], rel=1e-5)


def test_options_that_do_not_fit_a_pipeline(photos):
    flux, odd = made("FluxPipeline"), TextToImage(resolution=9)
    with pytest.raises(ConfigError, match="snr_gamma=5, and this pipeline learns by flow"):
        rows_of(TextToImage(snr_gamma=5), photos, flux)
    with pytest.raises(ConfigError, match="squares of 2 pixels") as found:
        rows_of(odd, photos, flux)
    assert found.value.hint in ("resolution=8", "resolution=10")
    assert rows_of(odd, photos, made()).batch([0])["pixel_values"].shape[-1] == 9
    pipe = made("PixArtAlphaPipeline")  # which would take the nearest size of its own
    encoded = rows_of(TextToImage(resolution=16), photos, pipe)
    (picture,) = TextToImage(resolution=16, steps=1).pictures(encoded.setting, ["a"], 1)
    assert picture.size == (16, 16)


def step_of(seed):
    """Return the step of noise that a row with a seed gets."""
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(2):  # the latents, and the noise
        torch.randn(4, 8, 8, generator=numbers)
    return int(torch.randint(0, 1000, (1,), generator=numbers))


def test_a_run_goes_on_in_the_middle_of_an_epoch(trained, tmp_path, adapterhub, monkeypatch):
    task = "text-to-image(samples=0, flip=true, empty_prompts=0.3)"
    options = ("--steps", "4", "train.gradient_accumulation=2", "train.save_every=2")
    trained("whole", task, UNET, *options)
    step, numbers = Engine.step, itertools.count()

    def stopped(self, *given):
        if next(numbers) == 3:
            raise KeyboardInterrupt
        return step(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", stopped)
        with pytest.raises(AssertionError):
            trained("stopped", task, UNET, *options)
    code, _, err = adapterhub("train", tmp_path / "stopped" / "recipe.yaml", "--resume")
    assert (code, "resumed after step 2 of 4" in err) == (0, True)
    assert adapter_bytes(tmp_path / "whole") == adapter_bytes(tmp_path / "stopped")
