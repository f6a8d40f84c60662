"""An evaluation made readable: Markdown tables, plots, an HTML page, a model card."""
