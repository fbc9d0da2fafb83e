// The C interface that Python loads. Functions that can fail give 0, or less and leave what was wrong in headrace_error().
#pragma once

#include <cstdint>

#define HEADRACE_API extern "C" __attribute__((visibility("default")))

// Checksum of the headers, whose structures whoever loads the library has, too; cpp/build.py gives it.
HEADRACE_API uint32_t headrace_interface();
// Names of the instruction sets that this machine can run, best first, joined by commas.
HEADRACE_API const char* headrace_instruction_sets();
// Name of the one in use: the best, or the one that the environment variable HEADRACE_INSTRUCTION_SET names. Null: that is none of them.
HEADRACE_API const char* headrace_instruction_set();
// Of this thread's last failure.
HEADRACE_API const char* headrace_error();

namespace headrace {
class Pool;
class Decoder;
struct Candidate;
struct DecoderSpec;
struct Plan;
struct Moment;
}  // namespace headrace
// A decoder over memory and a pool that must outlive it; null if the specification contradicts itself. instruction_set: null: the one in use.
HEADRACE_API headrace::Decoder* headrace_decoder_create(const headrace::DecoderSpec* spec, int64_t spec_bytes, headrace::Pool* pool,
                                                        const char* instruction_set);
HEADRACE_API void headrace_decoder_destroy(headrace::Decoder* decoder);
// One step, see Decoder::step. Below 1: nothing was computed, or what was computed is of no use.
HEADRACE_API int32_t headrace_decoder_step(headrace::Decoder* decoder, const headrace::Plan* plan, const float* in, float* out, headrace::Candidate* best);
// From now on each step writes when its parts ran; null: none does.
HEADRACE_API void headrace_decoder_record(headrace::Decoder* decoder, headrace::Moment* moments, int64_t capacity);
// How many moments the last step wrote.
HEADRACE_API int64_t headrace_decoder_recorded(const headrace::Decoder* decoder);

// A block of zeroed memory (memory.h), which the system gives page by page; null if there is none of that size.
HEADRACE_API void* headrace_memory_allocate(int64_t bytes);
// Give it back, with the size that it has.
HEADRACE_API void headrace_memory_free(void* data, int64_t bytes);

namespace headrace {
class Pool;
}
// Threads (pool.h), the caller's included; null if that is no possible number, or more than the system starts.
HEADRACE_API headrace::Pool* headrace_pool_create(int64_t threads);
// None of its runs may be going on. Null is none.
HEADRACE_API void headrace_pool_destroy(headrace::Pool* pool);
// Calls task(context, index, slot) for each index in [0, count), see Pool::run. Below 1: not possible.
HEADRACE_API int32_t headrace_pool_run(headrace::Pool* pool, int64_t count, void (*task)(void* context, int64_t index, int64_t slot), void* context);

namespace headrace {
class SharedGroup;
}
// Bytes of shared memory that the ranks of a group need, and one rank's part in it (shared_group.h); null: it is not possible.
HEADRACE_API int64_t headrace_group_bytes(int64_t size, int64_t capacity);
HEADRACE_API headrace::SharedGroup* headrace_group_create(int32_t file, int64_t rank, int64_t size, int64_t capacity, double deadline_seconds);
// It must not be waiting. Null is none.
HEADRACE_API void headrace_group_destroy(headrace::SharedGroup* group);
// data [count] becomes the sum over ranks: 0. Another number: they did not all come in time, or the group is broken since then, or since it was
// abandoned. `group` is a SharedGroup, untyped so that a decoder can be given this function for its sums.
HEADRACE_API int32_t headrace_group_sum(void* group, float* data, int64_t count);
HEADRACE_API void headrace_group_abandon(headrace::SharedGroup* group);

namespace headrace {
struct KVLayer;
struct Attention;
}  // namespace headrace
// Kernels (kernels.h) of one instruction set, by its name. 1, or 0: there is no such set here, or that is not possible.
HEADRACE_API int32_t headrace_rms_norm(const char* set, const float* x, const float* weight, float eps, int64_t n, float* out);
// kind: Activation.
HEADRACE_API int32_t headrace_activate(const char* set, int32_t kind, const float* gate, const float* up, int64_t n, float* out);
HEADRACE_API int32_t headrace_add(const char* set, float* x, const float* y, int64_t n);
HEADRACE_API int32_t headrace_softcap(const char* set, float* x, float cap, int64_t n);
HEADRACE_API int32_t headrace_rotate(const char* set, float* heads, int64_t count, int64_t head_dim, int64_t pairs, const float* cosine,
                                     const float* sine);
// The index in *out.
HEADRACE_API int32_t headrace_argmax(const char* set, const float* x, int64_t n, int64_t* out);
// Bytes of all keys of a layer, of all values, and of the scales of either, each on a 64-byte boundary; pointers of the layer are not looked at.
HEADRACE_API int32_t headrace_kv_bytes(const headrace::KVLayer* cache, int64_t* keys, int64_t* values, int64_t* scales);
HEADRACE_API int32_t headrace_kv_store(const char* set, const headrace::KVLayer* cache, int32_t block, int64_t offset, const float* keys,
                                       const float* values);
// table_length: entries of the task's table. apart: segment by segment, as threads do that share it.
HEADRACE_API int32_t headrace_attend(const char* set, const headrace::Attention* task, int64_t table_length, int32_t apart);

namespace headrace {
struct RowSampling;
}
// Tokens of rows of logits [rows][width] at their positions, see Sampler::sample (sampling.h); ids [rows][width] or null. set: an instruction
// set; null: the one in use. Below 1: not possible.
HEADRACE_API int32_t headrace_sample(const char* set, const float* logits, const int32_t* ids, int64_t rows, int64_t width,
                                     const headrace::RowSampling* samplings, const uint64_t* positions, int32_t* tokens);

// What format.h has, for Python.
struct HeadraceFormat {
  int32_t kind, bits, group, offset, has_min;
};
struct HeadraceMatrix {
  HeadraceFormat format;
  int64_t rows, columns;
  const void* data;
};
// Rows of kernels.h; the columns are the matrix's.
struct HeadraceRows {
  int64_t rows;
  const float* floats;
  int64_t stride;
  const int8_t* values;
  const float* scales;
  const int32_t* sums;
};

// What a quantised type of GGUF, by its number in files, is packed to. Below 1: there are no products with it.
HEADRACE_API int32_t headrace_block_format(int32_t gguf_type, HeadraceFormat* out);
// Bytes of a matrix; below 1: no such format or size.
HEADRACE_API int64_t headrace_matrix_bytes(const HeadraceFormat* format, int64_t rows, int64_t columns);
// Columns [begin, end) of blocks as files have them, [rows][row bytes] and so raw_bytes in all, and float32 [rows][columns] to a matrix (pack.h).
// Below 1: not possible.
HEADRACE_API int32_t headrace_pack_blocks(headrace::Pool* pool, int32_t gguf_type, const uint8_t* raw, int64_t raw_bytes, int64_t rows,
                                          int64_t columns, int64_t begin, int64_t end, uint8_t* out);
HEADRACE_API int32_t headrace_pack_floats(headrace::Pool* pool, const HeadraceFormat* format, const float* values, int64_t rows, int64_t columns,
                                          uint8_t* out);
// The kernels of the named instruction set (kernels.h), in the calling thread, for tests and measurements. Below 1: not possible.
HEADRACE_API int32_t headrace_multiply(const char* set, const HeadraceMatrix* matrix, const HeadraceRows* x, int64_t begin, int64_t end,
                                       const float* bias, float* out, int64_t out_stride, int32_t accumulate);
HEADRACE_API int32_t headrace_read_row(const char* set, const HeadraceMatrix* matrix, int64_t index, float* out);
HEADRACE_API int32_t headrace_quantize(const char* set, const float* x, int64_t columns, int8_t* values, float* scales, int32_t* sums);
HEADRACE_API int32_t headrace_quantize_weights(const char* set, const float* x, int64_t count, int32_t bits, int8_t* quants, uint16_t* scale);
