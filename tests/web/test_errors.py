"""One table of errors for both servers, and the form of each API."""

from __future__ import annotations

import pytest

from adapterhub.errors import ServingError
from adapterhub.web import errors

FIELD = errors.RequestError("top_k is -1", parameter="top_k")
PLAIN = {"error": "top_k is -1", "code": "invalid_request"}
OPENAI = {"message": "top_k is -1", "param": "top_k", "code": "invalid_request"}


def test_each_class_of_errors_has_a_status():
    known = [each for each in vars(errors).values() if isinstance(each, type)]
    raised = [each for each in known if issubclass(each, ServingError) and each is not ServingError]
    assert len(raised) > 30
    without = [each for each in raised if not {*each.__mro__} & errors.STATUSES.keys()]
    assert not without


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"error": {**OPENAI, "type": "invalid_request_error"}}),
        ("/v2/rerank", {"error": {**OPENAI, "type": "invalid_request_error"}}),
        ("/v2/models/a/infer", {**PLAIN, "error_type": "Validation"}),
        ("/models/a", {**PLAIN, "error_type": "validation"}),
    ],
)
def test_an_error_has_the_form_of_the_paths_api(path, body):
    assert errors.body_of(errors.problem_of(FIELD), path) == body


@pytest.mark.parametrize(
    ("error", "code", "headers"),
    [
        (FIELD, 400, {}),
        (errors.NoTokenError("no valid token"), 401, {"www-authenticate": "Bearer"}),
        (errors.OverloadedError(9, 8, 2.6), 429, {"retry-after": "3"}),
        (errors.ComputationError("the answer has NaN"), 500, {}),
        (errors.DeadlineError(0.5), 504, {"retry-after": "1"}),
        (errors.TooLargeError("does not fit into memory alone"), 507, {}),
        (errors.BusyError(), 503, {"retry-after": "5"}),
        (errors.HubRefusal("gone", status=410, headers={"a": "b"}), 410, {"a": "b"}),
        (RuntimeError("/home/ada/secret"), 500, {}),
    ],
)
def test_an_error_has_a_status_and_headers(error, code, headers):
    problem = errors.problem_of(error)
    assert (problem.status.code, problem.headers) == (code, headers)
    assert "secret" not in problem.message


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (errors.MissingEntryError("no file"), 404, "EntryNotFound"),
        (errors.LargeBodyError(1 << 20), 413, None),
        (FIELD, 400, None),
        (RuntimeError("/home/ada/secret"), 500, None),
    ],
)
def test_a_hub_answers_in_the_words_of_the_hubs_clients(error, code, word):
    body, status, headers = errors.hub_body(errors.refusal_of(error))
    assert (status, headers.get("x-error-code")) == (code, word)
    assert headers["x-error-message"] == body["error"]
    assert "secret" not in body["error"]
