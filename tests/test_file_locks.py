from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loopinterp import file_locks, storage
from loopinterp.errors import InputError
from loopinterp.file_locks import need_writable, only_writer

HOLDER = (
    "import sys, time\n"
    "from loopinterp.file_locks import only_writer\n"
    "with only_writer(sys.argv[1], 'a run', fix='Wait.'):\n"
    "    print('held', flush=True); time.sleep(60)\n"
)


def test_the_second_writer_is_refused_and_a_death_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with (
            pytest.raises(InputError, match=r"a run: expected one writer .* another .*Wait\."),
            only_writer(path, "a run", fix="Wait."),
        ):
            pytest.fail("two writers")
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

    monkeypatch.setattr(file_locks, "lock", no_locks)
    with (
        pytest.warns(UserWarning, match="it is not locked against a second writer"),
        only_writer(tmp_path / "lock", "it", fix=""),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(InputError, match="a folder that can be written"),
        only_writer(tmp_path / "file" / "lock", "it", fix=""),
    ):
        pytest.fail("written")


@pytest.mark.parametrize("place", ["x", "zoo/x", "zoo/../x", "no/such/folder/x"])
def test_the_package_itself_is_only_read(place: str) -> None:
    package = Path(file_locks.__file__).parent
    for write in (need_writable, lambda path: storage.write_bytes(path, b"")):
        with pytest.raises(InputError, match="a place outside the package"):
            write(package / place)
    with (
        pytest.raises(InputError, match="a place outside"),
        only_writer(package / "x", "it", fix=""),
    ):
        pytest.fail("written")
    assert not (package / "x").exists() and not (package / "no").exists()


def test_a_link_into_the_package_is_no_way_around(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(Path(file_locks.__file__).parent)
    with pytest.raises(InputError, match="a place outside"):
        need_writable(tmp_path / "link" / "x")
    need_writable(tmp_path / "x")
    need_writable("a\0b")  # whoever opens it says what is wrong
