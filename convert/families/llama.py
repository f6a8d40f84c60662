"""Llama 1/2/3.x and everything stored as Llama: SmolLM2, Yi, TinyLlama, DeepSeek LLM, ..."""

from latentfold.convert.families.family import Family

FAMILY = Family("llama", portable=True)
