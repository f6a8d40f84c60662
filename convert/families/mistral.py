"""Mistral 7B v0.2 and later, Nemo, Small: Llama's tensors; a sliding window (v0.1) is refused."""

from dataclasses import replace

from latentfold.convert.families import llama

FAMILY = replace(llama.FAMILY, model_type="mistral")
