"""What a converted layer is written as."""
