"""Nothing is built, believed or loaded where another user could have put something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sightline.recording.native import trusted_files
from sightline.recording.native.builder import import_extension
from tests.recording.native.stand_in import FakeCompiler, builder, sentence

pytestmark = pytest.mark.usefixtures("own_environment")
STRANGER = 4321


def open_to_others(path: Path) -> None:
    """Have another user own a folder or file; where the tests may not, let everybody write it."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        path.chmod(0o777)


def refusal(folder: Path, part: Path) -> str:
    return (
        f"The native engine is neither built nor loaded in {folder}, because another user owns or can change "
        f"{part}: set SIGHTLINE_CACHE to a folder of your own."
    )


@pytest.mark.parametrize("which", ["cache", "native", "folder", "above"])
def test_a_folder_of_another_user_on_the_way(
    fake: FakeCompiler, sources: Path, tmp_path: Path, which: str
) -> None:
    cache = tmp_path / "shared" / "cache"
    made = builder(sources, cache)
    made.folder.mkdir(parents=True)
    part = {"cache": cache, "native": cache / "native", "folder": made.folder, "above": cache.parent}[which]
    open_to_others(part)
    assert sentence(made.build) == refusal(made.folder, part)
    assert sentence(made.existing) == refusal(made.folder, part)
    assert fake.calls == 0
    assert list(made.folder.iterdir()) == []


def test_a_folder_that_its_owner_opens_while_it_builds(
    fake: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    """The file is checked when it is loaded, not only before it is built."""
    cache = tmp_path / "shared" / "cache"
    made = builder(sources, cache)
    fake.does(f'chmod 777 "{cache.parent}"')
    path = made.build()
    assert sentence(lambda: import_extension(path)) == refusal(made.folder, cache.parent)
    cache.parent.chmod(0o755)
    assert import_extension(path).answer() == 42


def test_a_file_of_another_user(fake: FakeCompiler, sources: Path, cache: Path) -> None:
    path = builder(sources, cache).build()
    open_to_others(path)
    said = (
        f"The native engine in {path.parent} is not loaded, because another user owns {path.name} or can "
        "write it: remove it, or set SIGHTLINE_CACHE to a folder of your own."
    )
    assert sentence(lambda: import_extension(path)) == said
    assert sentence(builder(sources, cache).build) == said


def test_a_link_in_place_of_the_extension(
    fake: FakeCompiler, sources: Path, cache: Path, tmp_path: Path
) -> None:
    path = builder(sources, cache).build()
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert sentence(lambda: import_extension(path)) == refusal(path.parent, path)


@pytest.mark.parametrize("name", ["build.log", "facts.json", "failed.txt", "lock", "_observer.so"])
@pytest.mark.parametrize("fails", [False, True])
def test_no_link_is_followed(
    fake: FakeCompiler, sources: Path, cache: Path, tmp_path: Path, name: str, fails: bool
) -> None:
    private = tmp_path / "diary"
    private.write_text("mine", "utf-8")
    made = builder(sources, cache)
    made.folder.mkdir(parents=True)
    (made.folder / name).symlink_to(private)
    if fails:
        fake.does("exit 1")
    if fails or name not in ("build.log", "facts.json"):
        assert sentence(made.build)
    else:
        assert import_extension(made.build()).answer() == 42
        assert not (made.folder / name).is_symlink()
    assert private.read_text("utf-8") == "mine"


def test_a_path_that_leads_through_a_folder_of_another_user(
    fake: FakeCompiler, sources: Path, tmp_path: Path
) -> None:
    """Who owns the folder of a link says where it leads."""
    (tmp_path / "mine").mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "cache").symlink_to(tmp_path / "mine")
    open_to_others(shared)
    made = builder(sources, shared / "cache")
    assert sentence(made.build) == refusal(made.folder, shared)
    shared.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(shared, 0, 0)
    assert import_extension(made.build()).answer() == 42  # a link of one's own is no fault


def test_folders_that_others_may_use_but_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp

    sticky = tmp_path / "tmp"
    (sticky / "cache").mkdir(parents=True)
    sticky.chmod(0o1777)
    trusted_files.check_folder(sticky / "cache" / "native")
    assert "can change" in sentence(lambda: trusted_files.check_folder(sticky))
    sticky.chmod(0o770)  # as in systems where every user has a group of the same name
    entry = grp.struct_group(("somebody", "x", sticky.stat().st_gid, ["somebody", "else"]))
    monkeypatch.setattr(grp, "getgrgid", lambda number: entry)
    assert "can change" in sentence(lambda: trusted_files.check_folder(sticky / "cache"))
    monkeypatch.undo()
    import pwd

    name = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group((name, "x", number, [])))
    trusted_files.check_folder(sticky / "cache")


def test_what_is_not_there_is_no_fault(tmp_path: Path) -> None:
    trusted_files.check_folder(tmp_path / "nowhere" / "below")
    assert not trusted_files.exists(tmp_path / "nowhere" / "file")
    assert trusted_files.read_text(tmp_path / "nowhere" / "file") is None
