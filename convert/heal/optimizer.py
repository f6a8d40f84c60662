"""AdamW in steps that are relative to each tensor's size, each taken as soon as the tensor's gradient is complete.

No more than one gradient exists at a time, so training needs no memory for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from latentfold.convert.heal.processes import Processes

BETAS = (0.9, 0.98)


def size(parameter: nn.Parameter) -> float:
    """Root mean square of a tensor; of zeros, such as a bias that only the class demands, 0: it stays what it is."""
    return float(parameter.detach().float().square().mean().sqrt())


class RelativeAdamW:
    """Decoupled Adam (Loshchilov & Hutter, arXiv:1711.05101) without decay; a step is `rate` times a tensor's size.

    `backward()` of a loss takes the step: set `rate` before it.

    Args:
        parameters: by name.
        processes: over whom gradients are averaged.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], processes: Processes) -> None:
        self.processes = processes
        self.sizes = {name: size(parameter) for name, parameter in parameters.items()}
        self.steppers = {
            name: torch.optim.AdamW([parameter], lr=0.0, betas=BETAS, weight_decay=0.0, fused=True)
            for name, parameter in parameters.items()
        }
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._step, name))

    def set_rate(self, rate: float) -> None:
        """Of the steps that follow, relative to each tensor's size."""
        for name, stepper in self.steppers.items():
            stepper.param_groups[0]["lr"] = rate * self.sizes[name]

    def _step(self, name: str, parameter: Any) -> None:
        self.processes.sum_(parameter.grad)
        if self.processes.count > 1:
            parameter.grad /= self.processes.count
        self.steppers[name].step()
        parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What going on from here needs besides the weights."""
        return {name: (self.sizes[name], stepper.state_dict()["state"]) for name, stepper in self.steppers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        for name, (found, moments) in state.items():
            self.sizes[name] = found
            groups = self.steppers[name].state_dict()["param_groups"]
            self.steppers[name].load_state_dict({"state": moments, "param_groups": groups})
