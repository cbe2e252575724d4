"""Attention of packed queries to keys that lie in pages."""
