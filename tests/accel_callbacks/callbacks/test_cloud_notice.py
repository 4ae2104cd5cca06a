"""Notices of clouds: what their metadata addresses answer, and what a run makes of it."""

from __future__ import annotations

import json
import re
import signal
import time
from datetime import datetime

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, Preemption, cloud_notice
from accel_callbacks.callbacks.cloud_notice import CloudNotices
from tests.support import metadata as support


@pytest.fixture
def metadata(monkeypatch):
    monkeypatch.setattr(cloud_notice, "_EVERY", 0.02)
    # What a request to the metadata address must not use.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with support.metadata_server() as server:
        yield server


def asked(metadata, provider: str):
    return CloudNotices([provider], metadata.address).ask(provider)


@pytest.mark.parametrize(
    ("provider", "text"),
    [
        ("aws", "AWS spot notice, 11[78] s left"),
        ("gce", "GCE spot notice, 27 s left"),
        ("azure", "Azure spot notice, 11[78] s left"),
    ],
)
def test_the_notice_of_each_cloud_is_read_and_its_absence_is_none(metadata, capfd, provider, text):
    metadata.answers[support.GCE] = (200, b"FALSE")
    metadata.answers[support.AZURE] = (200, b'{"DocumentIncarnation": 1, "Events": []}')
    assert asked(metadata, provider) is None
    metadata.announce()
    assert re.fullmatch(text, str(asked(metadata, provider)))
    assert capfd.readouterr().err == ""


def test_an_event_of_another_machine_of_the_set_is_none_and_one_that_has_begun_is_one(metadata):
    metadata.announce()
    metadata.answers[support.AZURE_NAME] = (200, b"another")
    assert asked(metadata, "azure") is None
    events = [
        {"EventType": "Reboot", "Resources": ["another"], "NotBefore": ""},
        {"EventType": "Terminate", "Resources": ["another"], "NotBefore": ""},
    ]
    metadata.answers[support.AZURE] = (200, json.dumps({"Events": events}).encode())
    assert asked(metadata, "azure").seconds == 27.0


BAD = {
    "garbage": (200, b"<html>\xff"),
    "no time": (200, b'{"action": "stop"}'),
    "huge": (200, b"x" * 100_000),
    "error": (500, b"broken"),
    "slow": support.slow,
    "redirect": lambda handler: support.reply(handler, 302, b"", Location="/elsewhere"),
}


@pytest.mark.parametrize("provider", ["aws", "gce", "azure"])
@pytest.mark.parametrize("answer", BAD)
def test_an_answer_that_is_no_answer_is_said_once(metadata, monkeypatch, capfd, provider, answer):
    monkeypatch.setattr(cloud_notice, "_TIMEOUT", 0.2)
    metadata.answers = dict.fromkeys((support.AWS, support.GCE, support.AZURE), BAD[answer])
    notices = CloudNotices([provider], metadata.address)
    if (provider, answer) == ("azure", "no time"):
        return  # it has no events
    assert notices.ask(provider) is None
    assert notices.ask(provider) is None
    said = capfd.readouterr().err
    assert said.count(f"no notice of '{provider}' can be read from {metadata.address}") == 1
    assert "/elsewhere" not in metadata.requests


def test_an_address_that_refuses_is_said_once_and_is_asked_again(metadata, capfd):
    notices = CloudNotices(["gce"], "http://127.0.0.1:9")
    assert notices.ask("gce") is None
    assert "Connection refused" in capfd.readouterr().err
    notices.address = metadata.address
    metadata.announce()
    assert notices.ask("gce") is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"notices": "asw"}, "Did you mean 'aws'"),
        ({"notices": "aws", "metadata_address": "file:///etc"}, "must begin with http"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Preemption(**options)


# --- in a run ---------------------------------------------------------------------------------


class InSave(Callback):
    """Has the notice come in a save, and waits until it is there."""

    saves_alike = True

    def __init__(self, metadata, preemption) -> None:
        self.metadata, self.preemption = metadata, preemption

    def on_save_checkpoint(self, run, model, checkpoint):
        self.metadata.announce()
        wait_for(self.preemption)


def wait_for(preemption) -> None:
    while preemption.received is None:
        time.sleep(0.01)


def train(folder, *callbacks, each_step=lambda run: None) -> Accelerator:
    accel = Accelerator(cpu=True, callbacks=[*callbacks, Checkpoint(folder, every_n_steps=3)])
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.ones(8, 1))
    model, optimizer, data = accel.prepare(model, sgd, data)
    with accel.run("noticed") as run:
        for _ in run.epochs(1):
            for batch in data:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                each_step(run)
    return accel


def saved(folder) -> list[str]:
    return [entry.name for entry in checkpoint_io.CheckpointFolder(folder).list()]


def test_a_notice_is_a_preemption_with_the_seconds_that_it_leaves(
    metadata, tmp_path, capfd, monkeypatch
):
    class Standing(datetime):
        @classmethod
        def now(cls, zone=None):
            return cls(2026, 1, 1, tzinfo=zone)

    for module in (cloud_notice, support):
        monkeypatch.setattr(module, "datetime", Standing)
    preemption = Preemption(notices="aws", metadata_address=metadata.address)
    limits = []

    def each_step(run) -> None:
        if run.global_step == 2:
            metadata.announce()
            wait_for(preemption)
            limits.append(preemption._catcher._deadline.interval)

    with pytest.raises(SystemExit) as stop:
        train(tmp_path, preemption, each_step=each_step)
    assert stop.value.code == 75
    assert 100 < limits[0] < 117  # and not the time until the machine is gone, to the second
    assert saved(tmp_path) == ["step-00000002"]
    assert "stopped at step 2: AWS spot notice, 11" in capfd.readouterr().err
    asked_before = len(metadata.requests)
    time.sleep(0.1)
    assert len(metadata.requests) == asked_before  # nobody asks any more
    metadata.answers.clear()
    assert train(tmp_path).current_run.global_step == 8


def test_a_notice_in_a_save_and_a_signal_after_it_lose_nothing(metadata, tmp_path):
    preemption = Preemption(notices=["gce", "azure"], metadata_address=metadata.address)

    class Shutdown(Callback):
        def on_preempt(self, run, model, reason):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(SystemExit) as stop:
        train(tmp_path, preemption, InSave(metadata, preemption), Shutdown())
    assert stop.value.code == 75
    assert saved(tmp_path) == ["step-00000003"]


def test_nothing_is_asked_unless_notices_are_named(metadata, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_METADATA_ADDRESS", metadata.address)
    train(tmp_path, Preemption())
    assert metadata.requests == []
    metadata.announce()
    preemption = Preemption(notices="gce")
    with pytest.raises(SystemExit):
        train(tmp_path / "noticed", preemption, each_step=lambda run: wait_for(preemption))
    assert saved(tmp_path / "noticed")
