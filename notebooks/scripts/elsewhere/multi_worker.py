"""The experiment with TensorFlow's MultiWorkerMirroredStrategy: a replica per process.

python multi_worker.py --experiment FILE --report FILE

starts two on this machine. The loop is written out: ``fit`` of Keras 3 does not know this
strategy.
"""

import argparse
import signal

import tensorflow_processes
from experiment import Experiment, Measured, report
from tensorflow_digits import channels_last, digits_cnn, tf

parser = argparse.ArgumentParser()
parser.add_argument("--experiment", required=True)
parser.add_argument("--report", required=True)
options = parser.parse_args()
experiment = Experiment.load(options.experiment)
processes = tensorflow_processes.start(worker=2)  # from here on there are two

ring = tf.distribute.experimental.CollectiveCommunication.RING  # over gRPC; the other is NCCL
strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
)
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # TensorFlow would save a checkpoint first
batch_size = experiment.labels.shape[1]

with strategy.scope():  # every variable made here gets worker 0's value in all processes
    model = digits_cnn(experiment.weights)
    optimizer = tf.keras.optimizers.SGD(experiment.lr, experiment.momentum)
    optimizer.build(model.trainable_variables)


def replica_step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        # Divided by the global batch, since the gradients of all replicas are added up.
        loss = tf.nn.compute_average_loss(each, global_batch_size=batch_size)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # adds them up
    return loss


@tf.function(autograph=False)
def train_step(images, labels):
    losses = strategy.run(replica_step, args=(images, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


def own_share(step):
    def share(context):
        place = context.replica_id_in_sync_group, context.num_replicas_in_sync
        images, labels = experiment.share(*place, step)
        return tf.constant(channels_last(images)), tf.constant(labels)

    return strategy.experimental_distribute_values_from_function(share)


losses, measured = [], Measured()
for step in range(experiment.steps):
    images, labels = own_share(step)
    with measured:
        losses.append(float(train_step(images, labels)))

report(
    options.report,
    worker=strategy.cluster_resolver.task_id,
    losses=losses,
    step_s=measured.step_s,
    sent_bytes=measured.sent_bytes,
    versions={"tensorflow": tf.__version__, "keras": tf.keras.__version__},
)
processes.finish()
