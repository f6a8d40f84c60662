"""How far a student's predictions are from its teacher's, without ever holding all logits.

Shape legend
    B  windows    T  tokens of a window    N  B T, or a part of it    D  hidden size    V  vocabulary
    K  most likely tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Logits held at a time, N V: as many as make the products with the vocabulary fast."""
BLOCK = 1 << 20
"""Logits compared at a time: as many as stay in a processor's cache."""

Head = Callable[[Tensor], Tensor]
Comparison = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits (N, V) to the sum over N of their divergence from what was predicted, and its gradient (N, V)."""


class Targets(Protocol):
    """What is predicted for B T tokens."""

    def split(self, size: int) -> Iterator[Comparison]:
        """For so many tokens at a time what compares a student's logits with it."""


def chunk_size(vocab: int) -> int:
    """Tokens whose logits are held at a time."""
    return max(1, CHUNK // vocab)


def divergence(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over N of KL(teacher || student) in nats, and its gradient in the student's logits; logits (N, V).

    With p the teacher's and q the student's probabilities the gradient is q - p.

    Returns:
        () in float32, and (N, V) in the dtype of the student's logits.
    """
    total, gradient = student.new_zeros((), dtype=torch.float32), torch.empty_like(student)
    size = max(1, BLOCK // student.shape[-1])
    for mine, wanted, out in zip(student.split(size), teacher.split(size), gradient.split(size), strict=True):
        log_p = wanted.log_softmax(-1, dtype=torch.float32)
        log_q = mine.log_softmax(-1, dtype=torch.float32)
        p = log_p.exp()
        total += torch.dot(p.flatten(), log_p.sub_(log_q).flatten())
        out.copy_(log_q.exp_().sub_(p))
    return total, gradient


def top_divergence(student: Tensor, ids: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """The same where of the teacher only K tokens are known; all others are one event, of what probability is left.

    With t for that event the gradient is q - p for the K tokens and q (1 - p_t / q_t) for all others.

    Args:
        student: (N, V) logits.  ids: (N, K) tokens.  log_p: (N, K) their log probabilities.
    """
    total, gradient = student.new_zeros((), dtype=torch.float32), torch.empty_like(student)
    size = max(1, BLOCK // student.shape[-1])
    parts = zip(student.split(size), ids.split(size), log_p.split(size), gradient.split(size), strict=True)
    for mine, top, wanted, out in parts:
        q, p = mine.softmax(-1, dtype=torch.float32), wanted.exp()
        q_top = q.gather(-1, top)
        p_tail, q_tail = (1 - part.sum(-1, keepdim=True).clamp(max=1 - 1e-6) for part in (p, q_top))
        total += (p * (wanted - q_top.clamp_min(1e-30).log())).sum() + (p_tail * (p_tail / q_tail).log()).sum()
        q *= 1 - p_tail / q_tail
        out.copy_(q.scatter_(-1, top, q_top - p))
    return total, gradient


def distillation_loss(student: Tensor, targets: Targets, head: Head, vocab: int) -> Tensor:
    """Mean over all tokens of KL(teacher || student) in nats (Hinton et al., arXiv:1503.02531, at temperature 1).

    Logits are computed a few tokens at a time. The gradient of a chunk is taken at once, so that nothing as large as
    the vocabulary waits for the way back and nothing is computed twice.

    Args:
        student: (B, T, D) last hidden states, with a gradient.
        targets: what the teacher predicts for these tokens.
        head: hidden states (N, D) to logits (N, V); its weights get no gradient.
        vocab: V.
    """
    loss: Tensor = _Distillation.apply(student.flatten(0, 1), targets, head, chunk_size(vocab))
    return loss


class _Distillation(torch.autograd.Function):
    """(N, D) to the mean divergence; its gradient is known when it is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Targets, head: Head, size: int) -> Tensor:
        total, gradient = rows.new_zeros((), dtype=torch.float32), torch.empty_like(rows)
        for row, compare, out in zip(rows.split(size), targets.split(size), gradient.split(size), strict=True):
            with torch.enable_grad():
                row = row.detach().requires_grad_()
                logits = head(row)
            found, outer = compare(logits.detach())
            out.copy_(torch.autograd.grad(logits, row, outer)[0])
            total += found
        ctx.save_for_backward(gradient.div_(len(rows)))
        return total / len(rows)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None
