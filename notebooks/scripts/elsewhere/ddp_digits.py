"""The experiment with PyTorch's DistributedDataParallel, on the CPU.

torchrun --standalone --nproc-per-node 2 ddp_digits.py --experiment FILE --report FILE
"""

import argparse

import torch
import torch.distributed as dist
from experiment import Experiment, Measured, report
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def small_cnn():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.SiLU()),
        *(nn.Flatten(), nn.Linear(1024, 10)),
    )


def main(options):
    experiment = Experiment.load(options.experiment)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    model = small_cnn()
    weights = {name: torch.from_numpy(value) for name, value in experiment.weights.items()}
    model.load_state_dict(weights)
    model = DistributedDataParallel(model)  # sends the weights of rank 0 to all
    rates = {"lr": experiment.lr, "momentum": experiment.momentum}
    optimizer = torch.optim.SGD(model.parameters(), **rates)

    losses, measured = torch.zeros(experiment.steps), Measured()
    for step in range(experiment.steps):
        images, labels = map(torch.from_numpy, experiment.share(rank, size, step))
        with measured:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()  # averages the gradients
            optimizer.step()
        losses[step] = loss.detach()

    dist.all_reduce(losses)
    report(
        options.report,
        worker=rank,
        losses=losses / size,
        step_s=measured.step_s,
        sent_bytes=measured.sent_bytes,
        versions={"torch": torch.__version__},
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--report", required=True)
    main(parser.parse_args())
