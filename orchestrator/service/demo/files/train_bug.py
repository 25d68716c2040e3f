"""A training script with a bug: its second step reads a key that no batch has."""

import torch


def main() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        batch = {"inputs": torch.randn(4, 8)} | ({"labels": torch.randn(4, 8)} if step == 0 else {})
        loss = (model(batch["inputs"]) - batch["labels"]).square().mean()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
