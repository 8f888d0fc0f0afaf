"""Scores of dattri's methods, for `benchmarks.attribution`; runs in a Python with PyTorch.

python benchmarks/attribution_dattri.py given.npz result.npz
"""

import itertools
import sys

import numpy as np
import torch
from dattri.algorithm.influence_function import IFAttributorEKFAC
from dattri.algorithm.tracin import TracInAttributor
from dattri.algorithm.trak import TRAKAttributor
from dattri.task import AttributionTask
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RATE = 0.1
REGULARIZATIONS = 0.0, 1.0, 1e2, 1e4
DAMPINGS = 1e-5, 1e-4, 1e-3, 1e-2


def main() -> None:
    given = np.load(sys.argv[1])
    seeds = sorted({name.split("/")[1] for name in given if "/" in name})
    numbers = sorted({name.split("/")[2] for name in given if "/" in name})

    def state_dict(seed: str, number: str) -> dict[str, torch.Tensor]:
        state = {}
        for i in range(3):
            state[f"{2 * i}.weight"] = torch.tensor(given[f"w{i}/{seed}/{number}"].T.copy())
            state[f"{2 * i}.bias"] = torch.tensor(given[f"b{i}/{seed}/{number}"])
        return state

    def model() -> nn.Module:
        sizes = given["w0/0/0"].shape[0], 64, 64, 10
        first, second, third = (nn.Linear(n, m) for n, m in itertools.pairwise(sizes))
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)

    def loader(x: str, y: str) -> DataLoader:
        tensors = torch.tensor(given[x]), torch.tensor(given[y].astype(np.int64))
        return DataLoader(TensorDataset(*tensors), batch_size=len(tensors[0]), shuffle=False)

    train, test = loader("x", "y"), loader("qx", "qy")
    net = model()

    def loss(params: dict, data: tuple) -> torch.Tensor:
        x, y = data
        logits = torch.func.functional_call(net, params, x.unsqueeze(0) if x.ndim == 1 else x)
        return nn.functional.cross_entropy(logits, y.reshape(-1))

    def margin(params: dict, data: tuple) -> torch.Tensor:
        p = torch.exp(-loss(params, data))
        return torch.log(p) - torch.log1p(-p)

    def probability(params: dict, data: tuple) -> torch.Tensor:
        return torch.exp(-loss(params, data))

    result, last = {}, numbers[-1]
    tracin = []
    for seed in seeds:
        task = AttributionTask(loss, net, [state_dict(seed, n) for n in numbers[:-1]])
        weights = RATE * torch.ones(len(numbers) - 1)
        attributor = TracInAttributor(task, weight_list=weights, normalized_grad=False)
        tracin.append(attributor.attribute(train, test).detach().numpy())
    result["TracIn"] = np.mean(tracin, 0)
    for damping in REGULARIZATIONS:
        task = AttributionTask(
            margin, net, [state_dict(seed, last) for seed in seeds],
        )  # fmt: skip
        options = {"device": "cpu", "proj_dim": 512}
        attributor = TRAKAttributor(
            task, probability, projector_kwargs=options, regularization=damping
        )
        attributor.cache(train)
        name = f"TRAK, regularization {damping:g}"
        result[name] = attributor.attribute(test).detach().numpy()
    for damping in DAMPINGS:
        scores = []
        for seed in seeds:
            net.load_state_dict(state_dict(seed, last))
            task = AttributionTask(loss, net, [state_dict(seed, last)])
            attributor = IFAttributorEKFAC(task, damping=damping)
            attributor.cache(train)
            scores.append(attributor.attribute(train, test).detach().numpy())
        result[f"EK-FAC, damping {damping:g}"] = np.mean(scores, 0)
    np.savez(sys.argv[2], **result)


if __name__ == "__main__":
    main()
