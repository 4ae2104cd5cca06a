"""Warnings of this library as records of Accelerate's loggers, where Accelerate logs them."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

from checkpoint_io.warning import warn

__all__ = ["LOGGERS", "log_warnings"]

_MODELING = "accelerate.utils.modeling"
#: The logger of each function that logs in Accelerate what it warns of here.
#: The others of these functions warn in Accelerate, too.
LOGGERS: dict[str, str | None] = {
    "check_device_map": None,
    "check_os_kernel": "accelerate.utils.other",
    "check_tied_parameters_on_same_device": _MODELING,
    "clean_state_dict_for_safetensors": "accelerate.utils.other",
    "convert_dict_to_env_variables": "accelerate.utils.environment",
    "load_checkpoint_and_dispatch": _MODELING,
    "load_checkpoint_in_model": _MODELING,
    "save": "accelerate.utils.other",
}
# What scripts look for in these texts.
_PHRASES = (
    (r"the device map has names that are no module", "device_map keys do not match any submodules"),
    (r"has unused (?=.)", "has weights that were not used when the model was loaded: "),
    (r"^weights without tensors that share", "Removed shared tensors: these share"),
)


@functools.cache
def log_warnings(function: Callable[..., Any], logger: str | None) -> Callable[..., Any]:
    """Return a function that logs the user warnings of another one, and passes others on.

    Args:
        function: the other one.
        logger: the name of the logger; None to warn with phrases of Accelerate's.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        caught: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                return function(*args, **kwargs)
        finally:
            for one in caught:
                if one.category is not UserWarning:
                    warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
                elif logger is None:
                    warn(_reword(str(one.message)))
                else:
                    logging.getLogger(logger).warning(_reword(str(one.message)))

    return call


def _reword(text: str) -> str:
    for ours, theirs in _PHRASES:
        text = re.sub(ours, theirs, text)
    return text
