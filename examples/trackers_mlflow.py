"""MLflow: in a database below the project folder, or on the server that MLFLOW_TRACKING_URI names.

pip install mlflow-skinny sqlalchemy alembic pillow
python examples/trackers_mlflow.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, set_seed
from loggers import MLflowTracker


def main() -> None:
    parser = argparse.ArgumentParser(description="Log to MLflow.")
    parser.add_argument("--project_dir", default="runs/trackers_mlflow")
    folder = parser.parse_args().project_dir
    set_seed(0)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tracker = MLflowTracker(run_name="softmax", tags={"team": "vision"})
    accel = Accelerator(cpu=True, log_with=tracker, project_dir=folder)
    model, optimizer, train = accel.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))

    with accel.run("digits", config={"optimizer": {"lr": 0.5}}) as run:
        for epoch in run.epochs(2):
            for inputs, labels in train:
                with accel.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accel.log({"train/loss": loss})
            with accel.evaluate(model):
                guesses = model(data.tensors[0]).argmax(dim=1)
            wrong = (guesses != data.tensors[1]).nonzero().flatten()
            accel.log({"val/accuracy": 1 - len(wrong) / len(guesses), "epoch": epoch})
            accel.log_images({"val/wrong": data.tensors[0][wrong[:4]].view(-1, 1, 8, 8)})
            pairs = zip(data.tensors[1][wrong].tolist(), guesses[wrong].tolist(), strict=True)
            accel.log_table("val/mistakes", columns=["digit", "guess"], data=[*map(list, pairs)])
        accel.save_model(model, f"{folder}/model")
        accel.log_artifact(f"{folder}/model", name="softmax", kind="model")
        client = accel.get_tracker("mlflow", unwrap=True)  # an mlflow.MlflowClient
    accel.end_training()

    run_id = tracker.state_dict()["run_id"]
    history = client.get_metric_history(run_id, "train/loss")
    print(f"{len(history)} losses, the last {history[-1].value:.3f}, in {client.tracking_uri}")
    print(f"status {client.get_run(run_id).info.status}")


if __name__ == "__main__":
    main()
