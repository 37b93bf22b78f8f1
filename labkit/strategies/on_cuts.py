"""Techniques in which ranks divide parameters among themselves, each computing with its shard."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from labkit.engine.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.on_shares import OnShares
from labkit.strategies.saved_state import SavedState, State
from labkit.strategies.tensor_cut import TensorGroup
from labkit.strategies.traits import Division, Traits


class CutState(SavedState):
    """Whole parameters and optimizer states, on rank 0: any technique can go on from them."""

    def held(self) -> tuple[State, dict[str, nn.Parameter]]:
        shards = self.strategy.shards
        names: dict[nn.Parameter, str] = {}
        for name, shard in shards.items():
            if isinstance(shard, nn.Parameter):
                names.setdefault(shard, name)
        return shards, {name: parameter for parameter, name in names.items()}

    def collect(self) -> State:
        cuts = self.strategy
        state = cuts.group.unshard_state(super().collect(), cuts.shards)
        return state if cuts.comm.rank == 0 else State()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        cuts = self.strategy
        super().restore(cuts.group.shard_state(state, cuts.shards))


@dataclass(eq=False)
class OnCuts(OnShares):
    """The base of techniques whose ranks hold shards of some parameters, and all of the others.

    Attributes:
        group: knows how the parameters are divided.
    """

    saved_state_class = CutState
    traits = Traits(division=Division.ROWS)

    def make_group(self, comm: Comm) -> TensorGroup:
        """Return the group that cuts the model over the ranks of ``comm``."""
        raise NotImplementedError

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.group = self.make_group(comm)
        self.cut(model)
        self.move_to_device(comm, model)
        held = [shard for shard in self.shards.values() if isinstance(shard, nn.Parameter)]
        parameters = list(dict.fromkeys(held))
        self.trained = [p for p in parameters if p.requires_grad]
        self.optimizer = make_optimizer(self.trained)
        self.norm_ranks = range(comm.world_size)
        if comm.rank > 0:
            self.counted_elsewhere = {p for p in parameters if p not in self.group.cuts}

    def cut(self, model: nn.Module) -> None:
        """Cut the model in place."""
        self.group.cut(model)

    @property
    def shards(self) -> State:
        """This rank's shards of parameters, and buffers, by name; a tied one has two names.

        They are looked up: a move to a GPU, or a forward, may put a new buffer in place of one.
        """
        return self.model.state_dict(keep_vars=True)

    def full_state(self) -> State:
        state = State()
        for name, shard in self.shards.items():
            state[name] = self.group.unshard(shard, shard.detach()).cpu().clone()
        return state
