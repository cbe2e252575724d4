"""What `env` prints: the machine and the packages that a command would use."""

from __future__ import annotations

from pydantic import BaseModel


class Gpu(BaseModel):
    """A GPU that torch sees; `memory` in bytes, `capability` such as 9.0."""

    name: str
    memory: int
    capability: str


class EnvReport(BaseModel):
    """What a bug report should hold.

    Args:
        packages: versions by name; what is wrong with one that is missing or broken stands in its place.
        cpus: that this process may use; `threads` of torch.
        memory, free_memory: of the machine, in bytes.
        cuda: version that torch was built for.
        kernels: whether Triton kernels run, and why not.
        variables: environment variables by name, None if unset; a secret's value is never shown.
        cache: what is in the cache's usual folder, or None if there is none.
    """

    version: str
    python: str
    system: str
    cpu: str
    cpus: int
    threads: int | None = None
    memory: int | None = None
    free_memory: int | None = None
    packages: dict[str, str]
    cuda: str | None = None
    gpus: list[Gpu] = []
    kernels: str
    variables: dict[str, str | None]
    cache: str | None = None
