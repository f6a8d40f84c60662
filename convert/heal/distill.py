"""How far a student's predictions are from its teacher's, without ever holding all logits.

Shape legend
    B  windows    T  tokens of a window    N  B T, or a chunk of it    D, D'  hidden sizes    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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

    Logits are computed a few tokens at a time, and again on the way back.

    Args:
        student: (B, T, D) last hidden states, with a gradient.  teacher: (B, T, D').
        student_head, teacher_head: hidden states (N, D) to logits (N, V).
        vocab: V.
    """
    rows, targets = student.flatten(0, 1), teacher.flatten(0, 1)
    size = chunk_size(vocab)

    def of_chunk(row: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher_head(target)
        return divergence(student_head(row), wanted)

    total = rows.new_zeros((), dtype=torch.float32)
    for row, target in zip(rows.split(size), targets.split(size), strict=True):
        total = total + checkpoint(of_chunk, row, target, use_reentrant=False)
    return total / len(rows)
