"""What earlier versions had is answered with what serves instead."""

import pytest

import accel_callbacks
from accel_callbacks import utils
from accel_callbacks.cli.main import main
from accel_callbacks.compat.names import NotProvided, resolve
from accel_callbacks.errors.removed import REMOVED
from accel_callbacks.launch.config_file import values_of
from accel_callbacks.plugins.option import SettingsError


@pytest.mark.parametrize("package", [accel_callbacks, accel_callbacks.plugins, utils])
def test_a_name_says_since_when_it_is_gone(package):
    with pytest.raises(ImportError, match=r"no 'TorchFTKwargs'\. It was removed in 0\.2\.0\. "):
        _ = package.TorchFTKwargs


def test_a_name_of_accelerate_is_not_provided():
    quantize = resolve("accelerate.utils", "load_and_quantize_model")
    with pytest.raises(NotProvided, match=r"removed in 0\.2\.0\. transformers loads"):
        quantize()


@pytest.mark.parametrize("flag", ["--warm_workers", "--warm-workers", "--no_warm_workers"])
def test_a_flag_says_since_when_it_is_gone(flag, capsys):
    assert main(["launch", flag, "train.py"]) == 2
    assert f"{flag}. It was removed in 0.2.0. A restart" in capsys.readouterr().err


def test_a_key_of_a_config_file_says_since_when_it_is_gone():
    with pytest.raises(SettingsError, match=r"It was removed in 0\.2\.0"):
        values_of({"warm_workers": True}, "accel.yaml")


def test_the_table_hides_no_name_that_is_there():
    assert not REMOVED.keys() & {*accel_callbacks.__all__, *accel_callbacks.plugins.__all__}
    assert not REMOVED.keys() & {*utils.__all__}
