"""A prompt as the engine sees it: segments of token ids, cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """The prefix or one document: tokens that are computed, stored and shared as a unit.

    Args:
        name: the document's path, or `prefix`.
        token_ids: its tokens.
        chunks: lengths of its chunks in tokens; they add up to `len(token_ids)`. Every chunk opens a new page.
    """

    name: str
    token_ids: tuple[int, ...]
    chunks: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.chunks) != len(self.token_ids) or 0 in self.chunks:
            raise ValueError(
                f"chunks of {self.name} must be positive and add up to {len(self.token_ids)}: {self.chunks}"
            )

    @classmethod
    def of(cls, name: str, token_ids: list[int] | tuple[int, ...]) -> Segment:
        """A segment of one chunk (the prefix, or text that is never stored)."""
        return cls(name, tuple(token_ids), (len(token_ids),) if token_ids else ())
