"""What will be written, and every refusal, before a weight is read."""
