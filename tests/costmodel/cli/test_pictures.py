"""What a picture must not do: cover a name, name one place twice."""

import itertools

import pytest

pytest.importorskip("matplotlib")

from matplotlib.text import Text

from costmodel.cli.pictures.figure import around, name_points, new_figure
from costmodel.cli.pictures.roofline import Dot, coinciding, roofs
from costmodel.hardware.hardware import load_hardware


def names_on(axes, points, taken):
    name_points(axes, [(f"point {index}", point, "black") for index, point in enumerate(points)], taken)
    renderer = axes.figure.canvas.get_renderer()
    return [Text.get_window_extent(text, renderer) for text in axes.texts]


def test_names_cover_nothing_and_are_left_out_where_there_is_no_room():
    _, axes = new_figure()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    points = [(5 + 0.05 * (i % 3), 4 + 0.1 * i) for i in range(12)]
    taken = [around(axes, point, 6) for point in points]
    boxes = names_on(axes, points, taken)
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for one, other in itertools.combinations([*boxes, *taken], 2) if one in boxes)
    assert len(names_on(axes, [(5, 5)], [axes.bbox])) == len(points)


def test_dots_in_one_place_share_a_name():
    def dot(name, setup, intensity, share):
        return Dot(name, setup, intensity, 5e12, 6e12, "bf16", share)

    dots = [dot("fc1", "a", 2, 0.2), dot("fc2", "b", 2.01, 0.5), dot("softmax", "a", 8, 0.3)]
    assert [[dot.name for dot in group] for group in coinciding(dots)] == [["fc2", "fc1"], ["softmax"]]


def test_roofs_of_about_one_rate_share_a_label():
    found = roofs(load_hardware("h100"))
    assert ["fp8", "int8"] in [names for _, names in found]
    assert ["fp32", "vector"] in [sorted(names) for _, names in found]
    assert all(high[0] > 1.3 * low[0] for high, low in itertools.pairwise(found))
