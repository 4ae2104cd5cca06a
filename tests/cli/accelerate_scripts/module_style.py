"""``import accelerate`` and everything by its full name."""

import accelerate
import accelerate.utils
import torch
from torch.utils.data import DataLoader

accelerate.utils.set_seed(3)
state = accelerate.PartialState(cpu=True)
print("processes", state.num_processes, state.distributed_type == accelerate.DistributedType.NO)
print("shape", accelerate.utils.get_data_structure({"x": torch.ones(2, 3)})["x"].shape)


def train(accelerator: accelerate.Accelerator) -> float:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(
        model, optimizer, DataLoader(torch.arange(16.0).view(8, 2), batch_size=2)
    )
    total = 0.0
    for batch in data:
        loss = model(batch).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total


print(f"loss {train(accelerate.Accelerator(cpu=True)):.4f}")
gathered = accelerate.utils.gather_object(["one"])
print("gathered", gathered, accelerate.utils.is_torch_version(">=", "2.0"))
