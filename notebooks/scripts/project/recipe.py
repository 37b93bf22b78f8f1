"""How it is trained: ``python recipe.py``, or by ``launch.sh`` on as many ranks as you like.

The settings are those of ``labkit train`` (``--help`` lists them): another technique is one word,
``builtin=True`` takes PyTorch's.
"""

import os

from model import make_model

import labkit
from data import make_dataset

SETTINGS = {"strategy": "ddp", "batch_size": 50, "epochs": 10, "lr": 0.1, "warmup_epochs": 1.0}


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    place = {"checkpoint_dir": "checkpoints", "resume": True}
    own = {"model": make_model, "dataset": make_dataset}
    result = labkit.train_with(**SETTINGS, **own, **place, world_size=ranks, verbose=True)
    if os.environ.get("RANK", "0") == "0":
        result.save_state("model.safetensors")
        print(f"accuracy {result.test_accuracy:.1%}, replicas agree: {result.replicas_agree}")


if __name__ == "__main__":
    main()
