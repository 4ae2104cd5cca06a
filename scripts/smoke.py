"""What must work with the installed wheel, outside the repository: python smoke.py."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("accel_callbacks", "checkpoint_io", "loggers")


def check_imports(outside: Path | None) -> None:
    """The packages come from the installation and are marked as typed."""
    for name in PACKAGES:
        module = importlib.import_module(name)
        assert module.__file__ is not None, f"{name} is a folder, not the installed package"
        folder = Path(module.__file__).resolve().parent
        assert (folder / "py.typed").is_file(), f"{folder} has no py.typed"
        if outside is not None:
            assert outside.resolve() not in folder.parents, f"{name} comes from {folder}"


def check_training() -> None:
    """Five steps of a plain loop, saved, changed and restored."""
    import torch

    from accel_callbacks import Accelerator

    torch.manual_seed(0)
    accel = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    steps = 0
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    assert steps == 5, f"{steps} steps instead of 5"
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "state")
        accel.save_state(path)
        saved = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        accel.load_state(path)
    restored = zip(saved, model.parameters(), strict=True)
    assert all(torch.equal(before, now) for before, now in restored), "load_state changed values"
    accel.end_training()


def check_report() -> None:
    """The page of ``accel report --html`` finds its scripts."""
    from accel_callbacks import Accelerator
    from accel_callbacks.cli.main import main as cli

    with tempfile.TemporaryDirectory() as folder:
        accel = Accelerator(cpu=True, project_dir=folder)
        with accel.run("smoke"):
            pass
        page = Path(folder) / "page.html"
        assert cli(["report", folder, "--html", str(page)]) == 0
        assert "uPlot" in page.read_text(encoding="utf-8")


def check_shadowing(name: str) -> None:
    """A user's own file of this name beside the script is named."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder).resolve() / f"{name}.py"
        own.write_text("MINE = True\n", encoding="utf-8")
        script = own.with_name("train.py")
        script.write_text("from accel_callbacks import Accelerator\n", encoding="utf-8")
        command = [sys.executable, str(script)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode != 0, f"{own.name} beside the script went unnoticed"
    assert "ImportError" in done.stderr, done.stderr
    assert str(own) in done.stderr, f"the error does not name {own}: {done.stderr}"


def main() -> None:
    """Run every check; the first failing one ends the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outside", type=Path, help="folder that nothing may be imported from")
    outside = parser.parse_args().outside
    check_imports(outside)
    print("ok: imports and py.typed", flush=True)
    check_training()
    print("ok: five steps, save_state, load_state", flush=True)
    check_report()
    print("ok: accel report --html", flush=True)
    for name in ("loggers", "checkpoint_io"):
        check_shadowing(name)
        print(f"ok: a {name}.py beside the script is named", flush=True)


if __name__ == "__main__":
    main()
