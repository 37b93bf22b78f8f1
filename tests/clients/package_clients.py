"""Other people's trainers, a function each: ``client(backend)`` trains and returns numbers."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from training import batches, network, train, values_of


def dataset():
    """One data set of 12 samples for all ranks: a trainer gives each its share."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(12, 8, generator=generator)
    return TensorDataset(samples, torch.randint(6, (12,), generator=generator))


def lightning(backend):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()

        def training_step(self, batch, number):
            return cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch, number):
            right = self.model(batch[0]).argmax(1) == batch[1]
            self.log("right", right.sum(), sync_dist=True, reduce_fx="sum")
            self.log("mean", right.sum(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.5)

    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    loader = DataLoader(dataset(), 2)
    trainer.fit(module, loader, loader)
    return [*trainer.callback_metrics.values(), *values_of(module)]


def fabric(backend):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=backend)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    model, optimizer = fabric.setup(model := network(), torch.optim.SGD(model.parameters(), 0.5))
    data = fabric.setup_dataloaders(DataLoader(dataset(), 2))
    results = train(model, optimizer, data, fabric.backward)
    return [*fabric.all_gather(results[0]), fabric.all_reduce(results[0]), *results]


def accelerate(backend):
    from accelerate import Accelerator

    dist.init_process_group(backend)  # before the Accelerator, which refuses the name
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(dataset(), 2))
    results = train(model, optimizer, data, accelerator.backward)
    assert accelerator.num_processes == dist.get_world_size()
    gathered = accelerator.gather_for_metrics(torch.arange(3) + accelerator.process_index)
    return [*results, gathered, accelerator.reduce(results[0], "mean")]


def transformers(backend):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    dist.init_process_group(backend)  # before the Trainer, which refuses the name
    tokens = torch.randint(20, (12, 9), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, **sizes, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
    )
    options = {"use_cpu": True, "report_to": [], "max_steps": 4, "logging_steps": 1}
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, disable_tqdm=True, **options
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return [evaluated, *losses, *values_of(model)]


def ignite(backend):
    import ignite.distributed as idist
    from ignite.engine import create_supervised_trainer
    from ignite.metrics import Accuracy

    dist.init_process_group(backend)  # Ignite refuses the name
    idist.sync()
    model = network()
    # idist.auto_model(model) does not wrap it where it does not know the name.
    model = DistributedDataParallel(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.5))
    trainer = create_supervised_trainer(
        model, optimizer, cross_entropy, output_transform=lambda x, y, logits, loss: (logits, y)
    )
    Accuracy().attach(trainer, "accuracy")
    state = trainer.run(idist.auto_dataloader(dataset(), batch_size=6, shuffle=False))
    return [state.metrics["accuracy"], idist.all_reduce(1.0), *values_of(model)]


def torchmetrics(backend):
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    dist.init_process_group(backend)
    metrics = [MulticlassAccuracy(6), MulticlassAUROC(6), MeanMetric()]
    for samples, labels in batches(2 + dist.get_rank()):
        logits = network()(samples)
        metrics[0].update(logits, labels)
        metrics[1].update(logits, labels)
        metrics[2].update(logits.detach())
    return [metric.compute() for metric in metrics]


def torchtnt(backend):
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.train import train as train_unit
    from torchtnt.utils.distributed import all_gather_tensors

    class Unit(AutoUnit):
        def compute_loss(self, state, data):
            logits = self.module(data[0])
            return cross_entropy(logits, data[1]), logits

        def configure_optimizers_and_lr_scheduler(self, module):
            return torch.optim.SGD(module.parameters(), 0.5), None

    dist.init_process_group(backend)
    unit = Unit(module=network(), strategy="ddp", device=torch.device("cpu"))
    train_unit(unit, batches(), max_epochs=2)
    return [*values_of(unit.module), *all_gather_tensors(torch.ones(1 + dist.get_rank()))]


def skorch(backend):
    from accelerate import Accelerator
    from skorch import NeuralNetClassifier
    from skorch.hf import AccelerateMixin

    class Classifier(AccelerateMixin, NeuralNetClassifier):
        pass

    class CrossEntropy:  # not a module, which accelerate would wrap in DDP
        def __call__(self, logits, labels):
            return cross_entropy(logits, labels)

    dist.init_process_group(backend)
    samples, labels = dataset().tensors
    options = {"criterion": CrossEntropy, "train_split": None, "verbose": 0}
    model = Classifier(network(), accelerator=Accelerator(cpu=True), batch_size=2, **options)
    model.fit(samples.numpy(), labels.numpy())
    losses = torch.tensor(model.history[:, "train_loss"])
    return [losses, *values_of(model.module_)]


def timm(backend):
    from timm.models import create_model
    from timm.utils import distribute_bn, reduce_tensor
    from timm.utils.distributed import init_distributed_device_so

    init_distributed_device_so("cpu", backend)
    torch.manual_seed(0)
    model = create_model("test_resnet", num_classes=6)
    model = DistributedDataParallel(model)
    images = torch.randn(3, 2, 3, 32, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    data = list(zip(images, torch.arange(6).view(3, 2)))
    results = train(model, torch.optim.SGD(model.parameters(), 0.01), data)
    distribute_bn(model, dist.get_world_size(), reduce=True)
    return [reduce_tensor(results[0], dist.get_world_size()), *results, *model.buffers()]


# A deep network carries the rounding of its first sum far.
timm.rounding = 1e-4


def fairscale(backend):
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    dist.init_process_group(backend)
    model = network()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    return train(ShardedDataParallel(model, optimizer), optimizer)


def peft(backend):
    from peft import LoraConfig, get_peft_model

    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = get_peft_model(network(), LoraConfig(r=2, target_modules=["0", "2"]))
    return train(DistributedDataParallel(model))
