"""Names beside marks: short enough to fit, far enough apart to read."""

from collections.abc import Sequence
from dataclasses import dataclass

CHARACTER, LINE = 6.6, 15  # width and height of 12 px text


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        beside = self.left >= other.right or other.left >= self.right
        return not (beside or self.top >= other.bottom or other.top >= self.bottom)

    def inside(self, other: "Box") -> bool:
        across = other.left <= self.left and self.right <= other.right
        return across and other.top <= self.top and self.bottom <= other.bottom


def wide(text: str) -> float:
    return len(text) * CHARACTER


def short(name: str, longest: int = 15) -> str:
    """A long name with its middle left out: both ends tell variants apart."""
    return name if len(name) <= longest else f"{name[: longest - 7]}…{name[-6:]}"


def shorten(names: Sequence[str]) -> dict[str, str]:
    """A short label a name. Where two would look the same, each shows the place at which they part instead."""
    labels = {name: short(name) for name in names}
    for label in {one for one in labels.values() if list(labels.values()).count(one) > 1}:
        alike = [name for name in names if labels[name] == label]
        part = _common_start(alike)
        for name in alike:
            labels[name] = f"{name[:4]}…{name[max(4, part - 1) : part + 9]}"
    return labels


def _common_start(names: Sequence[str]) -> int:
    """How many leading characters all names share."""
    columns = zip(*names, strict=False)
    return next((i for i, letters in enumerate(columns) if len(set(letters)) > 1), min(map(len, names)))


def spread(wanted: Sequence[float], top: float, bottom: float) -> list[float]:
    """Ascending positions at least one line apart, near the wanted ones, above `bottom`."""
    places: list[float] = []
    for want in wanted:
        places.append(max(want, places[-1] + LINE if places else top))
    floor = bottom
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], floor)
        floor = places[i] - LINE
    return places


def free(x: float, y: float, width: float, taken: Sequence[Box], area: Box) -> Box:
    """The first place around (x, y) in `area` that meets nothing taken, moving away step by step."""
    for away in range(0, 120, 6):
        up, down = y - 9 - away, y + 9 + away
        corners = [(x + 9, up), (x + 9, down), (x - 9 - width, up), (x - 9 - width, down)]
        middles = [(x - width / 2, up - 7), (x - width / 2, down + 7)]
        for left, middle in corners + middles:
            box = Box(left, middle - 8, left + width, middle + 8)
            if box.inside(area) and not any(box.meets(other) for other in taken):
                return box
    return Box(x + 9, y - 17, x + 9 + width, y - 1)
