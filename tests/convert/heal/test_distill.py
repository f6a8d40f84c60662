"""The loss by its definition: all at once, in chunks, and where of the teacher only the likeliest tokens are known."""

from __future__ import annotations

import torch

from latentfold.convert.heal.distill import distillation_loss, divergence, top_divergence
from latentfold.convert.heal.teacher import _FromHidden


def test_the_loss_is_the_divergence() -> None:
    """In chunks and through the checkpoint: value and gradient of KL(teacher || student), all at once."""
    torch.manual_seed(0)
    head, other = torch.randn(50, 6), torch.randn(50, 5)
    student, teacher = torch.randn(2, 9, 6, requires_grad=True), torch.randn(2, 9, 5)
    targets = _FromHidden(teacher.flatten(0, 1), lambda x: x @ other.T)
    found = distillation_loss(student, targets, lambda x: x @ head.T, vocab=1 << 22)
    p, q = (teacher @ other.T).softmax(-1), (student @ head.T).softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1).mean()
    assert torch.allclose(found, expected, atol=1e-5)
    (a,), (b,) = (torch.autograd.grad(loss, student, retain_graph=True) for loss in (found, expected))
    assert torch.allclose(a, b, atol=1e-5)
    assert divergence(torch.zeros(3, 4), torch.zeros(3, 4))[0] == 0


def test_with_all_tokens_but_one_kept_it_is_the_divergence() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(7, 12), torch.randn(7, 12)
    log_p, ids = teacher.log_softmax(-1).topk(11)
    value, gradient = top_divergence(student, ids, log_p)
    whole, expected = divergence(student, teacher)
    assert torch.allclose(value, whole, atol=1e-4)
    assert torch.allclose(gradient, expected, atol=1e-5)


def test_with_few_tokens_kept_the_others_are_one_event() -> None:
    """Value and gradient of the divergence between two distributions over the kept tokens and `any other`."""
    torch.manual_seed(1)
    student, teacher = torch.randn(5, 40, requires_grad=True), torch.randn(5, 40)
    log_p, ids = teacher.log_softmax(-1).topk(3)
    q = student.softmax(-1).gather(-1, ids)
    p = log_p.exp()
    p, q = (torch.cat([part, 1 - part.sum(-1, keepdim=True)], -1) for part in (p, q))
    expected = (p * (p.log() - q.log())).sum()
    (wanted,) = torch.autograd.grad(expected, student)
    value, gradient = top_divergence(student.detach(), ids, log_p)
    assert torch.allclose(value, expected, atol=1e-4)
    assert torch.allclose(gradient, wanted, atol=1e-5)
    total = student.log_softmax(-1).exp()
    full = (teacher.softmax(-1) * (teacher.log_softmax(-1) - total.log())).sum()
    assert value <= full, "what is lumped together can only look nearer"
