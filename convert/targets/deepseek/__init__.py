"""The stock class."""
