"""Copying one honest node, so that it is over-represented."""

from typing import Any

import torch
from torch import Tensor

from dfl_lightning.errors import UserError
from dfl_lightning.phases import ColludingAttack, one_message
from dfl_lightning.round import Block, Round
from dfl_lightning.seeding import generator


class Mimic(ColludingAttack):
    """All attackers send the model of the honest node whose updates vary most (Karimireddy et al. 2022).

    During the warm-up the main direction z of the honest updates is learnt (Oja's rule around a running mean), and who
    has the largest |<z, update>| is copied; from then on it is always the same node. Knows the honest updates of all
    rounds; keeps two vectors of d numbers.

    Args:
        warmup: rounds in which z is learnt, at least 1.
    """

    needs_start = True

    def __init__(self, warmup: int = 5, **options: Any) -> None:
        super().__init__(**options)
        if warmup < 1:
            raise UserError(f"attack.warmup is {warmup}, but the direction is learnt in at least 1 round.")
        self.warmup = warmup
        self.forget()

    def forget(self) -> None:
        """Starts anew, knowing nothing of earlier rounds."""
        self._memory: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.forget()  # a checkpoint is loaded after this

    def state_dict(self) -> dict[str, Any]:
        return dict(self._memory)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._memory = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in state_dict.items()
        }

    def attack(self, round: Round) -> None:
        honest = self.seen(round).nonzero()[:, 0]
        if round.exchanges == 0 and self._memory.get("rounds", 0) < self.warmup:
            self._learn(round, honest)
        if (here := honest[round.clients[honest] == self._memory["victim"]]).numel():
            round.forge(one_message(round), lambda block: block.own[here])

    def _learn(self, round: Round, honest: Tensor) -> None:
        """One step of Oja's rule, and the node that stands out along the new direction."""
        dim, done = round.num_parameters, self._memory.get("rounds", 0)
        if not self._memory:
            z = torch.randn(dim, generator=generator(round.seed, "mimic"))
            self._memory = {"z": z / z.norm(), "mean": torch.zeros(dim)}
        z, mean = self._memory["z"], self._memory["mean"]

        def updates(block: Block) -> Tensor:
            assert block.start is not None
            return (block.own[honest] - block.start[honest]).to(z)

        def centre_and_project(block: Block) -> Tensor:  # <z, update - mean>, and the new mean on the way
            here = updates(block)
            mean[block.columns].mul_(done / (done + 1)).add_(here.mean(0), alpha=1 / (done + 1))
            return (here - mean[block.columns]).double() @ z[block.columns].double()

        along = round.reduce(centre_and_project)

        def turn(block: Block) -> Tensor:  # z becomes its running mean with sum_i <z, x_i - mean> (x_i - mean)
            step = along.to(z) @ (updates(block) - mean[block.columns])
            z[block.columns] = (done * z[block.columns] + step) / (done + 1)
            return z[block.columns].double().square().sum()

        z /= max(float(round.reduce(turn).sqrt()), torch.finfo(torch.float32).tiny)
        standing_out = round.reduce(lambda block: updates(block).double() @ z[block.columns].double()).abs()
        self._memory |= {"rounds": done + 1, "victim": int(round.clients[honest[int(standing_out.argmax())]])}
