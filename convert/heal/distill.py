"""How far a student's predictions are from its teacher's, without ever holding all logits.

Shape legend
    B  windows    T  tokens of a window    N  B T, or a chunk of it    D, D'  hidden sizes    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Logits held at a time: N V."""

Head = Callable[[Tensor], Tensor]


def chunk_size(vocab: int) -> int:
    """Tokens whose logits are held at a time."""
    return max(1, CHUNK // vocab)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over N of KL(teacher || student) in nats; logits (N, V)."""
    target = teacher.float().log_softmax(-1)
    return (target.exp() * (target - student.float().log_softmax(-1))).sum()


def distillation_loss(student: Tensor, teacher: Tensor, student_head: Head, teacher_head: Head, vocab: int) -> Tensor:
    """Mean over all tokens of KL(teacher || student) in nats (Hinton et al., arXiv:1503.02531, at temperature 1).

    Logits are computed a few tokens at a time. The gradient of a chunk is taken at once, so that nothing as large as
    the vocabulary waits for the way back and nothing is computed twice.

    Args:
        student: (B, T, D) last hidden states, with a gradient.  teacher: (B, T, D').
        student_head, teacher_head: hidden states (N, D) to logits (N, V); their weights get no gradient.
        vocab: V.
    """
    rows, targets = student.flatten(0, 1), teacher.flatten(0, 1)
    loss: Tensor = _Distillation.apply(rows, targets, student_head, teacher_head, chunk_size(vocab))
    return loss


class _Distillation(torch.autograd.Function):
    """(N, D) and (N, D') to the mean divergence; its gradient is known when it is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor, student_head: Head, teacher_head: Head, size: int) -> Tensor:
        total, gradient = rows.new_zeros((), dtype=torch.float32), torch.empty_like(rows)
        for i, (row, target) in enumerate(zip(rows.split(size), targets.split(size), strict=True)):
            wanted = teacher_head(target)
            with torch.enable_grad():
                row = row.detach().requires_grad_()
                found = divergence(student_head(row), wanted)
                (part,) = torch.autograd.grad(found, row)
            total += found.detach()
            gradient[i * size : i * size + len(row)] = part
        ctx.save_for_backward(gradient / len(rows))
        return total / len(rows)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None, None
