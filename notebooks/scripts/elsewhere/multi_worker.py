"""The experiment with TensorFlow's MultiWorkerMirroredStrategy: one replica in each process.

python multi_worker.py --experiment FILE --report FILE

starts both processes on this machine. The loop is written out: Keras 3's ``fit`` does not know this strategy.
"""

import argparse

import tensorflow_processes

parser = argparse.ArgumentParser()
parser.add_argument("--experiment", required=True)
parser.add_argument("--report", required=True)
options = parser.parse_args()
others = tensorflow_processes.start(worker=2)  # before TensorFlow is loaded, which takes seconds

from experiment import Experiment, Measured, report  # noqa: E402
from tensorflow_digits import channels_last, digits_cnn, tf  # noqa: E402

experiment = Experiment.load(options.experiment)
ring = tf.distribute.experimental.CollectiveCommunication.RING
strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
)
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
batch_size = experiment.labels.shape[1]

with strategy.scope():  # every variable made here is sent by worker 0 to the others
    model = digits_cnn(experiment.weights)
    optimizer = tf.keras.optimizers.SGD(experiment.lr, experiment.momentum)


def replica_step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.nn.compute_average_loss(each, global_batch_size=batch_size)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # adds them up
    return loss


@tf.function
def train_step(images, labels):
    losses = strategy.run(replica_step, args=(images, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


def share(step):
    def value(context):
        images, labels = experiment.share(context.replica_id_in_sync_group, size, step)
        return tf.constant(channels_last(images)), tf.constant(labels)

    return strategy.experimental_distribute_values_from_function(value)


losses, measured = [], Measured()
for step in range(experiment.steps):
    images, labels = share(step)
    with measured:
        losses.append(float(train_step(images, labels)))

report(
    options.report,
    worker=rank,
    losses=losses,
    step_s=measured.step_s,
    sent_bytes=measured.sent_bytes,
    versions={"tensorflow": tf.__version__, "keras": tf.keras.__version__},
)
if others:
    others.finish()
else:
    tensorflow_processes.wait()
