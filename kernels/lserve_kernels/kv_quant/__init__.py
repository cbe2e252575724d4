"""Pages of 8 and 4 bits."""
