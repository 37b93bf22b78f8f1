"""What the three TensorFlow scripts share: the model, its weights from PyTorch, and silence."""

import contextlib
import os
import sys
import tempfile

import numpy as np


@contextlib.contextmanager
def quiet():
    """Keep what is written to stderr to itself, unless an error ends the block."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(stderr, kept.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only
# Keras reads its settings from a file in the home folder, and else writes one: neither, here.
os.environ |= {"KERAS_HOME": os.devnull, "KERAS_BACKEND": "tensorflow"}
with quiet():  # while it loads, TensorFlow does not look at that level yet
    import tensorflow as tf

tf.get_logger().setLevel("ERROR")
# Several processes (or replicas) share the cores: none of them takes all.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


def digits_cnn(weights):
    """The experiment's model, with these weights; call it in the strategy's scope.

    TensorFlow's images are [row, column, channel], PyTorch's [channel, row, column].

    - A convolution's weights are [row, column, in, out] here, [out, in, row, column] there.
    - A linear layer's weights are [in, out] here, [out, in] there.
    - Its 1024 inputs are flattened in the order (4 rows, 4 columns, 64 channels) here,
      in the order (64 channels, 4 rows, 4 columns) there.
    """
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input([8, 8, 1]),
            layers.Conv2D(32, 3, padding="same", activation="silu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(64, 3, padding="same", activation="silu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    linear = weights["6.weight"].reshape(10, 64, 4, 4).transpose(2, 3, 1, 0)
    model.set_weights(
        [
            *(weights["0.weight"].transpose(2, 3, 1, 0), weights["0.bias"]),
            *(weights["3.weight"].transpose(2, 3, 1, 0), weights["3.bias"]),
            *(linear.reshape(1024, 10), weights["6.bias"]),
        ]
    )
    return model


def channels_last(images):
    """[batch, channel, row, column] to [batch, row, column, channel]."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1))
