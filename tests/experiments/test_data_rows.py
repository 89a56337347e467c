"""Patch rows and grids."""

import math

import numpy as np
import pytest

from experiments.data import frames_from_rows, grid_positions, rows_from_frames, snap_grid


@pytest.mark.parametrize(("t", "h", "w", "patch"), [(1, 2, 3, 4), (3, 4, 1, 2), (2, 1, 1, 8)])
def test_rows_round_trip(t, h, w, patch):
    frames = np.random.default_rng(0).integers(0, 256, (t, h * patch, w * patch, 3), np.uint8)
    rows = rows_from_frames(frames, patch=patch)
    assert rows.shape == (t * h * w, patch * patch * 3)
    assert rows.dtype == np.float32
    assert rows.min() >= -1.0
    assert rows.max() <= 1.0
    np.testing.assert_array_equal(frames_from_rows(rows, grid=(t, h, w), patch=patch), frames)


def test_row_order_is_t_h_w_then_y_x_channel():
    t, h, w, p = 2, 3, 2, 2
    frames = np.arange(t * h * p * w * p * 3, dtype=np.uint8).reshape(t, h * p, w * p, 3)
    rows = rows_from_frames(frames, patch=p)
    for i, (a, b, c) in enumerate(grid_positions((t, h, w))):
        tile = frames[a, b * p : b * p + p, c * p : c * p + p].reshape(-1)
        np.testing.assert_allclose(rows[i], tile / 127.5 - 1, atol=1e-6)


def test_rows_reject_what_the_patch_does_not_divide():
    with pytest.raises(ValueError, match="multiples of patch"):
        rows_from_frames(np.zeros((1, 6, 8, 3), np.uint8), patch=4)
    with pytest.raises(ValueError, match="rows must be"):
        frames_from_rows(np.zeros((5, 48), np.float32), grid=(1, 2, 3), patch=4)


def test_positions_of_a_cut_grid_are_the_first_ones():
    np.testing.assert_array_equal(grid_positions((2, 3, 4), 17), grid_positions((2, 3, 4))[:17])


@pytest.mark.parametrize(
    ("height", "width"), [(64, 64), (100, 37), (37, 100), (720, 1280), (1280, 720), (33, 3000), (4000, 17)]
)
@pytest.mark.parametrize("most", [7, 64, 1024])
def test_snap_grid_keeps_aspect_within_the_budget(height, width, most):
    patch = 16
    h, w = snap_grid(height, width, patch=patch, max_patches=most)
    assert 1 <= h * w <= most
    scale = min(1.0, math.sqrt(most / (height / patch * width / patch)))
    for side, got in ((height, h), (width, w)):
        ideal = side / patch * scale
        if min(height, width) / patch * scale >= 1:  # no side is held up at a single patch
            assert abs(got - ideal) <= max(1.0, 0.5 + 0.1 * ideal)
    if height / patch * width / patch < most * 0.9:
        assert max(abs(h * patch - height), abs(w * patch - width)) <= patch / 2


def test_snap_grid_is_exact_where_the_size_fits():
    assert snap_grid(720, 1280, patch=16, max_patches=3600) == (45, 80)
    assert snap_grid(720, 1280, patch=16, max_patches=3599) == (45, 79)
    assert snap_grid(4, 4, patch=4, max_patches=1) == (1, 1)


@pytest.mark.parametrize(
    ("height", "width", "most", "match"),
    [(3, 9, 4, "both sides"), (9, 3, 4, "both sides"), (9, 9, 0, "max_patches")],
)
def test_snap_grid_errors(height, width, most, match):
    with pytest.raises(ValueError, match=match):
        snap_grid(height, width, patch=4, max_patches=most)
