"""A field of a request acts, changes nothing by its value, or is refused by its name."""

import pytest

from adapterhub.serving import Engine
from adapterhub.serving.adapter_cache import BareBackbone
from tests.kit.server import TEXTS, running, service_of
from tests.kit.web_servers import ask

CHAT = {"messages": [{"role": "user", "content": "a plot"}], "max_tokens": 4, "temperature": 0}
TEXT = {"prompt": "a plot", "max_tokens": 4, "temperature": 0}
THINKING = (
    "{% for m in messages %}{{ m['content'] }}{{ m['name'] }} {% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}the end the end{% endif %}"
)
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
INFER_PATH = "/v2/models/classes/infer"
TENSOR = {
    "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXTS[0]]}],
    "parameters": {"priority": 0},
}
BODIES = {
    CHAT_PATH: {"model": "writer", **CHAT},
    "/models/writer/v1/chat/completions": {"model": "writer", **CHAT},
    TEXT_PATH: {"model": "writer", **TEXT},
    "/v1/predict": {"model": "classes", "inputs": ["a plot"]},
    "/v1/embeddings": {"model": "vectors", "input": "a plot"},
    "/embed": {"model": "vectors", "inputs": "a plot"},
    "/predict": {"model": "classes", "inputs": "a plot"},
    "/classify": {"model": "classes", "input": ["a plot"]},
    "/pooling": {"model": "classes", "input": ["a plot"]},
    "/score": {"model": "vectors", "text_1": "a plot", "text_2": ["fine"]},
    "/rerank": {"model": "vectors", "query": "a plot", "documents": ["fine"]},
    "/models/classes": {"inputs": "a plot"},
    "/models/vectors": {"inputs": "a plot"},
    "/models/writer": {"inputs": "a plot", "parameters": {"max_new_tokens": 4}},
}


@pytest.fixture(scope="module")
def url(backbones, llama_folders):
    with Engine(str(backbones("llama"))) as engine:
        bare = engine.adapters.find(BareBackbone.TEXTS).result()
        bare.predictor.tokenizer.chat_template = THINKING
        with running(service_of(engine, llama_folders)) as url:
            yield url


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_refused_by_name_and_null_is_no_field(url, path):
    body = BODIES[path]
    assert ask(url, path, body).status == 200
    for name, value in (("min_q", 0.1), ("whatever", {"a": 1}), ("whatever", [])):
        answer = ask(url, path, {**body, name: value})
        assert answer.status in (400, 422), answer.data.decode()
        assert name in answer.data.decode()
    two = ask(url, path, {**body, "whatever": 1, "min_q": 1})
    assert "whatever" in two.data.decode()
    assert "min_q" in two.data.decode()
    nulls = {"truncate": None, "encoding_format": None, "stream": None, "whatever": None}
    accepted = ask(url, path, {**body, **(nulls if path != "/v1/predict" else {"truncate": None})})
    assert accepted.status == 200, accepted.data.decode()


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize(
    "field",
    [
        {"repetition_penalty": 8.0}, {"min_p": 0.9}, {"stop_token_ids": [5]}, {"min_tokens": 4},
        {"tool_choice": "required"}, {"guided_choice": ["yes"]},
        {"reasoning_effort": "none"}, {"enable_thinking": False}, {"ignore_eos": True},
        {"add_generation_prompt": False}, {"continue_final_message": True}, {"store": True},
        {"skip_special_tokens": False}, {"stream_options": {"whatever": 1}, "stream": True},
        {"stream_options": {"include_usage": True}}, {"bad_words": ["a"]}, {"documents": [{}]},
    ],
    ids=lambda field: "-".join(field),
)  # fmt: skip
def test_what_would_change_a_text_and_is_not_supported(url, path, field):
    answer = ask(url, path, {**BODIES[path], **field})
    assert answer.status == 400, answer.data.decode()
    assert next(iter(field)) in answer.data.decode() or "whatever" in answer.data.decode()


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_what_changes_nothing_is_accepted(url, path):
    nothing = {"repetition_penalty": 1.0, "min_p": 0, "tool_choice": "none", "store": False,
               "stop_token_ids": [], "user": "x", "skip_special_tokens": True, "n": 1}  # fmt: skip
    nothing |= {"response_format": {"type": "text"}, "tools": [], "presence_penalty": 0}
    if path == TEXT_PATH:
        nothing |= {"best_of": 1, "echo": False}
    plain, same = (ask(url, path, BODIES[path] | more).json for more in ({}, nothing))
    assert same["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("path", "body", "more", "word"),
    [
        *((CHAT_PATH, BODIES[CHAT_PATH], {"chat_template_kwargs": more}, word) for more, word in (
            ({"add_generation_prompt": False}, "add_generation_prompt"),
            ({"tools": [{}]}, "tools"), ([1], "chat_template_kwargs"))),
        (CHAT_PATH, BODIES[CHAT_PATH],
         {"messages": [{"role": "user", "content": "a", "chat_template_kwargs": {}}]}, "beside"),
        (INFER_PATH, TENSOR, {"parameters": {"whatever": 1}}, "not supported"),
        (INFER_PATH, TENSOR, {"outputs": [{"name": "label", "parameters": {"classification": 2}}]},
         "not supported"),
    ],
)  # fmt: skip
def test_arguments_that_are_none_of_a_template_or_a_protocol(url, path, body, more, word):
    assert ask(url, path, body).status == 200
    answer = ask(url, path, {**body, **more})
    assert answer.status in (400, 422)
    assert word in answer.data.decode()


def test_arguments_of_a_chat_template_change_the_prompt(url):
    def tokens(**more):
        answer = ask(url, CHAT_PATH, {**BODIES[CHAT_PATH], **more})
        assert answer.status == 200, answer.data.decode()
        return answer.json["usage"]["prompt_tokens"]

    plain = tokens()
    assert tokens(chat_template_kwargs={"enable_thinking": True}) == plain
    assert tokens(chat_template_kwargs={"enable_thinking": False}) > plain
    named = [{**CHAT["messages"][0], "name": "the great actor"}]
    assert tokens(messages=named) > plain
