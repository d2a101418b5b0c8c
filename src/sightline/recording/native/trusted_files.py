"""Files of a cache that are run or believed: no other user may have been able to write them.

One rule for everything that is loaded, now and when an engine comes built: every folder on the way belongs to
this user or to root and can be written by nobody else, and so does the file, which is opened without
following a link, checked by its descriptor, and loaded from it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from sightline.errors import NativeUnavailable

CACHE: Final = "SIGHTLINE_CACHE"
#: The folder of the package: engines in it were installed, and no other cache changes who may write them.
_PACKAGE: Final = Path(__file__).parents[2]
_OWN: Final = "let it belong to you or to root, and let nobody else write it (chmod go-w)"
_MOST_LINKS: Final = 40


def check_folder(folder: Path) -> None:
    """Raise unless nobody else can replace a folder, write into it, or change where its path leads.

    It need not exist yet. Others may write into a folder above it that is sticky, as `/tmp` is.
    """
    try:
        for each, info in _folders_to(folder):
            last = each == os.path.realpath(folder)
            if not _is_own(info) or _others_write(info, sticky_is_safe=not last):
                raise _refused(folder, each)
    except PermissionError as error:
        raise _unreadable(folder) from error
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise


def open_file(path: Path) -> int:
    """A descriptor of a file to be loaded; raises `FileNotFoundError`, or the sentence why it is not safe."""
    check_folder(path.parent)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except PermissionError as error:
        raise _unreadable(path.parent) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path.parent, str(path)) from error
        raise
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode) or not _is_own(info) or _others_write(info, sticky_is_safe=False):
        os.close(file)
        repair = f"remove it, or set {CACHE} to a folder of your own"
        raise NativeUnavailable(
            f"The native engine in {path.parent} is not loaded, because another user owns {path.name} or can "
            f"write it: {_OWN if _is_installed(path) else repair}."
        )
    return file


def exists(path: Path) -> bool:
    """Whether there is a file to be loaded; raises if it is not safe."""
    try:
        os.close(open_file(path))
    except FileNotFoundError:
        return False
    return True


def read_text(path: Path) -> str | None:
    """The text of a small file beside the extension; None if there is none."""
    try:
        with os.fdopen(open_file(path), encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None


def write_text(path: Path, text: str) -> None:
    """Put a new file in the place of whatever is there, be it a link."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """A descriptor of a file that is only locked, made if needed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path.parent, str(path)) from error
        raise
    try:
        yield file
    finally:
        os.close(file)


def _folders_to(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder and every link that has a part in where a path leads, below the root."""
    at, parts, links = "/", deque(folder.absolute().parts[1:]), 0
    while parts:
        part = parts.popleft()
        if part == "..":
            at = os.path.dirname(at)
            continue
        each = os.path.join(at, part)
        info = os.lstat(each)
        yield each, info
        if not stat.S_ISLNK(info.st_mode):
            at = each
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        target = Path(os.readlink(each))
        if target.is_absolute():
            at = "/"
        parts.extendleft(reversed([one for one in target.parts if one != "/"]))


def _is_own(info: os.stat_result) -> bool:
    return info.st_uid in (0, os.geteuid())


def _others_write(info: os.stat_result, *, sticky_is_safe: bool) -> bool:
    """Whether another user can write a file, or add to a folder and take away from it."""
    if stat.S_ISLNK(info.st_mode):  # the mode of a link says nothing
        return False
    if sticky_is_safe and stat.S_ISDIR(info.st_mode):
        if info.st_mode & stat.S_ISVTX:
            return False
        if not info.st_mode & stat.S_IWOTH and _is_private_group(info.st_gid):
            return False
    return bool(info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _is_private_group(number: int) -> bool:
    """Whether a group has no member but this user, as where every user has a group of the same name."""
    import grp  # neither is on Windows, where this is never reached
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _refused(folder: Path, part: str) -> NativeUnavailable:
    why = f"because another user owns or can change {part}"
    if _is_installed(folder):
        return NativeUnavailable(f"The native engine in {folder} is not loaded, {why}: {_OWN}.")
    return NativeUnavailable(
        f"The native engine is neither built nor loaded in {folder}, {why}: "
        f"set {CACHE} to a folder of your own."
    )


def _unreadable(folder: Path) -> NativeUnavailable:
    other = "" if _is_installed(folder) else f", or set {CACHE} to another folder"
    return NativeUnavailable(
        f"The native engine in {folder} cannot be read by this user: make it readable with "
        f"`chmod -R a+rX`{other}."
    )


def _is_installed(path: Path) -> bool:
    """Whether a path is inside the package itself."""
    return path.absolute().is_relative_to(_PACKAGE)
