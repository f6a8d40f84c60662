"""What each model family is, as data; docs/families.md shows how to add one."""

from __future__ import annotations
