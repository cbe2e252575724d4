"""Bounds of the keys in a page."""
