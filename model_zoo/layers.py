"""Linear and embedding layers with the weight init that language-model papers use."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` with weights from N(0, std) and zero bias."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool, std: float = 0.02) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(d_in, d_out, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` with weights from N(0, 0.02)."""

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.weight, std=0.02)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dim."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of predicting token t+1 at position t; label -100 is left out.

    `logits` is (batch, seq, vocab), `labels` (batch, seq).
    """
    vocab = logits.shape[-1]
    return nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocab), labels[:, 1:].reshape(-1), ignore_index=-100
    )
