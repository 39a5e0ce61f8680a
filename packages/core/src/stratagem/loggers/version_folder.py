"""VersionFolder: the folder of a run within the folder of its experiment, `root/version_N`."""

from __future__ import annotations

from pathlib import Path

from stratagem.errors import ConfigurationError
from stratagem.storage import paths
from stratagem.storage.owner import Owner

_MARK = ".run"
"""A file in the folder with the ids of the runs that wrote there, one per line."""
_WRITER = ".writer"
"""A file in the folder that names the process that writes there, or how its run ended."""


def local_folder(owner: str, folder: str | Path) -> Path:
    """Return a folder that a logger writes to; `~` is the home folder.

    Args:
        owner: the logger's name, for messages.
        folder: a path, or a URL that begins with "file://".

    Raises:
        ConfigurationError: the folder is another URL.

    Example:
        >>> local_folder("CSVLogger", "logs").name
        'logs'
    """
    place = paths.parse_user_path(folder)
    if isinstance(place, Path):
        return place
    raise ConfigurationError(
        f"{owner}(save_dir={place!r}): expected a local folder, received a URL: a store of objects "
        "takes no rows one by one. Log to a local folder; checkpoints go to a URL by "
        "ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)"
    )


class VersionFolder:
    """Chooses the folder of a run, and finds it again when the run is resumed.

    The folder of a resumed run has a mark with the run's id: the checkpoint contains the id, but no
    path. A folder is not used if another process writes to it, or if its run has already continued
    from the same checkpoint to its end.

    Args:
        owner: the logger's name, for messages.
        root: the folder of all runs.
        version: an int or a name, used whether its folder exists or not; None: the version of the
            resumed run, or else the next free version.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> folder = VersionFolder("CSVLogger", root, None)
        >>> folder.begin_run("0123456789abcdef", None)
        False
        >>> folder.version
        0
        >>> again = VersionFolder("CSVLogger", root, None)
        >>> again.begin_run("0123456789abcdef", 5)
        True
        >>> again.version
        0
    """

    def __init__(self, owner: str, root: Path, version: int | str | None) -> None:
        self.root = root
        self._owner = owner
        self._version = version
        self._run_id = ""

    @property
    def version(self) -> int | str:
        """The version of the run; the folder of a new version is created.

        Raises:
            ConfigurationError: the folder cannot be created.
        """
        if self._version is None:
            self._version = self._claim()
            self._mark()
        return self._version

    @property
    def path(self) -> Path:
        """The folder of this run."""
        return self.of(self.root, self.version)

    @staticmethod
    def of(root: Path, version: int | str) -> Path:
        """Return the folder of a version."""
        return root / (f"version_{version}" if isinstance(version, int) else version)

    def make(self) -> Path:
        """Create the folder of this run and return it."""
        path = self.path
        path.mkdir(parents=True, exist_ok=True)
        self._mark()
        return path

    def begin_run(self, run_id: str, resumed_at: int | None) -> bool:
        """Set the run of this folder; find the earlier folder of a resumed run.

        Args:
            run_id: the id of the run.
            resumed_at: steps taken before the run was resumed; None: the run is new.

        Returns:
            Whether a resumed run continues in a folder to which it wrote before.
        """
        self._run_id = run_id
        if self._version is None and resumed_at is not None:
            self._version = self._find(run_id, resumed_at)
        if self._version is None:
            return False
        is_own = run_id in _runs_of(self.path)
        self._mark()
        return is_own and resumed_at is not None

    def end(self, status: str, steps: int) -> None:
        """Record how the run ended, and after how many steps."""
        if self._version is not None and self.path.is_dir():
            (self.path / _WRITER).write_text(f"{status} {steps}")

    def _claim(self) -> int:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            version = 1 + max(self._numbers(), default=-1)
        except OSError as error:
            raise ConfigurationError(
                f"{self._owner}: the folder {str(self.root)!r} cannot be made "
                f"({type(error).__name__}: {error}): pass a save_dir that can be written to"
            ) from error
        while True:
            # Creating the folder claims the number: two concurrent runs get different numbers.
            try:
                self.of(self.root, version).mkdir()
            except FileExistsError:
                version += 1
            else:
                return version

    def _numbers(self) -> list[int]:
        """Return the numbers of the existing versions."""
        numbers = (name.removeprefix("version_") for name in self._names())
        return [int(number) for number in numbers if number.isascii() and number.isdecimal()]

    def _names(self) -> list[str]:
        return [path.name for path in self.root.iterdir()] if self.root.is_dir() else []

    def _find(self, run_id: str, resumed_at: int) -> int | str | None:
        """Return the version to which the run began to write last.

        None: no folder of the run can be used.
        """
        versions: list[int | str] = [*self._numbers(), *self._names()]
        folders = {v: self.of(self.root, v) for v in versions}
        own = {
            v: folder
            for v, folder in folders.items()
            if run_id in _runs_of(folder) and not _is_taken(folder, resumed_at)
        }
        return max(own, key=lambda v: (own[v] / _MARK).stat().st_mtime_ns, default=None)

    def _mark(self) -> None:
        path = self.path
        if not self._run_id or not path.is_dir():
            return
        (path / _WRITER).write_text(str(Owner.this()))
        if self._run_id in _runs_of(path):
            (path / _MARK).touch()
            return
        with (path / _MARK).open("a") as file:
            file.write(self._run_id + "\n")


def _runs_of(folder: Path) -> list[str]:
    return _text_of(folder / _MARK).split()


def _is_taken(folder: Path, resumed_at: int) -> bool:
    """Whether another process writes here, or a run ended here after more than these steps."""
    text = _text_of(folder / _WRITER)
    status, _, steps = text.partition(" ")
    if status == "success" and steps.isdecimal():
        return int(steps) > resumed_at
    owner = Owner.parse(text)
    return owner is not None and owner != Owner.this() and owner.runs() is True


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # another tool's folder, or another user's
        return ""
