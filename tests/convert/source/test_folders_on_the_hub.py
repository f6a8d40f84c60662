"""Files that lie in folders of a repository: templates are brought, a folder with a licence's name is no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from latentfold.convert import convert_checkpoint
from tests.conftest import MakeModel
from tests.hub_server import HubServer

pytestmark = pytest.mark.hub
TEMPLATE = "additional_chat_templates/rag.jinja"
OTHERS = {"LICENSES/MIT.txt": b"MIT", "NOTICE.d/a/b.txt": b"of whom", "LICENSE": b"Apache"}


@pytest.mark.parametrize("hub", [False, True], ids=["folder", "hub"])
def test_folders_of_a_source(
    hub: bool, make_model: MakeModel, server: HubServer, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = make_model()
    for name, content in {TEMPLATE: b"{{ documents }}", "chat_template.jinja": b"{{ x }}", **OTHERS}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    source = str(folder)
    if hub:
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        server.create_repo(source := "org/folders", files=files)
    out = tmp_path / "out"
    convert_checkpoint(source, str(out), kv_rank=8, rope_dim=4, **options)
    assert (out / TEMPLATE).read_bytes() == b"{{ documents }}"
    assert (out / "LICENSE").read_bytes() == b"Apache"
    assert not (out / "LICENSES").is_file() and not (out / "NOTICE.d").is_file()
