"""Where weights come from: a folder or the Hub."""
