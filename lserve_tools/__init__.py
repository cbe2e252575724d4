"""Read every document once, keep its KV small on disk, answer any number of questions about it."""

__version__ = "0.1.0"
