"""Mistral 7B, Nemo, Small: Llama's tensors, in v0.1 with a sliding window."""

from dataclasses import replace

from latentfold.convert.families import llama

FAMILY = replace(llama.FAMILY, model_type="mistral")
