// C functions of the decoder.
#include <cstddef>
#include <stdexcept>
#include <string>

#include "api.h"
#include "decoder.h"
#include "error.h"

// Python's formats are HeadraceFormat, and those of the decoder's structs are Format: the same memory.
static_assert(sizeof(headrace::Format) == sizeof(HeadraceFormat) && offsetof(headrace::Format, has_min) == offsetof(HeadraceFormat, has_min));

using headrace::Decoder;
using headrace::DecoderSpec;
using headrace::guarded;

Decoder* headrace_decoder_create(const DecoderSpec* spec, int64_t spec_bytes, headrace::Pool* pool, const char* instruction_set) {
  return guarded([&] {
    if (spec_bytes != sizeof(DecoderSpec))
      throw std::invalid_argument("a DecoderSpec has " + std::to_string(sizeof(DecoderSpec)) + " bytes, not " + std::to_string(spec_bytes));
    const headrace::Kernels* kernels = instruction_set ? headrace::find_kernels(instruction_set) : headrace::chosen_kernels();
    if (!kernels) throw std::invalid_argument("this machine does not have the instruction set that was asked for");
    return new Decoder(*spec, *pool, *kernels);
  });
}

void headrace_decoder_destroy(Decoder* decoder) { delete decoder; }

int32_t headrace_decoder_step(Decoder* decoder, const headrace::Plan* plan, const float* in, float* out, headrace::Candidate* best) {
  return guarded([&] {
    decoder->step(*plan, in, out, best);
    return 1;
  });
}

void headrace_decoder_record(Decoder* decoder, headrace::Moment* moments, int64_t capacity) { decoder->record(moments, capacity); }

int64_t headrace_decoder_recorded(const Decoder* decoder) { return decoder->recorded(); }
