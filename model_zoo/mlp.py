"""A stack of equal linear layers: the smallest model with something to decide."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
}


class MLP(nn.Module):
    """`num_layers` linear layers of `hidden` by `hidden`, an activation between them.

    `forward(x, y)` takes two (batch, hidden) tensors and returns the scalar mean squared error.
    """

    def __init__(
        self, num_layers: int, hidden: int, *, bias: bool = True, activation: str = "gelu"
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(num_layers))
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return F.mse_loss(self.layers[-1](x), y)
