"""What licences want of who publishes a conversion."""

from __future__ import annotations

from fnmatch import fnmatch

from latentfold.convert.write.recipe import Recipe

NOTICES = {
    "*-nd-*": "forbids derivatives: ask the original's author before you publish a conversion",
    "cc-by-nc-*": "allows no commercial use",
    "llama*": "wants 'Built with Llama' shown, its LICENSE, NOTICE and use policy beside the weights, and since "
    "Llama 3 a model name that begins with Llama",
    "gemma": "wants its terms passed on, a notice file, and a statement that the weights were modified",
    "other": "is not a standard one: read its terms before you publish",
}
"""What to know before publishing under a licence, by its Hub id; the first pattern that matches."""


def licence_notice(recipe: Recipe) -> str | None:
    """What to mind about the original's licence before publishing, or None."""
    licence = recipe.source.license
    if not isinstance(licence, str):
        return "the original's licence is not known here: make sure that it allows publishing a conversion"
    for pattern, notice in NOTICES.items():
        if fnmatch(licence.lower(), pattern):
            return f"the original's licence ({licence}) {notice}"
    return None
