"""Pictures, tables, sounds: converted once for all trackers, on the hub's thread."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loggers import (
    MEDIA,
    NullTracker,
    RunInfo,
    Scalar,
    Status,
    Tracker,
    TrackerHub,
    configured_tracker,
    media,
)
from loggers.multimedia.convert import as_audio, as_images, as_numbers, as_table, check_shape

RUN = RunInfo("digits", "runs", "a1")


class Scalars(Tracker):
    """Has no media at all."""

    def __init__(self, name: str = "scalars") -> None:
        self.name = name

    def start(self, run: RunInfo) -> None:
        pass

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        pass

    def finish(self, status: Status = "success") -> None:
        pass


class Everything(Scalars):
    """Keeps what it is given, and on which thread."""

    def __init__(self, name: str = "everything") -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.threads: set[int] = set()

    def _keep(self, kind: str, /, *args: Any, **kwargs: Any) -> None:
        self.calls.append((kind, args, kwargs))
        self.threads.add(threading.get_ident())

    def log_images(self, *args: Any, **kwargs: Any) -> None:
        self._keep("images", *args, **kwargs)

    def log_table(self, *args: Any) -> None:
        self._keep("table", *args)

    def log_histogram(self, *args: Any) -> None:
        self._keep("histogram", *args)

    def log_text(self, *args: Any) -> None:
        self._keep("text", *args)

    def log_audio(self, *args: Any, **kwargs: Any) -> None:
        self._keep("audio", *args, **kwargs)

    def log_video(self, *args: Any, **kwargs: Any) -> None:
        self._keep("video", *args, **kwargs)

    def log_figure(self, *args: Any) -> None:
        self._keep("figure", *args)

    def log_artifact(self, *args: Any, **kwargs: Any) -> None:
        self._keep("artifact", *args, **kwargs)

    def log_graph(self, model: Any, inputs: Any = None) -> None:
        self._keep("graph", model.training, torch.is_grad_enabled(), model(inputs))


def test_every_kind_arrives_converted_and_off_the_main_thread() -> None:
    tracker, model = Everything(), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1))
    model[0].eval()
    figure = object()
    with TrackerHub([tracker], run=RUN, strict=True) as hub:
        hub.log_images({"a": torch.ones(2, 3, 4, 5)}, 1, captions={"a": ["x", "y"]})
        hub.log_table("t", ["n", "ok"], [[torch.tensor(1.5), True]], 2)
        hub.log_histogram({"h": torch.tensor([[1.0, float("inf")]])}, 3)
        hub.log_text({"s": "words"}, 4)
        hub.log_audio({"b": torch.zeros(2, 8)}, 5, sample_rate=8000)
        hub.log_video({"v": torch.zeros(3, 1, 4, 5)}, 6, fps=8)
        hub.log_figure({"f": figure}, 7)
        hub.log_artifact("/file.txt", name="n", kind="model")
        hub.log_graph(model, torch.ones(1, 1))
    assert sorted(kind for kind, _, _ in tracker.calls) == sorted(MEDIA)
    calls = {kind: (args, kwargs) for kind, args, kwargs in tracker.calls}
    (images, step), kwargs = calls["images"]
    assert (images["a"].shape, images["a"].dtype, step) == ((2, 4, 5, 3), np.uint8, 1)
    assert kwargs == {"captions": {"a": ["x", "y"]}}
    assert calls["table"][0] == ("t", ["n", "ok"], [[1.5, True]], 2)
    assert calls["histogram"][0][0]["h"].tolist() == [1.0]
    assert calls["text"] == (({"s": "words"}, 4), {})
    assert calls["audio"][0][0]["b"].shape == (8, 2)
    assert calls["audio"][1] == {"sample_rate": 8000}
    assert calls["video"][0][0]["v"].shape == (3, 4, 5, 1)
    assert calls["video"][1] == {"fps": 8}
    assert calls["figure"] == (({"f": figure}, 7), {})
    assert calls["artifact"] == (("/file.txt",), {"name": "n", "kind": "model"})
    (training, gradients, output), _ = calls["graph"]
    assert (training, gradients, output.requires_grad) == (False, False, False)
    assert [part.training for part in model.modules()] == [True, False, True]
    assert threading.get_ident() not in tracker.threads
    assert len(tracker.threads) == 1


def test_what_is_changed_after_the_call_is_recorded_as_it_was() -> None:
    from PIL import Image

    tracker = Everything()
    tensor, array, picture = torch.zeros(2, 2), np.zeros((2, 2)), Image.new("L", (2, 2))
    rows = [[1]]
    with TrackerHub([tracker], run=RUN, flush_every_s=1e9) as hub:
        hub.log_images({"t": tensor, "a": [array], "p": picture}, 1)
        hub.log_table("t", ["n"], rows, 1)
        tensor += 1
        array += 1
        picture.putpixel((0, 0), 255)
        rows[0][0] = 2
    images = tracker.calls[0][1][0]
    assert [int(image.sum()) for image in images.values()] == [0, 0, 0]
    assert tracker.calls[1][1][2] == [[1]]


def test_trackers_without_a_kind_are_left_out_with_one_warning_a_kind() -> None:
    plain, other, full = Scalars(), Scalars("other"), Everything()
    hub = TrackerHub([plain, full, other], run=RUN)
    hub.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            hub.log_text({"a": "b"}, step)
            hub.log_histogram({"a": [1]}, step)
    hub.finish()
    assert len(full.calls) == 6
    assert len({str(warning.message) for warning in caught}) == len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}
    assert "trackers 'scalars', 'other' do not record text" in str(caught[0].message)
    assert hub.report()["scalars"].failures == 0


def test_which_kinds_a_tracker_has() -> None:
    class Pictures(Scalars):
        def log_images(self, *args: Any, **kwargs: Any) -> None:
            pass

    assert media(Scalars()) == frozenset()
    assert media(Pictures()) == {"images"}
    assert media(Everything()) == media(NullTracker()) == set(MEDIA)
    with pytest.warns(UserWarning, match="'scalars' does not record text"):
        Scalars().log_text({"a": "b"}, 1)


def test_many_small_ones_between_two_deliveries_are_all_recorded() -> None:
    tracker = Everything()
    with TrackerHub([tracker], run=RUN, flush_every_s=1e9) as hub:
        for layer in range(300):
            hub.log_histogram({f"layer{layer}": torch.ones(8)}, 1)
    assert len(tracker.calls) == 300
    assert hub.report()["everything"].dropped == 0


def test_large_ones_that_wait_for_their_device_are_bounded_counted_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("loggers.queue.MEDIA_BYTES", 1000)
    gate, tracker = threading.Event(), Everything()

    class Late:
        nbytes = 800

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            gate.wait()
            return np.zeros(1)

    with TrackerHub([tracker], run=RUN) as hub:
        for step in range(4):
            hub.log_histogram({"a": Late()}, step)
        gate.set()
    lost = hub.report()["everything"].dropped
    assert lost in (2, 3)
    assert len(tracker.calls) == 4 - lost
    assert sum("newest are dropped" in text for text in caplog.messages) == 1


def test_what_was_delivered_makes_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loggers.queue.MEDIA_BYTES", 1000)
    tracker = Everything()
    with TrackerHub([tracker], run=RUN) as hub:
        for step in range(4):
            hub.log_histogram({"a": torch.ones(200)}, step)
            hub.flush()
    assert (len(tracker.calls), hub.report()["everything"].dropped) == (4, 0)


def test_keywords_of_media_are_checked_where_they_are_given(tmp_path: Path) -> None:
    full = Everything()
    run = RunInfo("digits", str(tmp_path), "a1")
    with TrackerHub([full, "jsonl"], run=run) as hub:
        with pytest.raises(ValueError, match="'wandb', which is no tracker here"):
            hub.log_images({"a": np.zeros((2, 2))}, 1, log_kwargs={"wandb": {"commit": True}})
        with pytest.raises(TypeError, match="log_images of tracker 'jsonl' takes no keyword 'x'"):
            hub.log_images({"a": np.zeros((2, 2))}, 1, log_kwargs={"jsonl": {"x": 1}})
        with pytest.raises(TypeError, match="log_table of tracker 'jsonl' takes no keyword 'rows'"):
            hub.log_table("t", ["n"], [[1]], 1, log_kwargs={"jsonl": {"rows": 1}})
        hub.log_images({"a": np.zeros((2, 2))}, 1, log_kwargs={"everything": {"commit": True}})
    assert [kwargs for _, _, kwargs in full.calls] == [{"commit": True}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pictures_of_a_side_stream_are_read_after_it() -> None:
    tracker, side = Everything(), torch.cuda.Stream()
    with TrackerHub([tracker], run=RUN, flush_every_s=0) as hub:
        image = torch.zeros(1, 2, 2, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)
            image += 1
            hub.log_images({"a": image}, 1)
    assert tracker.calls[0][1][0]["a"].min() == 255


def test_filters_hold_for_media_too() -> None:
    tracker = Everything()
    with TrackerHub([configured_tracker(tracker, include=["val/*"])], run=RUN) as hub:
        hub.log_text({"val/a": "x", "train/a": "y"}, 1)
        hub.log_text({"train/b": "y"}, 1)
        hub.log_table("train/t", ["n"], [[1]], 1)
        hub.log_table("val/t", ["n"], [[1]], 1)
        hub.log_artifact("/file.txt")
    assert [(kind, args[0]) for kind, args, _ in tracker.calls] == [
        ("text", {"val/a": "x"}),
        ("table", "val/t"),
        ("artifact", "/file.txt"),
    ]


@pytest.mark.parametrize("step", [1, 2])
def test_media_follow_the_steps_of_a_tool_that_drops_lower_ones(step: int) -> None:
    tracker = Everything()
    tracker.needs_rising_steps = True
    with TrackerHub([tracker], run=RUN) as hub:
        hub.log({"a": 1.0}, 2)
        hub.log_text({"a": "b"}, step)
    assert tracker.calls[0][1][1] == 2


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("cat.png", TypeError, "'x' is a str"),
        ([], TypeError, "not empty"),
        (np.zeros(3), ValueError, r"shape \(3,\)"),
        (np.zeros((3, 8, 8)), ValueError, 'pass channels="first"'),
        (torch.zeros(8, 8, 3), ValueError, "8 channels"),
        ([np.zeros((8, 8)), torch.zeros(2, 2, 2, 2, 2)], ValueError, "shape"),
    ],
)
@pytest.mark.parametrize("trackers", [[], [Everything()]])
def test_what_is_no_picture_is_an_error_at_the_call(
    value: Any, error: type[Exception], text: str, trackers: Sequence[Tracker]
) -> None:
    with TrackerHub(trackers, run=RUN) as hub:
        with pytest.raises(error, match=text):
            hub.log_images({"x": value}, 1)
        with pytest.raises(ValueError, match="2 columns and a row of 1"):
            hub.log_table("t", ["a", "b"], [[1]], 1)
        with pytest.raises(ValueError, match="expected"):
            hub.log_video({"x": np.zeros((2, 2, 3))}, 1)


def test_what_cannot_be_converted_is_lost_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Everything()
    with TrackerHub([tracker], run=RUN) as hub:
        for step in range(3):
            hub.log_histogram({"a": ["x"]}, step)
        hub.log_text({"a": "b"}, 3)
    assert [kind for kind, _, _ in tracker.calls] == ["text"]
    assert len(caplog.messages) == 1
    assert "a histogram is made of numbers" in caplog.text


@pytest.mark.parametrize(
    ("value", "channels", "shape"),
    [
        (np.zeros((4, 5)), None, (1, 4, 5, 1)),
        (np.zeros((4, 5, 3)), None, (1, 4, 5, 3)),
        (np.zeros((2, 4, 5, 4)), None, (2, 4, 5, 4)),
        (np.zeros((3, 4, 5)), "first", (1, 4, 5, 3)),
        (torch.zeros(4, 5), None, (1, 4, 5, 1)),
        (torch.zeros(3, 4, 5), None, (1, 4, 5, 3)),
        (torch.zeros(2, 1, 4, 5, dtype=torch.bfloat16), None, (2, 4, 5, 1)),
        (torch.zeros(4, 5, 3), "last", (1, 4, 5, 3)),
        ([torch.zeros(3, 4, 5), torch.zeros(1, 2, 6)], None, (2, 4, 6, 3)),
    ],
)
def test_layouts_of_pictures(value: Any, channels: Any, shape: tuple[int, ...]) -> None:
    check_shape("x", value, channels)
    result = as_images(value, channels)
    assert (result.shape, result.dtype) == (shape, np.uint8)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]]), [0, 128, 255]),
        (np.array([[-1.0, 2.0, np.nan]]), [0, 255, 0]),
        (np.array([[0, 128, 300]]), [0, 128, 255]),
        (np.array([[True, False, True]]), [255, 0, 255]),
        (torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.float16), [0, 128, 255]),
    ],
)
def test_values_of_pictures(value: Any, expected: list[int]) -> None:
    assert as_images(value).ravel().tolist() == expected


def test_pictures_of_pil_and_lists_of_several_sizes() -> None:
    from PIL import Image

    grey, color = Image.new("L", (2, 3), 7), Image.new("RGBA", (4, 1), (1, 2, 3, 4))
    assert as_images(grey).shape == (1, 3, 2, 1)
    both = as_images([grey, color])
    assert both.shape == (2, 3, 4, 4)
    assert both[0, 0, 0].tolist() == [7, 7, 7, 255]
    assert both[1, 0, 3].tolist() == [1, 2, 3, 4]
    assert both[0, 0, 3].tolist() == both[1, 2, 0].tolist() == [0, 0, 0, 0]
    assert as_images(Image.new("P", (2, 2))).shape == (1, 2, 2, 4)


def test_audio_numbers_and_cells() -> None:
    assert as_audio(np.array([2.0, -2.0, np.nan])).tolist() == [1.0, -1.0, 0.0]
    assert as_audio(torch.zeros(2, 5)).shape == (5, 2)
    assert as_audio(np.zeros((5, 2))).shape == (5, 2)
    with pytest.raises(ValueError, match="shape"):
        as_audio(np.zeros((1, 2, 3)))
    assert as_numbers(torch.tensor([True, False])).tolist() == [1, 0]
    assert as_numbers([[1, 2]]).tolist() == [1, 2]
    assert as_table([[np.int64(3), None, "x", torch.tensor(2), (1,)]]) == [
        [3, None, "x", 2, "(1,)"]
    ]
