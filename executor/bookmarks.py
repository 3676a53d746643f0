"""Where the loaders of a run's training data are: one, or several that are read in turns, each at its own place."""

from dataclasses import dataclass

from .state.checkpoint_folder import DataPlace, Progress


@dataclass(eq=False)
class Bookmark:
    """A place in training data. data: what is read, in words. is_read: whether a loader is at it. has_moved: that one
    has read something. was_left: the last one did not come to the end of its epoch. is_behind: a loader at a new
    place began since something was read here."""

    data: str = ""
    epoch: int = 0
    samples: int = 0
    is_read: bool = False
    has_moved: bool = False
    was_left: bool = False
    is_behind: bool = False

    def took(self, samples: int) -> None:
        """Samples of this epoch are behind it."""
        self.samples, self.has_moved, self.is_behind = samples, True, False

    def end(self) -> None:
        """The loader has come to the end of its epoch."""
        self.epoch, self.samples, self.is_read = self.epoch + 1, 0, False

    def leave(self) -> None:
        """The loop has left the loader, or that has failed; the next one begins another epoch, if anything was read of
        this one and the run is not resumed here."""
        self.was_left, self.is_read = self.has_moved, False


class Bookmarks:
    """All places. saved: where to go on.

    A loader that begins takes the place of an earlier one that has ended, of one with the same data where there is a
    choice; while all others are being read, a new one. What is saved begins with the places that are read in turns; one
    of a loader that another one has followed (of a warm-up, say) comes behind them.
    """

    def __init__(self, saved: Progress | None = None) -> None:
        saved = Progress() if saved is None else saved
        places = [DataPlace(data=saved.data, epoch=saved.epoch, samples=saved.samples), *saved.others]
        self._all = [Bookmark(place.data, place.epoch, place.samples) for place in places]

    def begin(self, data: str) -> Bookmark:
        """The place of a loader of this data that begins."""
        others = [mark for mark in self._all if mark.is_read]
        free = [mark for mark in self._all if not mark.is_read]
        mark = next((mark for mark in free if mark.data == data), free[0] if free else None)
        if mark is None:
            mark = Bookmark(epoch=max((other.epoch for other in others if other.data == data), default=0))
            self._all.append(mark)
            for other in others:
                other.is_behind = True
        if mark.was_left:
            mark.epoch, mark.samples, mark.was_left = mark.epoch + 1, 0, False
        mark.data, mark.is_read, mark.has_moved, mark.is_behind = data, True, False, False
        return mark

    def progress(self, steps: int) -> Progress:
        """How far the run has come."""
        marks = sorted(self._all, key=lambda mark: mark.is_behind)
        first, *others = (DataPlace(data=r.data, epoch=r.epoch, samples=r.samples) for r in marks)
        return Progress(steps=steps, data=first.data, epoch=first.epoch, samples=first.samples, others=tuple(others))
