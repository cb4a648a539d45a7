/* The interface of the compiled kernels, written once: Python parses this file with cffi (kernels/cpu/library.py), the C++
   sources include it (api.h). Plain C declarations only, without preprocessor directives.

   A tensor crosses as the address of its first value, 0 for none. `threads` is the most that a call may use. A seed is
   that of stochastic rounding. A scale is a byte: an exponent, E + 127, or what enum Scales says. */

typedef uintptr_t address;

/* of values in memory; BYTE, a bool, only in masks */
enum Dtype { FLOAT32, BFLOAT16, FLOAT16, BYTE };

/* What the scales of a tensor are; both as kernels/reference has them. SIGNED_E4M3: after the blocks' scales comes the
   tensor's exponent, E + 127. */
enum Scales { POWER, SIGNED_E4M3 };

/* the scale of a block that holds a NaN or an infinity */
enum { NAN_EXPONENT = 255 };

/* which kernel multiplies; GEMM_AMX_EMULATED: GEMM_AMX with emulated tiles, for tests; GEMM_TORCH: the call only quantizes
   the operands, the caller multiplies */
enum GemmKernel { GEMM_BFLOAT16, GEMM_AMX, GEMM_AMX_EMULATED, GEMM_INTEGER, GEMM_TORCH };

/* How a tensor is quantized, packed or unpacked: a format, a layout (dsq/formats) and the caller's choices. */
typedef struct {
  int64_t outer, rows, columns;
  int64_t row_bytes;      /* of a row of codes */
  int32_t along_rows;     /* blocks run along the rows (the token axis), else along the columns */
  int32_t bits;
  int32_t block_size;            /* values that share a scale; 0: one scale for the tensor */
  int32_t static_scale;   /* with block 0: the scale of a static binary point, or -1 */
  int32_t scales;         /* enum Scales */
  int32_t dtype;          /* of the values: input of quantize and pack, output of unpack */
  int32_t out_dtype;      /* of quantize's output */
  int32_t stochastic;
  int32_t isa;            /* instruction set: an index of dsq_isa */
} CodecDesc;

/* How the scale of a block follows from its largest magnitude (dsq.formats.SCALE_RULES). */
enum ScaleRules { E8M0_FLOOR, E8M0_CEIL, E8M0_EVEN, E8M0_RCEIL, E4M3_TE, E4M3_CLAMPED, FP32_AMAX };

/* A format that is data (dsq.formats.GridFormat) and a layout; of `codec` neither the block nor the scales count. */
typedef struct {
  CodecDesc codec;
  int64_t block_rows, block_columns;  /* of the tensor as it lies in memory */
  int32_t one_block;                  /* the block is the tensor */
  int32_t digits, lowest;
  int32_t rule;                       /* enum ScaleRules */
  int32_t pair;                       /* 0, or 2 in blocks of 16 */
  float largest, prescale;
} GridDesc;

/* Values coded in groups that have a lowest value and a step each: run i of `run` consecutive values is of group
   i % groups. */
typedef struct {
  int64_t count, run, groups;
  int32_t bits;        /* 1 to 8 */
  int32_t dtype;       /* of the values */
  int32_t stochastic;
  int32_t isa;
} AffineDesc;

/* How an operand enters a product. Offsets are into the call's scratch memory, in bytes. */
typedef struct {
  CodecDesc codec;
  int64_t offset;                     /* of the quantized values, or of the codes */
  int64_t scales_offset;
  int64_t row_stride, column_stride;  /* of the values, as the product sees them (perhaps transposed) */
  uint64_t seed;                      /* added to the call's */
  int32_t packed;                     /* it comes as codes and scales */
  int32_t across;                     /* a row of its codes holds one index of the contraction, for every vector */
} OperandDesc;

typedef struct {
  OperandDesc a, b;
  CodecDesc result;       /* out_dtype: of the result; bits 0: it is not quantized */
  uint64_t result_seed;
  int64_t result_offset;  /* of scratch memory for sums in float32, where the result is narrower and quantized */
  int64_t rows, columns, depth;
  int64_t panels_offset;  /* of the GEMM's own scratch memory */
  int32_t gemm;           /* enum GemmKernel */
  int32_t block_size;            /* of GEMM_INTEGER: values to an integer dot product */
} MatMulDesc;

typedef struct {
  MatMulDesc output;
  CodecDesc stash;  /* how x is packed for the backward */
  uint64_t stash_seed;
} LinearForwardDesc;

typedef struct {
  MatMulDesc input_gradient, weight_gradient;
} LinearBackwardDesc;

/* From a batch to the next, from a head to the next and from a row to the next, in values; columns lie side by side. */
typedef struct {
  int64_t batch, head, row;
} HeadStrides;

/* Attention of `queries` to `keys`, vectors of `width` values; causal: query i sees keys 0 to i. `kept`: the factor of
   weights that dropout keeps. */
typedef struct {
  int64_t batches, heads, queries, keys, width;
  HeadStrides q, k, v, o, lse, d_o, dq, dk, dv, mask, d_mask, noise;
  float scale, kept;
  int32_t causal;
  int32_t dtype;  /* FLOAT32 or BFLOAT16; of lse FLOAT32 */
} AttentionDesc;

/* o and lse are of the forward; lse, a number a row, is the logarithm of the sum of its exponentials, and may be null.
   From d_o to dv of the backward. mask, float32, is added to the scores, and d_mask, likewise, is its gradient; noise, a
   byte, is 1 for a weight that dropout keeps, else 0; each may be null. */
typedef struct {
  address q, k, v, o, lse, d_o, dq, dk, dv, mask, d_mask, noise;
} AttentionTensors;

/* What this library was built from: the digest of this file. This function never changes. */
const char* dsq_abi_digest(void);

/* The name of instruction set `index`, best first, or null past the last; `usable`: whether this machine has it. */
const char* dsq_isa(int index, int* usable);
/* Whether this machine has the instructions of an enum GemmKernel. */
int dsq_has_gemm(int gemm);
/* The name of integer GEMM `index`, best first, or null past the last; `usable`: whether this machine has its
   instructions. GEMM_INTEGER is the first of those, or what dsq_use_integer_gemm (for tests) was told. */
const char* dsq_integer_gemm(int index, int* usable);
void dsq_use_integer_gemm(int index);
/* Whether GEMM_INTEGER multiplies codes of such widths. */
int dsq_gemm_integer_fits(int a_bits, int b_bits, int block_size);
/* GOMP_parallel and omp_get_thread_num of the process's OpenMP runtime; until then, one thread. */
void dsq_use_threads(address run, address number);

void dsq_quantize(const CodecDesc* desc, address x, address out, int threads, uint64_t seed);
void dsq_pack(const CodecDesc* desc, address x, address codes, address scales, int threads, uint64_t seed);
void dsq_unpack(const CodecDesc* desc, address codes, address scales, address out, int threads);
void dsq_quantize_grid(const GridDesc* desc, address x, address out, int threads, uint64_t seed);
void dsq_pack_grid(const GridDesc* desc, address x, address codes, address scales, int threads, uint64_t seed);
void dsq_unpack_grid(const GridDesc* desc, address codes, address scales, address out, int threads);

/* ranges: float32 (2, groups), the low of each group and its step. running: of the same shape, alpha and beta of
   kernels/reference/stash.py; or 0: each group is one run, in its own range. */
void dsq_affine_pack(const AffineDesc* desc, address x, address running, double decay, address ranges, address codes,
                     int threads, uint64_t seed);
void dsq_affine_unpack(const AffineDesc* desc, address codes, address ranges, address out, int threads);

void dsq_pack_mask(int isa, address values, int dtype, int64_t count, float low, float high, int nan_is_open,
                   address bits, int threads);
void dsq_unpack_mask(int isa, address bits, int64_t count, int dtype, address values, int threads);
void dsq_apply_mask(int isa, address bits, int64_t count, int dtype, address x, address out, int threads);
void dsq_relu(int isa, address x, int64_t count, address y, address bits, int threads);
/* out = x times `factor` where the bit is 1, else times 0. */
void dsq_scale_mask(int isa, address bits, int64_t count, int dtype, address x, float factor, address out, int threads);
/* Draws `count` numbers of 53 bits from `generator`, the memory of torch.get_rng_state(), and moves it on; out: 1 for each below `threshold`,
   else 0, in bits or in bytes. */
void dsq_bernoulli(int isa, address generator, int64_t count, uint64_t threshold, int bytes, address out);

/* c (rows x columns, contiguous, float32) = a (rows x depth) b (depth x columns) + bias (columns, float32, or 0). No
   size is 0. `scratch` has the bytes that the function ..._scratch asks for. */
int64_t dsq_gemm_bfloat16_scratch(int gemm, int64_t rows, int64_t columns, int64_t depth);
/* `gemm`: GEMM_BFLOAT16 or AMX's. One stride of a and one of b is 1. */
void dsq_gemm_bfloat16(int gemm, address a, int64_t a_row_stride, int64_t a_depth_stride, address b,
                       int64_t b_depth_stride, int64_t b_column_stride, address bias, address c, int64_t rows,
                       int64_t columns, int64_t depth, address scratch, int threads);
int64_t dsq_gemm_integer_scratch(int64_t rows, int64_t columns, int64_t depth, int a_bits, int b_bits, int block_size);
/* Packed a and b with blocks of `block_size` values along the depth, or one scale each, of `kind` in enum Scales. `block_size` divides 256 and
   is a multiple of as many codes of the widest bits as 32 bits hold; a dot product over it must fit 32 bits.
   `digits` 0: codes are integers of so many `bits`; else elements of a grid with so many digits, in `code_bits` bits, which
   are multiplied as integers of `bits` bits in the unit of the grid's finest step. */
void dsq_gemm_integer(address a_codes, address a_scales, int a_kind, int a_bits, int a_across, int a_digits, int a_code_bits,
                      address b_codes, address b_scales, int b_kind, int b_bits, int b_across, int b_digits, int b_code_bits,
                      int one_scale, int block_size, address bias, address c, int64_t rows, int64_t columns, int64_t depth,
                      address scratch, int threads);

/* y = x w^T + bias; x is packed into `codes` and `scales` too, unless codes is 0. */
void dsq_linear_forward(const LinearForwardDesc* desc, address x, address w, address bias, address y, address codes,
                        address scales, address scratch, int threads, uint64_t seed);
/* dx = dy w, unless dx is 0; dw = dy^T x from the packed x, unless dw is 0. */
void dsq_linear_backward(const LinearBackwardDesc* desc, address dy, address w, address codes, address scales,
                         address dx, address dw, address scratch, int threads, uint64_t seed);

/* The name of attention's instruction set `index`, best first, or null past the last; `usable`: whether this machine has
   it. The first of those serves, or what dsq_use_attention (for tests) was told. */
const char* dsq_attention(int index, int* usable);
void dsq_use_attention(int index);
/* o and lse; the gradients, from q, k, v and d_o. `scratch` has the floats that ..._scratch asks for, for
   each thread. */
int64_t dsq_attention_scratch(const AttentionDesc* desc, int backward);
void dsq_attention_forward(const AttentionDesc* desc, const AttentionTensors* tensors, address scratch, int threads);
void dsq_attention_backward(const AttentionDesc* desc, const AttentionTensors* tensors, address scratch, int threads);
