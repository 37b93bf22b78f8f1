"""The experiment with Horovod, on the CPU.

horovodrun --gloo -np 2 python horovod_digits.py --experiment FILE --report FILE

With ``import labkit.horovod as hvd`` the same text runs on labkit, under torchrun.

A worker sends 2 (P-1)/P S bytes per step, as S bytes of gradients go once around the ring of P
workers and back. On top of that Horovod's workers exchange some 150 bytes in every cycle of a
millisecond (HOROVOD_CYCLE_TIME), also while there is nothing to do: which gradients are ready
everywhere? So a slow step sends more than a fast one. The first step sends the names, too.
"""

import argparse

import horovod.torch as hvd
import torch
from experiment import Experiment, Measured, report
from torch import nn
from torch.nn.functional import cross_entropy


def small_cnn():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.SiLU()),
        *(nn.Flatten(), nn.Linear(1024, 10)),
    )


def main(options):
    experiment = Experiment.load(options.experiment)
    hvd.init()
    torch.set_num_threads(1)  # the workers share the cores of one machine
    rank, size = hvd.rank(), hvd.size()

    model = small_cnn()
    weights = {name: torch.from_numpy(value) for name, value in experiment.weights.items()}
    model.load_state_dict(weights)
    rates = {"lr": experiment.lr, "momentum": experiment.momentum}
    optimizer = torch.optim.SGD(model.parameters(), **rates)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)

    losses, measured = torch.zeros(experiment.steps), Measured()
    for step in range(experiment.steps):
        images, labels = map(torch.from_numpy, experiment.share(rank, size, step))
        with measured:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()  # starts to average each gradient as soon as it is there
            optimizer.step()  # waits for the averages
        losses[step] = loss.detach()

    losses = hvd.allreduce(losses, name="losses")  # the mean over the workers
    report(
        options.report,
        worker=rank,
        losses=losses,
        step_s=measured.step_s,
        sent_bytes=measured.sent_bytes,
        versions={"torch": torch.__version__},
    )
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--report", required=True)
    main(parser.parse_args())
