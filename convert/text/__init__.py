"""Texts and token windows."""
