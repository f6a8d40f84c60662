"""Qwen2 and Qwen2.5: q/k/v bias. Qwen3: q/k-norm instead."""

from latentfold.convert.families.family import Family

QWEN2 = Family("qwen2", biased=lambda config: True, portable=True)
QWEN3 = Family("qwen3", q_norm="q_norm", k_norm="k_norm", why_not_portable="q/k-norm")
FAMILIES = (QWEN2, QWEN3)
