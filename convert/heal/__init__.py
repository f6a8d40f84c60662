"""Distilling the original into its conversion: minutes of training that win back most of what was lost."""
