"""What a picture must not do: cross a leader, cover a label, name one place twice."""

import itertools

import pytest

from costmodel.cli.pictures.figure import Labels, new_figure
from costmodel.cli.pictures.roofline import Dot, _coinciding, _roofs
from costmodel.hardware.hardware import load_hardware


@pytest.fixture
def labels():
    _, axes = new_figure()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    return Labels(axes)


def test_leaders_cross_nothing_and_labels_cover_no_label(labels):
    """A column of close points between two lines: more than have room beside them."""
    points = [(5 + 0.05 * (i % 3), 4 + 0.1 * i) for i in range(12)]
    for point in points:
        labels.avoid_point(point, 6)
    labels.avoid_line([(0, 3.5), (10, 3.5)])
    labels.avoid_line([(0, 7.5), (10, 7.5)])
    lines = len(labels.lines)
    for i, point in enumerate(points):
        labels.place(f"point {i}", point, "black", 4)
    placed = labels.lines[lines:]
    assert len(placed) >= 6
    for one, other in itertools.combinations(labels.lines, 2):
        assert not (one in placed or other in placed) or not one.intersects_path(other, filled=False)
    boxes = labels.boxes[len(points) :]
    assert len(boxes) == len(placed)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_a_label_without_room_is_left_out(labels):
    labels.boxes.append(labels.axes.bbox)
    labels.place("nowhere", (5, 5), "black")
    assert labels.lines == []


def test_dots_in_one_place_share_a_label(labels):
    def dot(name, setup, intensity, share):
        return Dot(name, setup, intensity, 5e12, 6e12, "bf16", share)

    dots = [dot("fc1", "a", 2, 0.2), dot("fc2", "b", 2.01, 0.5), dot("softmax", "a", 8, 0.3)]
    groups = _coinciding(dots, labels)
    assert [[dot.name for dot in group] for group in groups] == [["fc2", "fc1"], ["softmax"]]


def test_datatypes_of_one_rate_keep_their_names():
    roofs = _roofs(load_hardware("h100"))
    assert ["fp8", "int8"] in roofs.values()
    assert sorted(itertools.chain(*roofs.values())) == ["bf16", "fp32", "fp8", "int8", "tf32"]
    assert ["vector"] in _roofs(load_hardware("msfp-accelerator")).values()
