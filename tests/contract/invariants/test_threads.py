"""Threads share one model: each computes with its own route, as if it were alone."""

import asyncio
import itertools
import os
import sys
import threading
from contextvars import copy_context
from threading import Thread

import pytest
import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel, TextIteratorStreamer

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.errors import AttachError
from adapterhub.methods import METHODS
from tests.kit import selection, tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.matrix import CELLS, example, one_of_each_signature
from tests.kit.tiny_models import logits

THREADS = 8
# In all threads of one cell together; `make threads` runs 2,000.
FORWARDS = int(os.environ.get("ADAPTERHUB_FORWARDS", "40" if selection.ALL else "16"))
# Each mechanism once on a decoder and an encoder-decoder; the full matrix has every method there.
MECHANISMS = tuple(METHODS) if tiny_models.FULL_MATRIX else ("lora", "mam", "prompt", "scalar-mix")
SHARED = [
    (method, architecture)
    for method, architecture in CELLS
    if (architecture == "bert" and method in one_of_each_signature())
    or (architecture in ("llama", "t5") and method in MECHANISMS)
]
ROUTED = [cell for cell in SHARED if not METHODS[cell[0]].trains_backbone and cell[0] != "head"]


@pytest.fixture(autouse=True)
def frequent_switches():
    """Let threads interrupt each other as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def batch():
    return tiny_models.batch(3, 7, seed=5)


def run_threads(target, count=THREADS):
    """Call target(number) in threads that start together; return what they raised."""
    errors, barrier = [], threading.Barrier(count)

    def run(number):
        try:
            barrier.wait()
            target(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


class Served:
    """A model with the adapters a0, a1, ... and, by name, what each computes alone for a batch."""

    def __init__(self, model, method, count=THREADS):
        self.model = model
        names = [f"a{number}" for number in range(count)]
        for number, name in enumerate(names):
            tiny_models.scramble(ah.attach(model, example(method), name=name), seed=number)
        self.alone = {}
        for name in (None, *names):
            ah.activate(model, *([name] if name else []))
            self.alone[name] = self.computed()
        ah.activate(model)

    def computed(self, model=None):
        return logits(self.model if model is None else model, **batch())

    def check(self, found, *rows):
        """Check outputs against what the adapters of the rows compute alone."""
        own = torch.stack([self.alone[name][row] for row, name in enumerate(rows)])
        assert torch.allclose(found, own, atol=1e-5, rtol=1e-5), rows

    def check_route(self, *rows):
        """Check the outputs of a route."""
        with ah.route(self.model, rows):
            found = self.computed()
        self.check(found, *rows)


@selection.long_table(("method", "architecture"), ROUTED, parts=8, nightly=3)
def test_each_thread_computes_with_its_own_route(method, architecture):
    served = Served(tiny_models.usual_model(architecture), method)

    def serve(number):
        for _ in range(FORWARDS // THREADS):
            served.check_route(f"a{number}", None, f"a{(number + 1) % THREADS}")

    assert run_threads(serve) == []
    assert torch.equal(served.computed(), served.alone[None])


def check_threads_agree(model):
    """Check that the output of each thread is that of one alone."""
    expected = logits(model, **batch())

    def serve(number):
        for _ in range(FORWARDS // THREADS):
            assert torch.equal(logits(model, **batch()), expected)

    assert run_threads(serve) == []


@selection.long_table("method", ["bitfit", "norms", "full", "lora"], 2)
def test_parameters_in_fp32_serve_threads_of_a_bf16_backbone(method):
    """Each call lowers them; calls of several threads overlap."""
    model = tiny_models.model("bert", dtype=torch.bfloat16)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    check_threads_agree(model)
    assert all(p.dtype == torch.float32 for p in adapter.parameters())
    model(**batch(), labels=torch.zeros(3, dtype=torch.long)).loss.backward()
    assert all(p.grad is not None for p in adapter.parameters())


@selection.long_table("method", ["lora", "mam", "prompt"], 3)
def test_activation_in_one_thread_never_mixes_into_passes_of_others(method):
    served, done = Served(tiny_models.language_model("gpt2"), method, 2), threading.Event()

    def serve(number):
        if number == 0:
            for turn in range(60):
                ah.activate(served.model, *[[], ["a0"], ["a1"]][turn % 3])
            done.set()
        while not done.is_set():
            found = served.computed()
            assert any(torch.allclose(found, own, atol=1e-5) for own in served.alone.values())

    assert run_threads(serve, 4) == []


def test_adapters_are_attached_and_detached_while_other_threads_have_routes():
    served, done = Served(tiny_models.usual_model("bert"), "lora", 4), threading.Event()

    def serve(number):
        if number == 0:
            for turn in range(12):
                name = f"new{turn}"
                tiny_models.scramble(ah.attach(served.model, "mam", name=name))
                ah.detach(served.model, name)
            done.set()
        while not done.is_set():
            served.check_route(f"a{number}", None, "a0")

    assert run_threads(serve, 4) == []


def test_what_another_thread_has_in_a_route_stays():
    """Its adapters and weights; its head, which a thread without a route would take away."""
    served = Served(tiny_models.model("bert"), "lora", 2)
    model = served.model
    ah.activate(model, "a0")
    merge = lambda: ah.merge(model, "a0", "a1")  # noqa: E731
    for refused in (lambda: ah.detach(model, "a1"), merge, served.computed):
        with ah.route(model, ["a1"] * 3):
            (error,) = run_threads(lambda _, refused=refused: refused(), 1)
        assert isinstance(error, AttachError)
        assert "another thread has a route open" in str(error)
    served.check(served.computed(), "a0", "a0", "a0")
    with ah.route(model, ["a1"] * 3):
        assert run_threads(lambda _: ah.detach(model, "a0"), 1) == []
    assert list(get_state(model).adapters) == ["a1"]


def test_a_route_of_this_thread_refuses_changes():
    served = Served(tiny_models.model("bert"), "lora", 2)
    with ah.route(served.model, ["a0", None, "a1"]):
        for change, *arguments in (
            (ah.merge,), (ah.combine, ["a0", "a1"]), (ah.attach, "lora"), (ah.activate,),
            (ah.activate, "a0"), (ah.detach,), (ah.detach, "a0"),
        ):  # fmt: skip
            with pytest.raises(AttachError, match=r"inside route\(...\)"):
                change(served.model, *arguments)
        served.check(served.computed(), "a0", None, "a1")
    assert torch.equal(served.computed(), served.alone[None])


def test_a_route_that_replaces_parameters_is_alone():
    model = Served(tiny_models.model("bert"), "bitfit", 1).model
    tiny_models.scramble(ah.attach(model, "lora", name="b"))

    def other(_):
        with ah.route(model, ["b"]):
            pass

    with ah.route(model, ["a0"]):
        for errors in (run_threads(other, 1), run_threads(lambda _: ah.activate(model), 1)):
            assert "replaces parts of the model" in str(*errors)
    assert run_threads(other, 1) == []


@selection.long_table(
    ("method", "reentrant"),
    list(itertools.product(("lora", "mam", "scalar-mix"), (False, True))),
    3,
)
def test_gradients_are_recomputed_with_the_route_of_the_forward_pass(method, reentrant):
    """Autograd recomputes in threads of its own on a GPU; here, in a thread without a route."""
    outside = hasattr(PreTrainedModel, "activation_checkpointing_enable")  # since 5.23
    if reentrant and method == "scalar-mix" and not outside:
        pytest.skip("before transformers 5.23, hooks are in the checkpoint, where none may mix")
    gradients = []
    for elsewhere in (False, True):
        model = tiny_models.language_model("llama")
        torch.manual_seed(0)
        Served(model, method, 2)
        model.train()
        tiny_models.enable_gradient_checkpointing(model, use_reentrant=reentrant)
        model.enable_input_require_grads()
        with ah.route(model, ["a0", "a1", "a0"]):
            first = model(**batch()).logits.square().sum()
        with ah.route(model, ["a1", "a1", "a0"]):
            second = model(**tiny_models.batch(3, 5, seed=1)).logits.square().sum()
            if not elsewhere:
                second.backward()
        if elsewhere:
            assert run_threads(lambda _, second=second: second.backward(), 1) == []
        assert run_threads(lambda _, first=first: first.backward(), 1) == []
        adapters = get_state(model).adapters.values()
        gradients.append([p.grad for adapter in adapters for p in adapter.parameters()])
    assert any(gradient.abs().sum() > 0 for gradient in gradients[0])
    for here, there in zip(*gradients, strict=True):
        torch.testing.assert_close(here, there, atol=1e-5, rtol=1e-4)


def test_a_route_follows_its_coroutine():
    """asyncio interleaves coroutines in one thread, and hands calls to others; none is left."""
    served = Served(tiny_models.usual_model("llama"), "lora", 4)
    model = served.model

    async def request(name):
        with ah.route(model, [name] * 3):
            await asyncio.sleep(0)
            inside = await asyncio.to_thread(served.computed)
            await asyncio.sleep(0)
            return inside, served.computed()

    async def serve():
        return await asyncio.gather(*(request(f"a{number}") for number in range(4)))

    for number, outputs in enumerate(asyncio.run(serve())):
        for output in outputs:
            served.check(output, *[f"a{number}"] * 3)
    assert get_state(model).routes == []


def test_an_interrupted_pass_leaves_nothing_behind():
    model, inputs = tiny_models.language_model("t5"), batch()
    for number in range(2):
        tiny_models.scramble(ah.attach(model, "lora", name=f"a{number}"), seed=number)
    targets = {"decoder_input_ids": inputs["input_ids"][:, :4]}
    ah.activate(model, "a1")
    expected = model(**inputs, **targets).logits
    ah.activate(model, "a0")

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.get_decoder().register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**inputs, **targets)
    handle.remove()
    ah.activate(model, "a1")
    outputs = model(**inputs | targets, encoder_outputs=model.get_encoder()(**inputs))
    torch.testing.assert_close(outputs.logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not selection.ALL, reason="several compilations")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_compiled_model_follows_the_route_of_its_thread():
    """Its calls alternate: torch does not check the guards of several threads at once."""
    torch._dynamo.reset()
    calls, served = threading.Lock(), Served(tiny_models.usual_model("llama"), "lora", 2)
    compiled = torch.compile(served.model, backend="eager", fullgraph=True)
    for name in served.alone:
        with ah.route(served.model, [name] * 3):
            served.computed(compiled)

    def serve(number):
        for turn in range(6):
            name = (None, "a0", "a1")[(turn + number) % 3]
            with ah.route(served.model, [name] * 3), calls:
                found = served.computed(compiled)
            served.check(found, name, name, name)

    assert run_threads(serve, 3) == []
    torch._dynamo.reset()


SMALL_CACHE = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # else most memory
WAYS = {  # of transformers into its thread
    "generate_batch": lambda model: model.generate_batch([[7, 8, 9]], max_new_tokens=2),
    "generate": lambda model: model.generate(
        torch.tensor([[7, 8, 9]]), cache_implementation="paged", max_new_tokens=2
    ),
    "context": lambda model: model.continuous_batching_context_manager().__enter__(),
    "manager": lambda model: model.init_continuous_batching(),
}


@selection.long_table("method", [m for m in METHODS if m not in ("head", "scalar-mix")], parts=4)
def test_continuous_batching_is_refused_where_its_thread_computes_something_else(method):
    """In a route of any kind; with keys, values or tokens that no request has; for others' keys."""
    model = tiny_models.language_model("gpt2")
    adapter = ah.attach(model, example(method), name="own")
    virtual = any(
        p.site.kind in ("keyvalue", "embed") or p.module.token_sets for p in adapter.placed
    )
    for way in WAYS.values():
        for context in (ah.route(model, ["own"]), ah.disabled(model)):
            with context, pytest.raises(AttachError, match="in a thread of its own"):
                way(model)
        if virtual:
            with pytest.raises(AttachError, match="no place for prefixes and prompts"):
                way(model)
    if not virtual:
        with pytest.raises(AttachError, match="persistent"):
            model.generate_batch([[7, 8, 9]], persistent_manager=True)
        manager = model.init_continuous_batching()
        with ah.disabled(model), pytest.raises(AttachError, match="in a thread of its own"):
            manager.add_requests([[7, 8, 9]])
        ah.activate(model)
        with pytest.raises(AttachError, match="another adapter is active"):
            manager.add_request([7, 8, 9])
        model._cached_continuous_batching_manager = manager
        with pytest.raises(AttachError, match="destroy_cached_continuous_batching_manager"):
            model.generate_batch([[7, 8, 9]])


def test_continuous_batching_and_streams_compute_with_the_adapter():
    """The first with what is active; the second in a copy of the route's context."""
    model, tokenizer = tiny_models.language_model("llama"), word_tokenizer()
    Served(model, "lora", 2)
    prompt, options = [7, 8, 9], {"max_new_tokens": 4, "do_sample": False}
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, 3).long()}
    expected = {}
    for name in ("a0", "a1"):
        ah.activate(model, name)
        expected[name] = model.generate(**inputs, **options)[0, 3:].tolist()
        (found,) = model.generate_batch(
            [prompt], continuous_batching_config=SMALL_CACHE, max_new_tokens=4
        ).values()
        assert found.generated_tokens == expected[name]
    assert expected["a0"] != expected["a1"]
    with ah.route(model, ["a0"]):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        given = {**inputs, **options, "streamer": streamer}
        Thread(target=copy_context().run, args=(model.generate,), kwargs=given).start()
        assert "".join(streamer) == tokenizer.decode(expected["a0"])
