from __future__ import annotations

import errno
import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from loopinterp.core import storage
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.storage import need_writable, only_writer


def test_json_comes_back_as_it_went(tmp_path: Path) -> None:
    document = {"a": [1, 2.5, None, True], "b": {"c": "×"}}
    storage.write_json(tmp_path / "deep" / "er" / "x.json", document)
    assert storage.read_json(tmp_path / "deep" / "er" / "x.json") == document


def test_numpy_values_and_paths_become_json(tmp_path: Path) -> None:
    document = {"f": np.float32(0.5), "i": np.arange(3), "p": Path("a/b"), "b": np.bool_(True)}
    storage.write_json(tmp_path / "x.json", document)
    expected = {"f": 0.5, "i": [0, 1, 2], "p": "a/b", "b": True}
    assert storage.read_json(tmp_path / "x.json") == expected


def test_what_is_not_json_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    storage.write_json(tmp_path / "x.json", {"old": 1})
    with pytest.raises(TypeError, match=r"\bset\b"):
        storage.write_json(tmp_path / "x.json", {"new": {1, 2}})
    assert storage.read_json(tmp_path / "x.json") == {"old": 1}


def test_tensors_come_back_with_dtype_shape_and_metadata(tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.empty(0, 5),
    }
    storage.write_tensors(tmp_path / "x.safetensors", tensors, {"hash": "abc"})
    back = storage.read_tensors(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)


def test_arrays_come_back(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3).T, "flag": np.array([True, False])}
    storage.write_arrays(tmp_path / "x.safetensors", arrays, {"about": "×"})
    back, texts = storage.read_arrays(tmp_path / "x.safetensors")
    assert texts == {"about": "×"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write_bytes(tmp_path / "x", b"old")

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(InputError) as caught:
        storage.write_bytes(tmp_path / "x", b"new")
    assert caught.value.what == f"output file {tmp_path / 'x'}"
    assert caught.value.given == os.strerror(errno.ENOSPC)
    assert caught.value.fix.startswith("Free some space")
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_writer_killed_at_any_moment_never_leaves_a_part(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    storage.write_json(target, {"value": 0, "pad": "." * 100_000})
    code = (
        "import sys; from loopinterp.core.storage import write_json\n"
        "for i in range(10**9):\n"
        "    write_json(sys.argv[1], {'value': i, 'pad': '.' * 100_000})\n"
        "    print(i, flush=True)\n"
    )
    for lines in (1, 2, 5, 9):
        command = [sys.executable, "-c", code, str(target)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(lines):
                writer.stdout.readline()
            writer.kill()
        document = storage.read_json(target)
        assert document["value"] >= lines - 1
        assert len(document["pad"]) == 100_000


def test_the_umask_does_not_hide_files_from_the_group(tmp_path: Path) -> None:
    storage.write_bytes(tmp_path / "x", b"1")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError) as caught:
        storage.write_json(tmp_path / "file" / "x.json", {})
    assert caught.value.what == f"output folder {tmp_path / 'file'}"


BOMBS = [b"[" + b"1" * 5000 + b"]", b"[" * 200_000, b'{"a":' * 200_000]
"""Valid as far as they go, and too much for Python's parser."""


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00", b'{"a": 1}}', *BOMBS], ids=len)
def test_damaged_json_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        storage.read_json(tmp_path / "x.json")
    assert caught.value.what == f"file {tmp_path / 'x.json'}"
    assert caught.value.expected == "valid JSON"


@pytest.mark.parametrize("reader", [storage.read_json, storage.read_tensors, storage.read_arrays])
def test_a_missing_file_is_named(tmp_path: Path, reader: object) -> None:
    assert callable(reader)
    with pytest.raises(CheckpointError) as caught:
        reader(tmp_path / "absent")
    assert caught.value.what == f"file {tmp_path / 'absent'}"
    assert caught.value.given == os.strerror(errno.ENOENT)


@pytest.mark.parametrize("keep", [0, 4, 20, 90, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "x.safetensors"
    storage.write_tensors(path, {"w": torch.ones(8, 8)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError) as caught:
        storage.read_tensors(path)
    size = path.stat().st_size
    assert caught.value.what == f"file {path}" and caught.value.given.startswith(f"{size} bytes")


def test_a_flipped_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    storage.write_tensors(path, {"w": torch.ones(8, 8)})
    data = bytearray(path.read_bytes())
    data[8] = 0
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        storage.read_tensors(path)
    assert caught.value.what == f"file {path}"
    assert caught.value.given.startswith(f"{len(data)} bytes")


def test_a_flip_of_any_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    storage.write_tensors(path, {"w": torch.ones(4), "é": torch.zeros(3).bool()}, {"a": "1 ×"})
    original = path.read_bytes()
    for place in range(len(original)):
        for bit in (1, 32):
            flipped = bytearray(original)
            flipped[place] ^= bit
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError):
                storage.read_tensors(path)
    path.write_bytes(original)
    assert storage.read_tensors_and_metadata(path)[1] == {"a": "1 ×"}


def test_a_file_that_was_written_elsewhere_has_no_seal_and_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", {"format": "pt", "sha256": "?"})
    tensors, texts = storage.read_tensors_and_metadata(tmp_path / "x.safetensors")
    assert tensors["w"].tolist() == [1, 1] and texts == {"format": "pt", "sha256": "?"}


def test_the_same_content_gives_the_same_bytes_each_time(tmp_path: Path) -> None:
    """safetensors' own order of texts is another one each time."""
    path, seen = tmp_path / "x", set()
    for _ in range(5):
        storage.write_tensors(path, {"w": torch.ones(2)}, {text: text for text in "abcdefgh"})
        seen.add(path.read_bytes())
    assert len(seen) == 1


def test_arrays_that_numpy_cannot_hold_are_one_clear_error(tmp_path: Path) -> None:
    storage.write_tensors(tmp_path / "x.safetensors", {"w": torch.ones(2, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError) as caught:
        storage.read_arrays(tmp_path / "x.safetensors")
    assert caught.value.what == f"file {tmp_path / 'x.safetensors'}"
    assert "NumPy" in caught.value.expected


def test_what_is_no_plain_file_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name, words in (("pipe", "a pipe"), ("zeros", "a device"), ("folder", "a folder")):
        for reader in (storage.read_json, storage.read_tensors):
            once = f"^file [^:]*: expected a plain file, got .*{words}"
            with pytest.raises(CheckpointError, match=once):
                reader(tmp_path / name)
    storage.write_json(tmp_path / "there", 1)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert storage.read_json(tmp_path / "link") == 1


def test_digests_see_names_types_shapes_and_values() -> None:
    one = {"w": torch.ones(2, 3)}
    others = [
        {"v": torch.ones(2, 3)},
        {"w": torch.ones(3, 2)},
        {"w": torch.ones(2, 3).int()},
        {"w": torch.full((2, 3), 1 + 1e-7)},
        {},
        one | {"b": torch.ones(())},
    ]
    digests = {storage.digest_tensors(tensors) for tensors in [one, *others]}
    assert len(digests) == 7
    assert storage.digest_tensors({"w": torch.ones(3, 2).T}) in digests


HANGING_WRITER = (
    "import os, sys, time\n"
    "from loopinterp.core.storage import write_bytes\n"
    "os.replace = lambda *_: (print('written', flush=True), time.sleep(60))\n"
    "write_bytes(sys.argv[1], b'new')\n"
)


def test_what_a_kill_leaves_is_swept_by_the_next_write_and_nothing_else(tmp_path: Path) -> None:
    target, other = tmp_path / "x.json", tmp_path / "y.json"
    mine = [".x.json.abc", ".x.json.a1b2c3d4", f".part-{'0' * 16}-{'0' * 16}", "x.json.part"]
    for name in mine:
        (tmp_path / name).write_bytes(b"kept")
    writers = [
        subprocess.Popen([sys.executable, "-c", HANGING_WRITER, str(path)], stdout=subprocess.PIPE)
        for path in (target, target, other)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"written\n"
        writers[0].kill()
        writers[0].wait()
        before = {path.name for path in tmp_path.iterdir()}
        assert len(before) == 3 + len(mine)
        storage.write_bytes(target, b"whole")
        # That of the living writer of the same file is left alone, and that of another file.
        after = {path.name for path in tmp_path.iterdir()}
        assert len(before - after) == 1 and after - before == {"x.json"}
        assert set(mine) <= after
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    for path in (target, other):
        storage.write_bytes(path, b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", "y.json", *mine}


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "zip.safetensors")
    (tmp_path / "raw.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    storage.write_tensors(tmp_path / "named.pkl", {"w": torch.ones(2)})
    for name in ("zip.safetensors", "raw.safetensors", "named.pkl"):
        with pytest.raises(CheckpointError, match="a pickle"):
            storage.read_tensors(tmp_path / name)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name_length", range(1, 120))
def test_no_header_length_is_mistaken_for_a_pickle(tmp_path: Path, name_length: int) -> None:
    path = tmp_path / "x.safetensors"
    storage.write_arrays(path, {"x" * name_length: np.zeros(1)})
    arrays, texts = storage.read_arrays(path)
    assert list(arrays) == ["x" * name_length] and texts == {}


def test_json_of_infinities_can_be_read_back(tmp_path: Path) -> None:
    storage.write_json(tmp_path / "x.json", {"a": float("inf"), "b": float("nan")})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text)["a"] == float("inf")


@pytest.mark.parametrize("text", ["[1]", "3", "null", '"words"'])
def test_json_that_is_no_object_is_refused_where_an_object_is_wanted(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        storage.read_json_object(path)
    assert (caught.value.what, caught.value.expected) == (f"file {path}", "a JSON object")
    assert f"({type(json.loads(text)).__name__})" in caught.value.given
    path.write_text('{"a": 1}')
    assert storage.read_json_object(path) == {"a": 1}


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_files_have_the_permissions_of_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        storage.write_json(tmp_path / "new.json", {})
        (tmp_path / "opened").write_text("")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("new.json", "opened")]
    assert modes[0] == modes[1] == 0o666 & ~mask


HOLDER = (
    "import sys, time\n"
    "from loopinterp.core.storage import only_writer\n"
    "with only_writer(sys.argv[1], 'a run', fix='Wait.'):\n"
    "    print('held', flush=True); time.sleep(60)\n"
)


def test_the_second_writer_is_refused_and_a_death_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(InputError) as caught, only_writer(path, "a run", fix="Wait."):
            pytest.fail("two writers")
        assert (caught.value.what, caught.value.fix) == ("a run", "Wait.")
        holder.kill()
    with only_writer(path, "a run", fix="Wait."):
        pass
    with only_writer(path, "a run", fix="Wait."):
        pass


def test_an_error_inside_lets_go(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), only_writer(tmp_path / "lock", "it", fix=""):
        _ = 1 / 0
    with only_writer(tmp_path / "lock", "it", fix=""):
        pass


def test_where_nothing_can_be_locked_writing_goes_on_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: int) -> bool:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(storage, "lock", no_locks)
    with (
        pytest.warns(UserWarning, match=r"\[Errno 38\]"),
        only_writer(tmp_path / "lock", "it", fix=""),
    ):
        pass


def test_a_folder_of_locks_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(InputError) as caught,
        only_writer(tmp_path / "file" / "lock", "it", fix=""),
    ):
        pytest.fail("written")
    assert caught.value.what == f"output folder {tmp_path / 'file'}"


@pytest.mark.parametrize("place", ["x", "zoo/x", "zoo/../x", "no/such/folder/x"])
def test_the_package_itself_is_only_read(place: str) -> None:
    package = Path(storage.__file__).parent.parent
    for write in (need_writable, lambda path: storage.write_bytes(path, b"")):
        with pytest.raises(InputError) as caught:
            write(package / place)
        assert caught.value.what.startswith(f"output {package}")
        assert caught.value.given == "one inside it"
    with pytest.raises(InputError) as caught, only_writer(package / "x", "it", fix=""):
        pytest.fail("written")
    assert (caught.value.what, caught.value.given) == (f"output {package}", "one inside it")
    assert not (package / "x").exists() and not (package / "no").exists()


def test_a_link_into_the_package_is_no_way_around(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(Path(storage.__file__).parent.parent)
    with pytest.raises(InputError) as caught:
        need_writable(tmp_path / "link" / "x")
    assert caught.value.what == f"output {tmp_path / 'link' / 'x'}"
    assert caught.value.given == "one inside it"
    need_writable(tmp_path / "x")
    need_writable("a\0b")  # whoever opens it says what is wrong
