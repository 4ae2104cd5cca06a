"""Options that a callback or the Accelerator lacks: the error names the one that was meant."""

from __future__ import annotations

import copy
import pickle

import pytest

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import EMA, Checkpoint, EarlyStopping, ProgressBar, configured


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Checkpoint(save_top_k=3),
            r"Checkpoint\(\) .*'save_top_k'. Did you mean 'keep_best'",
        ),
        (lambda: Checkpoint("c", every_n_train_steps=3), "Did you mean 'every_n_steps'"),
        (lambda: Checkpoint(train_time_interval=3), "Did you mean 'every_seconds'"),
        (lambda: ProgressBar(refresh_rate=3), "Did you mean 'refresh_every'"),
        (lambda: EarlyStopping("loss", patiense=3), "Did you mean 'patience'"),
        (lambda: EMA(decey=0.9), "Did you mean 'decay'"),
        (lambda: ProgressBar(theme="dark"), "no option 'theme'. It has refresh_every, "),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_meant(make, text):
    with pytest.raises(TypeError, match=text):
        make()


def test_c10_filename_of_lightning_is_answered_with_how_checkpoints_are_named():
    with pytest.raises(TypeError, match="named step-<global step>") as raised:
        Checkpoint(filename="{epoch}-{val_loss:.2f}")
    assert "Did you mean" not in str(raised.value)
    assert "save_state(path) saves under any name" in str(raised.value)


def test_c10_one_function_answers_unknown_options():
    with pytest.raises(TypeError, match=r"^Accelerator\(\) has no option 'mixed_precison'. Did"):
        Accelerator(mixed_precison="bf16")
    with pytest.raises(TypeError, match=r"^EMA\(\) has no option 'zzz'. It has decay, "):
        EMA(zzz=1)
    with pytest.raises(TypeError, match=r"^Accelerator\(\) has no option 'zzz'. It has "):
        Accelerator(zzz=1)


def test_an_unknown_mode_is_answered_with_the_modes():
    with pytest.raises(ValueError, match="mode='auto' is unknown; use 'min' or 'max'"):
        EarlyStopping("loss", mode="auto")


class Takes(Callback):
    def __init__(self, first, *, second=2, **others):
        self.given = (first, second, others)


def test_callbacks_of_users_take_what_they_take():
    assert Takes(1, second=3, third=4).given == (1, 3, {"third": 4})
    stopper = EarlyStopping("loss", patience=5)
    for same in (copy.deepcopy(stopper), pickle.loads(pickle.dumps(stopper))):
        assert same.patience == 5


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: configured(one), lambda one: [one]])
def test_one_callback_needs_no_list(wrap):
    ema = EMA(decay=0.5)
    assert Accelerator(cpu=True, callbacks=wrap(ema)).callbacks == [ema]
    assert Accelerator(cpu=True, callbacks=None).callbacks == []
    assert Accelerator(cpu=True, callbacks=(one for one in (ema,))).callbacks == [ema]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("bf16", r"by name: Accelerator\(mixed_precision='bf16'\)"),
        (EMA(), r"by name: Accelerator\(callbacks=\[EMA"),
        (True, "by name, and True has none"),
    ],
)
def test_an_argument_without_a_name_is_answered_with_the_name(value, text):
    with pytest.raises(TypeError, match=text):
        Accelerator(value)
