"""How far a student's predictions are from its teacher's, without ever holding all logits.

Shape legend
    B  windows    T  tokens of a window    N  B T, or a part of it    D, D'  hidden sizes    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Logits held at a time, N V: as many as make the products with the vocabulary fast."""
BLOCK = 1 << 20
"""Logits compared at a time: as many as stay in a processor's cache."""

Head = Callable[[Tensor], Tensor]


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
        for row, target, out in zip(rows.split(size), targets.split(size), gradient.split(size), strict=True):
            wanted = teacher_head(target)
            with torch.enable_grad():
                row = row.detach().requires_grad_()
                logits = student_head(row)
            found, outer = divergence(logits.detach(), wanted)
            out.copy_(torch.autograd.grad(logits, row, outer)[0])
            total += found
        ctx.save_for_backward(gradient.div_(len(rows)))
        return total / len(rows)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None, None
