"""The source's tensors against what will be read of them."""

from __future__ import annotations

from latentfold.convert.errors import InputError
from latentfold.convert.families.family import Family
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.targets.target import Conversion


def check_tensors(checkpoint: Checkpoint, family: Family, target: Conversion) -> None:
    """Compare every tensor the conversion needs with the files' headers.

    Raises:
        InputError: naming the tensor, its file, what was expected and what was found.
    """
    expected = target.expected
    target.model.check_headers(checkpoint.headers)
    for name in expected:
        header = checkpoint.headers[name]
        if header.dtype not in ("F16", "BF16", "F32", "F64"):
            raise InputError(f"tensor {name} in {header.file}: expected F16, BF16 or F32, found {header.dtype}")
    for name, header in checkpoint.headers.items():
        if name not in expected and name not in target.model.copies and not name.endswith(family.ignored):
            raise InputError(
                f"tensor {name} in {header.file}: a {family.model_type} checkpoint has no such tensor, and leaving it "
                "out would change the model"
            )
