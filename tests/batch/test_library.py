from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lserve_tools.batch.library import CachedLibrary, FolderLibrary, matches
from lserve_tools.errors import DocumentError
from lserve_tools.text.segments import Segment
from tests.helpers.small_tokenizer import small_tokenizer

PATHS = ["a.md", "b.md", "code/x.py", "code/deep/y.py", "odd[1].md"]


def cached(names: list[str] | None) -> list[str]:
    return [s.name for s in CachedLibrary(Segment.of(p, (1,)) for p in reversed(PATHS)).find(names)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, ["a.md", "b.md", "code/deep/y.py", "code/x.py", "odd[1].md"]),
        ([], []),
        (["b.md", "a.md"], ["b.md", "a.md"]),
        (["./a.md"], ["a.md"]),
        (["*.md"], ["a.md", "b.md", "odd[1].md"]),
        (["code/*.py"], ["code/x.py"]),
        (["code/**"], ["code/deep/y.py", "code/x.py"]),
        (["**/*.py"], ["code/deep/y.py", "code/x.py"]),
        (["b.md", "?.md"], ["b.md", "a.md"]),
        (["[ab].md"], ["a.md", "b.md"]),
        (["[!a].md"], ["b.md"]),
        (["odd[1].md"], ["odd[1].md"]),
        (["a.md", "a.md"], ["a.md", "a.md"]),
    ],
)
def test_names_and_globs_find_documents_in_order(names: list[str] | None, expected: list[str]) -> None:
    assert cached(names) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.mb", "a.mb: no such document in the cache; did you mean 'a.md'?"),
        ("docs/x.py", "docs/x.py: no such document in the cache; did you mean 'code/x.py'?"),
        ("zzzzzzzz", "zzzzzzzz: no such document in the cache."),
        ("*.txt", "*.txt: no document of the cache matches."),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, expected: str) -> None:
    with pytest.raises(DocumentError) as caught:
        cached(["a.md", name])
    assert caught.value.message == expected


@given(st.text(alphabet=st.sampled_from("ab/*?[]!-^\\&."), max_size=12))
def test_any_glob_is_taken(glob: str) -> None:
    assert matches(["a", "b.md"], glob.split("/")) in (True, False)
    assert matches(glob.split("/"), ["**"])


def test_without_a_cache_files_are_read_beside_the_batch(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("a.md", "b.md"):
        (tmp_path / "docs" / name).write_text(f"text of {name}")
    library = FolderLibrary(tmp_path, small_tokenizer())
    assert [s.name for s in library.find(["docs/b.md", "docs/*.md"])] == ["docs/b.md", "docs/a.md", "docs/b.md"]
    (segment,) = library.find(["./docs/a.md"])
    assert small_tokenizer().decode(segment.token_ids) == "[docs/a.md]\ntext of a.md\n\n"
    assert library.find(None) == library.find([]) == []
    for name, expected in [
        ("docs/c.md", "cannot be read"),
        ("*.txt", "no file in"),
        ("/x*", "cannot be used as a glob"),
    ]:
        with pytest.raises(DocumentError, match=expected):
            library.find([name])
