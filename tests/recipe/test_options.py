"""The ranges of the training options."""

from __future__ import annotations

import pytest

from adapterhub.config.options import options_of
from adapterhub.errors import ConfigError
from adapterhub.recipe.recipe import TrainOptions


def test_options_out_of_range_are_listed_together():
    with pytest.raises(ConfigError) as error:
        TrainOptions(epochs=0, learning_rate=-1.0, beta2=1.0, eval_every=0, patience=0)
    names = [line.split(":")[0] for line in error.value.offenders]
    assert names == ["epochs", "patience", "learning_rate", "beta2", "eval_every"]


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_a_decay_rate_is_at_least_0_and_below_1(name):
    TrainOptions(**{name: 0.0})
    with pytest.raises(ConfigError, match=rf"{name}: 1.0 \(at least 0, below 1\)"):
        TrainOptions(**{name: 1.0})


def test_every_option_has_a_help_text():
    assert all(option.help for option in options_of(TrainOptions))
