"""Attention inside a chunk of a prompt: dense heads, and streaming heads with their two windows."""
