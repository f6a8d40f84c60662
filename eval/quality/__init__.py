"""What the model lost."""
