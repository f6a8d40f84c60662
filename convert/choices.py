"""What options may be, as plain names: to be known before torch is. The targets have a list of their own, as light."""

from __future__ import annotations

ENGINES = ("any", "transformers")
"""What has to load the stock class."""

DTYPES = ("bfloat16", "float32", "float16")
"""What models are computed and stored in."""

TRAINED = ("attention", "norms", "all")
"""Which tensors of the layers healing trains."""

PRODUCTS = ("float32", "bfloat16")
"""What healing multiplies in; float16 would need its losses scaled."""

RECOMPUTED = {"none": 0.0, "half": 0.5, "all": 1.0}
"""Of which share of the layers healing computes inner results twice instead of keeping them."""
