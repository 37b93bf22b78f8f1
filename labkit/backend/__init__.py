"""The ``torch.distributed`` backend "labkit": our collectives under PyTorch's own DDP."""

import lazy_loader

# Lazy: ``import labkit`` registers the backend's name, and must not wait for torch.distributed.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "chosen": ["all_reduce", "ddp_hook", "use"],
        "group": ["LabkitGroup"],
        "queues": ["sent"],
    },
)
