"""The experiment with a technique of labkit, on the CPU, its messages over TCP.

python labkit_digits.py ring_all_reduce 2 --experiment FILE --report FILE
"""

import argparse
from functools import partial

import torch
from experiment import Experiment, Measured, report

import labkit
from labkit import strategies
from labkit.collectives import ring_all_reduce
from labkit.workload.models import build_model


def train(comm, options):
    torch.set_num_threads(1)  # the workers share the cores of one machine
    experiment = Experiment.load(options.experiment)
    model = build_model("small_cnn", num_classes=10, input_shape=(1, 8, 8), seed=0)
    weights = {name: torch.from_numpy(value) for name, value in experiment.weights.items()}
    model.load_state_dict(weights)
    rates = {"lr": experiment.lr, "momentum": experiment.momentum}
    technique = strategies.get(options.strategy)()
    technique.setup(comm, model, partial(torch.optim.SGD, **rates))
    worker, workers = technique.share_index()  # no workers: this rank is the server
    batch_size = experiment.labels.shape[1]

    losses, measured = torch.zeros(experiment.steps), Measured()
    for step in range(experiment.steps):
        images, labels = map(torch.from_numpy, experiment.share(worker, workers or 1, step))
        if not workers:
            images, labels = images[:0], labels[:0]
        with measured:
            loss = technique.step(images, labels, batch_size)  # the sum over its own samples
        losses[step] = loss.detach() / batch_size

    ring_all_reduce(comm, losses)
    name = f"worker {worker}" if workers else "server"
    report(
        options.report,
        worker=worker if workers else comm.world_size - 1,
        losses=losses,
        step_s=measured.step_s,
        sent_bytes={name: measured.sent_bytes},
        versions={"torch": torch.__version__},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--report", required=True)
    given = parser.parse_args()
    labkit.run(train, given, world_size=given.ranks, device="cpu", transport="gloo")
