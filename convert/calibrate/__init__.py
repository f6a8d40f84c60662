"""What attention is sensitive to."""
