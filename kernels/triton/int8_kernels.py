"""Products of packed codes in Triton: codes made ready (``expand``), then multiplied as int8 (``multiply``).

A vector is a row of a or a column of b: what the contraction runs along, in runs of RUN values. Where all boxes of a
run can be brought to one step, by shifting narrow codes, exactly, one integer dot product takes the run, else a box.

Suffixes: V vectors of a tile, K a run's values, B its boxes, X values of a box, T and C as in tiles.py; M rows and N
columns of a tile of the product, D values of a dot product.
"""

import triton
import triton.language as tl

from dsq.kernels.triton.codec_kernels import exponent_of_tensor
from dsq.kernels.triton.tiles import as_words, load_words, split_words


@triton.jit(do_not_specialize=["vectors", "depth", "boxes", "last"])
def expand(
    codes_pointer, scales_pointer, out_codes_pointer, out_steps_pointer, out_apart_pointer,
    vectors, depth, boxes, last, row_words, scales_to_vector, scales_to_box, out_vectors, out_depth,
    GRID: tl.constexpr, OF_TENSOR: tl.constexpr, BITS: tl.constexpr, BOX: tl.constexpr, SPARE: tl.constexpr,
    ACROSS: tl.constexpr, WORD: tl.constexpr, V: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A run of V vectors: codes as bytes, a vector's side by side, and the steps of boxes, a box's side by side. Codes
    of BITS bits may be shifted by SPARE (-1: none is); ``out_apart`` counts the runs of a vector that this does not
    bring to one step. ACROSS: a row of packed codes holds one index of the contraction, else a vector."""
    runs = out_depth // RUN  # in the one dimension of a grid that may pass 65,535
    first, run = (tl.program_id(0) // runs).to(tl.int64) * V, tl.program_id(0) % runs
    vector_V = first + tl.arange(0, V)
    at_K = run * RUN + tl.arange(0, RUN)
    box_B = run * (RUN // BOX) + tl.arange(0, RUN // BOX)
    codes_pointer = as_words(codes_pointer, WORD)
    if ACROSS:
        row_K = at_K.to(tl.int64)
        col0_K = tl.zeros_like(row_K) + first
        words = load_words(codes_pointer, row_K, col0_K, row_K < depth, row_words, BITS, WORD, RUN, V)
        code_VK = tl.trans(split_words(words, BITS, WORD, RUN, V))
    else:
        col0_V = tl.zeros_like(vector_V) + run * RUN
        words = load_words(codes_pointer, vector_V, col0_V, vector_V < vectors, row_words, BITS, WORD, V, RUN)
        code_VK = split_words(words, BITS, WORD, V, RUN)
    SIGN: tl.constexpr = 1 << (BITS - 1)
    code_VBX = tl.reshape((code_VK ^ SIGN) - SIGN, (V, RUN // BOX, BOX))
    tensor = exponent_of_tensor(scales_pointer, last, OF_TENSOR)
    mask_VB = (vector_V < vectors)[:, None] & (box_B < boxes)[None, :]
    at_VB = vector_V[:, None] * scales_to_vector + box_B[None, :] * scales_to_box
    scale_VB = tl.load(scales_pointer + at_VB, mask_VB, other=0).to(tl.int32)
    step_VB = GRID.multiply(1.0, scale_VB, tensor, BITS)
    if SPARE >= 0:
        exponent_VB = scale_VB & GRID.exponent_mask
        live_VB = tl.max(tl.abs(code_VBX), axis=2) > 0  # a box of zeros may have any step
        lowest_V = tl.min(tl.where(live_VB, exponent_VB, GRID.exponent_mask), axis=1)
        lowest_V = tl.where(lowest_V == GRID.exponent_mask, 0, lowest_V)
        shift_VB = tl.where(live_VB, exponent_VB - lowest_V[:, None], 0)
        shared_V = tl.max(shift_VB, axis=1) <= SPARE
        tl.atomic_add(out_apart_pointer + vector_V, 1, (shared_V == 0) & (vector_V < vectors))
        shared_VB = shared_V[:, None] & (shift_VB >= 0)
        turned_VBX = tl.where((step_VB < 0)[:, :, None], -code_VBX, code_VBX)
        code_VBX = tl.where(shared_VB[:, :, None], turned_VBX << shift_VB[:, :, None], code_VBX)
        nan_V = tl.max((step_VB != step_VB).to(tl.int32), axis=1) > 0
        step_V = tl.where(nan_V, float("nan"), GRID.multiply(1.0, lowest_V, tensor, BITS))
        step_VB = tl.where(shared_VB, step_V[:, None], step_VB)
    tl.store(out_steps_pointer + box_B[None, :] * out_vectors + vector_V[:, None], step_VB)
    out_VK = out_codes_pointer + vector_V[:, None] * out_depth + at_K[None, :]
    tl.store(out_VK, tl.reshape(code_VBX, (V, RUN)).to(tl.int8))


@triton.jit
def _sums(
    a_pointer, a_steps_pointer, b_pointer, b_steps_pointer, row_M, col_N, a_vectors, b_vectors, depth, steps,
    SPAN: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The tile's sums over ``depth``: an integer dot product takes SPAN values, which have every ``steps``-th step."""
    D: tl.constexpr = SPAN if SPAN > 32 else 32  # the narrowest that tensor cores multiply
    k_D = tl.arange(0, D)
    a_at_MD = a_pointer + row_M.to(tl.int64)[:, None] * depth + k_D[None, :]
    b_at_DN = b_pointer + col_N.to(tl.int64)[None, :] * depth + k_D[:, None]
    sum_MN = tl.zeros((M, N), tl.float32)
    for i in range(0, depth // SPAN):
        if D == SPAN:
            a_MD, b_DN = tl.load(a_at_MD + i * SPAN), tl.load(b_at_DN + i * SPAN)
        else:
            a_MD = tl.load(a_at_MD + i * SPAN, (k_D < SPAN)[None, :], other=0)
            b_DN = tl.load(b_at_DN + i * SPAN, (k_D < SPAN)[:, None], other=0)
        dot_MN = tl.dot(a_MD, b_DN, out_dtype=tl.int32).to(tl.float32)
        a_step_M = tl.load(a_steps_pointer + i * steps * a_vectors + row_M)
        b_step_N = tl.load(b_steps_pointer + i * steps * b_vectors + col_N)
        sum_MN += dot_MN * a_step_M[:, None] * b_step_N[None, :]
    return sum_MN


@triton.jit(do_not_specialize=["rows"])
def multiply(
    a_pointer, a_steps_pointer, a_apart_pointer, b_pointer, b_steps_pointer, b_apart_pointer, bias_pointer, c_pointer,
    rows, columns, a_vectors, b_vectors, depth,
    BOX: tl.constexpr, RUN: tl.constexpr, SHARING: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of c = a b + bias, of what ``expand`` wrote; GROUP rows of tiles share what
    they read of b. SHARING: runs may have been brought to one step."""
    across, program = tl.cdiv(columns, N), tl.program_id(0)
    group = program // (GROUP * across)
    in_group = tl.minimum(tl.cdiv(rows, M) - group * GROUP, GROUP)
    top = group * GROUP + program % (GROUP * across) % in_group
    row_M = top * M + tl.arange(0, M)
    col_N = program % (GROUP * across) // in_group * N + tl.arange(0, N)
    apart = 1
    if SHARING:
        apart = tl.maximum(tl.max(tl.load(a_apart_pointer + row_M)), tl.max(tl.load(b_apart_pointer + col_N)))
    operands = a_pointer, a_steps_pointer, b_pointer, b_steps_pointer, row_M, col_N, a_vectors, b_vectors, depth
    if apart == 0:  # noqa: SIM108 (each way is a loop of its own)
        sum_MN = _sums(*operands, RUN // BOX, RUN, M, N)
    else:
        sum_MN = _sums(*operands, 1, BOX, M, N)
    mask_N = col_N < columns
    if bias_pointer is not None:
        sum_MN += tl.load(bias_pointer + col_N, mask_N, other=0)[None, :]
    at_MN = row_M.to(tl.int64)[:, None] * columns + col_N[None, :]
    tl.store(c_pointer + at_MN, sum_MN, (row_M < rows)[:, None] & mask_N[None, :])
