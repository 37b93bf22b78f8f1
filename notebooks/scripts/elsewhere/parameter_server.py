"""The experiment with TensorFlow's ParameterServerStrategy: a server, two workers, a coordinator.

python parameter_server.py --experiment FILE --report FILE

starts all four on this machine. TensorFlow means this strategy to be asynchronous: each worker's
gradients are applied when they come. Here the coordinator waits for those of both workers, so
that it can be compared with the other strategies.
"""

import argparse

import tensorflow_processes
from experiment import Experiment, report
from tensorflow_digits import channels_last, digits_cnn, tf

parser = argparse.ArgumentParser()
parser.add_argument("--experiment", required=True)
parser.add_argument("--report", required=True)
options = parser.parse_args()
experiment = Experiment.load(options.experiment)
WORKERS = 2
processes = tensorflow_processes.start(chief=1, ps=1, worker=WORKERS)  # from here on four

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":  # the server and the workers execute what they are sent
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    )
    processes.finish()

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

with strategy.scope():  # every variable made here is on the server
    model = digits_cnn(experiment.weights)
    weights = [weight.value for weight in model.trainable_variables]
    velocities = [tf.Variable(tf.zeros_like(weight)) for weight in weights]


@tf.function(autograph=False)
def loss_and_gradients(images, labels, batch_size):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_sum(each) / batch_size
    return loss, tape.gradient(loss, weights)


@tf.function(autograph=False)
def apply(gradients):
    """SGD with momentum, on the server (the optimizers of Keras 3 do not know this strategy)."""
    rates = {"lr": experiment.lr, "momentum": experiment.momentum, "use_locking": True}
    for w, v, gradient in zip(weights, velocities, gradients):
        tf.raw_ops.ResourceApplyMomentum(var=w.handle, accum=v.handle, grad=gradient, **rates)


def shares(step):
    """The arguments for each worker's part of a batch."""
    for worker in range(WORKERS):
        images, labels = experiment.share(worker, WORKERS, step)
        yield channels_last(images), labels


def in_lockstep(step):
    """One update with the gradients of the whole batch. Returns its loss."""
    batch_size = float(experiment.labels.shape[1])
    parts = [
        coordinator.schedule(loss_and_gradients, args=(*share, batch_size))
        for share in shares(step)
    ]
    losses, gradients = zip(*coordinator.fetch(parts))  # waits for both
    apply([sum(both) for both in zip(*gradients)])
    return float(sum(losses))


losses, measured = [], tensorflow_processes.MeasuredByAll(processes)
for step in range(experiment.steps):
    with measured:
        losses.append(in_lockstep(step))

report(
    options.report,
    losses=losses,
    step_s=measured.step_s,
    sent_bytes=measured.sent_bytes,
    versions={"tensorflow": tf.__version__, "keras": tf.keras.__version__},
)
processes.finish()
