"""What `adapterhub serve` can be told: flags over a file, and what is not valid."""

import pytest

from adapterhub.errors import ConfigError
from adapterhub.serving.options import ServeOptions, read_serve_options


def test_flags_are_taken_before_the_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("adapters: [polite@3, shop=./run]\nport: 9000\nadapter_memory: 1.5GiB\n")
    options = read_serve_options(str(file), {"port": 9001, "refresh": "off"})
    assert options.adapters == ("polite@3", "shop=./run")
    assert options.port == 9001
    assert options.size("adapter_memory") == 3 << 29
    assert options.seconds("refresh") == float("inf")
    assert options.seconds("deadline") == 30


def test_options_that_are_not_valid():
    for given, said in (
        ({"prot": 1}, "port"),
        ({"deadline": "soon"}, "'soon' is not a time"),
        ({"deadline": "off"}, "'off' is not a time"),
        ({"body": "large"}, "'large' is not a size"),
        ({"port": 70000}, "port: 70000, must be at least 0 and at most 65535"),
        ({"inputs": 0}, "inputs: 0, must be at least 1"),
        ({"metrics": "all"}, "metrics"),
    ):
        with pytest.raises(ConfigError) as error:
            read_serve_options(None, given)
        assert said in str(error.value)


def test_who_reaches_an_address():
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        assert ServeOptions(host=host).is_local
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.org"):
        assert not ServeOptions(host=host).is_local
