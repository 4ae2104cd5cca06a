"""Accumulation, tracking, checkpoints with automatic names, a custom object, and a resume."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict) -> None:
        self.seen = state["seen"]


def build() -> tuple:
    set_seed(7)
    accelerator = Accelerator(
        cpu=True,
        log_with="tensorboard",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        project_config=ProjectConfiguration(
            project_dir=sys.argv[1],
            logging_dir=sys.argv[1],
            automatic_checkpoint_naming=True,
            total_limit=2,
        ),
    )
    accelerator.init_trackers("demo", config={"lr": 0.1})
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.linspace(0, 1, 24).view(8, 3)), batch_size=2)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return (accelerator, counter, *accelerator.prepare(model, optimizer, data))


def epoch(accelerator, counter, model, optimizer, data) -> None:
    for (inputs,) in data:
        with accelerator.accumulate(model):
            loss = model(inputs).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        counter.seen += len(inputs)
        accelerator.log({"loss": loss.item()}, step=counter.seen)


everything = accelerator, counter, model, optimizer, data = build()
epoch(*everything)
accelerator.save_state()
before = accelerator.unwrap_model(model).weight.detach().clone()
epoch(*everything)
folder = sorted((Path(sys.argv[1]) / "checkpoints").glob("checkpoint_*"))[0]
accelerator.load_state(str(folder))
print("back", torch.equal(before, accelerator.unwrap_model(model).weight), counter.seen)
accelerator.wait_for_everyone()
accelerator.save_model(model, f"{sys.argv[1]}/model")
print("files", sorted(path.name for path in Path(sys.argv[1], "model").iterdir()))
print(f"weights {before.sum():.5f}")
accelerator.end_training()
