"""The experiment with TensorFlow's ParameterServerStrategy: a server, two workers, a coordinator.

python parameter_server.py --experiment FILE --report FILE [--asynchronous]

starts all four processes on this machine. TensorFlow means this strategy to be asynchronous: each
worker's gradients are applied when they come. Without ``--asynchronous`` the coordinator waits
for those of both workers and applies their mean, so that it can be compared with the others.
"""

import argparse

import tensorflow_processes

parser = argparse.ArgumentParser()
parser.add_argument("--experiment", required=True)
parser.add_argument("--report", required=True)
parser.add_argument("--asynchronous", action="store_true")
options = parser.parse_args()
WORKERS = 2
# Before TensorFlow is loaded, which takes seconds in each process.
processes = tensorflow_processes.start(chief=1, ps=1, worker=WORKERS)

from experiment import Experiment, Measured, report  # noqa: E402
from tensorflow_digits import channels_last, digits_cnn, tf  # noqa: E402

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":  # the server and the workers execute what they are sent
    task = {"job_name": resolver.task_type, "task_index": resolver.task_id}
    server = tf.distribute.Server(resolver.cluster_spec(), **task, protocol="grpc")
    processes.finish()

experiment = Experiment.load(options.experiment)
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

with strategy.scope():  # every variable made here is on the server
    model = digits_cnn(experiment.weights)
    weights = [weight.value for weight in model.trainable_variables]
    velocities = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in weights]
    updates = tf.Variable(0, trainable=False)


@tf.function(autograph=False)
def gradients_of(images, labels, batch_size):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_sum(each) / batch_size
    return loss, tape.gradient(loss, weights)


@tf.function(autograph=False)
def apply(gradients):
    """SGD with momentum, on the server. (Optimizers of Keras 3 do not know this strategy.)"""
    rates = {"lr": experiment.lr, "momentum": experiment.momentum, "use_locking": True}
    for weight, velocity, grad in zip(weights, velocities, gradients):
        variables = {"var": weight.handle, "accum": velocity.handle}
        tf.raw_ops.ResourceApplyMomentum(**variables, grad=grad, **rates)


@tf.function(autograph=False)
def gradients_and_update(images, labels, batch_size):
    """Returns the loss, and how many updates of others came between reading and updating."""
    read = updates.read_value()
    with tf.control_dependencies([read]):
        loss, gradients = gradients_of(images, labels, batch_size)
    with tf.control_dependencies([apply(gradients)]):
        return loss, updates.assign_add(1) - 1 - read


def share(worker, step):
    images, labels = experiment.share(worker, WORKERS, step)
    return channels_last(images), labels


def in_lockstep(step):
    batch_size = float(experiment.labels.shape[1])
    parts = [
        coordinator.schedule(gradients_of, args=(*share(worker, step), batch_size))
        for worker in range(WORKERS)
    ]
    losses, gradients = zip(*coordinator.fetch(parts))  # waits for both
    apply([sum(both) for both in zip(*gradients)])
    return sum(losses)

print([w.device for w in weights], type(weights[0]))
losses, measured = [], Measured()
B=[]
for step in range(experiment.steps):
    with measured:
        losses.append(float(in_lockstep(step)))
    B.append(processes.sent_bytes())
print([{k:b[k]-a[k] for k in a} for a,b in zip(B,B[1:])])
report(
    options.report,
    losses=losses,
    step_s=measured.step_s,
    sent_bytes=measured.sent_bytes,
    versions={"tensorflow": tf.__version__, "keras": tf.keras.__version__},
)
todo = [(worker, step) for step in range(experiment.steps) for worker in range(WORKERS)]
import time; t=time.time()
r = [coordinator.schedule(gradients_and_update, args=(*share(*x), 32.0)) for x in todo]
coordinator.join()
print(coordinator.fetch(r), time.time()-t)
C=processes.sent_bytes(); print({k:(C[k]-B[-1][k])/24 for k in C})
processes.finish()
