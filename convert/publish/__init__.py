"""Card and push."""
