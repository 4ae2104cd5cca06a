"""Each kind of media that a tracker says it has is in its tool's files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loggers import RunInfo, Tracker, media

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

PIXELS = np.arange(2 * 6 * 5 * 3, dtype=np.uint8).reshape(2, 6, 5, 3)
COLUMNS, ROWS = ["digit", "guess"], [[7, "seven"], [1, None]]
SOUND = np.linspace(-0.5, 0.5, 80, dtype=np.float32)
KINDS = {
    "mlflow": {"images", "table", "text", "figure", "artifact"},
    "trackio": {
        *("images", "table", "histogram", "text", "audio", "video", "figure", "artifact"),
    },
    "comet": {"images", "table", "histogram", "text", "audio", "video", "figure", "artifact"},
    "swanlab": {"images", "table", "text", "audio", "video", "figure", "artifact"},
    "clearml": {"images", "table", "histogram", "text", "audio", "video", "figure", "artifact"},
    "dvclive": {"images", "table", "text", "figure", "artifact"},
}
Runs = Callable[..., RunInfo]


@pytest.fixture
def logged(name: str, hub: Any, run_info: Runs, tmp_path: Path, read: Any) -> Any:
    """Log all kinds that the tracker has at step 3, and read the run back."""
    tracker: Tracker = hub(name, run_info()).trackers[0]
    assert media(tracker) == KINDS[name]
    file = tmp_path / "weights.bin"
    file.write_bytes(b"weights")
    tracker.start(run_info())
    tracker.log({"loss": 0.5}, step=3)
    tracker.log_images({"val/digits": PIXELS}, 3, captions={"val/digits": ["seven", "one"]})
    tracker.log_images({"grey": PIXELS[:1, :, :, :1]}, 3)
    tracker.log_table("errors", COLUMNS, ROWS, 3)
    tracker.log_text({"note": "warm <b>"}, 3)
    if "histogram" in KINDS[name]:
        tracker.log_histogram({"weights": np.array([0.0, 1.0, 1.0]), "none": np.array([])}, 3)
    if "video" in KINDS[name]:
        tracker.log_video({"film": PIXELS}, 3, fps=2)
    if "audio" in KINDS[name] and name != "swanlab":  # SwanLab's needs soundfile
        tracker.log_audio(
            {"tone": SOUND, "stereo": np.stack([SOUND, SOUND], 1)}, 3, sample_rate=8000
        )
    if name != "dvclive":  # nothing without a repository of DVC
        tracker.log_artifact(str(file), name="best", kind="model")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "a.txt").write_text("a")
        tracker.log_artifact(str(tmp_path / "folder"))
    tracker.flush()
    tracker.finish()
    found = read(name, run_info())
    found.name, found.run = name, run_info()
    return found


def opened(data: bytes | Path) -> Any:
    return np.asarray(Image.open(io.BytesIO(data) if isinstance(data, bytes) else data))


def test_media_are_read_back(logged: Any) -> None:
    CHECKS[logged.name](logged)


def check_mlflow(found: Any) -> None:
    root = Path(found.client.get_run(found.id).info.artifact_uri.removeprefix("file://"))
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.*")}
    pictures = sorted(path for path in root.glob("images/*.png") if "step" in path.name)
    assert [opened(path).tolist() for path in pictures] == [
        one.tolist() for one in (PIXELS[0, :, :, 0], PIXELS[0], PIXELS[1])
    ]
    table = json.loads(files["tables/errors/3.json"].read_text())
    assert table == {"columns": COLUMNS, "data": ROWS}
    assert files["text/note/3.txt"].read_text() == "warm <b>"
    assert files["best/weights.bin"].read_bytes() == b"weights"
    assert "folder/a.txt" in files


def check_trackio(found: Any) -> None:
    import trackio

    row = {key: rows[-1][1] for key, rows in found.history.items()}
    root = Path(trackio.utils.MEDIA_DIR)

    def file(key: str) -> Path:
        return root / row[key]["file_path"]

    assert (opened(file("val/digits/1"))[..., :3] == PIXELS[1]).all()
    assert row["val/digits/1"]["caption"] == "one"
    assert row["errors"]["_type"] == "trackio.table"
    assert row["note"] == {"_type": "trackio.markdown", "_value": "warm <b>"}
    assert row["weights"]["values"][0] == 1
    assert file("tone").read_bytes()[:4] == b"RIFF"
    assert Image.open(file("film")).n_frames == 2
    artifacts = {a["name"]: a for a in trackio.SQLiteStorage.get_artifacts(found.run.name)}
    assert set(artifacts) == {"best", "folder"}
    assert artifacts["best"]["type"] == "model"


def check_comet(found: Any) -> None:
    uploads = {}
    for payload, data in found.uploads:
        said = payload["additional_params"]
        uploads[said.get("figName") or said["fileName"]] = (payload, data)
    payload, data = uploads["val/digits/1"]
    assert (opened(data) == PIXELS[1]).all()
    assert payload["metadata"] == {"caption": "one"}
    assert (opened(uploads["grey"][1]) == PIXELS[0, :, :, 0]).all()
    rows = list(csv.reader(io.StringIO(uploads["errors-3.csv"][1].decode())))
    assert rows == [COLUMNS, ["7", "seven"], ["1", ""]]
    assert found.history["note"] == [(3, "warm <b>")]
    assert [count for _, count in json.loads(uploads["weights"][1])["index_values"]] == [1, 2]
    assert uploads["tone.wav"][1][:4] == b"RIFF"
    assert Image.open(io.BytesIO(uploads["film.gif"][1])).n_frames == 2
    assert uploads["best"][1] == b"weights"
    assert any(name.endswith("a.txt") for name in uploads)


def check_swanlab(found: Any) -> None:
    (folder,) = found.folders
    files = {key: [] for key, _ in found.media}
    for key, filename in found.media:
        files[key] += folder.glob(f"media/*/{filename}")
    assert (opened(files["val/digits"][1]) == PIXELS[1]).all()
    assert "<td>seven</td></tr><tr><td>1</td><td></td>" in files["errors"][0].read_text()
    assert found.history["note"] == [(3, "warm <b>")]
    assert Image.open(files["film"][0]).n_frames == 2
    saved = {path.name for path in folder.glob("files/**/*")}
    assert {"weights.bin", "a.txt"} <= saved


def check_clearml(found: Any) -> None:
    events = {(e["metric"], e["variant"]): e for e in found.events}
    picture = opened(Path(events["val/digits", "1"]["url"]))
    assert picture.shape == PIXELS[1].shape  # JPEG
    table = json.loads(events["errors", "errors"]["plot_str"])["data"][0]
    assert table["cells"]["values"] == [[7, 1], ["seven", None]]
    counts = json.loads(events["weights", "weights"]["plot_str"])["data"][0]["y"]
    assert (counts[0], counts[-1]) == (1, 2)
    assert "[3] note: warm <b>" in found.console
    assert Path(events["tone", "tone"]["url"]).read_bytes()[:4] == b"RIFF"
    assert Image.open(events["film", "film"]["url"]).n_frames == 2
    artifacts = {one["key"]: one for one in found.task["execution"]["artifacts"]}
    assert Path(artifacts["best"]["uri"]).read_bytes() == b"weights"
    assert "folder" in artifacts


def check_dvclive(found: Any) -> None:
    images = found.folder / "plots" / "images"
    assert (opened(images / "val/digits/1/3.png") == PIXELS[1]).all()
    assert (opened(images / "grey/3.png") == PIXELS[0, :, :, 0]).all()
    points = json.loads((found.folder / "plots/custom/errors/3.json").read_text())
    assert points == [{"digit": 7, "guess": "seven"}, {"digit": 1, "guess": None}]
    assert (found.folder / "text/note/3.txt").read_text() == "warm <b>"


CHECKS = {
    "mlflow": check_mlflow,
    "trackio": check_trackio,
    "comet": check_comet,
    "swanlab": check_swanlab,
    "clearml": check_clearml,
    "dvclive": check_dvclive,
}


def test_figures(name: str, hub: Any, run_info: Runs, tmp_path: Path) -> None:
    """Drawn as a picture, and the figure can still be drawn afterwards."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot([1, 2])
    tracker: Tracker = hub(name, run_info()).trackers[0]
    tracker.start(run_info())
    tracker.log_figure({"curve": figure}, 3)
    tracker.flush()
    tracker.finish()
    figure.savefig(tmp_path / "again.png")
    if name in ("mlflow", "swanlab", "clearml", "dvclive"):
        pictures = [p for p in (tmp_path / "runs").rglob("*") if p.suffix in (".png", ".jpeg")]
        assert any(opened(path).shape[:2] == (100, 100) for path in pictures)


def test_sounds_of_swanlab(hub: Any, run_info: Runs, read: Any) -> None:
    pytest.importorskip("swanlab", reason="swanlab is not installed")
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    with hub("swanlab", run_info()) as opened_hub:
        opened_hub.get("swanlab").log_audio(
            {"tone": np.stack([SOUND, SOUND], 1)}, 3, sample_rate=8000
        )
    (folder,) = read("swanlab", run_info()).folders
    (path,) = folder.glob("media/audio/*.wav")
    assert soundfile.info(path).channels == 2
    assert soundfile.info(path).frames == len(SOUND)
