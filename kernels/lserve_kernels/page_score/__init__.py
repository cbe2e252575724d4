"""How well pages may fit a query."""
