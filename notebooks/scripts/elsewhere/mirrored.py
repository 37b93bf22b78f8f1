"""The experiment with TensorFlow's MirroredStrategy: two replicas in one process.

python mirrored.py --experiment FILE --report FILE

On a machine with several GPUs, ``MirroredStrategy()`` makes a replica on each of them. Here the
processor is divided into two logical devices.
"""

import argparse

from experiment import Experiment, Measured, report
from tensorflow_digits import channels_last, digits_cnn, tf


def two_logical_cpus():
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # Copies all gradients to one device, adds them up there, and copies the sums to all.
    to_one_device = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"], cross_device_ops=to_one_device)


def main(options):
    experiment = Experiment.load(options.experiment)
    batch_size = experiment.labels.shape[1]
    strategy = two_logical_cpus()

    with strategy.scope():  # every variable made here gets a copy on each device
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

    def shares(step):
        def share(context):
            place = context.replica_id_in_sync_group, context.num_replicas_in_sync
            images, labels = experiment.share(*place, step)
            return tf.constant(channels_last(images)), tf.constant(labels)

        return strategy.experimental_distribute_values_from_function(share)

    losses, measured = [], Measured()
    for step in range(experiment.steps):
        images, labels = shares(step)
        with measured:
            losses.append(float(train_step(images, labels)))

    report(
        options.report,
        losses=losses,
        step_s=measured.step_s,
        sent_bytes=measured.sent_bytes,
        versions={"tensorflow": tf.__version__, "keras": tf.keras.__version__},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--report", required=True)
    main(parser.parse_args())
