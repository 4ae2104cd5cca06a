"""A job of Ray Train on two workers: python -m tests.ray.job FOLDER [--kill]

With ``--kill``, worker 1 sends itself SIGKILL after step 12 of the first attempt.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch


def train(config: dict[str, Any]) -> None:
    from accel_callbacks import Accelerator, set_seed
    from accel_callbacks.callbacks import Checkpoint

    set_seed(0)
    folder = Path(config["folder"])
    saver = Checkpoint(every_n_steps=5, async_save=False)
    accel = Accelerator(cpu=True, project_dir=folder / "run", callbacks=[saver])
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    samples = torch.arange(320.0).reshape(80, 4) / 320
    data = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer, data = accel.prepare(model, optimizer, data)
    killed = folder / "killed"
    with accel.run("ray") as run:
        with open(folder / f"starts-{accel.process_index}", "a", encoding="utf-8") as starts:
            starts.write(f"{run.global_step} of {accel.num_processes}\n")
        for _ in run.epochs(1):
            for batch in data:
                accel.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                last = accel.process_index == 1 and run.global_step == 12
                if config["kill"] and last and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
    if accel.is_main_process:
        torch.save(accel.unwrap_model(model).state_dict(), folder / "weights.pt")


def main() -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
    )
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": options.folder, "kill": options.kill},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=f"{options.folder}/ray", failure_config=FailureConfig(max_failures=2)
        ),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
