"""A transformers model, one layer at a time or whole."""
