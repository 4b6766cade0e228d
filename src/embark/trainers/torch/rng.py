"""The state of torch's random numbers, so that a resumed run draws the ones it would have drawn.

The data needs none of it: its batches are functions of the seed and the step.
"""

import torch


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Of this rank, as tensors, which a checkpoint takes like any others. Ranks differ: save it under the rank."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on from there. Of a state saved on another kind of device, what both have is set."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
