"""Mistral 7B, Nemo, Small: Llama's tensors, in v0.1 with a sliding window."""

from latentfold.convert.families.family import Family

FAMILY = Family("mistral", portable=True)
