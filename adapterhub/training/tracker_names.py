"""Which experiment trackers there are: checked before torch is imported, if none is named."""

from __future__ import annotations

from collections.abc import Iterable

from adapterhub.errors import ConfigError, unknown

_PIP = {"comet_ml": "comet-ml"}  # where the package is not called like its module
_OWN = "tensorboard"  # written by training/report.py


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that are unknown or not installed.

    Raises:
        ConfigError: one of them is.
    """
    if not (chosen := tuple(names)):
        return
    from accelerate import tracking

    available = {str(name) for name in tracking.get_available_trackers()}
    for name in chosen:
        if name == _OWN:
            raise ConfigError(
                "TensorBoard is no train.tracker", hint="train.tensorboard=true, the default"
            )
        if name not in tracking.LOGGER_TYPE_TO_CLASS:
            choices = sorted(str(n) for n in tracking.LOGGER_TYPE_TO_CLASS if n != _OWN)
            raise unknown("tracker", name, choices)
    if missing := [name for name in chosen if name not in available]:
        raise ConfigError(
            f"not installed: {', '.join(missing)}, named by train.tracker",
            hint=f"pip install {' '.join(_PIP.get(name, name) for name in missing)}",
        )
