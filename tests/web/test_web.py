"""What both servers share: the table of errors, the file of tokens, limits of connections."""

import json
import os
import resource
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapterhub.errors import ConfigError, FileError, ServingError
from adapterhub.web import errors, tokens
from adapterhub.web.connections import ConnectionLimits, most_connections
from adapterhub.web.tokens import TokenFile

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
    ("error", "status", "words"),
    [
        (errors.SlowError("slow"), 408, "did not come in time"),
        (ConfigError("no such name", offenders=["a"]), 400, "no such name; a"),
        (RuntimeError("/home/ada/secret"), 500, "internal error"),
    ],
)
def test_a_hub_refuses_with_the_status_of_an_error(error, status, words):
    refusal = errors.refusal_of(error)
    assert refusal.status == status
    assert words in refusal.problem


# The file of tokens: digests only, changed under a lock, read again when it has changed.


@pytest.fixture
def file(tmp_path):
    return TokenFile(tmp_path / "folder" / "tokens.json")


def test_a_token_is_random_and_kept_as_its_digest(file):
    made = file.create("shop", ["predict", "admin"], ["team-*", "polite"])
    assert made.startswith("ah_")
    assert len(made) == len("ah_") + 43  # 32 bytes
    assert made != file.create("other", seconds=3600)
    text = file.path.read_text()
    assert made not in text
    assert made[3:] not in text
    known = file.check(made)
    assert (known.name, known.roles) == ("shop", ("predict", "admin"))
    assert known.adapters == ("team-*", "polite")
    if os.name != "nt":
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    late = file.create("late", seconds=1e-6)
    for text in ("", "ah_", made[:-1], f"{made}=", f" {made}", made.swapcase(), "ah_" + "A" * 43,
                 late):  # fmt: skip
        assert file.check(text) is None
    assert file.tokens()[1].expires > file.tokens()[1].created


def test_a_token_that_is_revoked_by_another_process_ends(file, monkeypatch):
    monkeypatch.setattr(tokens, "_LOOK_EVERY", 0.0)
    made, other = file.create("shop"), file.create("other")
    assert file.check(made)
    TokenFile(file.path).revoke("shop")
    assert file.check(made) is None
    assert file.check(other)
    file.path.unlink()
    assert file.check(other) is None


def test_a_file_that_cannot_be_read_makes_no_token_valid(file, monkeypatch):
    monkeypatch.setattr(tokens, "_LOOK_EVERY", 0.0)
    made = file.create("shop")
    data = json.loads(file.path.read_text())
    data["tokens"][0]["roles"] = ["root"]
    file.path.write_text(json.dumps(data))
    assert file.check(made) is None
    with pytest.raises(FileError, match="not a file of tokens"):
        file.tokens()


def test_the_last_use_is_noted_and_changes_of_others_stay(file):
    made = file.create("shop")
    assert file.check(made)
    TokenFile(file.path).create("other")
    file.note_uses()  # too early
    assert all(each.used is None for each in file.tokens())
    file.note_uses(at_once=True)
    shop, other = file.tokens()
    assert shop.used >= shop.created
    assert other.used is None


def test_tokens_that_cannot_be_made_or_ended(file):
    for name, roles, adapters in (
        ("two words", ["predict"], ["*"]),
        ("shop", ["root"], ["*"]),
        ("shop", ["predict"], ["a b"]),
    ):
        with pytest.raises(ConfigError, match="cannot be made"):
            file.create(name, roles, adapters)
        assert not file.path.exists()
    file.create("shop")
    with pytest.raises(ConfigError, match="there is a token with the name 'shop'"):
        file.create("shop")
    with pytest.raises(ConfigError, match="did you mean 'shop'"):
        file.revoke("shpo")


def test_many_writers_lose_nothing(file):
    names = [f"client-{n}" for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(file.create, names))
    assert {each.name for each in file.tokens()} == {*names}


# Limits of connections: who leaves for a new one, and who is refused.


class Opened:
    """A connection, of which its state alone counts."""

    def __init__(self, *, waits=True, answered=False):
        self.waits_for_client, self.was_answered = waits, answered
        self.transport, self.is_dropped = self, False

    def abort(self):
        self.is_dropped = True


def opened(limits, number, address="10.0.0.1", **state):
    found = [Opened(**state) for _ in range(number)]
    assert all(limits.admit(each, address) for each in found)
    return found


def test_the_quietest_of_an_address_leaves_for_a_new_one():
    limits = ConnectionLimits(most=8)
    (client,) = opened(limits, 1, answered=True)
    first, second, third = opened(limits, 3)
    limits.note(first)
    opened(limits, 1)
    dropped = [each.is_dropped for each in (client, first, second, third)]
    assert dropped == [False, False, True, False]
    (other,) = opened(limits, 1, "10.0.0.2")
    opened(limits, 20)
    assert (client.is_dropped, other.is_dropped, len(limits.open)) == (False, False, 5)
    assert limits.counts == {"10.0.0.1": 4, "10.0.0.2": 1}


def test_what_is_being_answered_is_not_dropped():
    limits = ConnectionLimits(most=8)
    busy = opened(limits, 4, waits=False)
    assert not limits.admit(Opened(), "10.0.0.1")
    busy += opened(limits, 4, "10.0.0.2", waits=False)
    assert not limits.admit(Opened(), "10.0.0.3")
    limits.forget(busy.pop())
    limits.forget(Opened())  # it was refused
    assert limits.admit(Opened(), "10.0.0.3")
    assert not any(each.is_dropped for each in busy)


def test_a_proxy_has_the_connections_of_many():
    limits = ConnectionLimits(most=8, is_proxy=lambda address: address == "10.0.0.9")
    opened(limits, 8, "10.0.0.9")
    opened(limits, 1, "10.0.0.1")
    assert (len(limits.open), limits.counts["10.0.0.9"]) == (8, 7)


@pytest.mark.parametrize(
    ("files", "most"), [(256, 64), (1024, 512), (20_000, 8192), (resource.RLIM_INFINITY, 8192)]
)
def test_connections_leave_files_for_everything_else(monkeypatch, files, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert most_connections() == most
