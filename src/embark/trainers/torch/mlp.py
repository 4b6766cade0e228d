"""Linear layers with ReLUs between them."""

from torch import nn

from embark.trainers.torch.dropout import ReLUWithDropout


def mlp(width: int, sizes: tuple[int, ...], dropout: float, *, ends_linear: bool = False) -> nn.Sequential:
    """From `width` over `sizes`; a ReLU behind each layer, unless it `ends_linear`."""
    layers: list[nn.Module] = []
    for number, size in enumerate(sizes, start=1):
        is_hidden = number < len(sizes)
        layers += [nn.Linear(width, size), ReLUWithDropout(dropout) if dropout and is_hidden else nn.ReLU()]
        width = size
    return nn.Sequential(*(layers[:-1] if ends_linear else layers))
