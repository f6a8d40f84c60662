"""A conversion from end to end."""
