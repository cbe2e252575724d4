from __future__ import annotations

import os
from pathlib import Path

import pytest

from lserve_tools.errors import NotTextError, UsageError
from lserve_tools.text.documents import find_documents


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def test_text_files_are_found_in_path_order_and_hidden_ones_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"b.md": "b", "a/z.py": "z", "a.txt": "a", ".git/config": "x", "a/.hidden": "x", "LICENSE": "l"})
    documents, errors = find_documents(tmp_path)
    assert [d.path for d in documents] == ["LICENSE", "a.txt", "a/z.py", "b.md"]
    assert errors == []


def test_a_single_file_is_a_root(tmp_path: Path) -> None:
    write(tmp_path, {"only.md": "text", "other.md": "no"})
    documents, _ = find_documents(tmp_path / "only.md")
    assert [(d.path, d.text, d.size) for d in documents] == [("only.md", "text", 4)]


def test_text_is_kept_as_it_is_but_for_the_byte_order_mark(tmp_path: Path) -> None:
    write(tmp_path, {"a.md": b"\xef\xbb\xbfone\r\ntwo\r\n"})
    (document,), _ = find_documents(tmp_path)
    assert document.text == "one\r\ntwo\r\n"
    assert document.size == 13


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "binary"),
        (b"\xff\xd8\xff\xe0\x01\x02", "binary"),
        (b"%PDF-1.4\ntext", "binary"),
    ],
)
def test_files_without_text_are_named_and_no_failure(tmp_path: Path, content: bytes, expected: str) -> None:
    write(tmp_path, {"good.md": "text", "odd.bin": content})
    documents, (error,) = find_documents(tmp_path)
    assert [d.path for d in documents] == ["good.md"]
    assert isinstance(error, NotTextError)
    assert error.path == "odd.bin"
    assert expected in str(error)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"first\nna\xefve\n", "byte 0xef in line 2"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"cut in a letter \xc3", "byte 0xc3 in line 1"),
    ],
)
def test_text_in_another_encoding_fails_with_place_and_cure(tmp_path: Path, content: bytes, expected: str) -> None:
    write(tmp_path, {"good.md": "text", "old.txt": content})
    _, (error,) = find_documents(tmp_path)
    assert not isinstance(error, NotTextError)
    assert str(error).startswith("old.txt: ")
    assert expected in str(error)
    assert "iconv" in error.cure


def test_a_file_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    write(tmp_path, {"good.md": "text"})
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere.md")
    documents, (error,) = find_documents(tmp_path)
    assert [d.path for d in documents] == ["good.md"]
    assert "gone.md: cannot be read (No such file" in str(error)


def test_links_to_folders_are_followed_but_not_into_themselves(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"linked.md": "text"})
    docs = write(tmp_path / "docs", {"a/one.md": "text"})
    (docs / "a" / "loop").symlink_to(docs)
    (docs / "more").symlink_to(outside)
    documents, _ = find_documents(docs)
    assert [d.path for d in documents] == ["a/one.md", "more/linked.md"]


def test_pipes_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, {"good.md": "text"})
    os.mkfifo(tmp_path / "pipe")
    _, (error,) = find_documents(tmp_path)
    assert isinstance(error, NotTextError)


def test_file_names_that_are_not_utf8_are_reported(tmp_path: Path) -> None:
    write(tmp_path, {"good.md": "text"})
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xefve.md")).write_text("text")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    _, (error,) = find_documents(tmp_path)
    assert "file's name" in str(error)
    str(error).encode("utf-8")


def test_excluded_folders_are_not_entered(tmp_path: Path) -> None:
    write(tmp_path, {"good.md": "text", "cache/manifest.json": "{}"})
    documents, _ = find_documents(tmp_path, exclude=[tmp_path / "cache"])
    assert [d.path for d in documents] == ["good.md"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [({}, "holds no files"), ({"a.bin": b"\x00"}, "a.bin: binary"), ({".hid/a.md": "x"}, "holds no files")],
)
def test_a_folder_without_documents_is_refused(tmp_path: Path, files: dict[str, str | bytes], expected: str) -> None:
    write(tmp_path, files)
    with pytest.raises(UsageError, match=expected):
        find_documents(tmp_path)


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: no such file or folder"):
        find_documents(tmp_path / "nowhere")
